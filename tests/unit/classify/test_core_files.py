"""Capture files read by the native core: times, truncation, damage, files that are not captures."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import _core
from tests.captures import files, samples
from tests.captures import packets as p
from tests.captures.native import by_core, run_core
from tests.captures.samples import START_NS, conversation, spaced
from tests.places import ROOT

FRAMES = conversation(samples.in_ethernet)
PACKETS = spaced(FRAMES)
STEP_NS = PACKETS[1][0] - PACKETS[0][0]
DIALECTS = samples.dialects()


SMALL = {"max_flows": 256, "max_pairs": 256}
"""Limits with which a counter is created quickly."""


def exact_ns(name: str) -> int:
    """Maximum error of a sample's times in ns."""
    return 1 if "nano" in name or "10^-10" in name or "2^-32" in name else 1000


@pytest.mark.parametrize("name", [name for name, sample in DIALECTS.items() if sample.times])
def test_times(name: str) -> None:
    totals = run_core(DIALECTS[name].data).totals()
    assert abs(totals["start_ns"] - PACKETS[0][0]) <= exact_ns(name)
    assert abs(totals["end_ns"] - PACKETS[-1][0]) <= exact_ns(name)
    assert (totals["skipped"], totals["truncated"]) == ({}, False)


@pytest.mark.parametrize("name", [name for name, sample in DIALECTS.items() if sample.times])
def test_the_first_time_is_found_in_the_beginning_of_a_file(name: str) -> None:
    assert abs(_core.first_time(DIALECTS[name].data) - PACKETS[0][0]) <= exact_ns(name)


def test_a_packet_without_a_time_gets_that_of_its_neighbours() -> None:
    made = files.Pcapng()
    made.interface()
    made.simple(FRAMES[0])
    for packet in PACKETS[1:]:
        made.packet(0, packet)
    totals = run_core(bytes(made.data)).totals()
    assert totals["packets"] == len(FRAMES)
    assert totals["skipped"] == {}
    assert totals["start_ns"] >= START_NS - 1000


@pytest.mark.parametrize("wrong", [0, START_NS - 10 * 366 * 86400 * 10**9, START_NS + 10 * 366 * 86400 * 10**9])
@pytest.mark.parametrize("place", [0, 1, 30, 59])
def test_one_wrong_time_does_not_extend_the_capture(place: int, wrong: int) -> None:
    packets = spaced(FRAMES * 10)
    packets[place] = (wrong, packets[place][1])
    totals = run_core(files.pcap(packets, magic=files.NANO)).totals()
    assert totals["packets"] == len(packets)
    assert totals["end_ns"] - totals["start_ns"] <= STEP_NS * len(packets)


YEAR_NS = 366 * 86400 * 10**9


@pytest.mark.parametrize("later", [4, 16, 17, 60])
@pytest.mark.parametrize("before", [8, 30, 60])
def test_times_of_another_year_are_right_if_they_agree(before: int, later: int) -> None:
    packets = spaced(FRAMES * 20)[: before + later]
    packets = [(time + 3 * YEAR_NS * (number >= before), frame) for number, (time, frame) in enumerate(packets)]
    totals = run_core(files.pcap(packets, magic=files.NANO)).totals()
    assert (totals["packets"], totals["skipped"]) == (before + later, {})
    assert (totals["start_ns"], totals["end_ns"]) == (packets[0][0], packets[-1][0])
    assert totals["gap_ns"] == packets[before][0] - packets[before - 1][0]
    assert totals["gaps"] == [(packets[before - 1][0], packets[before][0])]


@pytest.mark.parametrize("wrong", [1, 3])
def test_a_few_wrong_times_at_the_end_are_wrong(wrong: int) -> None:
    packets = spaced(FRAMES * 10)
    odd = [(time + 3 * YEAR_NS, frame) for time, frame in packets[-wrong:]]
    totals = run_core(files.pcap(packets[:-wrong] + odd, magic=files.NANO)).totals()
    assert totals["skipped"] == {"time far from its neighbours'": wrong}
    assert (totals["end_ns"], totals["gap_ns"]) == (packets[-wrong - 1][0], 0)


def test_a_clock_that_is_reset_at_the_end_does_not_extend_the_capture() -> None:
    packets = spaced(FRAMES * 10)
    packets = packets[:-8] + [(number * 10**9 + 1, frame) for number, (_, frame) in enumerate(packets[-8:])]
    totals = run_core(files.pcap(packets, magic=files.NANO)).totals()
    assert totals["skipped"] == {"time far from its neighbours'": 8}
    assert totals["end_ns"] - totals["start_ns"] < STEP_NS * len(packets)


@pytest.mark.parametrize(("apart_s", "gap"), [(3600, False), (86400, False), (2 * 86400, True)])
def test_after_a_few_packets_only_a_long_silence_is_a_gap(apart_s: int, gap: bool) -> None:
    """What a filter leaves of a network may run once a day."""
    first = spaced(FRAMES)
    second = [(time + apart_s * 10**9, frame) for time, frame in first]
    assert bool(run_core(files.pcap([*first, *second])).totals()["gap_ns"]) == gap


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("apart_s", [3600, 3 * 366 * 86400])
def test_a_gap_in_a_file_or_between_two(apart_s: int, together: bool) -> None:
    """With --node, packets of others show that the capture ran; a gap after the node's last packet does not count."""
    first = spaced(FRAMES * 20)
    second = [(time + apart_s * 10**9, frame) for time, frame in first]
    parts = [[*first, *second]] if together else [first, second]
    gap_ns = second[0][0] - first[-1][0]
    data = [files.pcap(part, magic=files.NANO) for part in parts]
    totals = run_core(*data).totals()
    assert (totals["gap_ns"], totals["gaps"]) == (gap_ns, [(first[-1][0], second[0][0])])
    if apart_s == 3600:
        other = samples.in_ethernet(p.ipv4(p.udp(b"x", 40000, 514), p.UDP, samples.A, "10.1.1.99"))
        late = [(time, other) for time, _ in second]
        of_node = (
            files.pcap([*first, *late], magic=files.NANO),
            files.pcap([*first, *late, second[-1]], magic=files.NANO),
        )
        node = p.ip_bytes(samples.B)
        of_node_totals = [run_core(data, node=node).totals() for data in of_node]
        assert [totals["gap_ns"] for totals in of_node_totals] == [0, gap_ns]
        assert [len(totals["gaps"]) for totals in of_node_totals] == [0, 1]


def test_of_many_gaps_the_longest_are_kept() -> None:
    """Seventy files with 31 to 100 s between them, not in the order of length: all count, 64 are listed."""
    pauses = [31 + number * 37 % 70 for number in range(70)]
    at, parts = START_NS, []
    for pause in (0, *pauses):
        at += pause * 10**9
        parts.append([(at, FRAMES[0])])
    totals = run_core(*(files.pcap(part, magic=files.NANO) for part in parts)).totals()
    assert totals["gap_ns"] == sum(pauses) * 10**9
    assert sorted((end - begin) // 10**9 for begin, end in totals["gaps"]) == sorted(pauses)[-64:]


@pytest.mark.parametrize("name", ["pcap-micro-little", "pcap-modified-big", "pcapng-little", "pcapng-mixed-big"])
def test_a_file_that_ends_anywhere(name: str) -> None:
    """Complete records are counted, and the truncated one is reported."""
    data = DIALECTS[name].data
    whole = run_core(data).totals()["packets"]
    counts = []
    for end in range(24, len(data), 1 + 2 * (len(data) // 3000)):
        try:
            totals = run_core(data[:end], **SMALL).totals()
        except ValueError:
            assert end < 200
            continue
        counts.append(totals["packets"])
        assert totals["skipped"] == {}
    assert counts == sorted(counts)
    assert set(counts) | {whole} == set(range(whole + 1))


def test_truncation_is_reported_with_its_offset() -> None:
    data = files.pcap(PACKETS)
    last = len(data) - len(files.record(PACKETS[-1]))
    counter = run_core(data[:-1])
    assert counter.totals()["truncated"] is True
    assert counter.problems() == [(0, last, "ends in the middle of a record")]
    assert counter.totals()["packets"] == len(PACKETS) - 1
    between = run_core(data[:last])
    assert (between.totals()["truncated"], between.problems()) == (False, [])


GARBAGE = {
    "zeroes": bytes(1000),
    "ones": b"\xff" * 1000,
    "text": b"this is not a record at all, and continues for a while. " * 20,
    "a length of 2 GB": struct.pack("<IIII", 1_700_000_001, 0, 1 << 31, 1 << 31) + bytes(300),
    "a frame's half": FRAMES[0] * 3,
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_reading_resumes_at_records_after_damage(garbage: str, order: str) -> None:
    packets = spaced(FRAMES * 20)
    records = [files.record(packet, order=order) for packet in packets]
    before = files.header(order=order) + b"".join(records[:50])
    counter = run_core(before + GARBAGE[garbage] + b"".join(records[50:]))
    totals = counter.totals()
    assert totals["packets"] == len(packets)
    assert totals["skipped"] == {"corrupt record": 1}
    assert counter.problems() == [(0, len(before), "corrupt record")]
    assert (
        by_core(before + GARBAGE[garbage] + b"".join(records[50:])).ways
        == by_core(b"".join([files.header(), *[files.record(packet) for packet in packets]])).ways
    )


@pytest.mark.parametrize("garbage", GARBAGE)
def test_reading_resumes_at_blocks_after_damage(garbage: str) -> None:
    packets = spaced(FRAMES * 20)
    made = files.Pcapng()
    made.interface(resolution=9)
    for packet in packets[:50]:
        made.packet(0, packet)
    place = len(made.data)
    made.data += GARBAGE[garbage].ljust(-(-len(GARBAGE[garbage]) // 4) * 4, b"\xff")
    for packet in packets[50:]:
        made.packet(0, packet)
    counter = run_core(bytes(made.data))
    assert counter.totals()["packets"] == len(packets)
    assert counter.problems()[0] == (0, place, "corrupt record")


NO_CAPTURE = {
    "nothing": b"",
    "a few bytes": b"\xd4\xc3\xb2\xa1",
    "text": b"Nov 14 22:13:20 node1 systemd[1]: Started session 1.\n" * 10,
    "an archive": b"PK\3\4" + bytes(400),
    "zeroes": bytes(4096),
}


@pytest.mark.parametrize("what", NO_CAPTURE)
def test_what_is_not_a_capture(what: str) -> None:
    with pytest.raises(ValueError, match="pcap"):
        run_core(NO_CAPTURE[what])
    assert _core.first_time(NO_CAPTURE[what]) == -1


def test_a_capture_without_packets() -> None:
    totals = run_core(files.header()).totals()
    assert (totals["packets"], totals["bytes"], totals["truncated"]) == (0, 0, False)


def test_several_files_are_one_capture() -> None:
    packets = spaced(FRAMES * 4)
    parts = [
        files.pcap(packets[:9]),
        files.pcapng(packets[9:14]),
        files.pcap(packets[14:], order=">", magic=files.NANO),
    ]
    assert by_core(*parts) == by_core(files.pcap(packets))


BOUNDS = [
    {"max_flows": 256},
    {"max_flows": 1024, "max_pairs": 4096},
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_few_flows_at_a_time_give_the_same_sums(bounds: dict[str, int]) -> None:
    """3000 connections of thirty nodes, many at once: flows beyond the limit are folded, and nothing is lost."""
    frames = []
    for number in range(3000):
        node, port = f"10.1.1.{number % 30 + 1}", 32768 + number
        frames.append(samples.in_ethernet(p.ipv4(p.tcp(b"", port, 6817, p.SYN), p.TCP, node, samples.B)))
    for number in range(3000):
        node, port = f"10.1.1.{number % 30 + 1}", 32768 + number
        frames.append(samples.in_ethernet(p.ipv4(p.tcp(b"x" * 50, port, 6817, p.ACK), p.TCP, node, samples.B)))
    data = files.pcap(spaced(frames, 1_000_000))
    free, tight = run_core(data), run_core(data, **bounds)
    roles = bytes(len(free.hosts()))
    counts = [
        tuple(sum(row[column] for row in counter.rows(roles)) for column in (8, 9))
        + tuple(tuple(map(sum, zip(*(row[column] for row in counter.rows(roles)), strict=True))) for column in (12, 13))
        for counter in (free, tight)
    ]
    # Opened connections, packets and bytes; those that continue after a fold are counted separately.
    assert counts[0] == counts[1]
    assert counts[0][:2] == (3000, 0)
    assert tight.totals()["beyond"] == (0, 0)


SCRIPT = """
import re, sys
from pathlib import Path
from tests.captures.native import run_core
run_core(Path(sys.argv[1]), keep=0)
# Not getrusage, which includes the parent's memory at the fork.
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_what_a_capture_holds(tmp_path: Path) -> None:
    """Half a million addresses and ports, every packet another flow."""
    file = tmp_path / "scan.pcap"
    head = struct.pack("<IIII", 1_700_000_000, 0, 54, 60)
    frame = bytearray(samples.in_ethernet(p.ipv4(p.tcp(b"", 1, 2, p.SYN), p.TCP, samples.A, samples.B)))
    with file.open("wb") as out:
        out.write(files.header())
        for number in range(500_000):
            struct.pack_into(
                "!IIHH", frame, 26, number * 2654435761 & 0xFFFFFFFF, number, number & 0xFFFF, number >> 3 & 0xFFFF
            )
            out.write(head + frame)
    root = ROOT
    argv = [sys.executable, "-c", SCRIPT, str(file)]
    done = subprocess.run(argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150 << 10
