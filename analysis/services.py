"""Group rows of counts into services and other traffic; every packet of the capture is counted in exactly one place."""

from __future__ import annotations

import re
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from analysis.cluster import DHCP_SERVERS
from analysis.model import Destination, Routed, TrafficKind, Unclassified
from analysis.numbers import quantiles, weight
from analysis.observed import EMPTY, SCANNED, UNREAD, Link, Observation, Role, Row
from analysis.signatures import ICMP, ICMPV6, PROTOCOLS, SCTP, TCP, UDP, Signature

IGMP = 2
TRANSPORTS = (TCP, UDP, SCTP)
UNDERSTOOD = (*TRANSPORTS, ICMP, ICMPV6, IGMP)
"""IP protocols whose purpose is known."""
PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}
ROUTED = "routed"
"""Name of routed traffic if the catalogue has no service for it."""
MAX_UNKNOWN = 60
"""Maximum services that the catalogue does not know; further ones, for instance of a scan, are counted together."""
MAX_PORTS = 40
TOP, DESTINATIONS = 20, 100
DISCOVERY_PORTS = {(UDP, port) for port in (137, 138, 1900, 3702, 5353, 5355)}
"""Discovery by multicast or broadcast: NetBIOS, SSDP, WS-Discovery, mDNS, LLMNR."""
REGULAR = 0.25
"""Maximum interquartile range of regular intervals, relative to the median."""
MISSING = 0.1
"""Share of connections with an opening or first bytes that lack the other: above it, packets are missing or cut."""
KNOWN_FRAMES = ("ARP", "LLDP", "LLC")
"""Prefixes of the names of frames without IP whose purpose is known."""

ROLE_NAMES = {
    Role.UNKNOWN: "unknown addresses",
    Role.NODE: "nodes",
    Role.SMS: "the management node",
    Role.OUTSIDE: "addresses outside",
    Role.GROUP: "groups",
    Role.SERVER: "other servers",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
Place = tuple[int, int]
"""(IP protocol, port); port 0 for dynamic ports."""


@dataclass
class ServiceCounts:
    """The counts of one service.

    Attributes:
        by_node, by_sms: connections opened by nodes and by the management node. For routed traffic by_sms are those
            opened from outside.
        packets, bytes: (to the server, from it).
        rows: those that show who opens connections.
        clients: indexes of the hosts that opened; most_clients and most_servers: the maximum of the rows.
        users, reached: machines of nodes that opened, and that the management node opened to (`users.count_users`).
        intervals: by the side that opened.
        places: ports by packets.
    """

    name: str
    signature: Signature | None = None
    routed: bool = False
    rows: list[Row] = field(default_factory=list)
    by_node: int = 0
    by_sms: int = 0
    midstream: int = 0
    unanswered: int = 0
    packets: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    first_ns: int = 0
    last_ns: int = 0
    boot: int = 0
    steady: int = 0
    clients: set[int] = field(default_factory=set)
    most_clients: int = 0
    most_servers: int = 0
    users: int = 0
    reached: int = 0
    places: Counter[Place] = field(default_factory=Counter)
    intervals: dict[Role, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    latencies: list[tuple[float, float]] = field(default_factory=list)
    _regular: dict[Role, tuple[float, float]] = field(default_factory=dict)
    timeline: list[int] = field(default_factory=list)
    timeline_boot: list[int] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row. Answers, such as a DHCP server's broadcasts, do not count as opening."""
        self.count_packets(row, row.packets, row.bytes)
        if row.client == Role.GROUP or (row.client == Role.SMS and row.server == Role.GROUP) or _is_answer(row):
            return
        self.rows.append(row)
        if row.client in (Role.SMS, Role.OUTSIDE):
            self.by_sms += row.opened
            self.most_servers = max(self.most_servers, row.server_hosts)
        elif row.client == Role.NODE:
            self.by_node += row.opened
            self.clients.update(row.client_indexes)
            self.most_clients = max(self.most_clients, row.client_hosts)
        self.midstream += row.midstream
        self.unanswered += row.unanswered if row.protocol != UDP else 0
        self.boot += row.contacts_boot
        self.steady += row.contacts_steady
        self.intervals[row.client].extend(row.intervals)
        self.latencies.extend(row.latencies)
        self.timeline = _sum(self.timeline, row.timeline)
        self.timeline_boot = _sum(self.timeline_boot, row.timeline_boot)

    def count_packets(self, row: Row, packets: tuple[int, int], octets: tuple[int, int]) -> None:
        """Add packets and bytes of a row, and nothing else."""
        self.first_ns = min(self.first_ns or row.first_ns, row.first_ns)
        self.last_ns = max(self.last_ns, row.last_ns)
        self.places[row.protocol, row.port] += sum(packets)
        for side in (0, 1):
            self.packets[side] += packets[side]
            self.bytes[side] += octets[side]

    def regular(self, role: Role) -> tuple[float, float]:
        """Return (median, interquartile range) of the intervals, in seconds; (0, 0) for fewer than three."""
        if role not in self._regular:
            found = self.intervals[role]
            low, median, high = quantiles(found, (0.25, 0.5, 0.75)) if weight(found) >= 3 else (0.0, 0.0, 0.0)
            self._regular[role] = median, high - low
        return self._regular[role]

    @property
    def opened(self) -> int:
        """Connections that were opened in the capture."""
        return self.by_node + self.by_sms

    @property
    def contacts(self) -> int:
        """Number of uses; a connection that stays open is used many times."""
        return max(self.opened, self.boot + self.steady)

    @property
    def critical(self) -> bool:
        """Whether the catalogue says time-critical."""
        return bool(self.signature and self.signature.critical)

    @property
    def ports(self) -> tuple[str, ...]:
        """The busiest ports, sorted."""
        busiest = sorted(place for place, _ in self.places.most_common(MAX_PORTS))
        return tuple(port_name(place) for place in busiest)


@dataclass
class Sorted:
    """All traffic by category. ``routed`` is also one of ``services``.

    ``others``: packets of the catalogue's services that nodes or the management node use at other machines.
    """

    services: list[ServiceCounts]
    routed: Routed
    elsewhere: Unclassified
    unclassified: Unclassified
    others: Counter[str] = field(default_factory=Counter)


class _Tally:
    """Packets and bytes by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, what: str, packets: int, octets: int) -> None:
        if packets or octets:
            entry = self.by_name[what]
            entry[0] += packets
            entry[1] += octets

    def summary(self) -> Unclassified:
        """Return the totals and the largest entries."""
        top = sorted(self.by_name.items(), key=lambda item: (-item[1][1], item[0]))[:TOP]
        packets, octets = (sum(entry[side] for entry in self.by_name.values()) for side in (0, 1))
        return Unclassified(packets, octets, tuple(TrafficKind(what, *entry) for what, entry in top))


def sort_traffic(observation: Observation, roles: bytes, signatures: Sequence[Signature]) -> Sorted:
    """Assign every row to a service, to `elsewhere` or to `unclassified`; all packets add up to the capture's."""
    return _Sorter(observation, roles, signatures).sorted()


def port_name(place: Place) -> str:
    """Return a port's name: tcp/6817; tcp/dynamic for dynamic ports; "protocol 47" for protocols without ports."""
    protocol, port = place
    if protocol not in PROTOCOL_NAMES:
        return f"protocol {protocol}"
    if protocol not in TRANSPORTS:
        return PROTOCOL_NAMES[protocol]
    return f"{PROTOCOL_NAMES[protocol]}/{port or 'dynamic'}"


def iana_name(place: Place) -> str:
    """Return the registered name of a port, else tcp/1234."""
    protocol, port = place
    # 49152 and above are never registered (RFC 6335, section 6).
    if protocol in (TCP, UDP, SCTP) and 0 < port < 49152:
        try:
            name = socket.getservbyport(port, PROTOCOL_NAMES[protocol])
        except OSError:
            name = ""
        if _NAME.fullmatch(name):
            return name
    return port_name(place)


class _Sorter:
    def __init__(self, observation: Observation, roles: bytes, signatures: Sequence[Signature]) -> None:
        self.observation, self.roles, self.signatures = observation, roles, signatures
        # A row's kind is 1 + the index into the first bytes of all signatures, in their order.
        self.kinds = [signature for signature in signatures for _ in signature.first]
        self.by_place: dict[Place, Signature] = {}
        for signature in signatures:
            for place in signature.ports if not signature.routed else ():
                self.by_place.setdefault(place, signature)
        self._add_beside()
        self.read_as = self._find_read()
        self.router = next((one for one in signatures if one.routed), None)
        self.known: dict[str, ServiceCounts] = {}
        self.unknown: dict[Place, ServiceCounts] = {}
        self.nat = ServiceCounts(self.router.name if self.router else ROUTED, self.router, routed=True)
        self.elsewhere, self.unclassified = _Tally(), _Tally()
        self.others: Counter[str] = Counter()
        self.requested, self.outside = self._find_outside()
        self.translated = self._find_translated()

    def sorted(self) -> Sorted:
        for row in self.observation.rows:
            self._sort(row)
        for what, (packets, octets) in self.observation.other.items():
            tally = self.elsewhere if what.startswith(KNOWN_FRAMES) else self.unclassified
            tally.add(what, packets, octets)
        self.unclassified.add("addresses beyond the table limit", *self.observation.beyond)
        named = self._name_unknown()
        services = [one for one in (*self.known.values(), *named) if not self._of_another(one)]
        if any(self.nat.packets):
            services.append(self.nat)
        self._remainder(services)
        return Sorted(services, self._routed(), self.elsewhere.summary(), self.unclassified.summary(), self.others)

    def _add_beside(self) -> None:
        """Add the ports that belong to a service only where its first bytes were seen, as those of xCAT."""
        firsts = [first for signature in self.signatures for first in signature.first]
        seen = {row.kind for row in self.observation.rows if row.kind <= len(firsts) and row.server == Role.SMS}
        for kind in sorted(seen - {0}):
            if beside := firsts[kind - 1].beside:
                self.by_place.setdefault(beside, self.kinds[kind - 1])

    def _find_read(self) -> dict[tuple[int, int, Role, Role], Signature]:
        """Return the service of all connections to a port whose first bytes were captured, if it is the same of all.

        Those whose first bytes were not captured are then a sample of the same connections, as in a capture of one
        packet in four: n of one service and none of another limit the share of others to 3/n (the rule of three).
        Nothing is concluded where packets are complete: connections that were open before are not like others.
        """
        if not self._lacks_first_bytes():
            return {}
        read: dict[tuple[int, int, Role, Role], Counter[str]] = defaultdict(Counter)
        for row in self.observation.rows:
            if row.kind < UNREAD and row.port:
                name = self.kinds[row.kind - 1].name if 0 < row.kind <= len(self.kinds) else ""
                read[_way(row)][name] += row.opened + row.midstream
        by_name = {each.name: each for each in self.kinds}
        return {way: by_name[names.most_common(1)[0][0]] for way, names in read.items() if "" not in names}

    def _lacks_first_bytes(self) -> bool:
        """Return whether packets are missing or cut: of connections only the opening was captured, or the first bytes.

        These follow each other.
        """
        places = {(first.protocol, first.port) for signature in self.signatures for first in signature.first}
        missing = complete = 0
        for row in self.observation.rows:
            if (row.protocol, row.port) not in places or row.kind > UNREAD:
                continue
            if row.kind == UNREAD:
                missing += row.opened
            else:
                complete += row.opened
                missing += row.midstream if row.kind else 0
        return missing > MISSING * (missing + complete)

    def _signature(self, row: Row) -> Signature | None:
        if 0 < row.kind <= len(self.kinds):
            return self.kinds[row.kind - 1]
        if row.kind in (UNREAD, EMPTY) and (found := self.read_as.get(_way(row))):
            return found
        return self.by_place.get((row.protocol, row.port)) if row.protocol in TRANSPORTS else None

    def _sort(self, row: Row) -> None:
        ends, signature = {row.client, row.server}, self._signature(row)
        if signature and _is_of_another(row, signature):
            self.others[signature.name] += sum(row.packets)
        if row.kind == SCANNED:
            self.unclassified.add("port scan", sum(row.packets), sum(row.bytes))
        elif ends == {Role.NODE, Role.OUTSIDE}:
            self.nat.add(row)
        elif Role.UNKNOWN in ends or (row.protocol not in UNDERSTOOD and ends == {Role.NODE, Role.SMS}):
            self._count(self.unclassified, row, signature)
        elif ends == {Role.SMS, Role.OUTSIDE}:
            self._translated_row(row, signature)
        elif row.protocol in TRANSPORTS and (
            ends == {Role.NODE, Role.SMS} or (signature and ends in ({Role.NODE, Role.GROUP}, {Role.SMS, Role.GROUP}))
        ):
            self._service(row, signature)
        elif (row.client, row.server, row.protocol) == (Role.NODE, Role.GROUP, UDP) and not _is_discovery(row):
            # No packet shows whether the management node is a member of the group.
            if _regular(row):
                self._service(row, None)
            else:
                self._count(self.unclassified, row, None)
        else:
            self._count(self.elsewhere, row, signature)

    def _service(self, row: Row, signature: Signature | None) -> None:
        if signature:
            self._known(signature).add(row)
        else:
            place = (row.protocol, row.port)
            self.unknown.setdefault(place, ServiceCounts("")).add(row)

    def _known(self, signature: Signature) -> ServiceCounts:
        return self.known.setdefault(signature.name, ServiceCounts(signature.name, signature))

    def _count(self, tally: _Tally, row: Row, signature: Signature | None, *, less: tuple[int, int] = (0, 0)) -> None:
        tally.add(_label(row, signature), sum(row.packets) - less[0], sum(row.bytes) - less[1])

    # Unknown ports.

    def _name_unknown(self) -> list[ServiceCounts]:
        """Return the unknown services under their IANA names; scans are counted as unclassified."""
        left = []
        for place, counts in self.unknown.items():
            if _is_scan(counts, place):
                what = "ports that never answered"
                self.unclassified.add(what, sum(counts.packets), sum(counts.bytes))
            else:
                left.append((place, counts))
        left.sort(key=lambda item: (-sum(item[1].packets), item[0]))
        for _, counts in left[MAX_UNKNOWN:]:
            self.unclassified.add("further unknown ports", sum(counts.packets), sum(counts.bytes))
        named: dict[str, ServiceCounts] = {}
        catalogue = {signature.name: signature for signature in self.signatures if not signature.routed}
        for place, counts in left[:MAX_UNKNOWN]:
            name = iana_name(place)
            name = port_name(place) if name == self.nat.name else name
            into = self._known(catalogue[name]) if name in catalogue else named.setdefault(name, ServiceCounts(name))
            for row in counts.rows:
                into.add(row)
        return list(named.values())

    def _of_another(self, counts: ServiceCounts) -> bool:
        """Return whether only the management node uses a service that it would not open to nodes; count it elsewhere.

        The service is then that of the other machine, whatever that is; as is DHCP that only another machine answers.
        """
        signature = counts.signature
        if self._answered_by_another(counts):
            self.elsewhere.add(f"served by another machine: {counts.name}", sum(counts.packets), sum(counts.bytes))
            self.others[counts.name] += sum(counts.packets)
            return True
        if signature is None or signature.sms_opens or not counts.rows:
            return False
        if any(row.client != Role.SMS or row.server == Role.GROUP for row in counts.rows):
            return False
        self.elsewhere.add(f"the management node as a client: {counts.name}", sum(counts.packets), sum(counts.bytes))
        self.others[counts.name] += sum(counts.packets)
        return True

    def _answered_by_another(self, counts: ServiceCounts) -> bool:
        """Return whether nodes request addresses of all, and another server answers, the management node never."""
        if (
            counts.packets[1]
            or not set(counts.places) <= DHCP_SERVERS
            or any(row.server != Role.GROUP for row in counts.rows)
        ):
            return False
        return any(
            row.server == Role.SERVER and (row.protocol, row.port) in DHCP_SERVERS for row in self.observation.rows
        )

    # Routed traffic.

    def _find_outside(self) -> tuple[set[tuple[int, int, int]], dict[int, list[Link]]]:
        """Return the outside destinations of nodes as (host, protocol, port), and their links by host."""
        requested: set[tuple[int, int, int]] = set()
        outside: dict[int, list[Link]] = defaultdict(list)
        roles, node, outside_role = self.roles, Role.NODE.value, Role.OUTSIDE.value
        for link in self.observation.links:
            client_index, server_index, protocol, port, _, _ = link
            client, server = roles[client_index], roles[server_index]
            if client == node and server == outside_role:
                requested.add((server_index, protocol, port))
                outside[server_index].append(link)
            elif client == outside_role and server == node:
                outside[client_index].append(link)
        return requested, outside

    def _find_translated(self) -> dict[Place, list[int]]:
        """Return packets and bytes between the management node's own addresses and the nodes' destinations."""
        found: dict[Place, list[int]] = defaultdict(lambda: [0, 0])
        roles, sms = self.roles, Role.SMS.value
        for link in self.observation.links if self.requested else ():
            if roles[link.client] == sms and (link.server, link.protocol, link.port) in self.requested:
                entry = found[link.protocol, link.port]
                entry[0] += link.packets
                entry[1] += link.bytes
        return found

    def _translated_row(self, row: Row, signature: Signature | None) -> None:
        """Count copies of routed packets, seen a second time after NAT, as routed; the rest is own traffic."""
        left = self.translated[row.protocol, row.port] if row.client == Role.SMS else [0, 0]
        packets, octets = min(sum(row.packets), left[0]), min(sum(row.bytes), left[1])
        left[0] -= packets
        left[1] -= octets
        if packets:
            self.nat.count_packets(row, _share(row.packets, packets), _share(row.bytes, octets))
        self._count(self.elsewhere, row, signature, less=(packets, octets if packets else 0))

    def _routed(self) -> Routed:
        by_host = []
        for host, links in self.outside.items():
            packets, octets = sum(link.packets for link in links), sum(link.bytes for link in links)
            by_host.append((octets, packets, host, {(link.protocol, link.port) for link in links}))
        by_host.sort(key=lambda one: (-one[0], one[2]))
        hosts = self.observation.hosts
        destinations = tuple(
            Destination(hosts[host].address, packets, octets, tuple(map(port_name, sorted(places)[:TOP])))
            for octets, packets, host, places in by_host[:DESTINATIONS]
            if host < len(hosts)
        )
        return Routed(sum(self.nat.packets), sum(self.nat.bytes), destinations)

    def _remainder(self, services: list[ServiceCounts]) -> None:
        """Count the packets that the core has only in its totals as unclassified."""
        others = [self.elsewhere.summary(), self.unclassified.summary()]
        packets = sum(sum(one.packets) for one in services) + sum(one.packets for one in others)
        octets = sum(sum(one.bytes) for one in services) + sum(one.bytes for one in others)
        left = max(self.observation.packets - packets, 0), max(self.observation.bytes - octets, 0)
        self.unclassified.add("records that were not understood", *left)


def _way(row: Row) -> tuple[int, int, Role, Role]:
    return row.protocol, row.port, row.client, row.server


def _label(row: Row, signature: Signature | None) -> str:
    what = port_name((row.protocol, row.port)) + (f" ({signature.name})" if signature else "")
    if row.client == row.server:
        return (
            f"{ROLE_NAMES[row.client]} among themselves: {what}"
            if row.client != Role.SMS
            else f"{ROLE_NAMES[row.client]}: {what}"
        )
    # The label does not depend on who opened the connection.
    one, other = sorted((row.client, row.server))
    return f"{ROLE_NAMES[one]} and {ROLE_NAMES[other]}: {what}"


def _is_scan(counts: ServiceCounts, place: Place) -> bool:
    """Return whether all attempts to use an unknown port failed, as in a scan: that is not a service.

    Repeated attempts, or attempts of several nodes, mean a service that is down.
    """
    if counts.midstream or not counts.opened or (place[1] and counts.most_clients > 1):
        return False
    once = counts.opened <= max(counts.most_clients, counts.most_servers, 1)
    if place[0] == UDP:
        return once and not counts.packets[1] and counts.packets[0] <= 2 * counts.opened
    # An established connection takes at least two packets of the client (RFC 9293, section 3.5).
    refused = counts.packets[0] <= counts.opened and counts.packets[1] <= counts.opened
    return (once or not place[1]) and (refused or counts.unanswered >= counts.opened)


def _is_of_another(row: Row, signature: Signature) -> bool:
    """Return whether nodes use it at another machine than the management node, or that does; and get answers."""
    if row.kind == SCANNED or not (row.packets[1] or row.protocol == UDP):
        return False
    if row.client == Role.NODE:
        return row.server not in (Role.SMS, Role.GROUP)
    return row.client == Role.SMS and row.server == Role.SERVER and not signature.sms_opens


def _is_answer(row: Row) -> bool:
    """Return whether it goes to a DHCP client port (RFC 2131, RFC 8415), and thus is an answer."""
    return row.client == Role.SMS and (row.protocol, row.port) in ((UDP, 68), (UDP, 546))


def _is_discovery(row: Row) -> bool:
    return (row.protocol, row.port) in DISCOVERY_PORTS


def _regular(row: Row) -> bool:
    """Return whether nodes send to a group at regular intervals, as monitoring does."""
    if not row.port or weight(row.intervals) < 3:
        return False
    low, median, high = quantiles(row.intervals, (0.25, 0.5, 0.75))
    return median > 0 and high - low <= REGULAR * median


def _share(both: tuple[int, int], part: int) -> tuple[int, int]:
    """Split ``part`` in the proportion of ``both``."""
    total = sum(both)
    first = part * both[0] // total if total else 0
    return first, part - first


def _sum(one: list[int], other: Sequence[int]) -> list[int]:
    return [mine + more for mine, more in zip_longest(one, other, fillvalue=0)]
