"""Flow, packet and byte counts of the native core agree with tshark's on the same file.

docs/classify-agreement.md explains the remaining differences.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.captures import files, samples
from tests.captures.cluster import Plan, simulate
from tests.captures.native import by_core, differences, pairs, run_core
from tests.captures.sharks import Counted, by_tshark
from tests.places import ROOT

pytestmark = pytest.mark.slow

Need = Callable[[str], str]

PUBLIC = Path(os.environ.get("SMS_CAPTURES") or ROOT.parent / "shared" / "captures")
"""Public captures, not part of the project; without the folder their tests are skipped."""

SAMPLES = samples.everything()
NUMBERS = {"tcp": 6, "udp": 17}

CUT = "cut off in its headers"
"""The ports are beyond the captured bytes; tshark then shows a flow with port 0, the core none."""
HEADLESS = "fragment without its first"

EXPLAINED: dict[str, str | tuple[str, ...]] = {
    "headers-snap-64": CUT,
    "headers-snap-68": CUT,
    "headers-snap-96": CUT,
    "fragments-snap-64": (CUT, HEADLESS),
    "pppoe": "ethertype 0x8864",
    # Link types that a management node does not have: counted, with their number.
    "tcpdump/HDLC.pcap": "frames of link type 104",
    "tcpdump/OSPFv3_NBMA_adjacencies.pcap": "frames of link type 107",
    "tcpdump/arcnet-rfc1051-arp-icmp-http.pcap": "frames of link type 129",
    "tcpdump/e1000g.pcap": "frames of link type 226",
    "tcpdump/mpls-traceroute.pcap": "frames of link type 9",
    "tcpdump/nflog.pcap": "frames of link type 239",
    "zeek/Traces_llc.pcap": "frames of link type 10",
    "zeek/Traces_mixed-vlan-mpls.pcap": "ethertype 0x8847",
    "zeek/Traces_nflog-http.pcap": "frames of link type 239",
    "zeek/Traces_radiotap.pcap": "frames of link type 127",
    "zeek/Traces_wlanmon.pcap": "frames of link type 105",
    "zeek/quic-go_quic-go_zerortt.pcap": "frames of link type 9",
}
"""By capture: the names under which the core counts packets that only tshark assigns to flows."""

UNREAD: dict[str, str] = {
    "tcpdump/brcm-tag-prepend.pcap": "frames of link type 282",
    "tcpdump/brcm-tag.pcap": "frames of link type 281",
    "tcpdump/dsa.pcap": "frames of link type 284",
    "tcpdump/edsa.pcap": "frames of link type 285",
    "tcpdump/vtp_asan.pcap": "frames of link type 182",
}
"""Captures that tshark 4.0 rejects; the core counts their packets as frames of an unknown link type."""

END = "the end of the TCP or UDP header was not captured: tshark shows no conversation"
TABLES: dict[str, str] = {
    "cluster-snap-64": END,
    "fragments-snap-68": END,
    "headers-snap-64": END,
    "headers-snap-68": END,
    "headers-snap-96": END,
    "tunnels": "tshark also counts the packets inside others",
    "tcpdump/of13_ericsson.pcapng": "tshark also counts the packets that OpenFlow messages carry",
}
"""Captures whose conversations differ in tshark's own tables, though every packet is the same."""


def total(ways: dict[Any, tuple[int, int]]) -> list[int]:
    """Packets and bytes."""
    return [sum(both) for both in zip(*ways.values(), strict=True)] or [0, 0]


def check(file: Path, name: str, tool: str) -> None:
    """Compare the core's counts of a file with tshark's."""
    ours = by_core(file)
    totals = run_core(file).totals()
    other = totals["other"]
    # The parts add up to the totals.
    parts = [total(ours.ways), total(ours.plain), *other.values(), totals["beyond"]]
    assert [sum(both) for both in zip(*parts, strict=True)] == [ours.packets, ours.bytes]
    if name in UNREAD:
        assert other == {UNREAD[name]: (ours.packets, ours.bytes)}
        return
    theirs = by_tshark(tool, file)
    assert (ours.packets, ours.bytes) == (theirs.packets, theirs.bytes)
    here = {**ours.ways, **ours.plain}
    left = {way: seen for way, seen in {**theirs.ways, **theirs.plain}.items() if way not in here}
    if name in EXPLAINED:
        assert left, f"{name} agrees now: remove it from the table"
        names = EXPLAINED[name]
        assert total(left)[0] <= sum(other[what][0] for what in ([names] if isinstance(names, str) else names))
        theirs = _without(theirs, left)
    assert [*differences(ours.ways, theirs.ways), *differences(ours.plain, theirs.plain)] == []
    if name in EXPLAINED and name not in TABLES:
        return
    assert set(theirs.tables) == set(NUMBERS)
    found = list(_conversations(ours, theirs))
    assert bool(found) == (name in TABLES), found


def _conversations(ours: Counted, theirs: Counted) -> Iterator[str]:
    """Differences between the core's flows and the tables of ``tshark -z conv``."""
    if ours.connections.get(6, 0) != theirs.connections[6]:
        yield f"TCP connections: core {ours.connections.get(6, 0)}, tshark {theirs.connections[6]}"
    for protocol, number in NUMBERS.items():
        flows = pairs(ours, number)
        for (kind, ends), packets in theirs.later.items():
            if kind == number and ends in flows:
                flows[ends] -= packets
        yield from differences(flows, theirs.tables[protocol])


def _without(counted: Counted, left: dict[Any, Any]) -> Counted:
    for ways in (counted.ways, counted.plain):
        for way in left:
            ways.pop(way, None)
    return counted


@pytest.mark.parametrize("name", SAMPLES)
def test_our_own_captures(name: str, need: Need, tmp_path: Path) -> None:
    file = tmp_path / "sample"
    file.write_bytes(SAMPLES[name].data)
    check(file, name, need("tshark"))


def test_a_bigger_cluster(need: Need, tmp_path: Path) -> None:
    file = tmp_path / "cluster.pcap"
    file.write_bytes(files.pcap(simulate(Plan(nodes=12, boots=3, duration_s=1800, translated=True)).packets()))
    check(file, "", need("tshark"))


def public_captures() -> list[str]:
    """Names below the folder of public captures."""
    return sorted(str(path.relative_to(PUBLIC)) for path in PUBLIC.rglob("*.*cap*") if path.is_file())


@pytest.mark.parametrize("name", public_captures() or [pytest.param("", marks=pytest.mark.skip("no public captures"))])
def test_public_captures(name: str, need: Need, tmp_path: Path) -> None:
    file = PUBLIC / name
    if name.endswith(".gz"):
        file = tmp_path / "plain"
        file.write_bytes(gzip.decompress((PUBLIC / name).read_bytes()))
    check(file, name, need("tshark"))


def test_the_table_has_no_old_names() -> None:
    known = {*SAMPLES, *public_captures()}
    if any("/" in name for name in known):
        assert {*EXPLAINED, *UNREAD, *TABLES} <= known
