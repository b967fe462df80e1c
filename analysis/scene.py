"""What judging a service needs to know of the capture as a whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.observed import Boot, Host, Observation, Role
from analysis.roles import UNSPECIFIED, is_link_local

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
    """

    duration_s: float
    nodes: int
    steady_s: float
    boots: int = 0
    settled: int = 0
    booted_nodes: int = 0
    longest_s: float = 0.0


def watch(observation: Observation, roles: bytes) -> Scene:
    """The scene of an observation."""
    nodes, duration_s = len(find_nodes(observation.hosts, roles)), observation.covered_s
    by_mac: dict[str, list[Boot]] = defaultdict(list)
    for boot in observation.boots:
        by_mac[boot.mac].append(boot)
    steady_s = max(nodes - len(by_mac), 0) * duration_s
    longest_s = duration_s if steady_s else 0.0
    for boots in by_mac.values():
        boots.sort(key=lambda boot: boot.began_ns)
        ends = [*(boot.began_ns for boot in boots[1:]), observation.end_ns]
        spans = (end - boot.settled_ns for boot, end in zip(boots, ends, strict=True) if boot.settled_ns)
        of_node = min(sum(max(each, 0) for each in spans) / 1e9, duration_s)
        steady_s, longest_s = steady_s + of_node, max(longest_s, of_node)
    settled = sum(bool(boot.settled_ns) for boot in observation.boots)
    return Scene(duration_s, nodes, steady_s, len(observation.boots), settled, len(by_mac), longest_s)


def find_nodes(hosts: Sequence[Host], roles: bytes) -> dict[str, list[str]]:
    """Addresses of every compute node, by its link address where there are any: a node may have IPv4 and IPv6.

    What has shown nothing but that it is there is none, such as a switch or a bridge: it sent multicast from its
    address of the link, as all that speaks IPv6 does (RFC 4861), and nobody sent it anything.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        if roles[host.index] == Role.NODE and host.address not in UNSPECIFIED:
            mac = host.macs[0] if host.macs and any(host.macs[0].replace(":", "0").strip("0")) else host.via
            found[mac or host.address].append(host.address)
    silent = {host.address for host in hosts if is_link_local(host.address) and not host.received}
    return {machine: addresses for machine, addresses in found.items() if not silent.issuperset(addresses)}
