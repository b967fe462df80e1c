"""A large file is read by one thread and counted by another: the results are those of one thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import _core
from analysis.signatures import TCP, UDP
from tests.captures import files, samples
from tests.captures import packets as p
from tests.captures.cluster import Plan, simulate
from tests.captures.files import Packet
from tests.captures.native import PORTS

LARGE = 16 << 20
"""Size from which a file has a thread of its own (source.c)."""
WEEK_NS = 7 * 86400 * 10**9
FIRST = [(TCP, 6817, 10, b"\3\0", b"\5\xff"), (TCP, 0, 0, b"SSH-", b"SSH-"), (UDP, 514, 0, b"<", b"<")]
SAMPLED = [(UDP, 67, 100), (UDP, 123, 50), (TCP, 6817, 20)]


@pytest.fixture(scope="module")
def packets() -> list[Packet]:
    """A cluster with boots, twice with a week between, a scan, and times of another year: more than LARGE."""
    made = sorted(simulate(Plan(nodes=40, boots=4, duration_s=900, busy=3)).packets(), key=lambda packet: packet[0])
    frame = samples.in_ethernet
    syns = [frame(p.ipv4(p.tcp(b"", 4000, port, p.SYN), p.TCP, "10.1.0.77", "10.1.0.1")) for port in range(1, 3000)]
    middle = made[len(made) // 2][0]
    made += [(middle + number * 10**6, syn) for number, syn in enumerate(syns)]
    made += [(made[0][0] + 4 * 366 * 86400 * 10**9, syn) for syn in syns[:9]]
    times = LARGE // sum(len(packet[1]) + 16 for packet in made) + 1
    moved = [[(time + number * WEEK_NS, data) for time, data in made] for number in range(max(times, 2))]
    return [packet for part in moved for packet in part]


def damaged(data: bytes) -> bytes:
    """Invert a byte in every 50 kB."""
    made = bytearray(data)
    for place in range(50_000, len(made), 50_001):
        made[place] ^= 255
    return bytes(made)


KINDS: dict[str, Callable[[list[Packet]], bytes]] = {
    "pcap": files.pcap,
    "pcapng": files.pcapng,
    "big-endian, cut": lambda packets: files.pcap(packets, order=">", magic=files.NANO)[:-7],
    "damaged": lambda packets: damaged(files.pcap(packets)),
    "damaged pcapng": lambda packets: damaged(files.pcapng(packets)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"keep_flows": 1 << 16},
    "few": {"max_flows": 256, "max_pairs": 256},
    "node": {"node": p.ip_bytes("10.1.0.1")},
}


def count(file: Path, head: int, options: dict[str, Any]) -> list[Any]:
    """Return all results of a file. With ``head`` bytes that were read before, the core reads it in one thread."""
    counter = _core.Counter(PORTS, FIRST, SAMPLED, **options)
    with file.open("rb") as stream:
        counter.read(stream.fileno(), os.read(stream.fileno(), head))
    counter.finish()
    hosts = counter.hosts()
    roles = bytes(number % 3 for number in range(len(hosts)))
    return [
        *(hosts, counter.totals(), counter.links(), counter.attempts(), counter.samples(), counter.boots()),
        *(counter.problems(), counter.files(), counter.flows(), counter.rows(roles)),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_count_as_one(kind: str, packets: list[Packet], tmp_path: Path) -> None:
    """Addresses in their order, gaps, boots, scans, damage, intervals, and which side opened each connection."""
    file = tmp_path / "large"
    file.write_bytes(KINDS[kind](packets))
    assert file.stat().st_size > LARGE
    for options in OPTIONS.values():
        two, one = count(file, 0, options), count(file, 24, options)
        assert two == one
    assert one[1]["gap_ns"] > WEEK_NS / 2
    assert bool(one[1]["skipped"])


def test_an_end_while_it_reads(packets: list[Packet], tmp_path: Path) -> None:
    file = tmp_path / "large.pcap"
    file.write_bytes(files.pcap(packets))
    counter = _core.Counter(PORTS, [], [])
    with file.open("rb") as stream:
        reader = threading.Thread(target=counter.read, args=(stream.fileno(),))
        reader.start()
        while reader.is_alive() and not counter.packets:
            time.sleep(0)
        counter.stop()
        reader.join(20)
        assert not reader.is_alive()
    counter.finish()
    assert 0 < counter.packets <= len(packets)
    assert sum(link[4] for link in counter.links()) + counter.totals()["beyond"][0] <= counter.packets
