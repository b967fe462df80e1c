"""The generators' expected counts are what tshark finds: validates the reference data of the other tests."""

from __future__ import annotations

import gzip
import lzma
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.captures import files, samples
from tests.captures import packets as p
from tests.captures.cluster import ALL, STEADY, Made, Plan, simulate
from tests.captures.samples import Sample
from tests.captures.sharks import Counted, by_tshark, tshark

pytestmark = pytest.mark.slow

Need = Callable[[str], str]

SAMPLES = samples.everything()
PLANS = {
    "an hour": Plan(),
    "two boots, unicast, translated": Plan(nodes=5, boots=2, multicast=False, translated=True, seed=7, duration_s=1200),
}


@pytest.fixture(scope="module", params=PLANS)
def made(request: pytest.FixtureRequest) -> Made:
    return simulate(PLANS[request.param])


def true_counts(made: Made) -> Counted:
    """The generator's expected counts in the form used for comparisons."""
    counted = Counted(len(made.frames), sum(len(frame) for _, frame in made.frames))
    for (protocol, client, own, server, port), flow in made.flows.items():
        there, back = (p.ip_bytes(client), own), (p.ip_bytes(server), port)
        counted.add((protocol, there, back), flow.packets[0], flow.bytes[0])
        counted.add((protocol, back, there), flow.packets[1], flow.bytes[1])
        counted.connections[protocol] = counted.connections.get(protocol, 0) + 1
    return counted


def test_the_same_seed_gives_the_same_bytes() -> None:
    plan = Plan(nodes=3, duration_s=300)
    assert simulate(plan).packets() == simulate(plan).packets()
    assert simulate(plan).packets() != simulate(Plan(nodes=3, duration_s=300, seed=2)).packets()


def test_adding_a_service_does_not_change_the_others() -> None:
    few = simulate(Plan(services=("ntp", "syslog"))).truth()
    assert {name: few[name] for name in ("ntp", "syslog")} == {name: simulate(Plan()).truth()[name] for name in few}


def test_everything_happens() -> None:
    made = simulate(Plan())
    assert set(made.truth()) | {name.lower() for name in made.other} == set(ALL)
    assert all(total.packets > 50 for total in made.truth().values())
    opened = {name: set(total.opened) for name, total in made.truth().items()}
    assert {name for name in STEADY if opened[name] == {"node"}} == set(STEADY) - {"slurm", "ssh"}
    assert opened["ssh"] == {"sms"}
    assert opened["slurm"] == {"node", "sms"}
    assert made.truth()["nfs"].midstream == 7


def test_times_rise_and_stay_inside(made: Made) -> None:
    times = [time for time, _ in made.packets()]
    assert times == sorted(times)
    assert times[-1] - times[0] <= (made.plan.duration_s + 60) * 1e9


def test_the_truth_is_what_tshark_finds(made: Made, need: Need, tmp_path: Path) -> None:
    file = tmp_path / "made.pcap"
    file.write_bytes(files.pcap(made.packets(), magic=files.NANO))
    found, true = by_tshark(need("tshark"), file), true_counts(made)
    assert (found.packets, found.bytes) == (true.packets, true.bytes)
    assert found.ways == true.ways


PROTOCOLS = {
    "dhcp": 12,
    "tftp": 9,
    "ntp": 100,
    "smtp": 100,
    "http": 90,
    "nfs": 500,
    "syslog": 300,
    "ssh": 20,
    "lldp": 90,
}
"""Protocols that tshark recognizes by content, and the minimum packets of each in an hour."""


def test_tshark_decodes_the_protocols(need: Need, tmp_path: Path) -> None:
    file = tmp_path / "made.pcap"
    file.write_bytes(files.pcap(simulate(Plan()).packets()))
    decoded: Counter[str] = Counter()
    for line in tshark(need("tshark"), file, "-T", "fields", "-e", "frame.protocols").splitlines():
        decoded.update(set(line.split(":")))
    assert {name: least for name, least in PROTOCOLS.items() if decoded[name] < least} == {}
    assert not decoded["_ws.malformed"]


def test_slurm_is_as_it_is_on_the_wire() -> None:
    message = p.slurm(1008, bytes(8), sender="10.1.0.1", sender_port=6818)
    assert len(message) == 4 + int.from_bytes(message[:4])
    assert message[4:6] == b"\x26\x00"
    assert int.from_bytes(message[10:12]) == 1008
    assert b"MUNGE:" in message


@pytest.mark.parametrize("name", samples.dialects())
def test_dialects_are_read_by_tshark(name: str, need: Need, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    file = tmp_path / "sample"
    file.write_bytes(sample.data)
    lines = tshark(need("tshark"), file, "-T", "fields", "-e", "frame.len", "-e", "frame.time_epoch").splitlines()
    assert [int(line.split()[0]) for line in lines] == [len(frame) for frame in sample.frames]
    if sample.times:
        expected = [samples.START_NS + number * 1_000_500_000 for number in range(len(lines))]
        # To the microsecond, the resolution of most of them.
        times = [round(int(line.split()[1].replace(".", "")), -3) for line in lines]
        assert [abs(time - true) <= 2000 for time, true in zip(times, expected, strict=True)] == [True] * len(lines)


COMPRESSED = ("gzip", "xz", "zstd", "lz4")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_is_what_the_programs_read(kind: str, parts: int, need: Need) -> None:
    data = SAMPLES["pcap-micro-little"].data
    if kind in ("zstd", "lz4"):
        need(kind)
    packed = files.compress(kind, data, parts=parts)
    if kind == "gzip":
        assert gzip.decompress(packed) == data
    elif kind == "xz":
        assert lzma.decompress(packed) == data
    else:
        assert subprocess.run([kind, "-dcq"], input=packed, stdout=subprocess.PIPE, check=True).stdout == data


def test_rotated_sets() -> None:
    packets = samples.spaced([samples.in_ethernet(bytes(900))] * 40)
    sets = files.rotated(packets, size=5000, count=100)
    assert list(sets) == [f"out.pcap{number:02}" for number in range(len(sets))]
    assert len(sets) == 7
    assert sum(len(data) - 24 for data in sets.values()) == len(files.pcap(packets)) - 24
    ring = files.rotated(packets, size=5000, count=3)
    assert list(ring) == ["out.pcap0", "out.pcap1", "out.pcap2"]
    # The first has been overwritten: it is the newest.
    assert ring["out.pcap0"][24:28] > ring["out.pcap2"][24:28]


def test_samples() -> None:
    assert all(isinstance(sample, Sample) and sample.data for sample in SAMPLES.values())
    assert len(SAMPLES) > 40
