"""Sets of files with gaps, interrupted streams, and remarks on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.errors import CaptureError
from analysis.observed import Observation
from analysis.reading import read_captures
from tests.captures import cluster, files
from tests.captures.files import Packet

SMS = Path(sys.executable).with_name("sms")
LENGTH_S = 600


@pytest.fixture(scope="module")
def packets() -> list[Packet]:
    return list(cluster.simulate(cluster.Plan(nodes=3, duration_s=LENGTH_S)).packets())


def within(packets: list[Packet], begin: float, end: float) -> list[Packet]:
    first = packets[0][0]
    return [packet for packet in packets if begin <= (packet[0] - first) / 1e9 < end]


def observed(tmp_path: Path, *captures: bytes) -> Observation:
    names = [tmp_path / f"part{number}.pcap" for number in range(len(captures))]
    for name, data in zip(names, captures, strict=True):
        name.write_bytes(data)
    reading = read_captures([str(name) for name in names], signatures=())
    hosts = reading.hosts()
    return reading.observe(bytes(len(hosts)), hosts, reading.links())


def test_a_gap_between_files_is_not_an_interval(packets: list[Packet], tmp_path: Path) -> None:
    parts = [files.pcap(within(packets, *times)) for times in ((0, 120), (480, 9999))]
    seen = observed(tmp_path, *parts)
    assert seen.duration_s == pytest.approx(LENGTH_S, abs=60)
    assert seen.covered_s == pytest.approx(seen.duration_s - 360, abs=40)
    assert max((value for row in seen.rows for value, _ in row.intervals), default=0) < 200


def test_files_that_follow_each_other_have_no_gap(packets: list[Packet], tmp_path: Path) -> None:
    parts = [files.pcap(within(packets, begin, begin + 100)) for begin in range(0, LENGTH_S + 100, 100)]
    seen = observed(tmp_path, *(part for part in parts if len(part) > 24))
    whole = observed(tmp_path, files.pcap(packets))
    assert (seen.gap_s, seen.remarks) == (0, ())
    assert [row.intervals for row in seen.rows] == [row.intervals for row in whole.rows]


def test_what_is_done_meanwhile_is_done_once(packets: list[Packet], tmp_path: Path) -> None:
    names = [tmp_path / f"part{number}.pcap" for number in range(3)]
    for name in names[1:]:
        name.write_bytes(files.pcap(packets))
    names[0].write_bytes(b"no capture, but the first file")
    calls = []
    reading = read_captures(list(map(str, names)), signatures=(), meanwhile=lambda: calls.append(1))
    assert (calls, reading.counter.packets) == ([1], 2 * len(packets))


def test_the_same_packets_twice(packets: list[Packet], tmp_path: Path) -> None:
    whole = files.pcap(packets)
    seen = observed(tmp_path, whole, files.compress("gzip", whole))
    assert seen.remarks == (
        f"{tmp_path}/part0.pcap and {tmp_path}/part1.pcap hold the same packets: all are counted twice",
    )


def test_files_that_overlap(packets: list[Packet], tmp_path: Path) -> None:
    seen = observed(tmp_path, files.pcap(within(packets, 0, 400)), files.pcap(within(packets, 300, 9999)))
    assert [remark.endswith("overlap in time: packets in both are counted twice") for remark in seen.remarks] == [True]


@pytest.mark.parametrize("bad", [b"", b"\xd4\xc3\xb2\xa1", b"no capture\n" * 50], ids=["empty", "short", "text"])
def test_a_file_that_is_not_a_capture_is_skipped(bad: bytes, packets: list[Packet], tmp_path: Path) -> None:
    seen = observed(tmp_path, files.pcap(packets), bad)
    assert seen.packets == len(packets)
    assert len(seen.remarks) == 1
    assert seen.remarks[0].startswith(f"skipped: {tmp_path}/part1.pcap is ")
    with pytest.raises(CaptureError):
        observed(tmp_path, bad, bad)


def test_packets_that_were_cut(packets: list[Packet], tmp_path: Path) -> None:
    seen = observed(tmp_path, files.pcap(packets, snap=128))
    assert seen.cut == sum(len(frame) > 128 for _, frame in packets)
    assert seen.cut_at == 128
    assert observed(tmp_path, files.pcap(packets)).cut == 0


def wait_until_it_reads(child: subprocess.Popen[str]) -> None:
    """The core reads in a separate thread; the first bytes of a pipe are waited for before."""
    process = Path(f"/proc/{child.pid}")
    while len(list((process / "task").iterdir())) < 2 and "poll" not in (process / "wchan").read_text():
        assert child.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)


def interrupted(first: bytes, last: bytes, *, by: signal.Signals = signal.SIGINT) -> subprocess.CompletedProcess[str]:
    """`sms classify -` on a pipe whose writer flushes at Ctrl-C and exits later."""
    read, write = os.pipe()
    child = subprocess.Popen(
        [SMS, "classify", "-", "--json"], stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(read)
    try:
        os.write(write, first)
        wait_until_it_reads(child)
        child.send_signal(by)
        time.sleep(0.3)
        os.write(write, last)
        time.sleep(0.3)
    finally:
        os.close(write)
    out, errors = child.communicate(timeout=60)
    return subprocess.CompletedProcess([], child.returncode, out, errors)


ENDS = [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGHUP), (False, signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.parametrize(("held_back", "by"), ENDS, ids=["as it comes", "all at the end", "hangup", "term"])
def test_ctrl_c_ends_a_pipe_and_received_packets_count(
    held_back: bool, by: signal.Signals, packets: list[Packet]
) -> None:
    import json

    some = packets[:400]
    data = files.pcap(some)
    cut = 0 if held_back else len(data) // 2
    done = interrupted(data[:cut], data[cut:], by=by)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["capture"]["packets"] == len(some)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_while_files_are_read_is_an_interruption(tmp_path: Path) -> None:
    """A sparse file takes long enough; no thread keeps running."""
    path = tmp_path / "zeroes.pcap"
    path.write_bytes(files.header())
    os.truncate(path, 40 << 30)
    child = subprocess.Popen([SMS, "classify", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_it_reads(child)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "sms: interrupted"


@pytest.mark.parametrize("library", [True, False], ids=["by the library", "by the program"])
def test_zstd_is_the_same_either_way(
    library: bool, packets: list[Packet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from analysis import _core

    assert _core.has_zstd()
    monkeypatch.setattr(_core, "has_zstd", lambda: library)
    whole = files.pcap(packets)
    seen = observed(tmp_path, files.compress("zstd", whole, parts=4))
    assert (seen.packets, seen.bytes) == (len(packets), sum(len(frame) for _, frame in packets))
    broken = bytearray(files.compress("zstd", whole))
    broken[len(broken) // 2 : len(broken) // 2 + 40] = bytes(40)
    seen = observed(tmp_path, bytes(broken))
    assert seen.truncated
    assert any("damaged" in one.what or "failed" in one.what for one in seen.problems)
