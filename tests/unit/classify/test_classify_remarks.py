"""Remarks on captures, and the context that verdicts depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.classify import classify
from analysis.context import make_context
from analysis.model import Classification, Sms
from analysis.observed import Boot, Link, Observation, Problem, Role
from analysis.reading import read_captures
from analysis.roles import Roles, find_roles
from analysis.signatures import TCP, UDP
from tests.captures import files
from tests.captures.cluster import Made, Plan, simulate
from tests.unit.classify_cases import (
    NODE,
    SIGNATURES,
    SMS,
    SMS_MAC,
    START,
    S,
    boot,
    make_row,
    observe,
    paper,
    roles_of,
    run,
)


def remarks(observation: Observation, *, nodes: int = 8, **known: Any) -> tuple[str, ...]:
    roles = Roles(Sms(SMS_MAC, known.pop("own", ("10.1.0.1",)), "given"), roles_of(nodes), **known)
    return classify(observation, roles, SIGNATURES).capture.remarks


def test_nothing_to_remark() -> None:
    assert run(paper(), boots=[boot()]).capture.remarks == ()


ONE = make_row(NODE, SMS, TCP, 6817, opened=9)
LOG = make_row(NODE, SMS, UDP, 514, opened=8, contacts_steady=640, packets=(0, 0), bytes=(0, 0))
USED = [ONE, LOG, *(make_row(NODE, SMS, TCP, port, midstream=1, packets=(0, 0), bytes=(0, 0)) for port in (2049, 25))]
"""As many ports as no filter names."""
ASKED = make_row(NODE, SMS, UDP, 67, opened=4, contacts_boot=4)
REMARKS: dict[str, tuple[dict[str, Any], str]] = {
    "damage": ({"skipped": {"corrupt record": 9}, "total": 81}, "9 records (10 %) damaged or lost, "),
    "times": ({"skipped": {"time far from its neighbours'": 2}}, "2 packets with impossible times"),
    "room": ({"beyond": (19, 900)}, "19 packets (19 %) exceeded the address table"),
    "gap": ({"gap_s": 3000.0}, "nothing was captured for 50 min (83 %) of the 1 h from the first packet to the last: "),
    "reading": ({"remarks": ("skipped: b.pcap",)}, "skipped: b.pcap"),
    "first bytes": ({"cut": 5, "cut_at": 64}, "5 packets are cut at 64 bytes, which hides which service "),
}


@pytest.mark.parametrize("case", REMARKS)
def test_remarks(case: str) -> None:
    known, expected = REMARKS[case]
    (remark,) = remarks(observe(USED, **known))
    assert remark.startswith(expected)


def test_the_end_is_missing() -> None:
    assert remarks(replace(observe(USED), truncated=True)) == (
        "a file ends in the middle of a packet: later packets are missing",
    )


@pytest.mark.parametrize(
    ("truncated", "words"),
    [
        ("b", "b ends"),
        ("ac", "a and c end"),
        ("abcde", "a, b, c and 2 others end"),
    ],
)
def test_of_several_files_the_truncated_ones_are_named(truncated: str, words: str) -> None:
    problems = tuple(Problem(name, 7, "ends in the middle of a record") for name in truncated)
    other = Problem("f", 9, "something else")
    seen = replace(observe(USED), truncated=True, files=tuple("abcdef"), problems=(*problems, other))
    assert remarks(seen) == (f"{words} in the middle of a packet: later packets are missing",)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            {"cut": 3, "cut_at": 128},
            "hides when nodes booted and DHCP lease times: capture with tcpdump -s",
        ),
        ({"cut": 3, "cut_at": 400}, "but no boot was recognized"),
        ({}, "but no boot was recognized"),
        ({"cut": 3, "cut_at": 128, "boots": [boot()]}, "bytes, which hides DHCP lease times: capture"),
    ],
)
def test_dhcp_that_was_not_understood(known: dict[str, Any], expected: str) -> None:
    (remark,) = remarks(observe([ASKED, *USED], **known))
    assert expected in remark


@pytest.mark.parametrize("known", [{"gap_s": 100.0}, {"cut": 3, "cut_at": 128}, {"cut": 3, "cut_at": 400}])
def test_harmless_limits_are_not_remarked(known: dict[str, Any]) -> None:
    assert remarks(observe(USED, **known)) == ()


def test_the_most_serious_come_first() -> None:
    known: dict[str, Any] = {
        "skipped": {"corrupt record": 9},
        "gap_s": 3000.0,
        "cut": 9,
        "cut_at": 64,
        "remarks": ("skipped",),
    }
    found = remarks(observe(USED, nodes=1, **known), nodes=1, remarks=("10.1.1.1 was given",))
    assert [one.split()[0] for one in found] == ["9", "skipped", "10.1.1.1", "only", "nothing", "9"]


def test_one_machine_is_not_a_cluster() -> None:
    (remark,) = remarks(observe(USED, nodes=1), nodes=1)
    assert remark.startswith("only 1 machine could be a compute node")
    # With --node only one node is expected.
    assert remarks(observe(USED, nodes=1), nodes=1, node="10.1.1.1") == ()


def test_an_internet_server_is_not_a_management_node() -> None:
    seen = observe(USED)
    far = [replace(host, address=f"2{host.index}.1.1.1") if 1 <= host.index <= 8 else host for host in seen.hosts]
    (remark,) = remarks(replace(seen, hosts=tuple(far)), own=("192.0.2.1",))
    assert remark.startswith("192.0.2.1 and most of those that talk to it have public addresses of different networks")
    near = [replace(host, address=f"192.0.2.{host.index}0") if 1 <= host.index <= 8 else host for host in seen.hosts]
    assert remarks(replace(seen, hosts=tuple(near)), own=("192.0.2.1",)) == ()


# The context.


def test_time_that_no_file_covers_does_not_count() -> None:
    found = run(USED, gap_s=3540.0)
    context = make_context(observe(USED, gap_s=3540.0), roles_of())
    assert (context.duration_s, context.steady_s) == (60, 8 * 60)
    assert (found.capture.duration_s, found.capture.covered_s) == (3600, 60)
    (whole,) = (one for one in run(USED).unseen if one.name == "chrony")
    (parts,) = (one for one in found.unseen if one.name == "chrony")
    assert "too short to decide" in parts.why
    assert "hardly use it" in whole.why


def test_boots_of_hardware_are_not_counted() -> None:
    """A BMC uses DHCP, too."""
    links = [Link(0, 8, UDP, 623, 5, 500), *(Link(n, 0, TCP, 6817, 5, 500) for n in range(1, 8))]
    seen = observe(USED, links=links, boots=[boot(7), boot(1)])
    context = make_context(seen, roles_of())
    assert (context.nodes, context.boots, context.booted_nodes) == (7, 1, 1)


def test_nodes_that_have_no_address_yet_are_counted() -> None:
    seen = observe([ASKED], nodes=1, boots=[Boot(f"52:54:00:09:00:0{n}", START + S, 0) for n in range(3)])
    assert make_context(seen, bytes([SMS, Role.UNKNOWN, Role.OUTSIDE, Role.GROUP, NODE])).nodes == 3


# A simulated cluster, through the core.


@pytest.fixture(scope="module")
def made() -> Made:
    return simulate(Plan(nodes=8, boots=2, duration_s=1200))


def classify_capture(folder: Path, data: bytes, **options: Any) -> Classification:
    (folder / "made.pcap").write_bytes(data)
    reading = read_captures([str(folder / "made.pcap")], signatures=SIGNATURES)
    hosts, links = reading.hosts(), reading.links()
    roles = find_roles(hosts, links, reading.samples, **options)
    return classify(reading.observe(roles.by_index, hosts, links), roles, SIGNATURES)


def test_boots_that_are_truncated_are_reported_as_hidden(tmp_path: Path, made: Made) -> None:
    found = classify_capture(tmp_path, files.pcap(made.packets(), snap=56))
    assert (found.nodes.booted, found.nodes.boots_hidden) == (0, True)
    (remark,) = found.capture.remarks
    assert "56 bytes, which hides when nodes booted, DHCP lease times" in remark
    whole = classify_capture(tmp_path, files.pcap(made.packets()))
    assert (whole.nodes.booted, whole.nodes.boots_hidden, whole.capture.remarks) == (2, False, ())


def test_a_cluster_behind_a_router_is_the_same_cluster(tmp_path: Path, made: Made) -> None:
    """All frames of nodes are to and from the router; nothing else changes."""
    router = bytes.fromhex("525400ff0001")
    nodes = {bytes.fromhex(node.mac.replace(":", "")) for node in made.nodes}
    frames = [
        (at, b"".join(router if mac in nodes else mac for mac in (frame[:6], frame[6:12])) + frame[12:])
        for at, frame in made.packets()
        if frame[12:14] == b"\x08\x00"
    ]
    # The nodes are elsewhere: 10.1.1.x is 10.2.1.x.
    frames = [(at, move(frame)) for at, frame in frames]
    here = classify_capture(tmp_path, files.pcap(made.packets()))
    there = classify_capture(tmp_path, files.pcap(frames))
    assert (there.nodes.count, there.nodes.booted) == (here.nodes.count, here.nodes.booted) == (8, 2)
    assert {(one.name, one.verdict) for one in there.services} == {(one.name, one.verdict) for one in here.services}


def test_another_router_to_the_outside_is_remarked(tmp_path: Path) -> None:
    """On a mirror port, what nodes exchange with the outside may not pass the management node at all."""
    sms, router = bytes.fromhex("525400000001"), bytes.fromhex("5254aa000001")
    made = simulate(Plan(nodes=8, duration_s=1800.0))
    frames = [
        (at, frame[:12].replace(sms, router) + spread(frame)[12:]) if spread(frame) != frame else (at, frame)
        for at, frame in made.packets()
    ]
    found = classify_capture(tmp_path, files.pcap(frames))
    (remark,) = found.capture.remarks
    assert remark.startswith(
        "100 % of the packets between nodes and the outside pass another router (52:54:aa:00:00:01)"
    )
    assert next(one.verdict for one in found.services if one.name == "nat") == "time-critical"
    assert classify_capture(tmp_path, files.pcap(made.packets())).capture.remarks == ()


def spread(frame: bytes) -> bytes:
    """Return a frame with its outside address, if it has one, in one of nine networks, by the port of the node."""
    for end, port in ((26, 36), (30, 34)):
        if frame[12:14] == b"\x08\x00" and frame[end : end + 2] in (b"\xcb\x00", b"\xc6\x33"):
            number = 50 + int.from_bytes(frame[port : port + 2]) % 9
            return frame[:end] + bytes((number, number)) + frame[end + 2 :]
    return frame


def move(frame: bytes) -> bytes:
    ends = (frame[26:30], frame[30:34])
    moved = (b"\x0a\x02" + end[2:] if end[:3] == b"\x0a\x01\x01" else end for end in ends)
    return frame[:26] + b"".join(moved) + frame[34:]


@pytest.mark.parametrize("snap", [64, 76, 96, 128, 300])
def test_boots_are_seen_if_dhcp_is_cut_before_its_message_type(tmp_path: Path, made: Made, snap: int) -> None:
    """A client without an address that requests one has just booted."""
    found = classify_capture(tmp_path, files.pcap(made.packets(), snap=snap))
    assert (found.nodes.booted, found.nodes.boots_hidden) == (2, False)


@pytest.mark.parametrize("source", ["nodes", "the management node"])
def test_one_direction_alone_is_reported(source: str, tmp_path: Path, made: Made) -> None:
    """As of a mirror port that copies only what a port receives."""
    sms = bytes.fromhex(made.sms.mac.replace(":", ""))
    frames = [one for one in made.packets() if (one[1][6:12] == sms) == (source != "nodes")]
    found = classify_capture(tmp_path, files.pcap(frames))
    (remark,) = (one for one in found.capture.remarks if "one direction" in one)
    assert f" of TCP are from {source} to " in remark
