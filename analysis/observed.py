"""Typed results of the native core: the raw counts of a capture.

Times are integer nanoseconds since 1970, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

SCANNED = 255
"""Kind of the rows of port scans."""
EMPTY = 254
"""Kind of the rows of TCP connections without data."""
UNREAD = 253
"""Kind of the rows of connections whose first bytes would name their service, but were not captured."""


class Role(IntEnum):
    """Role of an address in the cluster; the core groups its counts by role."""

    UNKNOWN = 0
    NODE = 1
    SMS = 2
    OUTSIDE = 3
    GROUP = 4
    """Multicast and broadcast."""
    SERVER = 5
    """Another machine that serves the management node."""


@dataclass(frozen=True)
class Host:
    """An address that was seen.

    Attributes:
        index: its index in the core.
        address: IPv4 or IPv6, as text; "" stands for all further addresses behind the router with its link address.
        macs: link addresses its frames came from, the first two; empty if the link has none.
        via: link address that frames to it were sent to; "" if never seen.
        claimed: link address that announced the address by ARP or neighbour discovery; "" without one.
        sent, received: packets.
        outgoing: whether the capturing machine sent frames from it (known in Linux cooked captures).
    """

    index: int
    address: str
    macs: tuple[str, ...] = ()
    via: str = ""
    claimed: str = ""
    sent: int = 0
    received: int = 0
    outgoing: bool = False


class Link(NamedTuple):
    """Traffic between two addresses by the server's port; client and server are indexes of hosts.

    There may be tens of thousands: a tuple is created five times faster than a frozen dataclass.
    """

    client: int
    server: int
    protocol: int
    port: int
    packets: int
    bytes: int


@dataclass(frozen=True)
class Row:
    """All traffic of one protocol and port between two roles.

    Attributes:
        protocol, port: IP protocol and the server's port; port 0 for protocols without ports, and for unknown server
            ports above 32767 (dynamic ports).
        kind: 1 + index into the `first` table passed to the core; 0 if nothing matched; UNREAD, if that cannot be seen;
            EMPTY for TCP connections without data; SCANNED for scans, with port 0.
        client, server: roles of the side that opened and of the other side.
        client_hosts, server_hosts: distinct addresses; ``client_indexes`` the first 4096 clients.
        opened: connections opened in the capture. midstream: open when the capture began.
        resumed: continued after their state was dropped for lack of memory.
        unanswered: opened without an answer.
        packets, bytes: (client to server, server to client); bytes of the frames on the wire.
        first_ns, last_ns: times of the first and the last packet.
        contacts_boot, contacts_steady: contacts (a connection, or a client's packet after a second of silence)
            while the client, or the server if that is the node, was booting, and otherwise.
        intervals: (seconds between contacts of one client, weight: intervals that this sample represents).
        latencies: (seconds from a request to the first byte of its answer, weight).
        timeline, timeline_boot: contacts by part of the capture, in steady state and in boots.
    """

    protocol: int
    port: int
    kind: int
    client: Role
    server: Role
    client_hosts: int = 0
    server_hosts: int = 0
    client_indexes: tuple[int, ...] = ()
    opened: int = 0
    midstream: int = 0
    resumed: int = 0
    unanswered: int = 0
    packets: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    first_ns: int = 0
    last_ns: int = 0
    contacts_boot: int = 0
    contacts_steady: int = 0
    intervals: tuple[tuple[float, float], ...] = ()
    latencies: tuple[tuple[float, float], ...] = ()
    timeline: tuple[int, ...] = ()
    timeline_boot: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A sampled packet for the protocol decoders: the payload above UDP or TCP.

    Attributes:
        from_client: whether the client sent it.
        payload: at most the first 1024 bytes.
    """

    protocol: int
    port: int
    from_client: bool
    time_ns: int
    source: int
    destination: int
    payload: bytes


@dataclass(frozen=True)
class Scan:
    """A port scan by one host; source and targets are indexes of hosts.

    Attributes:
        pairs: indexes of its pairs in the core, which no service counts.
        ports: ports that were tried; failed: those that did not answer, or refused.
        packets: of both sides.
    """

    source: int
    targets: tuple[int, ...]
    pairs: tuple[int, ...]
    ports: int
    failed: int
    packets: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class Problem:
    """An unreadable place of a file, with the reason."""

    file: str
    offset: int
    what: str


@dataclass(frozen=True)
class Boot:
    """A node's boot: the times of its DHCP discover and of settling (0: the capture ended before)."""

    mac: str
    began_ns: int
    settled_ns: int


@dataclass(frozen=True)
class Observation:
    """All counts of a capture. ``rows`` are grouped by the roles of the addresses.

    Attributes:
        other: frames without IP by kind ("ARP", "LLDP", "ethertype 0x88b5"): (packets, bytes).
        skipped: number of skipped records by reason.
        beyond: packets and bytes counted only in the totals, because the address table was full.
        bin_s: seconds per part of a timeline; the first begins at ``start_ns``.
        cut: packets captured only in part; cut_at: the maximum captured bytes of one of them.
        gap_s: seconds in and between files in which nothing was captured; gaps: (begin, end) of the longest 64, in
            nanoseconds, in the order of time.
        scans: port scans; ``links`` are without them.
        remarks: limits of the files, as sentences.
    """

    files: tuple[str, ...]
    packets: int
    bytes: int
    start_ns: int
    end_ns: int
    truncated: bool
    hosts: tuple[Host, ...] = ()
    rows: tuple[Row, ...] = ()
    links: Sequence[Link] = ()
    samples: tuple[Sample, ...] = ()
    boots: tuple[Boot, ...] = ()
    other: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    beyond: tuple[int, int] = (0, 0)
    bin_s: float = 1.0
    cut: int = 0
    cut_at: int = 0
    gap_s: float = 0.0
    gaps: tuple[tuple[int, int], ...] = ()
    scans: tuple[Scan, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """Seconds from the first packet to the last."""
        return max(self.end_ns - self.start_ns, 0) / 1e9

    @property
    def covered_s(self) -> float:
        """Seconds that the files cover: the duration without the gaps in and between them."""
        return max(self.duration_s - self.gap_s, 0.0)
