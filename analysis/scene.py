"""What judging a service needs to know of the capture as a whole."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from analysis.nodes import find_nodes
from analysis.observed import Boot, Observation, Role, Row
from analysis.protocols import DHCP_PORTS
from analysis.signatures import UDP

DOUBT = 0.05
"""What 95 % leave."""
EXPECTED = -math.log(DOUBT)
"""So many events have to be expected for one at least to be seen with 95 % probability, where they come by chance (a
Poisson process: P(none) = exp(-expected)). The "rule of three": J. A. Hanley, A. Lippman-Hand, "If nothing goes wrong,
is everything all right?", JAMA 249 (1983), 1743-1745."""
UNKNOWN_EVERY_S = 3600.0
"""How often a node is taken to use a service of which nobody knows."""


@dataclass(frozen=True)
class Scene:
    """How long and at how many nodes was looked.

    Attributes:
        duration_s: seconds that the files cover.
        steady_s: seconds of all nodes together in which they were up and settled; longest_s: the most of one node.
        boots: boots that were seen; ``settled`` of them to their end.
        hidden: nodes booted, and yet no boot was seen, as their packets are cut or not understood.
        addresses: the nodes'.
    """

    duration_s: float
    nodes: int
    steady_s: float
    boots: int = 0
    settled: int = 0
    booted_nodes: int = 0
    longest_s: float = 0.0
    hidden: bool = False
    addresses: tuple[str, ...] = ()


def watch(observation: Observation, roles: bytes) -> Scene:
    """The scene of an observation."""
    found, apart = find_nodes(observation.hosts, roles, observation.links, observation.samples)
    by_mac: dict[str, list[Boot]] = defaultdict(list)
    for boot in observation.boots:
        if boot.mac not in apart:
            by_mac[boot.mac].append(boot)
    # Who has only just begun to boot has no address yet.
    nodes, duration_s = max(len(found), len(by_mac)), observation.covered_s
    steady_s = (nodes - len(by_mac)) * duration_s
    longest_s = duration_s if steady_s else 0.0
    for boots in by_mac.values():
        boots.sort(key=lambda boot: boot.began_ns)
        ends = [*(boot.began_ns for boot in boots[1:]), observation.end_ns]
        spans = (end - boot.settled_ns for boot, end in zip(boots, ends, strict=True) if boot.settled_ns)
        of_node = min(sum(max(each, 0) for each in spans) / 1e9, duration_s)
        steady_s, longest_s = steady_s + of_node, max(longest_s, of_node)
    return Scene(
        duration_s,
        nodes,
        steady_s,
        boots=sum(map(len, by_mac.values())),
        settled=sum(bool(boot.settled_ns) for boots in by_mac.values() for boot in boots),
        booted_nodes=len(by_mac),
        longest_s=longest_s,
        hidden=not by_mac and any(map(_of_boots, observation.rows)),
        addresses=tuple(address for each in found.values() for address in each if address),
    )


def _of_boots(row: Row) -> bool:
    """Whether it asks for an address without having one."""
    return (row.protocol, row.port, row.client) == (UDP, DHCP_PORTS[0], Role.NODE) and row.contacts_boot > 0
