"""A wire captured at the management node: records all frames, with the expected counts of each flow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from tests.captures import packets as p

SEGMENT = 1448
"""Bytes of payload of a full segment with the timestamp option."""
STAMPS = bytes((8, 10)) + bytes(8)
OFFER = bytes((2, 4, 5, 0xB4, 4, 2, 8, 10)) + bytes(8) + bytes((1, 3, 3, 7))
"""Options of a SYN as Linux sends them: segment size, selective acknowledgements, timestamps, window scale."""


@dataclass(eq=False)
class Station:
    """A station on the wire."""

    name: str
    mac: str
    address: str
    ports: Iterator[int] = field(default_factory=lambda: count(32768))

    def port(self) -> int:
        """Return the next free dynamic port."""
        return next(self.ports)


Key = tuple[int, str, int, str, int]
"""Protocol, client, port, server, port."""


@dataclass
class Flow:
    """Traffic between two ports: packets and bytes as (to the server, from it).

    Attributes:
        opener: "node" or "sms", the initiator.
        midstream: whether it was open before the capture began.
        syns: number of connections opened on it.
    """

    service: str
    opener: str
    midstream: bool = False
    syns: int = 0
    packets: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True)
class Total:
    """Totals of a service's flows; ``opened`` counts connections by initiator, a UDP flow as one."""

    flows: int = 0
    opened: dict[str, int] = field(default_factory=dict)
    midstream: int = 0
    packets: int = 0
    bytes: int = 0


Message = tuple[float, str, bytes]
"""Seconds after the previous message, sender ("c" client or "s" server), payload."""


class Wire:
    """All frames on the management node's interface, with their expected counts."""

    def __init__(self, sms: Station, *, rtt_s: float = 0.0002, snap_pad: bool = True) -> None:
        self.sms = sms
        self.rtt_s = rtt_s
        self.pad = snap_pad
        self.frames: list[tuple[int, bytes]] = []
        self.flows: dict[Key, Flow] = {}
        self.other: dict[str, list[int]] = {}
        self.idents = count(1)

    def frame(self, time_s: float, source: Station, payload: bytes, kind: int = p.IPV4, *, to: str) -> int:
        """Put a frame on the wire; return its size. Frames of other stations are padded to 60 bytes."""
        made = p.ethernet(payload, kind, src=source.mac, dst=to, pad=self.pad and source is not self.sms)
        self.frames.append((round(time_s * 1e9), made))
        return len(made)

    def noise(self, what: str, time_s: float, source: Station, payload: bytes, kind: int, *, to: str) -> None:
        """Add a frame without IP."""
        size = self.frame(time_s, source, payload, kind, to=to)
        seen = self.other.setdefault(what, [0, 0])
        seen[0] += 1
        seen[1] += size

    def open(self, key: Key, service: str, opener: str, *, midstream: bool = False) -> Flow:
        """Return the flow of this key, a new one if necessary."""
        return self.flows.setdefault(key, Flow(service, opener, midstream))

    def count(self, flow: Flow, back: bool, size: int) -> None:
        """Count a packet of a flow."""
        flow.packets[back] += 1
        flow.bytes[back] += size

    def datagram(
        self,
        time_s: float,
        flow: Flow,
        payload: bytes,
        ends: tuple[Station, int, Station, int],
        *,
        back: bool = False,
        to: str = "",
        source: str = "",
        target: str = "",
    ) -> None:
        """A UDP datagram from the first end to the second; ``back``: the server sends it.

        Args:
            to, source, target: link address of the receiver, and the IP addresses, where they are not the stations'.
        """
        sender, sport, receiver, dport = ends
        packet = p.ipv4(
            p.udp(payload, sport, dport),
            p.UDP,
            source or sender.address,
            target or receiver.address,
            ident=next(self.idents) & 0xFFFF,
        )
        self.count(flow, back, self.frame(time_s, sender, packet, to=to or receiver.mac))

    def exchange(
        self,
        time_s: float,
        service: str,
        client: Station,
        server: Station,
        ports: tuple[int, int],
        messages: Iterable[Message],
    ) -> None:
        """Exchange datagrams between a client and a server."""
        own, theirs = ports
        key = (p.UDP, client.address, own, server.address, theirs)
        flow = self.open(key, service, self.side(client))
        for wait_s, who, payload in messages:
            time_s += wait_s
            back = who == "s"
            ends = (server, theirs, client, own) if back else (client, own, server, theirs)
            self.datagram(time_s, flow, payload, ends, back=back)

    def side(self, station: Station) -> str:
        """ "sms" or "node"."""
        return "sms" if station is self.sms else "node"

    def connect(
        self,
        time_s: float,
        service: str,
        client: Station,
        server: Station,
        port: int,
        messages: Sequence[Message],
        *,
        own: int = 0,
        opened: bool = True,
        closed: bool = True,
    ) -> float:
        """Add a TCP connection; return the time after its last packet.

        Args:
            own: the client's port; 0 for the next free one.
            opened, closed: whether its SYN and its FIN are in the capture.
        """
        connection = Connection(self, service, client, server, own or client.port(), port, midstream=not opened)
        return connection.run(time_s, messages, opened=opened, closed=closed)

    def truth(self) -> dict[str, Total]:
        """Return the expected counts of each service."""
        totals: dict[str, Total] = {}
        for key, flow in self.flows.items():
            one = totals.get(flow.service, Total())
            opened = dict(one.opened)
            if not flow.midstream:
                opened[flow.opener] = opened.get(flow.opener, 0) + (flow.syns if key[0] == p.TCP else 1)
            totals[flow.service] = Total(
                one.flows + 1,
                opened,
                one.midstream + flow.midstream,
                one.packets + sum(flow.packets),
                one.bytes + sum(flow.bytes),
            )
        return totals

    def packets(self) -> list[tuple[int, bytes]]:
        """Return all frames in the order of their times."""
        return sorted(self.frames, key=lambda packet: packet[0])


class Connection:
    """A TCP connection while it is generated."""

    def __init__(
        self, wire: Wire, service: str, client: Station, server: Station, own: int, port: int, *, midstream: bool
    ) -> None:
        self.wire = wire
        self.ends = {"c": (client, own), "s": (server, port)}
        key = (p.TCP, client.address, own, server.address, port)
        self.flow = wire.open(key, service, wire.side(client), midstream=midstream)
        start = Random(repr(key)).randrange(1 << 32)
        self.seq = {"c": start, "s": start ^ 0x5A5A5A5A}

    def segment(self, time_s: float, who: str, flags: int, payload: bytes = b"", options: bytes = STAMPS) -> float:
        """Send one segment; return its time. A third station between the two is the management node, which routes."""
        peer = "s" if who == "c" else "c"
        (sender, sport), (receiver, dport) = self.ends[who], self.ends[peer]
        segment = p.tcp(payload, sport, dport, flags, seq=self.seq[who], ack=self.seq[peer], options=options)
        packet = p.ipv4(segment, p.TCP, sender.address, receiver.address, ident=next(self.wire.idents) & 0xFFFF)
        self.wire.count(self.flow, who == "s", self.wire.frame(time_s, sender, packet, to=receiver.mac))
        self.seq[who] = self.seq[who] + len(payload) + bool(flags & (p.SYN | p.FIN)) & 0xFFFFFFFF
        return time_s

    def run(self, time_s: float, messages: Sequence[Message], *, opened: bool, closed: bool) -> float:
        """Generate the whole connection."""
        rtt = self.wire.rtt_s
        if opened:
            self.flow.syns += 1
            self.segment(time_s, "c", p.SYN, options=OFFER)
            self.segment(time_s + rtt, "s", p.SYN | p.ACK, options=OFFER)
            time_s = self.segment(time_s + rtt * 1.5, "c", p.ACK)
        for wait_s, who, payload in messages:
            time_s = self.send(time_s + wait_s, who, payload)
        if closed:
            self.segment(time_s + rtt, "c", p.FIN | p.ACK)
            self.segment(time_s + rtt * 2, "s", p.FIN | p.ACK)
            time_s = self.segment(time_s + rtt * 2.5, "c", p.ACK)
        return time_s

    def send(self, time_s: float, who: str, payload: bytes) -> float:
        """Send a message in as many segments as necessary; the peer acknowledges every second one."""
        peer = "s" if who == "c" else "c"
        for number, at in enumerate(range(0, len(payload), SEGMENT), 1):
            piece = payload[at : at + SEGMENT]
            last = at + SEGMENT >= len(payload)
            time_s = self.segment(time_s + 0.000012, who, p.ACK | (p.PSH if last else 0), piece)
            if last or not number % 2:
                time_s = self.segment(time_s + self.wire.rtt_s / 4, peer, p.ACK)
        return time_s
