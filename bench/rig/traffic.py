"""A large capture of a busy cluster of 450 nodes: a few minutes are simulated once, then repeated.

Each repetition continues the times and changes the clients' ephemeral ports: connections are new, while the mounts and
the sockets of syslog and gmond stay, as on a real cluster.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.rig.measure import CACHE
from tests.captures import files
from tests.captures.cluster import START_S, Plan, simulate

FOLDER = Path(os.environ.get("SMS_BENCH_CAPTURES") or CACHE / "captures")
"""Captures are kept there between runs; ``python -m bench --clean`` removes them."""

MINUTES = Plan(nodes=450, boots=0, duration_s=300, busy=3)
BOOTS = Plan(nodes=450, boots=8, duration_s=300, busy=3)
DYNAMIC, PORTS = 32768, 28232
"""First ephemeral port of Linux (ip_local_port_range), and their number."""
STEP = 560
"""Offset of ports per repetition: ports recur less often than there are repetitions in a gigabyte."""
FIXED_PORT_SERVICES = {514, 8649}
"""UDP services whose clients keep one socket."""
SECONDS, PORT = struct.Struct("<I"), struct.Struct("!H")


class Block:
    """Records of a pcap file, and the offsets of their times and ports."""

    def __init__(self, packets: Iterable[files.Packet], length_s: int) -> None:
        self.length_s = length_s
        self.data = bytearray()
        self.times: list[tuple[int, int]] = []
        self.ports: list[tuple[int, int, int]] = []
        # Packets after the end of the block are moved to the beginning of the next one.
        begin, length = START_S * 10**9, length_s * 10**9
        for time, frame in sorted(packets, key=lambda packet: (packet[0] - begin) % length):
            place, late = len(self.data), (time - begin) // length
            self.data += files.record((time - late * length, frame))
            self.times.append((place, (time - late * length) // 10**9))
            self.ports += [(place + 16 + at, port, late) for at, port in _moving(frame)]

    def repeat(self, number: int) -> bytearray:
        """Return the block as of repetition ``number``."""
        moves = [((number - late) % 50 * STEP + (number - late) // 50 * 7) % PORTS for late in range(3)]
        for at, second in self.times:
            SECONDS.pack_into(self.data, at, second + number * self.length_s)
        for at, port, late in self.ports:
            PORT.pack_into(self.data, at, DYNAMIC + (port - DYNAMIC + moves[late]) % PORTS)
        return self.data


def _moving(frame: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and value of the ports of a frame that change with each repetition."""
    if frame[12:14] != b"\x08\0" or frame[23] not in (6, 17):
        return
    ports = struct.unpack_from("!HH", frame, 34)
    if frame[23] == 17 and FIXED_PORT_SERVICES & {*ports}:
        return
    yield from ((34 + 2 * place, port) for place, port in enumerate(ports) if DYNAMIC <= port < DYNAMIC + PORTS)


def records() -> Iterator[bytearray]:
    """Yield an endless capture without header in blocks of five minutes; nodes boot in the first one."""
    length_s = int(MINUTES.duration_s)
    end = (START_S + length_s) * 10**9
    yield Block((packet for packet in simulate(BOOTS).packets() if packet[0] < end), length_s).data
    block = Block(simulate(MINUTES).packets(), length_s)
    number = 0
    while number := number + 1:
        yield block.repeat(number)


def path_of(size: int) -> Path:
    """Return the path of the capture of this size."""
    return FOLDER / f"cluster-{size >> 20}M.pcap"


def capture(size: int) -> Path:
    """Return a capture of at least ``size`` bytes; create it if needed."""
    path = path_of(size)
    if path.exists():
        return path
    beside = path.with_suffix(".new")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with beside.open("wb") as file:
        written = file.write(files.header())
        for piece in records():
            written += file.write(piece)
            if written >= size:
                break
    return beside.rename(path)


def clean() -> None:
    """Remove the captures."""
    shutil.rmtree(FOLDER, ignore_errors=True)
