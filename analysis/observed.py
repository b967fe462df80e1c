"""What was counted in a capture, before anybody thinks about it: the typed view on the native core.

Times are nanoseconds since 1970 in whole numbers, spans are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

BINS = 64
"""Parts of equal length that a timeline has."""


class Role(IntEnum):
    """What an address is to the cluster; the core groups its counts by it."""

    UNKNOWN = 0
    NODE = 1
    SMS = 2
    OUTSIDE = 3
    GROUP = 4
    """Multicast and broadcast."""


@dataclass(frozen=True)
class Host:
    """An address that was seen.

    Attributes:
        index: its number in the core.
        address: IPv4 or IPv6, as text; "" stands for all further addresses behind the router with its link address.
        macs: link addresses its frames came from, the first two; empty where the link has none.
        via: link address that frames to it went to; "" when never seen.
        claimed: link address that said by ARP or neighbour discovery that the address is its own; "" without one.
        sent, received: packets.
        outgoing: whether the capturing machine itself sent frames of it (Linux cooked captures tell).
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
    """What one address had with another, by the server's port; client and server are numbers of hosts.

    There may be tens of thousands: a tuple is made five times faster than a frozen dataclass.
    """

    client: int
    server: int
    protocol: int
    port: int
    packets: int
    bytes: int


@dataclass(frozen=True)
class Row:
    """All traffic of one protocol and port between two kinds of addresses.

    Attributes:
        protocol, port: IP protocol and the server's port; port 0 for protocols without, and for server ports that
            nobody knows above 32767 (they are given out by the system, not by a service).
        kind: 1 + index into the `first` table that the core was given; 0 where nothing matched.
        client, server: who opened, and who was asked.
        client_hosts, server_hosts: distinct addresses; ``client_indexes`` the first 4096 of them.
        opened: connections whose beginning was seen. midstream: were open already when the capture began.
        resumed: went on after their state was dropped for want of room.
        unanswered: opened, and nothing came back.
        packets, bytes: (client to server, server to client); bytes are those of the frames on the wire.
        first_ns, last_ns: first and last packet.
        contacts_boot, contacts_steady: contacts (a connection, or a client's packet after a second of silence)
            while the client, or the server where that is the node, was booting, and else.
        intervals: (seconds between contacts of one client, how many such intervals this one stands for).
        latencies: (seconds from a request to the first byte of its answer, weight).
        timeline, timeline_boot: contacts by part of the capture, steady and boot apart.
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
    """A packet kept whole for those who read its protocol: the payload above UDP or TCP.

    Attributes:
        from_client: whether the client sent it.
        payload: at most 1024 bytes.
    """

    protocol: int
    port: int
    from_client: bool
    time_ns: int
    source: int
    destination: int
    payload: bytes


@dataclass(frozen=True)
class Problem:
    """A place of a file that could not be read, and what was done about it."""

    file: str
    offset: int
    what: str


@dataclass(frozen=True)
class Boot:
    """A node's boot: its DHCP discover, and when it had settled (0: the capture ended before)."""

    mac: str
    began_ns: int
    settled_ns: int


@dataclass(frozen=True)
class Observation:
    """All that was counted. ``rows`` are grouped by the roles that were given for the addresses.

    Attributes:
        other: frames that carry no IP, by what they are ("ARP", "LLDP", "ethertype 0x88b5"): (packets, bytes).
        skipped: records that could not be understood, by reason.
        beyond: packets and bytes that were counted in the totals alone, for want of room for their addresses.
        bin_s: seconds that a part of a timeline lasts; the first begins at ``start_ns``.
        cut: packets of which the capture holds only the beginning; cut_at: the most bytes that such a one has.
        gap_s: seconds between files that no file covers.
        remarks: what one should know of the files before believing what was counted, as sentences.
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
    remarks: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """From the first packet to the last."""
        return max(self.end_ns - self.start_ns, 0) / 1e9

    @property
    def covered_s(self) -> float:
        """Seconds that the files cover: the duration without the gaps between them."""
        return max(self.duration_s - self.gap_s, 0.0)
