"""Every packet in exactly one place: services, elsewhere, unclassified."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.model import Classification
from analysis.observed import Link, Role, Row
from analysis.services import iana_name, port_name
from analysis.signatures import ICMP, TCP, UDP, Signature
from tests.unit.classify_cases import GROUP, KINDS, NODE, OUTSIDE, SMS, UNKNOWN, make_row, paper, run, service

NAMES = st.sampled_from(["ARP", "LLDP", "LLC (spanning tree and the like)", "ethertype 0x88b5", "broken IP header"])
COUNTS = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows of any kind."""
    role, count = st.sampled_from(list(Role)), st.integers(0, 500)
    port = st.one_of(
        st.sampled_from([0, 22, 25, 67, 68, 69, 80, 123, 443, 514, 2049, 6817, 8649]), st.integers(0, 65535)
    )
    return [
        make_row(
            draw(role),
            draw(role),
            draw(st.sampled_from([TCP, UDP, ICMP, 2, 47, 58, 132])),
            draw(port),
            kind=draw(st.integers(0, 5)),
            opened=draw(count),
            midstream=draw(count),
            unanswered=draw(count),
            packets=draw(COUNTS),
            bytes=draw(COUNTS),
            contacts_boot=draw(count),
            contacts_steady=draw(count),
            client_hosts=draw(st.integers(0, 8)),
            client_indexes=tuple(draw(st.lists(st.integers(0, 11), max_size=5, unique=True))),
            intervals=tuple(draw(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 100)), max_size=4))),
            latencies=tuple(draw(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 100)), max_size=4))),
            timeline=tuple(draw(st.lists(count, max_size=3))),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]


def adds_up(found: Classification) -> bool:
    """Return whether all packets and bytes of the capture are counted exactly once."""
    others = (found.elsewhere, found.unclassified)
    return all(
        sum(getattr(one, what) for one in (*found.services, *others)) == getattr(found.capture, what)
        for what in ("packets", "bytes")
    )


@given(rows(), st.dictionaries(NAMES, COUNTS), COUNTS, st.data())
def test_all_packets_add_up(
    some: list[Row], other: dict[str, tuple[int, int]], beyond: tuple[int, int], data: st.DataObject
) -> None:
    place = st.builds(
        Link,
        st.integers(0, 11),
        st.integers(0, 11),
        st.just(TCP),
        st.sampled_from([25, 80, 443]),
        st.integers(0, 900),
        st.just(60),
    )
    found = run(some, other=other, beyond=beyond, links=data.draw(st.lists(place, max_size=6)))
    assert adds_up(found)
    assert len({one.name for one in found.services}) == len(found.services)
    assert all(sum(one.packets_each) == one.packets and sum(one.bytes_each) == one.bytes for one in found.services)
    assert found.routed.packets == sum(one.packets for one in found.services if one.name == "nat")
    assert all(one.reasons and 0 < one.confidence < 1 and 0 <= one.budget_s < float("inf") for one in found.services)
    assert found.as_dict()


def test_what_the_core_counted_in_its_totals_alone_is_shown() -> None:
    some = [make_row(NODE, SMS, TCP, 25, opened=1, packets=(5, 4))]
    found = run(some, total=20, beyond=(3, 180))
    assert adds_up(found)
    assert {one.what: one.packets for one in found.unclassified.top} == {
        "addresses beyond the table limit": 3,
        "records that were not understood": 8,
    }


ELSEWHERE = {
    "nodes among themselves": (
        make_row(NODE, NODE, TCP, 6818, opened=3),
        "nodes among themselves: tcp/6818 (slurmctld)",
    ),
    "itself": (make_row(SMS, SMS, TCP, 6819, opened=3), "the management node: tcp/6819"),
    "the world": (make_row(SMS, OUTSIDE, UDP, 53, opened=3), "the management node and addresses outside: udp/53"),
    "from the world": (
        make_row(OUTSIDE, SMS, TCP, 22, opened=3),
        "the management node and addresses outside: tcp/22 (ssh)",
    ),
    "multicast": (make_row(NODE, GROUP, UDP, 5353, opened=3), "nodes and groups: udp/5353"),
    "ping": (make_row(SMS, NODE, ICMP, 0, opened=3), "nodes and the management node: icmp"),
}
UNCLASSIFIED = {
    "strangers": (make_row(UNKNOWN, SMS, TCP, 80, opened=3), "unknown addresses and the management node: tcp/80"),
    "protocols": (make_row(NODE, SMS, 47, 0, opened=3), "nodes and the management node: protocol 47"),
    "unknown groups": (
        make_row(NODE, GROUP, UDP, 4444, opened=3, intervals=((5.0, 2.0), (90.0, 2.0))),
        "nodes and groups: udp/4444",
    ),
    "a scan": (
        make_row(NODE, SMS, TCP, 4000, opened=1, client_hosts=1, packets=(1, 1), bytes=(60, 60)),
        "ports that never answered",
    ),
    "a scan of high ports": (
        make_row(NODE, SMS, TCP, 0, opened=30000, client_hosts=1, packets=(30000, 30000)),
        "ports that never answered",
    ),
    "an unanswered scan": (
        make_row(NODE, SMS, TCP, 4000, opened=1, unanswered=1, client_hosts=1, packets=(4, 0)),
        "ports that never answered",
    ),
    "a scan over UDP": (
        make_row(NODE, SMS, UDP, 4000, opened=1, unanswered=1, client_hosts=1, packets=(1, 0)),
        "ports that never answered",
    ),
}


@pytest.mark.parametrize("case", [*ELSEWHERE, *UNCLASSIFIED])
def test_traffic_that_is_not_a_service(case: str) -> None:
    row, what = {**ELSEWHERE, **UNCLASSIFIED}[case]
    found = run([row])
    assert found.services == ()
    used, unused = found.elsewhere, found.unclassified
    if case in UNCLASSIFIED:
        used, unused = unused, used
    assert [(one.what, one.packets) for one in used.top] == [(what, sum(row.packets))]
    assert unused.packets == 0


def test_regular_packets_of_nodes_to_a_group_are_a_service() -> None:
    row = make_row(NODE, GROUP, UDP, 4444, opened=8, packets=(700, 0), bytes=(70000, 0), every=30)
    found = run([row])
    assert [(one.ports, one.clients) for one in found.services] == [(("udp/4444",), 8)]
    assert adds_up(found)
    assert run([replace(row, port=5353)]).services == ()


@pytest.mark.parametrize(
    "row",
    [
        make_row(NODE, SMS, UDP, 4000, opened=8, unanswered=8, packets=(8, 0), bytes=(800, 0)),
        make_row(NODE, SMS, TCP, 4000, opened=8, unanswered=8, packets=(32, 0), bytes=(2000, 0)),
        make_row(NODE, SMS, TCP, 4000, opened=2, client_hosts=2, packets=(2, 2), bytes=(120, 120)),
    ],
)
def test_failed_attempts_of_several_nodes_are_a_service_that_is_down(row: Row) -> None:
    assert [one.ports for one in run([row]).services] == [(port_name((row.protocol, row.port)),)]


def test_frames_without_ip() -> None:
    found = run(
        [], other={"ARP": (4, 240), "LLDP": (1, 60), "ethertype 0x88b5": (2, 120), "cut off in its headers": (1, 14)}
    )
    assert {one.what for one in found.elsewhere.top} == {"ARP", "LLDP"}
    assert {one.what for one in found.unclassified.top} == {"ethertype 0x88b5", "cut off in its headers"}


def test_a_scan_of_everything_leaves_the_services_alone() -> None:
    """65,000 ports, each tried once, whether it answers or not."""
    scan = [
        make_row(NODE, SMS, TCP, port, opened=1, client_hosts=1, packets=(1, 1), bytes=(60, 60))
        for port in range(1, 3000)
    ]
    found = run([*paper(), *scan])
    assert adds_up(found)
    assert {one.name for one in found.services} == {one.name for one in run(paper()).services}


def test_many_unknown_services_are_counted_together() -> None:
    found = run([make_row(NODE, SMS, TCP, port, opened=50) for port in range(10000, 11000)])
    assert adds_up(found)
    assert len(found.services) <= 60
    assert found.unclassified.top[0].what == "further unknown ports"


def test_routing_with_its_destinations_and_translated_copies() -> None:
    some = [
        make_row(NODE, OUTSIDE, TCP, 443, opened=4, packets=(40, 30), bytes=(4000, 9000)),
        make_row(OUTSIDE, NODE, TCP, 22, opened=1, packets=(5, 4), bytes=(500, 400)),
        # 70 of these are the copies; 30 are the management node's own.
        make_row(SMS, OUTSIDE, TCP, 443, opened=5, packets=(60, 40), bytes=(6000, 10000)),
        make_row(SMS, OUTSIDE, TCP, 80, opened=5, packets=(6, 4), bytes=(600, 400)),
    ]
    links = [
        Link(1, 9, TCP, 443, 70, 13000),
        Link(9, 2, TCP, 22, 9, 900),
        Link(0, 9, TCP, 443, 70, 13000),
        Link(0, 9, TCP, 80, 10, 1000),
    ]
    found = run(some, links=links)
    nat = service(found, "nat")
    assert adds_up(found)
    assert (nat.packets, nat.connections.node, nat.connections.sms) == (149, 4, 1)
    assert (found.routed.packets, found.routed.bytes) == (149, 26900)
    (one,) = found.routed.destinations
    assert (one.address, one.packets, one.ports) == ("198.51.100.10", 79, ("tcp/22", "tcp/443"))
    assert {one.what: one.packets for one in found.elsewhere.top} == {
        "the management node and addresses outside: tcp/443": 30,
        "the management node and addresses outside: tcp/80": 10,
    }


def test_routing_without_a_catalogue() -> None:
    found = run([make_row(NODE, OUTSIDE, TCP, 443, opened=4)], signatures=())
    assert [one.name for one in found.services] == ["routed"]


def test_names() -> None:
    places = ((UDP, 0), (TCP, 4001), (TCP, 50000))
    assert [iana_name(place) for place in places] == ["udp/dynamic", "tcp/4001", "tcp/50000"]
    try:
        assert iana_name((TCP, 25)) == socket.getservbyport(25, "tcp")
    except OSError:  # a machine without /etc/services
        assert iana_name((TCP, 25)) == "tcp/25"
    assert [port_name(place) for place in ((TCP, 0), (ICMP, 0), (89, 0))] == ["tcp/dynamic", "icmp", "protocol 89"]


def test_an_iana_name_of_the_catalogue_is_the_catalogues_service() -> None:
    """Another port of a service that has the same name in the catalogue."""
    known = Signature(iana_name((UDP, 514)), ports=((TCP, 601),), critical=True)
    found = run([make_row(NODE, SMS, UDP, 514, opened=5), make_row(NODE, SMS, TCP, 601, opened=5)], signatures=[known])
    assert [(one.name, one.ports) for one in found.services] == [(known.name, ("tcp/601", "udp/514"))]


def test_first_bytes_take_precedence_over_ports() -> None:
    found = run(
        [
            make_row(NODE, SMS, TCP, 25, kind=KINDS["warewulf"], opened=5),
            make_row(NODE, SMS, TCP, 25, opened=5, kind=99),
        ]
    )
    assert {one.name for one in found.services} == {"warewulf", "postfix"}


def test_numbers_of_a_service() -> None:
    row = make_row(
        NODE,
        SMS,
        TCP,
        25,
        opened=10,
        latencies=((0.001, 98.0), (0.5, 2.0)),
        intervals=((60.0, 1.0), (90.0, 2.0), (120.0, 1.0)),
        timeline=(1, 2, 3),
        timeline_boot=(0, 1, 0),
    )
    found = service(run([row, row]), "postfix")
    assert found.latency_ms and (found.latency_ms.p50, found.latency_ms.p99) == (1.0, 500.0)
    assert found.interval_s and (found.interval_s.median, found.interval_s.jitter) == (90.0, 30.0)
    assert (found.timeline, found.timeline_boot) == ((2, 4, 6), (0, 2, 0))
    assert (found.first_s, found.last_s, found.clients) == (0.0, 3600.0, 8)


def test_it_is_fast() -> None:
    """65,000 pairs and 4,000 rows; the limit is generous, for busy machines."""
    links = [Link(1 + n % 8, 9, TCP, 443, 1, 60) if n % 2 else Link(1 + n % 8, 0, TCP, 25, 1, 60) for n in range(65000)]
    some = [make_row((NODE, SMS)[n % 2], (SMS, NODE)[n % 2], TCP, 1 + n // 2, opened=5) for n in range(4000)]
    begin = time.process_time()
    found = run(some, links=links)
    assert time.process_time() - begin < 1
    assert adds_up(found)
