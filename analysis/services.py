"""Rows of counts -> services, and what is none: every packet of the capture ends up in exactly one place."""

from __future__ import annotations

import re
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add

from analysis.model import Destination, Heap, Routed, Unclassified
from analysis.numbers import quantiles, weight
from analysis.observed import Link, Observation, Role, Row
from analysis.signatures import ICMP, ICMPV6, PROTOCOLS, SCTP, TCP, UDP, Signature

IGMP = 2
CARRIED = (TCP, UDP, SCTP)
UNDERSTOOD = (*CARRIED, ICMP, ICMPV6, IGMP)
"""IP protocols whose purpose is known."""
SPOKEN = {number: name for name, number in PROTOCOLS.items()}
NAT = "nat"
"""What routed traffic is called where the catalogue has no service for it."""
MOST_UNKNOWN = 60
"""Services that the catalogue does not know; further ones, a scan's for instance, are counted together."""
MOST_PORTS = 40
TOP, DESTINATIONS = 20, 100
AMONG_NEIGHBOURS = {(UDP, port) for port in (137, 138, 1900, 3702, 5353, 5355)}
"""What machines ask all others on their network, by group or broadcast: NetBIOS, SSDP, WS-Discovery, mDNS, LLMNR."""
REGULAR = 0.25
"""Range between the quartiles over the median of what is called regular."""
KNOWN_FRAMES = ("ARP", "LLDP", "LLC")
"""Frames without IP whose purpose is known, by how their name begins."""

WHO = {
    Role.UNKNOWN: "unknown addresses",
    Role.NODE: "nodes",
    Role.SMS: "the management node",
    Role.OUTSIDE: "addresses outside",
    Role.GROUP: "groups",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
Place = tuple[int, int]
"""(IP protocol, port); port 0 for those that the system gives out."""


@dataclass
class Seen:
    """All that was counted of one service.

    Attributes:
        by_node, by_sms: connections that nodes and the management node opened. For routed traffic by_sms are those that
            were opened from outside.
        packets, bytes: (towards the server, from it).
        rows: those that tell who opens.
        clients: numbers of the hosts that opened; most_clients and most_servers: the most that a row counted.
        intervals: by who opened.
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
    places: Counter[Place] = field(default_factory=Counter)
    intervals: dict[Role, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    latencies: list[tuple[float, float]] = field(default_factory=list)
    _regular: dict[Role, tuple[float, float]] = field(default_factory=dict)
    timeline: list[int] = field(default_factory=list)
    timeline_boot: list[int] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Count a row in. What only answers, such as a DHCP server's broadcasts, opens nothing."""
        self.carry(row, row.packets, row.bytes)
        if row.client == Role.GROUP or (row.client == Role.SMS and row.server == Role.GROUP) or _answers(row):
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

    def carry(self, row: Row, packets: tuple[int, int], octets: tuple[int, int]) -> None:
        """Count a row's packets in, and nothing else of it."""
        self.first_ns = min(self.first_ns or row.first_ns, row.first_ns)
        self.last_ns = max(self.last_ns, row.last_ns)
        self.places[row.protocol, row.port] += sum(packets)
        for side in (0, 1):
            self.packets[side] += packets[side]
            self.bytes[side] += octets[side]

    def regular(self, role: Role) -> tuple[float, float]:
        """(median, range between the quartiles) of the intervals, in seconds; (0, 0) for fewer than three."""
        if role not in self._regular:
            found = self.intervals[role]
            low, median, high = quantiles(found, (0.25, 0.5, 0.75)) if weight(found) >= 3 else (0.0, 0.0, 0.0)
            self._regular[role] = median, high - low
        return self._regular[role]

    @property
    def opened(self) -> int:
        """Connections whose opening was seen."""
        return self.by_node + self.by_sms

    @property
    def contacts(self) -> int:
        """How often it was used; what stays open is used many times."""
        return max(self.opened, self.boot + self.steady)

    @property
    def critical(self) -> bool:
        """Whether the catalogue holds that nodes need it at every moment."""
        return bool(self.signature and self.signature.critical)

    @property
    def ports(self) -> tuple[str, ...]:
        """The busiest ports, in order."""
        busiest = sorted(place for place, _ in self.places.most_common(MOST_PORTS))
        return tuple(port_name(place) for place in busiest)


@dataclass
class Sorted:
    """Where all traffic went. ``routed`` is one of ``services`` too."""

    services: list[Seen]
    routed: Routed
    elsewhere: Unclassified
    unclassified: Unclassified


class _Heaps:
    """Packets and bytes by a name."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, what: str, packets: int, octets: int) -> None:
        if packets or octets:
            heap = self.by_name[what]
            heap[0] += packets
            heap[1] += octets

    def told(self) -> Unclassified:
        """All of it, the greatest heaps by name."""
        top = sorted(self.by_name.items(), key=lambda item: (-item[1][1], item[0]))[:TOP]
        packets, octets = (sum(heap[side] for heap in self.by_name.values()) for side in (0, 1))
        return Unclassified(packets, octets, tuple(Heap(what, *heap) for what, heap in top))


def sort_traffic(observation: Observation, roles: bytes, signatures: Sequence[Signature]) -> Sorted:
    """Every row to its service, to `elsewhere` or to `unclassified`; the packets of all add up to the capture's."""
    return _Sorter(observation, roles, signatures).sorted()


def port_name(place: Place) -> str:
    """tcp/6817; tcp/dynamic for ports that the system gives out; "protocol 47" for what has no ports."""
    protocol, port = place
    if protocol not in SPOKEN:
        return f"protocol {protocol}"
    if protocol not in CARRIED:
        return SPOKEN[protocol]
    return f"{SPOKEN[protocol]}/{port or 'dynamic'}"


def iana_name(place: Place) -> str:
    """The registered name of a port, else tcp/1234."""
    protocol, port = place
    # 49152 and above are never registered (RFC 6335, section 6).
    if protocol in (TCP, UDP, SCTP) and 0 < port < 49152:
        try:
            name = socket.getservbyport(port, SPOKEN[protocol])
        except OSError:
            name = ""
        if _NAME.fullmatch(name):
            return name
    return port_name(place)


class _Sorter:
    def __init__(self, observation: Observation, roles: bytes, signatures: Sequence[Signature]) -> None:
        self.observation, self.roles, self.signatures = observation, roles, signatures
        # A row's kind is 1 + the place in the table of first bytes, which is that of all signatures in their order.
        self.kinds = [signature for signature in signatures for _ in signature.first]
        self.by_place: dict[Place, Signature] = {}
        for signature in signatures:
            for place in signature.ports if not signature.routed else ():
                self.by_place.setdefault(place, signature)
        self.router = next((one for one in signatures if one.routed), None)
        self.known: dict[str, Seen] = {}
        self.unknown: dict[Place, Seen] = {}
        self.nat = Seen(self.router.name if self.router else NAT, self.router, routed=True)
        self.elsewhere, self.unclassified = _Heaps(), _Heaps()
        self.wanted, self.outside = self._outside()
        self.translated = self._translated()

    def sorted(self) -> Sorted:
        for row in self.observation.rows:
            self._sort(row)
        for what, (packets, octets) in self.observation.other.items():
            heaps = self.elsewhere if what.startswith(KNOWN_FRAMES) else self.unclassified
            heaps.add(what, packets, octets)
        self.unclassified.add("addresses beyond those that there was room for", *self.observation.beyond)
        named = self._named()
        services = [*self.known.values(), *named]
        if any(self.nat.packets):
            services.append(self.nat)
        self._remainder(services)
        return Sorted(services, self._routed(), self.elsewhere.told(), self.unclassified.told())

    def _signature(self, row: Row) -> Signature | None:
        if 0 < row.kind <= len(self.kinds):
            return self.kinds[row.kind - 1]
        return self.by_place.get((row.protocol, row.port)) if row.protocol in CARRIED else None

    def _sort(self, row: Row) -> None:
        ends, signature = {row.client, row.server}, self._signature(row)
        if ends == {Role.NODE, Role.OUTSIDE}:
            self.nat.add(row)
        elif Role.UNKNOWN in ends or (row.protocol not in UNDERSTOOD and ends == {Role.NODE, Role.SMS}):
            self._heap(self.unclassified, row, signature)
        elif ends == {Role.SMS, Role.OUTSIDE}:
            self._translated_row(row, signature)
        elif row.protocol in CARRIED and (
            ends == {Role.NODE, Role.SMS} or (signature and ends in ({Role.NODE, Role.GROUP}, {Role.SMS, Role.GROUP}))
        ):
            self._service(row, signature)
        elif (row.client, row.server, row.protocol) == (Role.NODE, Role.GROUP, UDP) and not _neighbours(row):
            # Whether the management node listens to the group no packet tells.
            if _regular(row):
                self._service(row, None)
            else:
                self._heap(self.unclassified, row, None)
        else:
            self._heap(self.elsewhere, row, signature)

    def _service(self, row: Row, signature: Signature | None) -> None:
        if signature:
            self._known(signature).add(row)
        else:
            place = (row.protocol, row.port)
            self.unknown.setdefault(place, Seen("")).add(row)

    def _known(self, signature: Signature) -> Seen:
        return self.known.setdefault(signature.name, Seen(signature.name, signature))

    def _heap(self, heaps: _Heaps, row: Row, signature: Signature | None, *, less: tuple[int, int] = (0, 0)) -> None:
        heaps.add(_label(row, signature), sum(row.packets) - less[0], sum(row.bytes) - less[1])

    # Unknown ports.

    def _named(self) -> list[Seen]:
        """Services by IANA's names, once what is no service is gone."""
        left = []
        for place, seen in self.unknown.items():
            if _nobody_there(seen, place):
                what = "ports that were asked for and never answered"
                self.unclassified.add(what, sum(seen.packets), sum(seen.bytes))
            else:
                left.append((place, seen))
        left.sort(key=lambda item: (-sum(item[1].packets), item[0]))
        for _, seen in left[MOST_UNKNOWN:]:
            self.unclassified.add("further ports that nobody knows", sum(seen.packets), sum(seen.bytes))
        named: dict[str, Seen] = {}
        catalogue = {signature.name: signature for signature in self.signatures if not signature.routed}
        for place, seen in left[:MOST_UNKNOWN]:
            name = iana_name(place)
            name = port_name(place) if name == self.nat.name else name
            into = self._known(catalogue[name]) if name in catalogue else named.setdefault(name, Seen(name))
            for row in seen.rows:
                into.add(row)
        return list(named.values())

    # Routed traffic.

    def _outside(self) -> tuple[set[tuple[int, int, int]], dict[int, list[Link]]]:
        """What nodes want outside, as (host, protocol, port), and their links by host."""
        wanted: set[tuple[int, int, int]] = set()
        outside: dict[int, list[Link]] = defaultdict(list)
        roles, node, away = self.roles, Role.NODE.value, Role.OUTSIDE.value
        for link in self.observation.links:
            opener, asked, protocol, port, _, _ = link
            client, server = roles[opener], roles[asked]
            if client == node and server == away:
                wanted.add((asked, protocol, port))
                outside[asked].append(link)
            elif client == away and server == node:
                outside[opener].append(link)
        return wanted, outside

    def _translated(self) -> dict[Place, list[int]]:
        """Packets and bytes between the management node's own address and what nodes want outside."""
        found: dict[Place, list[int]] = defaultdict(lambda: [0, 0])
        roles, sms = self.roles, Role.SMS.value
        for link in self.observation.links if self.wanted else ():
            if roles[link.client] == sms and (link.server, link.protocol, link.port) in self.wanted:
                heap = found[link.protocol, link.port]
                heap[0] += link.packets
                heap[1] += link.bytes
        return found

    def _translated_row(self, row: Row, signature: Signature | None) -> None:
        """Copies of routed packets, seen a second time behind the translation, belong to routing; the rest is the
        management node's own business with the world."""
        left = self.translated[row.protocol, row.port] if row.client == Role.SMS else [0, 0]
        packets, octets = min(sum(row.packets), left[0]), min(sum(row.bytes), left[1])
        left[0] -= packets
        left[1] -= octets
        if packets:
            self.nat.carry(row, _share(row.packets, packets), _share(row.bytes, octets))
        self._heap(self.elsewhere, row, signature, less=(packets, octets if packets else 0))

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

    def _remainder(self, services: list[Seen]) -> None:
        """What the core counted in its totals alone."""
        seen = [self.elsewhere.told(), self.unclassified.told()]
        packets = sum(sum(one.packets) for one in services) + sum(one.packets for one in seen)
        octets = sum(sum(one.bytes) for one in services) + sum(one.bytes for one in seen)
        left = max(self.observation.packets - packets, 0), max(self.observation.bytes - octets, 0)
        self.unclassified.add("records that were not understood", *left)


def _label(row: Row, signature: Signature | None) -> str:
    what = port_name((row.protocol, row.port)) + (f" ({signature.name})" if signature else "")
    if row.client == row.server:
        return f"{WHO[row.client]} among themselves: {what}" if row.client != Role.SMS else f"{WHO[row.client]}: {what}"
    # Who opened does not matter here.
    one, other = sorted((row.client, row.server))
    return f"{WHO[one]} and {WHO[other]}: {what}"


def _nobody_there(seen: Seen, place: Place) -> bool:
    """Whether a port that nobody knows was asked for in vain, as a scan does: that is no service.

    Whoever asks again and again wants something, and so do several nodes: then it is one that is away.
    """
    if seen.midstream or not seen.opened or (place[1] and seen.most_clients > 1):
        return False
    once = seen.opened <= max(seen.most_clients, seen.most_servers, 1)
    if place[0] == UDP:
        return once and not seen.packets[1] and seen.packets[0] <= 2 * seen.opened
    # A connection that came about takes two packets of the client's at least (RFC 9293, section 3.5).
    refused = seen.packets[0] <= seen.opened and seen.packets[1] <= seen.opened
    return (once or not place[1]) and (refused or seen.unanswered >= seen.opened)


def _answers(row: Row) -> bool:
    """Whether it goes to where DHCP's clients listen (RFC 2131, RFC 8415): they have asked before."""
    return row.client == Role.SMS and (row.protocol, row.port) in ((UDP, 68), (UDP, 546))


def _neighbours(row: Row) -> bool:
    return (row.protocol, row.port) in AMONG_NEIGHBOURS


def _regular(row: Row) -> bool:
    """Whether nodes tell a group something again and again, as monitoring does."""
    if not row.port or weight(row.intervals) < 3:
        return False
    low, median, high = quantiles(row.intervals, (0.25, 0.5, 0.75))
    return median > 0 and high - low <= REGULAR * median


def _share(both: tuple[int, int], part: int) -> tuple[int, int]:
    """A part of a sum, split as the sum is."""
    total = sum(both)
    first = part * both[0] // total if total else 0
    return first, part - first


def _sum(one: list[int], other: Sequence[int]) -> list[int]:
    if not one:
        return list(other)
    if len(other) > len(one):
        one = one + [0] * (len(other) - len(one))
    return list(map(add, one, (*other, *[0] * (len(one) - len(other)))))
