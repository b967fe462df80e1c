"""Port scans: found before roles and services, which must not include them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

from analysis.host_index import is_group
from analysis.observed import Host, Scan
from analysis.signatures import SCTP, TCP, UDP

PORTS = 15
"""Different ports that one host tries in vain: a scan."""
WITHIN_NS = 600 * 10**9
"""Maximum time for them. No node needs as many services that are all down; a daemon that retries uses one port."""
RETRIES = 10
"""Maximum datagrams of a scan to a port (nmap(1), --max-retries): more are of a program that reports, one way."""
PROBES = 3
"""Maximum connections of a scan to a port that answered."""


class Attempt(NamedTuple):
    """A pair of a client and a service: TCP connections without data, or, over UDP and SCTP, few packets.

    Attributes:
        pair: its index in the core.
        port: 0 for dynamic ports.
        unanswered: connections of ``opened`` without an answer; a reset is none.
        sent, received: packets.
    """

    pair: int
    client: int
    server: int
    protocol: int
    port: int
    opened: int
    unanswered: int
    sent: int
    received: int
    first_ns: int
    last_ns: int

    @property
    def failed(self) -> bool:
        """Whether no connection was answered."""
        return self.unanswered == self.opened

    @property
    def reports(self) -> bool:
        """Whether a program sends again and again what nobody answers, each time from another port."""
        return self.protocol != TCP and self.opened > RETRIES


def find_scans(attempts: Iterable[tuple[int, ...]], hosts: Callable[[], Sequence[Host]]) -> tuple[Scan, ...]:
    """Return the port scans, by source: PORTS different ports of one machine or of several that fail WITHIN_NS.

    Args:
        attempts: the core's, in the order of Attempt's fields.
        hosts: returns all hosts; called only if there may be a scan.
    """
    by_client: dict[int, list[Attempt]] = defaultdict(list)
    for one in starmap(Attempt, attempts):
        if one.protocol in (TCP, UDP, SCTP):
            by_client[one.client].append(one)
    found = []
    for client in sorted(by_client):
        if len(by_client[client]) >= PORTS:
            # Nobody answers a broadcast on behalf of all.
            mine = [one for one in by_client[client] if not (one.reports or is_group(hosts()[one.server]))]
            if scan := _scan(client, mine):
                found.append(scan)
    return tuple(found)


def _scan(client: int, attempts: Sequence[Attempt]) -> Scan | None:
    tried = _in_rapid_succession([one for one in attempts if one.failed and one.port])
    if not tried:
        return None
    targets = {one.server for one in tried}
    begin, end = min(one.first_ns for one in tried), max(one.last_ns for one in tried)
    near = [one for one in attempts if one.server in targets and begin - WITHIN_NS <= one.first_ns <= end + WITHIN_NS]
    failed = [one for one in near if one.failed]
    # Ports that answered: their services have other clients, if any.
    probes = [
        one for one in near if not one.failed and one.opened <= PROBES and begin <= one.first_ns and one.last_ns <= end
    ]
    all_of_it = [*failed, *probes]
    return Scan(
        client,
        tuple(sorted(targets)),
        tuple(sorted(one.pair for one in all_of_it)),
        _count_ports(all_of_it),
        _count_ports(failed),
        sum(one.sent + one.received for one in all_of_it),
        min(one.first_ns for one in all_of_it),
        max(one.last_ns for one in all_of_it),
    )


def _in_rapid_succession(attempts: list[Attempt]) -> list[Attempt]:
    """Return the attempts that are among PORTS different ports WITHIN_NS."""
    attempts.sort(key=lambda one: (one.first_ns, one.pair))
    ports: Counter[tuple[int, int]] = Counter()
    marked, begin, upto = [], 0, 0
    for end, one in enumerate(attempts):
        ports[one.protocol, one.port] += 1
        while one.first_ns - attempts[begin].first_ns > WITHIN_NS:
            old = attempts[begin]
            ports[old.protocol, old.port] -= 1
            if not ports[old.protocol, old.port]:
                del ports[old.protocol, old.port]
            begin += 1
        if len(ports) >= PORTS:
            marked += attempts[max(begin, upto) : end + 1]
            upto = end + 1
    return marked


def _count_ports(attempts: Iterable[Attempt]) -> int:
    """Count different ports of all machines; of dynamic ports, each connection is to another one."""
    named, by_server = set[tuple[int, int]](), Counter[int]()
    for one in attempts:
        by_server[one.server] += 1 if one.port else one.opened
        if one.port:
            named.add((one.protocol, one.port))
    return max(len(named), *by_server.values())
