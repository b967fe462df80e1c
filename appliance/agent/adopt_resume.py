"""Recovery of a killed adoption on the old node, also after a reboot."""

import time
from typing import Any, Callable, Dict, List

from appliance.agent import adopt_guard
from appliance.agent.adopt_leave import ASK_AGAIN_S, AdoptLeave
from appliance.agent.adopt_return import AdoptReturn
from appliance.agent.adopt_state import OldNode, read_mark
from appliance.agent.protocol import field
from appliance.agent.take import host_locked

ASK_S = 10.0
"""Seconds to ask who serves, while it is unknown."""


def resume(request: Dict[str, Any]) -> Dict[str, Any]:
    """Recover from a killed run on the old node; return the state found, the present one and what failed.

    Fields of the request: ``mark`` and ``lock`` as in ``AdoptRequest``; ``sure``: the container cannot have served
    since, so the services are restored here without asking. Without it, a state stays while it is unknown who serves.
    """
    mark, lock = field(request, "mark", str), field(request, "lock", str)
    with host_locked(lock):
        node = OldNode.stored(mark)
        if node is None:
            return {"found": "", "state": "", "trouble": ""}
        adopt_guard.renew(mark, lock)
        found = node.mark.state
        end = time.monotonic() + ASK_S

        def may_ask() -> bool:
            time.sleep(ASK_AGAIN_S)
            return time.monotonic() < end

        troubles = recover(node, may_ask, sure=field(request, "sure", bool, False))
        saved = read_mark(mark)
        return {"found": found, "state": saved.state if saved else "gone", "trouble": "; ".join(troubles)}


def recover(node: OldNode, may_ask: Callable[[], bool], *, sure: bool) -> List[str]:
    """Continue from a stored state; return what could not be restored. The lock is held.

    Args:
        may_ask: whether to ask again while it is unknown who serves.
        sure: the target has rolled back.
    """
    if node.mark.state == "up":
        AdoptReturn(node, None).recover(may_ask, sure=sure)
        return []
    leave = AdoptLeave(node, None)
    leave.recover(may_ask, sure=sure)
    return leave.troubles
