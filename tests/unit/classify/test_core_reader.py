"""Damaged records and blocks, field by field: what survives; files and streams as users have them.

test_core_files.py tests whole files: dialects, times, ends, garbage between records.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from analysis.errors import CaptureError
from analysis.observed import Observation
from analysis.reading import read_captures
from analysis.sources import check_files
from tests.captures import files, samples
from tests.captures import packets as p
from tests.captures.files import Packet
from tests.captures.native import run_core
from tests.places import ROOT

Need = Callable[[str], str]

PORT = 20_000
COUNT = 12
ALL = list(range(COUNT))


def datagram(number: int) -> bytes:
    """A frame identified by its source port, with a unique length."""
    text = f"<30>record {number} of a capture, ".encode() * 2 + b"z" * number
    return samples.in_ethernet(p.ipv4(p.udp(text, PORT + number, 514), p.UDP, samples.A, samples.B))


def numbered(count: int = COUNT) -> list[Packet]:
    """Packets a second apart."""
    return samples.spaced([datagram(number) for number in range(count)], 10**9)


def survivors(counter: Any) -> list[int]:
    """The numbers of the counted packets."""
    assert sum(flow[5] + flow[7] for flow in counter.flows()) == len(counter.flows())
    return sorted(flow[1] - PORT for flow in counter.flows())


# ---- pcap: one field of one record ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A field of a record's header, its damaged value, and the effect.

    Attributes:
        lost: whether the record itself is lost.
        place: where the problem is reported: at the "start" of the record, "inside" of it, or "" for not at all.
    """

    field: int
    value: Callable[[int], int]
    lost: bool
    place: str


SECOND, PART, CAPTURED, WIRE = range(4)
DAMAGES = {
    "more than any record has": Damage(CAPTURED, lambda was: 262_145, True, "start"),
    "a bit far up": Damage(CAPTURED, lambda was: was | 1 << 31, True, "start"),
    "all bits": Damage(CAPTURED, lambda was: 0xFFFFFFFF, True, "start"),
    "a little too long": Damage(CAPTURED, lambda was: was + 1, True, "start"),
    "into the next": Damage(CAPTURED, lambda was: was + 64, True, "start"),
    "over several": Damage(CAPTURED, lambda was: was + 512, True, "start"),
    "beyond the end": Damage(CAPTURED, lambda was: was | 1 << 16, True, "start"),
    "nothing kept": Damage(CAPTURED, lambda was: 0, True, "start"),
    "next to nothing kept": Damage(CAPTURED, lambda was: 1, True, "inside"),
    "a little too short": Damage(CAPTURED, lambda was: was - 1, False, "inside"),
    "shorter by a field": Damage(CAPTURED, lambda was: was - 4, False, "inside"),
    "shorter by three fields": Damage(CAPTURED, lambda was: was - 12, False, "inside"),
    "shorter by a header": Damage(CAPTURED, lambda was: was - 16, False, "inside"),
    "half": Damage(CAPTURED, lambda was: was // 2, False, "inside"),
    "too long on the wire": Damage(WIRE, lambda was: 1 << 25, True, "start"),
    "no length on the wire": Damage(WIRE, lambda was: 0, False, ""),
    "shorter on the wire than kept": Damage(WIRE, lambda was: was - 2, False, ""),
    "the first second of all": Damage(SECOND, lambda was: 0, False, ""),
    "the last second of all": Damage(SECOND, lambda was: 0xFFFFFFFF, False, ""),
    "a second of many": Damage(PART, lambda was: 0xFFFFFFFF, False, ""),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("magic", [files.MICRO, files.NANO, files.MODIFIED], ids=["micro", "nano", "modified"])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_field_costs_one_record_at_most(what: str, magic: int, order: str) -> None:
    damage = DAMAGES[what]
    for number in (0, 1, 5, COUNT - 3):
        records = [bytearray(files.record(packet, magic=magic, order=order)) for packet in numbered()]
        (was,) = struct.unpack_from(f"{order}I", records[number], damage.field * 4)
        struct.pack_into(f"{order}I", records[number], damage.field * 4, damage.value(was))
        head = files.header(magic=magic, order=order)
        begin = len(head) + sum(map(len, records[:number]))
        counter = run_core(head + b"".join(records))
        assert survivors(counter) == [one for one in ALL if one != number or not damage.lost]
        assert counter.totals()["truncated"] is False
        problems = counter.problems()
        assert len(problems) == bool(damage.place)
        assert counter.totals()["skipped"].get("corrupt record", 0) == bool(damage.place)
        for _, offset, reason in problems:
            assert reason == "corrupt record"
            first = begin + (damage.place == "inside")
            assert first <= offset < first + (1 if damage.place == "start" else len(records[number]))


@pytest.mark.parametrize("size", [16, 60, 100, 256, 512])
@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x04\0\0\0", b"text"])
@pytest.mark.parametrize("place", [0, 3, 16, 17, 60])
def test_a_damaged_block_of_a_disk(fill: bytes, size: int, place: int) -> None:
    """Some bytes overwritten, starting at some place in a record: the records beyond survive."""
    records = [files.record(packet) for packet in numbered()]
    data = bytearray(files.header() + b"".join(records))
    begin = len(files.header()) + sum(map(len, records[:4])) + place
    data[begin : begin + size] = (fill * size)[:size]
    ends = [len(files.header()) + sum(map(len, records[: number + 1])) for number in ALL]
    starts = [end - len(record) for end, record in zip(ends, records, strict=True)]
    touched = [number for number in ALL if starts[number] < begin + size and ends[number] > begin]
    counter = run_core(bytes(data))
    left = [flow[1] - PORT for flow in counter.flows() if flow[1] >= PORT]
    assert set(left) >= {number for number in ALL if number not in touched}
    assert counter.packets <= COUNT + size // 16
    if place < 16 and size > 16:
        assert counter.problems()[0][2] == "corrupt record"
        # Repeated fours look like records of four bytes each; the last of them may end a little further on.
        assert starts[4] <= counter.problems()[0][1] < begin + size + 20


def test_every_damaged_place_is_reported() -> None:
    records = [bytearray(files.record(packet)) for packet in numbered(60)]
    wrong = [3, 4, 20, 21, 22, 40, 59]
    starts = [len(files.header()) + sum(map(len, records[:number])) for number in range(60)]
    for number in wrong:
        struct.pack_into("<I", records[number], 8, 0xFFFFFFFF)
    counter = run_core(files.header() + b"".join(records))
    assert survivors(counter) == [number for number in range(60) if number not in wrong]
    # Adjacent damaged records are one place: they are skipped together.
    assert counter.problems() == [(0, starts[number], "corrupt record") for number in (3, 20, 40, 59)]


def test_the_first_hundred_places_are_reported_and_all_are_counted() -> None:
    packets = numbered(4) * 150
    records = [
        files.record(packet) + (b"\xff" * 5 if number % 4 == 3 else b"") for number, packet in enumerate(packets)
    ]
    counter = run_core(files.header() + b"".join(records) + files.record(packets[0]))
    assert counter.packets == len(packets) + 1
    assert len(counter.problems()) == 100
    assert counter.totals()["skipped"] == {"corrupt record": 150}


@pytest.mark.parametrize(("kept", "wrong", "lost"), [(64, 65, [6]), (64, 200, [6, 7]), (80, 14, [])])
def test_a_damaged_length_among_cut_frames(kept: int, wrong: int, lost: list[int]) -> None:
    """In cut frames a length up to the frame's own looks valid: only what it covers is lost."""
    frames = [frame + b"z" * 1000 for frame in (datagram(number) for number in ALL)]
    records = [bytearray(files.record(packet, snap=kept)) for packet in samples.spaced(frames, 10**9)]
    struct.pack_into("<I", records[5], 8, wrong)
    counter = run_core(files.header(snap=kept) + b"".join(records))
    assert set(survivors(counter)) >= {number for number in ALL if number not in lost and number != 5}
    assert len(counter.problems()) == 1


@pytest.mark.parametrize("link", [files.ETHERNET, files.RAW])
def test_frames_of_64_bytes(link: int) -> None:
    cut = 0 if link == files.ETHERNET else 14
    frames = [datagram(number)[cut:] for number in ALL]
    counter = run_core(files.pcap(samples.spaced(frames), link=link, snap=64))
    assert survivors(counter) == ALL
    assert counter.bytes == sum(map(len, frames))
    assert counter.totals()["truncated"] is False


def test_a_clock_that_was_set_while_it_ran() -> None:
    """From 1970 to today, and a network card's clock mixed with the kernel's: no record is lost by its time."""
    packets = numbered()
    late = [(number * 10**9, frame) for number, (_, frame) in enumerate(packets[:6])] + packets[6:]
    mixed = [(time if number % 2 else number * 10**9, frame) for number, (time, frame) in enumerate(packets)]
    for each in (late, late[::-1], mixed):
        counter = run_core(files.pcap(each))
        assert survivors(counter) == ALL
        assert counter.problems() == []


# ---- pcapng: one field of one block ----------------------------------------------------------------------------


def blocks_of(data: bytes, order: str) -> list[tuple[int, int]]:
    """(offset, type) of every block."""
    found, place = [], 0
    while place < len(data):
        kind, length = struct.unpack_from(f"{order}II", data, place)
        found.append((place, kind))
        place += length
    return found


BLOCK: dict[str, tuple[int, Callable[[int], int], bool, bool]] = {
    "leading length": (4, lambda was: was + 4, True, True),
    "leading length, far": (4, lambda was: was | 1 << 20, True, True),
    "leading length, no multiple": (4, lambda was: was + 1, True, True),
    "leading length, none": (4, lambda was: 0, True, True),
    "leading length, beyond the end": (4, lambda was: was | 1 << 14, True, True),
    "trailing length": (-4, lambda was: was ^ 8, True, True),
    "captured": (20, lambda was: was + 40, True, True),
    "captured, far": (20, lambda was: 1 << 31, True, True),
    "on the wire, far": (24, lambda was: 1 << 31, True, True),
    "interface": (8, lambda was: 7, True, True),
    "type": (0, lambda was: 0x0BAD, True, False),
    "type, of names": (0, lambda was: 4, True, False),
    "time": (12, lambda was: 0, False, False),
}
"""Offset in an enhanced packet block, damaged value, whether the packet is lost, whether a problem is reported."""


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("what", BLOCK)
def test_a_damaged_block(what: str, order: str) -> None:
    at, change, lost, reported = BLOCK[what]
    whole = files.pcapng(numbered(), order=order)
    blocks = [place for place, kind in blocks_of(whole, order) if kind == 6]
    for number in (0, 5, COUNT - 2):
        data = bytearray(whole)
        place = blocks[number] + at if at >= 0 else blocks[number + 1] + at
        (was,) = struct.unpack_from(f"{order}I", data, place)
        struct.pack_into(f"{order}I", data, place, change(was))
        counter = run_core(bytes(data))
        assert survivors(counter) == [one for one in ALL if one != number or not lost]
        offsets = [offset for _, offset, _ in counter.problems()]
        assert offsets == ([blocks[number]] if reported else [])
        assert counter.totals()["truncated"] is False


def test_a_packet_of_an_interface_that_was_not_described() -> None:
    made = files.Pcapng()
    made.interface()
    for number, packet in enumerate(numbered()):
        start = len(made.data)
        made.packet(0, packet)
        if number % 3 == 1:
            struct.pack_into("<I", made.data, start + 8, number)
    counter = run_core(bytes(made.data))
    assert survivors(counter) == [number for number in ALL if number % 3 != 1]
    assert counter.totals()["skipped"] == {"packet of an interface that was not described": 4}


@pytest.mark.parametrize("size", [3 << 20, 600 << 10, 1 << 20])
@pytest.mark.parametrize("kind", [4, 0x0A, 0x0BAD0BAD])
def test_a_block_larger_than_the_window(kind: int, size: int) -> None:
    """Names, secrets, unknown blocks: skipped; if the two lengths differ, it is reported, and nothing else is lost."""
    for harm in (0, 8):
        made = files.Pcapng()
        made.interface()
        for number, packet in enumerate(numbered()):
            if number == 6:
                start = len(made.data)
                made.block(kind, b"name" * (size // 4))
                made.data[-4:] = struct.pack("<I", struct.unpack("<I", made.data[-4:])[0] ^ harm)
            made.packet(0, packet)
        counter = run_core(bytes(made.data))
        assert survivors(counter) == ALL
        assert counter.problems() == ([(0, start, "corrupt record")] if harm else [])


def test_simple_packets_among_others() -> None:
    made = files.Pcapng()
    made.interface(snap=64)
    made.interface()
    for number, (time, frame) in enumerate(numbered()):
        if number % 2:
            made.packet(1, (time, frame))
        else:
            made.simple(frame)
    counter = run_core(bytes(made.data))
    assert survivors(counter) == ALL
    assert counter.totals()["skipped"] == {}
    assert counter.bytes == sum(len(frame) for _, frame in numbered())


TIMES = {
    "seconds": (0, 0),
    "milliseconds": (3, 0),
    "nanoseconds": (9, 0),
    "picoseconds, an offset": (12, 1_690_000_000),
    "2^-20": (0x80 | 20, 0),
    "2^-30, an offset": (0x80 | 30, 1_600_000_000),
    "microseconds, an offset": (6, 1_600_000_000),
    "microseconds, a negative offset": (6, -86_400),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("what", TIMES)
def test_resolutions_of_time(what: str, order: str) -> None:
    """To the nanosecond: the block's time in the units of the interface, plus its offset."""
    resolution, offset_s = TIMES[what]
    made = files.Pcapng(order)
    made.interface(resolution=resolution, offset_s=offset_s)
    for packet in numbered():
        made.packet(0, packet)
    units = 1 << (resolution & 0x7F) if resolution & 0x80 else 10**resolution
    times = [made.ticks(0, time) * 10**9 // units + offset_s * 10**9 for time, _ in numbered()]
    totals = run_core(bytes(made.data)).totals()
    assert (totals["start_ns"], totals["end_ns"]) == (times[0], times[-1])


HOSTILE_TIMES = {
    "the end of all units": (0, 0, 2**64 - 1),
    "a resolution of nothing": (0x7F, 0, 2**64 - 1),
    "2^-127": (0xFF, 0, 2**64 - 1),
    "2^-63": (0x80 | 63, 0, 2**64 - 1),
    "2^0": (0x80, 0, 2**64 - 1),
    "an offset into the future": (6, 2**62, 5),
    "an offset before all": (6, -(2**62), 5),
    "an offset of 30,000 years": (6, 2**40 - 1, 2**63),
    "as many years ago": (6, -(2**40) + 1, 5),
}


@pytest.mark.parametrize("what", HOSTILE_TIMES)
def test_times_in_the_distant_future(what: str) -> None:
    resolution, offset_s, ticks = HOSTILE_TIMES[what]
    made = files.Pcapng()
    made.interface(resolution=resolution, offset_s=offset_s)
    for _, frame in numbered():
        sizes = struct.pack("<IIIII", 0, ticks >> 32, ticks & 0xFFFFFFFF, len(frame), len(frame))
        made.block(6, sizes + frame)
    totals = run_core(bytes(made.data)).totals()
    assert totals["packets"] == COUNT
    assert 0 <= totals["start_ns"] <= totals["end_ns"] < 2**62


# ---- files and streams -----------------------------------------------------------------------------------------


def observed(*paths: Path | str) -> Observation:
    """Counts of files, read as `sms classify` does."""
    names = [str(path) for path in paths]
    check_files(names)
    reading = read_captures(names, signatures=())
    hosts = reading.hosts()
    return reading.observe(bytes(len(hosts)), hosts, reading.links())


def test_a_rotated_set_in_any_order(tmp_path: Path) -> None:
    made = files.rotated(numbered(40), size=700, count=9)
    assert len(made) > 3
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    for names in (sorted(made), sorted(made, reverse=True)):
        seen = observed(*(tmp_path / name for name in names))
        assert list(seen.files) == [str(tmp_path / name) for name in by_first_packet(made)]
        assert (seen.skipped, seen.truncated, seen.problems) == ({}, False, ())
        assert seen.packets == sum(len(data_packets(data)) for data in made.values())


def data_packets(data: bytes) -> list[int]:
    """The seconds of a little-endian capture's packets."""
    place, seconds = 24, []
    while place < len(data):
        second, _, captured, _ = struct.unpack_from("<IIII", data, place)
        seconds.append(second)
        place += 16 + captured
    return seconds


def by_first_packet(made: dict[str, bytes]) -> list[str]:
    return sorted(made, key=lambda name: data_packets(made[name])[0])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", files.COMPRESSORS)
def test_compressed_by_content_not_by_name(kind: str, parts: int, need: Need, tmp_path: Path) -> None:
    need(kind)
    data = files.pcap(numbered(200))
    file = tmp_path / "capture.pcap"
    file.write_bytes(files.compress(kind, data, parts=parts))
    seen = observed(file)
    assert (seen.packets, seen.truncated, seen.problems) == (200, False, ())
    assert seen.bytes == sum(len(frame) for _, frame in numbered(200))


@pytest.mark.parametrize("kind", files.COMPRESSORS)
def test_a_compressed_file_without_its_end(kind: str, need: Need, tmp_path: Path) -> None:
    """It is read up to the truncation, which is reported."""
    need(kind)
    dice = Random(3)
    packets = [(time, frame + dice.randbytes(1000)) for time, frame in numbered(600)]
    whole = files.compress(kind, files.pcap(packets), parts=6)
    file = tmp_path / "capture.gz"
    file.write_bytes(whole[: len(whole) * 3 // 4])
    seen = observed(file)
    assert 200 < seen.packets < 600
    assert seen.truncated
    assert any("failed" in one.what or "ends early" in one.what for one in seen.problems), seen.problems


STDIN = """
import sys
from analysis.errors import CaptureError
from analysis.reading import read_captures
try:
    reading = read_captures(sys.argv[1:], signatures=())
except CaptureError as error:
    sys.exit(f"{error} ({error.hint})")
print(reading.counter.packets, reading.counter.totals()["truncated"])
"""


def from_stdin(*argv: str, stdin: Any) -> subprocess.CompletedProcess[str]:
    """Read captures in a separate process."""
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", STDIN, *argv]
    if isinstance(stdin, bytes):
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=120)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())
    return subprocess.run(command, stdin=stdin, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("kind", ["", *files.COMPRESSORS])
def test_standard_input(kind: str, need: Need, tmp_path: Path) -> None:
    """A pipe, a compressed pipe, a file."""
    if kind:
        need(kind)
    data = files.pcap(numbered(3000))
    data = files.compress(kind, data, parts=2) if kind else data
    assert from_stdin("-", stdin=data).stdout == "3000 False\n"
    (tmp_path / "capture").write_bytes(data)
    with (tmp_path / "capture").open("rb") as file:
        assert from_stdin("-", stdin=file).stdout == "3000 False\n"


def test_standard_input_comes_after_files(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(files.pcap(numbered(5)))
    assert from_stdin("-", str(tmp_path / "before"), stdin=files.pcap(numbered(7))[:-1]).stdout == "11 True\n"


@pytest.mark.parametrize("data", [b"", b"\xd4\xc3", b"no capture at all\n" * 9000], ids=["empty", "short", "text"])
def test_standard_input_that_is_not_a_capture(data: bytes) -> None:
    done = from_stdin("-", stdin=data)
    assert done.returncode == 1
    says = "standard input is neither pcap nor pcapng (tcpdump -w" if data else "standard input is empty"
    assert done.stderr.startswith(says)


def wrong_folder(folder: Path) -> list[str]:
    (folder / "captures").mkdir()
    return [str(folder / "captures")]


def wrong_missing(folder: Path) -> list[str]:
    return [str(folder / "none.pcap")]


def wrong_twice(folder: Path) -> list[str]:
    (folder / "one").write_bytes(files.pcap(numbered()))
    return [str(folder / "one"), str(folder / "one")]


def wrong_by_another_name(folder: Path) -> list[str]:
    (folder / "one").write_bytes(files.pcap(numbered()))
    (folder / "other").symlink_to("one")
    return [str(folder / "one"), str(folder / "other")]


def wrong_text(folder: Path) -> list[str]:
    (folder / "syslog").write_bytes(b"Nov 14 22:13:20 node1 systemd[1]: Started session.\n" * 100)
    return [str(folder / "syslog")]


def wrong_empty(folder: Path) -> list[str]:
    (folder / "empty").touch()
    return [str(folder / "empty")]


def wrong_compressed(folder: Path) -> list[str]:
    dice = Random(4)
    (folder / "log.gz").write_bytes(files.compress("gzip", dice.randbytes(5 << 20)))
    return [str(folder / "log.gz")]


def wrong_both(folder: Path) -> list[str]:
    return [*wrong_text(folder), *wrong_empty(folder)]


def wrong_none(folder: Path) -> list[str]:
    return []


WRONG = [
    (wrong_folder, r"captures is a folder", "captures/*.pcap"),
    (wrong_missing, r"none\.pcap: cannot be read: no such file or directory$", "check the path"),
    (wrong_twice, r"one is given twice$", "name every file once"),
    (wrong_by_another_name, r"other is given twice, also as .*one$", "name every file once"),
    (wrong_text, r"syslog is neither pcap nor pcapng", "tcpdump -w"),
    (wrong_empty, r"empty is empty", "tcpdump without -U"),
    (wrong_compressed, r"log\.gz is neither pcap nor pcapng", "tcpdump -w"),
    (wrong_both, r"syslog is neither pcap nor pcapng", "tcpdump -w"),
    (wrong_none, r"no capture given", "sms classify FILE"),
]


@pytest.mark.parametrize(("make", "message", "hint"), WRONG, ids=[make.__name__ for make, _, _ in WRONG])
def test_what_cannot_be_read(make: Callable[[Path], list[str]], message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        observed(*make(tmp_path))
    assert hint in (caught.value.hint or "")
