"""Target of an adoption without its coordinator: whether the old node serves again.

The old node takes its addresses back when nobody answers for them, as while this host's network is down, and it knows
no lease. The addresses that it keeps show what it has done: they have the MAC address that moves if it serves, and
another one while it stays away.
"""

from typing import Callable, Dict, Sequence

from appliance.agent import arp
from appliance.agent.protocol import Problem
from appliance.agent.system import System
from appliance.shared.adopt import OldInterface
from appliance.shared.migration import TargetRequest

SERVES, AWAY, UNKNOWN = "serves", "away", "unknown"
"""What the old node does. It is unknown while no machine answers: this host's network may be down."""
SETTLED_S = 3.0
"""Seconds between two looks that have to agree: the old node decides within ``arp.QUERY_S``, and acts."""
AGAIN_S = 1.0
TIMES = 3
"""How often it is asked where somebody waits for the answer."""
NETWORK_DOWN = "nobody answers in the networks of %s: it cannot be seen whether the old node serves"
NETWORK_HINT = "repair its network, then run this again"


def serves_again(system: System, request: TargetRequest, isolate: Callable[[], object], *, alone: bool) -> bool:
    """Return whether the old node has its addresses back.

    Args:
        system: this host.
        isolate: called when no machine answers.
        alone: nobody waits for the answer: it is asked until there is one, whatever that lasts.

    Raises:
        Problem: no machine answers, and somebody waits.
    """
    asked = [one for one in request.gives if arp.ipv4(one.keeps)]  # others cannot tell
    before, isolated, left = "", False, TIMES
    while asked:
        found = look(system, asked, request.bridges)
        if found == SERVES:
            return True
        if found == before == AWAY:
            return False
        if found == before == UNKNOWN and not isolated:
            isolate()
            isolated = True
        left -= found == UNKNOWN
        if not (left or alone):
            raise Problem(NETWORK_DOWN % request.host, NETWORK_HINT)
        before = found
        system.sleep(SETTLED_S if found == AWAY else AGAIN_S)
    return False


def look(system: System, interfaces: Sequence[OldInterface], bridges: Dict[str, str]) -> str:
    """Return what the old node does now. One that does not answer while others do counts as off: it stays away.

    One network that works is enough: the old node, too, decides by an answer in one of them. A network that is split
    between both, with other machines on both sides, looks the same.
    """
    found = {_look(system, one, bridges[one.inside]) for one in interfaces}
    return next(one for one in (SERVES, AWAY, UNKNOWN) if one in found)


def _look(system: System, one: OldInterface, bridge: str) -> str:
    keeps = arp.ipv4(one.keeps)
    try:
        answers = system.find_macs(bridge, [*keeps, *arp.ipv4(one.witnesses)])
    except OSError:  # the bridge is down or gone
        return UNKNOWN
    if any(answers.get(address) == one.mac.lower() for address in keeps):
        return SERVES
    return AWAY if answers else UNKNOWN
