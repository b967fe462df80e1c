"""The guard of the old node of an adoption, as a process (``adopt_guard`` has its unit)."""

import os
import select
import socket
import time
from typing import Any, Dict, Optional, Tuple

from appliance.agent import adopt_network, protocol
from appliance.agent.adopt_resume import recover
from appliance.agent.adopt_state import OldNode
from appliance.agent.machine import reason
from appliance.agent.protocol import Problem, field
from appliance.shared.locks import Locked, UnsafeLock, find_holders, hold_lock

RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR = 0x1, 0x10, 0x100
"""linux/rtnetlink.h."""
LOOK_S = 10.0
"""Seconds after which it looks again although nothing has changed."""
CONFIGURED_S = 30.0
"""Seconds after which the network of the node should be configured. It is not where its configuration finds an
interface by the MAC address that has moved: then the guard adds the addresses that stay."""
PAUSE_S = 0.05
"""Seconds to wait for further changes after one."""
AWAY = ("given", "released")
"""States in which this node has not the addresses."""
HELD_S = 900.0
"""Seconds after which the lock shows no run: none is that long without storing another state where addresses may be
here, as ``adopt_state.UNDECIDED_S`` ends all that decide alone."""


def hold(request: Dict[str, Any]) -> Dict[str, Any]:
    """Keep away what has moved, until the services are back on this host."""
    mark, lock = field(request, "mark", str), field(request, "lock", str)
    changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    changes.bind((0, RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))
    with changes:
        guard = Guard(mark, lock)
        guard.look(early=True)
        _notify_ready()
        began = time.monotonic()
        while guard.look(late=time.monotonic() > began + CONFIGURED_S):
            if select.select([changes], [], [], LOOK_S)[0]:
                select.select([], [], [], PAUSE_S)
                _drain(changes)
    return {}


class Guard:
    """What the guard does at each look, and since when the lock keeps it from doing so."""

    def __init__(self, mark: str, lock: str) -> None:
        self.mark = mark
        self.lock = lock
        self.held: Optional[Tuple[Dict[str, float], float]] = None
        """The times of the stored state when the lock was met, and the monotonic time; None if it is free."""
        self.reported = False

    def look(self, *, early: bool = False, late: bool = False) -> bool:
        """Do what the stored state asks for; return whether there is one."""
        try:
            try:
                with hold_lock(self.lock):
                    self.held, self.reported = None, False
                    return self._act(early=early, late=late)
            except Locked:
                why = "process %s holds the lock" % ", ".join(map(str, find_holders(self.lock)))
                return self._act_beside(why, HELD_S, early)
            except UnsafeLock as error:
                return self._act_beside("%s %s" % (error.filename, error.strerror), 0.0, early)
        except (OSError, Problem) as error:  # such as a network that is not there yet
            protocol.note(reason(error))
            return True

    def _act(self, *, early: bool, late: bool) -> bool:
        node = OldNode.stored(self.mark)
        if node is None:
            return False
        if node.mark.state in AWAY:
            node.keep_away(early=early, late=late)
        if node.mark.state != "given" and not early:
            recover(node, lambda: False, sure=False)
        return os.path.exists(self.mark)

    def _act_beside(self, why: str, after_s: float, early: bool) -> bool:
        """Remove addresses that are back although the lock is held, once that is longer than a run takes.

        Nothing else is done: an agent that is at work after all decides who serves. One that takes the addresses
        stores another state before.
        """
        node = OldNode.stored(self.mark)
        if node is None:
            return False
        if self.held is None or self.held[0] != node.mark.times:
            self.held = (node.mark.times, time.monotonic())
        seconds = time.monotonic() - self.held[1]
        if seconds < after_s or node.mark.state not in AWAY:
            return True
        if not self.reported:
            self.reported = True
            node.record_event("lock held", why=why, seconds=round(seconds))
            protocol.note("%s since %d s: it acts without" % (why, seconds))
        if any(adopt_network.has_any_moved(one) for one in node.request.interfaces):
            again = OldNode.stored(self.mark)
            if again and again.mark == node.mark:
                node.keep_away(early=early, late=False)
        return True


def _drain(changes: socket.socket) -> None:
    changes.setblocking(False)
    try:
        while changes.recv(65536):
            pass
    except BlockingIOError:
        pass
    except OSError:
        pass  # more than its buffer has room for
    finally:
        changes.setblocking(True)


def _notify_ready() -> None:
    """Tell systemd that what depends on this unit may start (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)
