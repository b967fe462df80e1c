"""A big capture of a busy cluster of 450 nodes: minutes of it simulated once, then told over and over.

Each time over, times go on and the ports that clients take are others: connections are new ones, while the mounts,
the sockets of syslog and those of gmond stay, as on a real cluster.
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
"""Captures stay there from one run to the next; ``python -m bench --clean`` removes them."""

MINUTES = Plan(nodes=450, boots=0, duration_s=300, busy=3)
BOOTS = Plan(nodes=450, boots=8, duration_s=300, busy=3)
DYNAMIC, PORTS = 32768, 28232
"""The ports that Linux gives out (ip_local_port_range), and how many they are."""
STEP = 560
"""What ports move by each time over: less often used again than there are times over in a gigabyte."""
KEPT = {514, 8649}
"""UDP services whose clients have one socket for ever."""
SECONDS, PORT = struct.Struct("<I"), struct.Struct("!H")


class Block:
    """Records of a pcap file, and where their times and ports stand in them."""

    def __init__(self, packets: Iterable[files.Packet], length_s: int) -> None:
        self.length_s = length_s
        self.data = bytearray()
        self.times: list[tuple[int, int]] = []
        self.ports: list[tuple[int, int, int]] = []
        # What begins in the block and ends behind it is told at the beginning of the next one.
        begin, length = START_S * 10**9, length_s * 10**9
        for time, frame in sorted(packets, key=lambda packet: (packet[0] - begin) % length):
            place, late = len(self.data), (time - begin) // length
            self.data += files.record((time - late * length, frame))
            self.times.append((place, (time - late * length) // 10**9))
            self.ports += [(place + 16 + at, port, late) for at, port in _moving(frame)]

    def again(self, number: int) -> bytearray:
        """The block as it is the so many-th time over."""
        moves = [((number - late) % 50 * STEP + (number - late) // 50 * 7) % PORTS for late in range(3)]
        for at, second in self.times:
            SECONDS.pack_into(self.data, at, second + number * self.length_s)
        for at, port, late in self.ports:
            PORT.pack_into(self.data, at, DYNAMIC + (port - DYNAMIC + moves[late]) % PORTS)
        return self.data


def _moving(frame: bytes) -> Iterator[tuple[int, int]]:
    """Where a frame has ports that are others each time over, and which."""
    if frame[12:14] != b"\x08\0" or frame[23] not in (6, 17):
        return
    ports = struct.unpack_from("!HH", frame, 34)
    if frame[23] == 17 and KEPT & {*ports}:
        return
    yield from ((34 + 2 * place, port) for place, port in enumerate(ports) if DYNAMIC <= port < DYNAMIC + PORTS)


def records() -> Iterator[bytearray]:
    """An endless capture without its head, five minutes at a time; nodes boot in the first ones."""
    length_s = int(MINUTES.duration_s)
    end = (START_S + length_s) * 10**9
    yield Block((packet for packet in simulate(BOOTS).packets() if packet[0] < end), length_s).data
    block = Block(simulate(MINUTES).packets(), length_s)
    number = 0
    while number := number + 1:
        yield block.again(number)


def path_of(size: int) -> Path:
    """Where the capture of so many bytes is kept."""
    return FOLDER / f"cluster-{size >> 20}M.pcap"


def capture(size: int) -> Path:
    """A capture of at least so many bytes; made unless it is there."""
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
