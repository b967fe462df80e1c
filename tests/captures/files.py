"""Capture files of every supported format, from (time in ns, frame) pairs."""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from collections.abc import Callable, Iterable

ETHERNET, RAW, SLL, SLL2, NULL, LOOP, IPV4, IPV6 = 1, 101, 113, 276, 0, 108, 228, 229
"""Link types (the LINKTYPE_ values of tcpdump.org)."""

Packet = tuple[int, bytes]

MICRO, NANO, MODIFIED = 0xA1B2C3D4, 0xA1B23C4D, 0xA1B2CD34
"""Magic numbers; the last is that of the patched libpcap of Red Hat 6 and 7, with eight more bytes a record."""


def header(*, magic: int = MICRO, order: str = "<", link: int = ETHERNET, snap: int = 262144) -> bytes:
    """The header of a pcap file."""
    return struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, snap, link)


def record(packet: Packet, *, magic: int = MICRO, order: str = "<", snap: int = 262144) -> bytes:
    """One record of a pcap file."""
    time_ns, frame = packet
    seconds, rest = divmod(time_ns, 10**9)
    kept = frame[:snap]
    start = struct.pack(f"{order}IIII", seconds, rest if magic == NANO else rest // 1000, len(kept), len(frame))
    # Interface, ethertype, packet type, padding.
    more = struct.pack(f"{order}IHBB", 2, 0x0800, 0, 0) if magic == MODIFIED else b""
    return start + more + kept


def pcap(
    packets: Iterable[Packet], *, magic: int = MICRO, order: str = "<", link: int = ETHERNET, snap: int = 262144
) -> bytes:
    """A whole pcap file; ``snap`` cuts the frames as `tcpdump -s` does."""
    records = (record(packet, magic=magic, order=order, snap=snap) for packet in packets)
    return header(magic=magic, order=order, link=link, snap=snap) + b"".join(records)


class Pcapng:
    """A pcapng file, block by block (draft-ietf-opsawg-pcapng)."""

    def __init__(self, order: str = "<") -> None:
        self.data = bytearray()
        self.section(order)

    def block(self, kind: int, body: bytes) -> None:
        """Any block; its length is at the start and at the end."""
        body = _padded(body)
        size = struct.pack(f"{self.order}I", len(body) + 12)
        self.data += struct.pack(f"{self.order}I", kind) + size + body + size

    def options(self, *options: tuple[int, bytes]) -> bytes:
        """A list of options with its end; empty without options."""
        coded = b"".join(struct.pack(f"{self.order}HH", code, len(value)) + _padded(value) for code, value in options)
        return coded + bytes(4) if coded else b""

    def section(self, order: str = "<", *, length: int = -1) -> None:
        """A new section, by default of unknown length; its interfaces count from 0 again."""
        self.order = order
        self.interfaces: list[tuple[int, int, int]] = []
        start = struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, length)
        self.block(0x0A0D0D0A, start + self.options((4, b"made by the tests of sms")))

    def interface(
        self,
        link: int = ETHERNET,
        *,
        snap: int = 0,
        resolution: int | None = None,
        offset_s: int = 0,
        name: str = "eth0",
    ) -> int:
        """An interface; ``resolution`` is if_tsresol: a power of ten, with bit 7 a power of two. Returns its number."""
        options = [(2, name.encode())]
        if resolution is not None:
            options.append((9, bytes((resolution,))))
        if offset_s:
            options.append((14, struct.pack(f"{self.order}q", offset_s)))
        self.block(1, struct.pack(f"{self.order}HHI", link, 0, snap) + self.options(*options))
        self.interfaces.append((6 if resolution is None else resolution, snap, offset_s))
        return len(self.interfaces) - 1

    def ticks(self, number: int, time_ns: int) -> int:
        """A time in the units of an interface."""
        resolution, _, offset_s = self.interfaces[number]
        units = 1 << (resolution & 0x7F) if resolution & 0x80 else 10**resolution
        return (time_ns - offset_s * 10**9) * units // 10**9

    def packet(self, number: int, packet: Packet, *options: tuple[int, bytes]) -> None:
        """An enhanced packet block."""
        self._timed(6, struct.pack(f"{self.order}I", number), number, packet, options)

    def old_packet(self, number: int, packet: Packet) -> None:
        """An (obsolete) packet block."""
        self._timed(2, struct.pack(f"{self.order}HH", number, 0), number, packet, ())

    def _timed(
        self, kind: int, start: bytes, number: int, packet: Packet, options: Iterable[tuple[int, bytes]]
    ) -> None:
        time_ns, frame = packet
        kept = frame[: self.interfaces[number][1] or None]
        ticks = self.ticks(number, time_ns)
        sizes = struct.pack(f"{self.order}IIII", ticks >> 32, ticks & 0xFFFFFFFF, len(kept), len(frame))
        self.block(kind, start + sizes + _padded(kept) + self.options(*options))

    def simple(self, frame: bytes) -> None:
        """A simple packet block: of the first interface, without a time."""
        kept = frame[: self.interfaces[0][1] or None]
        self.block(3, struct.pack(f"{self.order}I", len(frame)) + kept)

    def names(self) -> None:
        """A name resolution block."""
        entry = b"\x0a\0\0\1sms\0"
        self.block(4, struct.pack(f"{self.order}HH", 1, len(entry)) + _padded(entry) + bytes(4))

    def statistics(self, number: int) -> None:
        """An interface statistics block."""
        self.block(5, struct.pack(f"{self.order}III", number, 0, 0))

    def unknown(self, kind: int = 0x0BAD0BAD, size: int = 37) -> None:
        """A block of unknown type."""
        self.block(kind, bytes(n & 255 for n in range(size)))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def pcapng(
    packets: Iterable[Packet], *, order: str = "<", link: int = ETHERNET, resolution: int | None = None, snap: int = 0
) -> bytes:
    """A plain pcapng file of one interface."""
    made = Pcapng(order)
    made.interface(link, resolution=resolution, snap=snap)
    for packet in packets:
        made.packet(0, packet)
    return bytes(made.data)


def rotated(packets: Iterable[Packet], *, size: int, count: int, name: str = "out.pcap") -> dict[str, bytes]:
    """The files of ``tcpdump -w NAME -C SIZE -W COUNT``: a new file once one is longer than ``size`` bytes.

    After ``count`` files it overwrites the first one, so that out.pcap0 may be newer than out.pcap1; the numbers have
    leading zeroes (tcpdump(8)).
    """
    width, made, number = len(str(count - 1)), {}, 0
    data = bytearray(header())
    for packet in packets:
        if len(data) > size:
            made[f"{name}{number:0{width}}"] = bytes(data)
            number = (number + 1) % count
            data = bytearray(header())
        data += record(packet)
    made[f"{name}{number:0{width}}"] = bytes(data)
    return dict(sorted(made.items()))


# Compression.


def _program(*argv: str) -> Callable[[bytes], bytes]:
    return lambda data: subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "xz": lzma.compress,
    "zstd": _program("zstd", "-q", "-c"),
    "lz4": _program("lz4", "-q", "-c"),
}
"""By name; zstd and lz4 need their programs."""


def compress(kind: str, data: bytes, *, parts: int = 1) -> bytes:
    """Compress ``data`` into ``parts`` consecutive members or frames, as pzstd and cat do."""
    step = max(1, -(-len(data) // parts))
    return b"".join(COMPRESSORS[kind](data[at : at + step]) for at in range(0, len(data), step))
