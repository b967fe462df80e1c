"""Record frames fast: headers of a pair of stations are made once. A frame costs a few microseconds."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.captures import packets as p
from tests.captures.files import Packet

RTT_S = 0.0002
SEGMENT = 1448
_SEGMENT = struct.Struct("!HHIIBBHHH")
_STAMPS = bytes((1, 1, 8, 10)) + bytes(8)
"""Options of every segment, as Linux sends them (RFC 7323): they count in packets that are cut."""
_DATAGRAM = struct.Struct("!HHHH")


@dataclass(eq=False)
class Box:
    """A machine, or a group. ``via``: the link address of its frames if a router forwards them."""

    mac: bytes
    v4: bytes
    v6: bytes = b""
    via: bytes = b""
    port: int = 32768

    def next_port(self) -> int:
        """Return the next dynamic port (32768 to 60999, as Linux)."""
        self.port = self.port + 1 if self.port < 60999 else 32768
        return self.port

    @property
    def link(self) -> bytes:
        """The link address of its frames."""
        return self.via or self.mac


class Tape:
    """Frames with their times, in any order."""

    def __init__(self) -> None:
        self.frames: list[Packet] = []
        self._heads: dict[tuple[Box, Box, int, bool], tuple[bytes, int, bytes]] = {}
        self._number = 0

    def raw(self, time_s: float, source: Box, payload: bytes, kind: int, *, to: bytes = b"\xff" * 6) -> None:
        """A frame of any type."""
        self.frames.append((round(time_s * 1e9), (to + source.link + kind.to_bytes(2) + payload).ljust(60, b"\0")))

    def ip(self, time_s: float, source: Box, target: Box, protocol: int, body: bytes, *, six: bool = False) -> None:
        """A packet from one machine to another."""
        head = self._heads.get((source, target, protocol, six)) or self._head(source, target, protocol, six)
        start, base, end = head
        if six:
            frame = start + len(body).to_bytes(2) + end + body
        else:
            size = 20 + len(body)
            self._number = number = self._number + 1 & 0xFFFF
            total = base + size + number
            total = (total & 0xFFFF) + (total >> 16)
            total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
            frame = b"".join((start, size.to_bytes(2), number.to_bytes(2), end[:4], total.to_bytes(2), end[4:], body))
        self.frames.append((round(time_s * 1e9), frame.ljust(60, b"\0")))

    def _head(self, source: Box, target: Box, protocol: int, six: bool) -> tuple[bytes, int, bytes]:
        link = target.link + source.link
        if six:
            head = link + b"\x86\xdd\x60\0\0\0", 0, bytes((protocol, 64)) + source.v6 + target.v6
        else:
            end = bytes((0, 0, 64, protocol)) + source.v4 + target.v4
            base = 0x4500 + sum(struct.unpack("!6H", end))
            head = link + b"\x08\0\x45\0", base, end
        self._heads[source, target, protocol, six] = head
        return head

    def udp(
        self, time_s: float, source: Box, sport: int, target: Box, dport: int, payload: bytes, *, six: bool = False
    ) -> None:
        """A datagram."""
        body = _DATAGRAM.pack(sport, dport, 8 + len(payload), 0) + payload
        self.ip(time_s, source, target, p.UDP, body, six=six)


class Stream:
    """A TCP connection, from its opening or in the middle."""

    def __init__(self, tape: Tape, client: Box, server: Box, port: int, *, own: int = 0, six: bool = False) -> None:
        self.tape, self.six = tape, six
        self.client, self.server, self.port, self.own = client, server, port, own or client.next_port()
        self.seq = [self.own * 65537 & 0x7FFFFFFF, port * 65539 & 0x7FFFFFFF]

    def _put(self, time_s: float, back: bool, flags: int, payload: bytes = b"") -> None:
        source, target = (self.server, self.client) if back else (self.client, self.server)
        ports = (self.port, self.own) if back else (self.own, self.port)
        seq = self.seq
        head = _SEGMENT.pack(*ports, seq[back], 0 if flags == p.SYN else seq[not back], 0x80, flags, 64240, 0, 0)
        self.tape.ip(time_s, source, target, p.TCP, head + _STAMPS + payload, six=self.six)
        seq[back] += len(payload) + bool(flags & (p.SYN | p.FIN))

    def open(self, time_s: float) -> None:
        """The three packets of an opening."""
        self._put(time_s, False, p.SYN)
        self._put(time_s + RTT_S, True, p.SYN | p.ACK)
        self._put(time_s + 1.5 * RTT_S, False, p.ACK)

    def refused(self, time_s: float, *, answer: bool) -> None:
        """An opening that a port without a listener refuses or a firewall drops."""
        self._put(time_s, False, p.SYN)
        if answer:
            self._put(time_s + RTT_S, True, p.RST | p.ACK)

    def send(self, time_s: float, payload: bytes, *, back: bool = False) -> None:
        """A message in full segments; every second one is acknowledged, the last one by what follows."""
        for number, at in enumerate(range(0, len(payload), SEGMENT), 1):
            time_s += 1e-5
            self._put(time_s, back, p.ACK | p.PSH, payload[at : at + SEGMENT])
            if not number % 2:
                self._put(time_s + RTT_S / 4, not back, p.ACK)

    def close(self, time_s: float) -> None:
        """Both sides end."""
        self._put(time_s, False, p.FIN | p.ACK)
        self._put(time_s + RTT_S, True, p.FIN | p.ACK)
        self._put(time_s + 1.5 * RTT_S, False, p.ACK)
