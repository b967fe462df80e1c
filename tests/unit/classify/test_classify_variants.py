"""Unusual captures of a simulated cluster, with the shipped catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.classify import classify
from analysis.model import LOW_CONFIDENCE, Classification, Service
from analysis.reading import read_captures
from analysis.roles import find_roles
from appliance.operations.classify.signatures import make_signatures, open_catalogue
from tests.captures import files, variants
from tests.captures.cluster import START_S, Plan, simulate
from tests.captures.files import Packet

SIGNATURES = make_signatures(open_catalogue(None))


def classified(folder: Path, packets: list[Packet], **options: Any) -> Classification:
    """Classify a capture. ``options``: of `files.pcap`."""
    (folder / "made.pcap").write_bytes(files.pcap(packets, **options))
    reading = read_captures([str(folder / "made.pcap")], signatures=SIGNATURES)
    hosts, links = reading.hosts(), reading.links()
    roles = find_roles(hosts, links, reading.samples)
    return classify(reading.observe(roles.by_index, hosts, links), roles, SIGNATURES)


def by_name(found: Classification) -> dict[str, Service]:
    return {one.name: one for one in found.services}


# Names.


def test_other_protocols_on_known_ports_have_their_own_names(tmp_path: Path) -> None:
    made = variants.named_services()
    found, true = by_name(classified(tmp_path, made.packets())), made.truth()
    assert found["rsh"].packets == true["rsh"].packets
    assert (found["rsh"].initiator, found["rsh"].verdict) == ("sms", "deferrable")
    assert found["rsyslog"].packets == true["syslog"].packets
    assert found["rsyslog"].connections.sms == 0
    assert (found["https"].packets, found["https"].ports) == (true["https"].packets, ("tcp/443", "udp/443"))
    assert found["https"].verdict == "time-critical"
    assert "http" not in found


def test_quic_is_recognized_on_other_ports(tmp_path: Path) -> None:
    made = variants.small()
    for number, node in enumerate(made.nodes):
        variants.quic(made, node, START_S + 30 + number, port=8853)
        variants.quic(made, node, START_S + 60 + number, port=8853, version=0x6B3343CF)
    found = by_name(classified(tmp_path, made.packets()))
    assert (found["https"].ports, found["https"].connections.node) == (("udp/8853",), 8)


# Leases.


@pytest.mark.parametrize("snap", [64, 96, 128, 262144])
@pytest.mark.parametrize("kind", ["relayed", "verified", "renewed"])
def test_short_packets_show_which_dhcp_clients_have_an_address(tmp_path: Path, kind: str, snap: int) -> None:
    """In 64 bytes of an Ethernet frame are the first 22 of DHCP, with ciaddr.

    All of it shows that systems of nodes have short leases, which they may renew.
    """
    found = by_name(classified(tmp_path, variants.leases(kind).packets(), snap=snap))["provisioning"]
    undecided = (kind, snap) == ("verified", 262144)
    assert found.verdict == ("time-critical" if kind == "renewed" or undecided else "deferrable")
    assert found.reasons[0].startswith("running nodes renew leases") == (kind == "renewed")
    assert ("systems of nodes" in found.reasons[0]) == undecided
    assert found.confidence < LOW_CONFIDENCE or not undecided


# Two networks.


def test_the_management_nodes_ipv6_address_is_its_own_without_neighbour_discovery(tmp_path: Path) -> None:
    """Others send from its /64 with link addresses of their own; through it, the outside is still routed."""
    found = classified(tmp_path, variants.dual_stack())
    assert found.sms.addresses == ("10.1.0.1", "2001:db8:1:1::1")
    assert found.nodes.count == 6
    nfs, routed = by_name(found)["nfs"], by_name(found)["nat"]
    assert nfs.clients == 6, "each has two addresses"
    assert routed.ports == ("tcp/443",)
    assert {one.address.partition(":")[0] for one in found.routed.destinations} > {"2001"}


# Gaps.

WEEK_S, YEARS_S = 7 * 86400, 3 * 365 * 86400


@pytest.mark.parametrize("apart_s", [2 * 3600, WEEK_S, YEARS_S])
def test_a_gap_inside_a_file_is_not_observed(tmp_path: Path, apart_s: float) -> None:
    """Two captures of a quarter of an hour in one file give no more than two of that length."""
    found = classified(tmp_path, variants.merged(0, apart_s))
    assert found.capture.duration_s == pytest.approx(apart_s + 900, abs=60)
    assert found.capture.covered_s == pytest.approx(1800, abs=120)
    assert found.capture.skipped == {}, "all times are right"
    ((begin, end),) = found.capture.gaps
    assert end - begin == pytest.approx(found.capture.duration_s - found.capture.covered_s, rel=1e-6)
    assert begin == pytest.approx(900, abs=60)
    (remark,) = found.capture.remarks
    assert remark.startswith("nothing was captured for ")
    for one in found.services:
        assert one.interval_s is None or one.interval_s.median < 900, one.name
        assert one.latency_ms is None or one.latency_ms.p99 < 5000, one.name
    whole = classified(tmp_path, variants.merged(0, duration_s=1800))
    assert hardly_used(found) <= hardly_used(whole)


def hardly_used(found: Classification) -> set[str]:
    return {one.name for one in found.unseen if "hardly" in one.why}


def test_silence_of_an_idle_or_filtered_capture_is_not_a_gap(tmp_path: Path) -> None:
    """Two nodes query the time every 17 minutes, or the management node synchronises files each hour: that is all."""
    rare = variants.small("arp", nodes=2, duration_s=1.0)
    for turn in range(24):
        for number, node in enumerate(rare.nodes):
            messages = [(0.001, "c", b"GET / HTTP/1.1\r\n\r\n"), (0.5, "s", bytes(20000))]
            rare.connect(START_S + 3600 * turn + number, "http", node, rare.sms, 80, messages)
    clock = simulate(Plan(nodes=2, boots=0, duration_s=86400, services=("ntp",), seed=5))
    for made in (rare, clock):
        found = classified(tmp_path, made.packets())
        assert found.capture.covered_s == found.capture.duration_s > 80000
