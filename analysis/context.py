"""Properties of the whole capture that the verdict on a service depends on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from analysis.cluster import EXECUTION, NODE_DAEMONS
from analysis.nodes import find_machines, find_nodes
from analysis.observed import Boot, Link, Observation, Role, Row
from analysis.protocols import DHCP_PORTS
from analysis.signatures import UDP

MISS_PROBABILITY = 0.05
"""1 - 95 %."""
EXPECTED = -math.log(MISS_PROBABILITY)
"""Expected number of random events for which at least one is seen with 95 % probability (Poisson process:
P(none) = exp(-expected)). The "rule of three": J. A. Hanley, A. Lippman-Hand, "If nothing goes wrong, is everything all
right?", JAMA 249 (1983), 1743-1745."""
UNKNOWN_EVERY_S = 3600.0
"""Assumed seconds between two uses of an unknown service by a node."""


@dataclass(frozen=True)
class CaptureContext:
    """Duration of the capture, number of nodes and their boots.

    Attributes:
        duration_s: seconds that the files cover.
        steady_s: total node-seconds in steady state (up and settled); longest_s: the maximum of one node.
        boots: boots that were seen; ``settled`` of them to their end.
        hidden: nodes booted, but no boot was seen, because their packets are cut or not understood.
        addresses: of the nodes.
        execution: machines on which the scheduler runs jobs: nobody logs in there to work.
        doubt: why the capture does not look like that of a cluster; "" if it does (`likeness.find_doubt`).
        machine: the machine of each host that has the role of a node; ``hardware``: those that are not nodes.
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
    machine: Mapping[int, str] = field(default_factory=dict)
    hardware: frozenset[str] = frozenset()
    execution: frozenset[str] = frozenset()
    doubt: str = ""


def make_context(observation: Observation, roles: bytes, routed: Collection[int] = ()) -> CaptureContext:
    """Return the context of an observation.

    Args:
        routed: hosts behind routers.
    """
    found, excluded = find_nodes(
        observation.hosts, roles, observation.links, observation.samples, routed=routed, scans=observation.scans
    )
    by_mac: dict[str, list[Boot]] = defaultdict(list)
    for boot in observation.boots:
        if boot.mac not in excluded:
            by_mac[boot.mac].append(boot)
    machine = find_machines(observation.hosts, roles, routed)
    # A node that has just started to boot has no address yet.
    nodes, duration_s = max(len(found), len(by_mac)), observation.covered_s
    steady_s = (nodes - len(by_mac)) * duration_s
    longest_s = duration_s if steady_s else 0.0
    for boots in by_mac.values():
        boots.sort(key=lambda boot: boot.began_ns)
        ends = [*(boot.began_ns for boot in boots[1:]), observation.end_ns]
        spans = (end - boot.settled_ns for boot, end in zip(boots, ends, strict=True) if boot.settled_ns)
        of_node = min(sum(max(each, 0) for each in spans) / 1e9, duration_s)
        steady_s, longest_s = steady_s + of_node, max(longest_s, of_node)
    return CaptureContext(
        duration_s,
        nodes,
        steady_s,
        boots=sum(map(len, by_mac.values())),
        settled=sum(bool(boot.settled_ns) for boots in by_mac.values() for boot in boots),
        booted_nodes=len(by_mac),
        longest_s=longest_s,
        hidden=not by_mac and any(map(_of_boots, observation.rows)),
        addresses=tuple(address for each in found.values() for address in each if address),
        machine=machine,
        hardware=frozenset(excluded),
        execution=frozenset(_find_execution(observation.links, roles, machine)),
    )


def _find_execution(links: Iterable[Link], roles: bytes, machine: Mapping[int, str]) -> Iterator[str]:
    """Yield the machines where the management node uses a scheduler's daemon, or that connect to it as one."""
    sms, node = Role.SMS.value, Role.NODE.value
    for client, server, protocol, port, _, _ in links:
        if (protocol, port) in NODE_DAEMONS and roles[client] == sms and server in machine:
            yield machine[server]
        elif (protocol, port) in EXECUTION and roles[server] == sms and roles[client] == node and client in machine:
            yield machine[client]


def _of_boots(row: Row) -> bool:
    """Return whether these are DHCP requests of clients without an address."""
    return (row.protocol, row.port, row.client) == (UDP, DHCP_PORTS[0], Role.NODE) and row.contacts_boot > 0
