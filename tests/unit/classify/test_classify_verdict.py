"""The rules: verdicts, their confidence and their reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.observed import Row
from analysis.services import iana_name
from analysis.signatures import ICMP, TCP, UDP, Signature
from tests.unit.classify_cases import (
    GROUP,
    KINDS,
    NODE,
    OUTSIDE,
    SIGNATURES,
    SMS,
    boot,
    make_row,
    paper,
    run,
    service,
)

TABLE_1 = {
    "provisioning": "deferrable",
    "warewulf": "deferrable",
    "rsyslog": "time-critical",
    "nfs": "time-critical",
    "nat": "time-critical",
    "ganglia": "time-critical",
    "slurmctld": "time-critical",
    "postfix": "time-critical",
    "chrony": "time-critical",
    "ssh": "deferrable",
}
"""Table 1 of "Decoupled management nodes" (2018), and the administrator's ssh, which the management node opens."""

HTTP_ALT = iana_name((TCP, 8080))


def test_table_1() -> None:
    found = run(paper(), boots=[boot()])
    assert {one.name: one.verdict for one in found.services} == TABLE_1
    assert {one.name: one.group for one in found.services if one.name in ("ssh", "nfs")} == {
        "ssh": "SMS-mgmt",
        "nfs": "SMS-services",
    }
    assert found.unclassified.packets == 0


def test_table_1_without_a_catalogue_where_rules_alone_can_tell() -> None:
    """Opening and polling decide most services; broadcasts to unknown groups stay elsewhere."""
    found = {one.name: one.verdict for one in run(paper(), boots=[boot()], signatures=()).services}
    needed = (TCP, 25), (UDP, 123), (TCP, 2049), (UDP, 514), (TCP, 6817)
    assert [found[name] for name in ("routed", *map(iana_name, needed))] == ["time-critical"] * 6
    assert [found[iana_name(place)] for place in ((TCP, 22), (TCP, 80))] == ["deferrable"] * 2


def test_several_ports_of_a_service_are_one() -> None:
    slurm = service(run(paper(), boots=[boot()]), "slurmctld")
    assert slurm.ports == ("tcp/dynamic", "tcp/6817", "tcp/6818")
    assert (slurm.connections.node, slurm.connections.sms, slurm.initiator) == (100, 320, "both")
    assert slurm.carried


def without(name: str, **changes: Any) -> tuple[Signature, ...]:
    return tuple(replace(one, **changes) if one.name == name else one for one in SIGNATURES)


CASES: dict[str, tuple[list[Row], dict[str, Any], str, str, str]] = {
    "nodes open": (
        [make_row(NODE, SMS, TCP, 4000, opened=12031, client_hosts=450)],
        {"nodes": 450},
        "tcp/4000",
        "time-critical",
        "450 nodes opened 12,031 connections, the management node none",
    ),
    "the management node opens": (
        [make_row(SMS, NODE, TCP, 4000, opened=27)],
        {},
        "tcp/4000",
        "deferrable",
        "the management node opened 27 connections to 8 nodes, nodes opened none",
    ),
    "one of a hundred does not count": (
        [make_row(SMS, NODE, TCP, 22, opened=900), make_row(NODE, SMS, TCP, 22, opened=2, client_hosts=1)],
        {},
        "ssh",
        "deferrable",
        "1 node opened 2 connections, the management node 900",
    ),
    "a critical service that only the management node was seen to open": (
        [make_row(SMS, NODE, TCP, 6818, opened=8)],
        {"duration_s": 60},
        "slurmctld",
        "time-critical",
        "the capture is too short to exclude that nodes do",
    ),
    "and in a long capture": (
        [make_row(SMS, NODE, TCP, 6818, opened=800)],
        {"duration_s": 86400},
        "slurmctld",
        "deferrable",
        "nodes opened none",
    ),
    "open already": (
        [make_row(NODE, SMS, TCP, 2049, midstream=8, contacts_steady=40)],
        {},
        "nfs",
        "time-critical",
        "no connection was opened in the capture (8 were open when it began)",
    ),
    "open already, unknown": (
        [make_row(NODE, SMS, TCP, 4000, midstream=8, contacts_steady=40)],
        {},
        "tcp/4000",
        "time-critical",
        "by the port the management node is the server",
    ),
    "open already, at nodes": (
        [make_row(SMS, NODE, TCP, 4000, midstream=8)],
        {},
        "tcp/4000",
        "deferrable",
        "by the port the nodes are the servers",
    ),
    "boot alone, seen long enough after it": (
        [make_row(NODE, SMS, TCP, 4000, opened=4, contacts_boot=4)],
        {"boots": [boot()], "duration_s": 11000},
        "tcp/4000",
        "deferrable",
        "only while they booted: 4 of 4 contacts fell in 1 boot",
    ),
    "boot alone, and the capture ends with it": (
        [make_row(NODE, SMS, TCP, 6817, opened=8, contacts_boot=8)],
        {"boots": [boot(n, settled=0) for n in range(8)], "duration_s": 100},
        "slurmctld",
        "time-critical",
        "no node was observed for more than 0 s after its boot; the catalogue says that nodes need it",
    ),
    "boot alone, all at once: minutes of many idle nodes are not hours of one": (
        [make_row(NODE, SMS, TCP, 2049, opened=200, contacts_boot=200, client_hosts=200)],
        {"boots": [boot(n) for n in range(200)], "nodes": 200, "duration_s": 430},
        "nfs",
        "time-critical",
        "no node was observed for more than 5 min after its boot; the catalogue says that nodes need it",
    ),
    "boot alone, unknown, all at once": (
        [make_row(NODE, SMS, TCP, 4000, opened=450, contacts_boot=450, client_hosts=450)],
        {"boots": [boot(n) for n in range(450)], "nodes": 450, "duration_s": 430},
        "tcp/4000",
        "time-critical",
        "too short to conclude",
    ),
    "boot alone, for a day, against the catalogue": (
        [make_row(NODE, SMS, TCP, 2049, opened=8, contacts_boot=8)],
        {"boots": [boot(n) for n in range(8)], "duration_s": 86400},
        "nfs",
        "time-critical",
        "the catalogue says that nodes need it at every moment",
    ),
    "boot alone, for a week, against the catalogue": (
        [make_row(NODE, SMS, TCP, 2049, opened=8, contacts_boot=8)],
        {"boots": [boot(n) for n in range(8)], "duration_s": 7 * 86400},
        "nfs",
        "deferrable",
        "the traffic contradicts it",
    ),
    "a controller that only pings on an idle cluster, for an hour": (
        [make_row(SMS, NODE, TCP, 6818, opened=576, server_hosts=16, every=100)],
        {"nodes": 16},
        "slurmctld",
        "time-critical",
        "nodes opened none, but the capture is too short to exclude that nodes do",
    ),
    "a controller that only pings many nodes, for minutes": (
        [make_row(SMS, NODE, TCP, 6818, opened=900, server_hosts=450, every=90)],
        {"nodes": 450, "duration_s": 180},
        "slurmctld",
        "time-critical",
        "the catalogue says that nodes need it at every moment",
    ),
    "rare needs of nodes beside a busy monitor": (
        [
            make_row(SMS, NODE, TCP, 4000, opened=11520, every=5),
            make_row(NODE, SMS, TCP, 4000, opened=64, every=900),
        ],
        {"duration_s": 7200},
        "tcp/4000",
        "time-critical",
        "8 nodes opened 64 connections, the management node 11,520",
    ),
    "rare needs of nodes, open since before the capture, beside a busy monitor": (
        [
            make_row(SMS, NODE, TCP, 4000, opened=11520, every=5),
            make_row(NODE, SMS, TCP, 4000, midstream=8, contacts_steady=64),
        ],
        {"duration_s": 7200},
        "tcp/4000",
        "time-critical",
        "8 nodes used it over connections opened before the capture (64 contacts), the management node opened 11,520",
    ),
    "files in use for a week, and calls back": (
        [
            make_row(SMS, NODE, TCP, 2049, opened=8),
            make_row(NODE, SMS, TCP, 2049, midstream=8, contacts_steady=6400),
        ],
        {"duration_s": 7 * 86400},
        "nfs",
        "time-critical",
        "8 nodes used it over connections opened before the capture",
    ),
    "a few logins from nodes beside the administrator's": (
        [
            make_row(SMS, NODE, TCP, 22, opened=900),
            make_row(NODE, SMS, TCP, 22, opened=3, client_hosts=2, contacts_steady=400, every=5),
        ],
        {},
        "ssh",
        "deferrable",
        "too few to override the catalogue",
    ),
    "a proxy on a port of a boot service": (
        [make_row(NODE, SMS, TCP, 8888, opened=96, every=300)],
        {"signatures": [Signature("boots", ports=((TCP, 8888),), boot=True, every_s=2592000, budget_s=86400)]},
        "boots",
        "time-critical",
        "the traffic contradicts it",
    ),
    "files for booting in a capture whose boots are not seen": (
        [make_row(NODE, SMS, TCP, 80, kind=KINDS["provisioning"], opened=36, intervals=((2.0, 24.0),))],
        {},
        "provisioning",
        "deferrable",
        "none of its 36 contacts fell in a boot",
    ),
    "a boot whose beginning is missing": (
        [make_row(NODE, GROUP, UDP, 67, opened=9, contacts_boot=72, contacts_steady=36)],
        {},
        "provisioning",
        "deferrable",
        "72 of 108 contacts came from nodes without an address",
    ),
    "a heartbeat over TLS is not a poll": (
        [make_row(NODE, SMS, TCP, 8443, opened=480, every=60, bytes=(96000, 144000))],
        {},
        iana_name((TCP, 8443)),
        "time-critical",
        "opened 480",
    ),
    "a long tolerated outage does not make a service deferrable": (
        [make_row(NODE, SMS, TCP, 25, opened=16)],
        {},
        "postfix",
        "time-critical",
        "nodes open connections and expect an answer, although they tolerate an outage of 5 days",
    ),
    "irregular contacts are described by their middle half": (
        [make_row(NODE, SMS, TCP, 4000, opened=96, intervals=((40.0, 30.0), (119.0, 30.0), (900.0, 30.0)))],
        {},
        "tcp/4000",
        "time-critical",
        "irregular contacts of a node, median interval 119 s; the middle half of 90 intervals is 40 s to 15 min long",
    ),
    "boot alone, unknown, and the capture ends with it": (
        [make_row(NODE, SMS, TCP, 4000, opened=8, contacts_boot=8)],
        {"boots": [boot(n, settled=0) for n in range(8)], "duration_s": 100},
        "tcp/4000",
        "time-critical",
        "too short to conclude",
    ),
    "boot and steady": (
        [make_row(NODE, SMS, UDP, 514, opened=40, contacts_boot=20, contacts_steady=20)],
        {"boots": [boot()]},
        "rsyslog",
        "time-critical",
        "20 contacts fell in nodes' boots, 20 in steady state",
    ),
    "a service for booting in a capture without boots": (
        [make_row(NODE, SMS, UDP, 69, opened=40)],
        {},
        "provisioning",
        "deferrable",
        "by the catalogue nodes need it only while they boot",
    ),
    "a poll of the catalogue's": (
        [make_row(NODE, SMS, TCP, 80, kind=KINDS["warewulf"], opened=96, every=300)],
        {},
        "warewulf",
        "deferrable",
        "only changes pass, which can wait",
    ),
    "an unknown poll with small answers": (
        [make_row(NODE, SMS, TCP, 8080, opened=96, every=300)],
        {},
        HTTP_ALT,
        "deferrable",
        "a poll that fetches only changes",
    ),
    "large answers are not a poll": (
        [make_row(NODE, SMS, TCP, 8080, opened=96, every=300, bytes=(9000, 96 << 20))],
        {},
        HTTP_ALT,
        "time-critical",
        "opened 96",
    ),
    "irregular requests are not a poll": (
        [make_row(NODE, SMS, TCP, 8080, opened=96, intervals=((40.0, 30.0), (300.0, 30.0), (900.0, 30.0)))],
        {},
        HTTP_ALT,
        "time-critical",
        "opened 96",
    ),
    "uploads are not a poll": (
        [make_row(NODE, SMS, TCP, 8080, opened=96, every=300, bytes=(90000, 9000))],
        {},
        HTTP_ALT,
        "time-critical",
        "opened 96",
    ),
    "regular and small, but the catalogue says critical": (
        [make_row(NODE, SMS, UDP, 123, opened=70, every=300, bytes=(6300, 6300))],
        {},
        "chrony",
        "time-critical",
        "opened 70",
    ),
    "regular and small on another port": (
        [make_row(NODE, SMS, TCP, 4000, opened=96, every=300)],
        {},
        "tcp/4000",
        "time-critical",
        "opened 96",
    ),
    "unanswered, known to the catalogue": (
        [make_row(NODE, SMS, TCP, 25, opened=3, unanswered=3, packets=(9, 0), bytes=(666, 0))],
        {},
        "postfix",
        "time-critical",
        "none of 3 connections was answered",
    ),
    "repeated and unanswered": (
        [make_row(NODE, SMS, TCP, 4000, opened=80, unanswered=80, packets=(80, 0), bytes=(5920, 0))],
        {},
        "tcp/4000",
        "time-critical",
        "none of 80 connections was answered",
    ),
    "five nodes against the catalogue, in a minute": (
        [make_row(NODE, SMS, TCP, 22, opened=5, client_hosts=5)],
        {"duration_s": 60},
        "ssh",
        "time-critical",
        "5 nodes opened 5 connections",
    ),
    "four nodes may be people": (
        [make_row(NODE, SMS, TCP, 22, opened=4, client_hosts=4)],
        {"duration_s": 60},
        "ssh",
        "deferrable",
        "too few to override the catalogue",
    ),
    "little against the catalogue": (
        [make_row(NODE, SMS, TCP, 22, opened=1, client_hosts=1)],
        {},
        "ssh",
        "deferrable",
        "too few to override the catalogue",
    ),
    "much against the catalogue": (
        [make_row(NODE, SMS, TCP, 22, opened=4000, every=60)],
        {},
        "ssh",
        "time-critical",
        "the traffic contradicts it",
    ),
    "one node": (
        [make_row(NODE, SMS, TCP, 25, opened=1, client_hosts=1)],
        {"nodes": 1},
        "postfix",
        "time-critical",
        "1 node opened 1 connection, the management node none",
    ),
    "routed": (
        [make_row(NODE, OUTSIDE, TCP, 443, opened=72), make_row(OUTSIDE, NODE, TCP, 22, opened=1)],
        {},
        "nat",
        "time-critical",
        "8 nodes opened 72 connections to outside addresses, 1 connection came in from outside",
    ),
    "the site's own verdict": (
        [make_row(NODE, SMS, TCP, 2049, opened=500)],
        {"signatures": without("nfs", verdict="deferrable", verdict_why="nothing but manual pages")},
        "nfs",
        "deferrable",
        "set by the site: nothing but manual pages",
    ),
    "the site's own verdict names what it replaces": (
        [make_row(NODE, SMS, TCP, 2049, opened=500)],
        {"signatures": without("nfs", verdict="deferrable")},
        "nfs",
        "deferrable",
        "otherwise it would be time-critical: 8 nodes opened 500 connections",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    rows, known, name, verdict, expected = CASES[case]
    found = service(run(rows, **known), name)
    assert found.verdict == verdict, found.reasons
    assert any(expected in reason for reason in found.reasons), found.reasons
    assert found.overridden == ("site" in case)
    assert 0 < found.confidence < 1


OVERRIDES: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "nfs": ([make_row(NODE, SMS, TCP, 2049, opened=500)], {}),
    "tcp/4000": ([make_row(NODE, SMS, TCP, 4000, opened=500)], {}),
    "the site's file says otherwise": (
        [make_row(NODE, SMS, TCP, 2049, opened=500)],
        {"signatures": without("nfs", verdict="time-critical", verdict_why="files")},
    ),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(case: str) -> None:
    """For known and unknown services: with full confidence, sorted, and with the verdict of the rules."""
    rows, known = OVERRIDES[case]
    name = case if case in ("nfs", "tcp/4000") else "nfs"
    others = [make_row(NODE, SMS, TCP, 25, opened=9), make_row(SMS, NODE, TCP, 22, opened=9)]
    found = run([*rows, *others], overrides={name: "deferrable", "nobody": "time-critical"}, **known)
    one = service(found, name)
    assert (one.verdict, one.group, one.confidence, one.overridden) == ("deferrable", "SMS-mgmt", 0.99, True)
    assert one.reasons[0] == "set by the site"
    assert one.reasons[1].startswith("otherwise it would be time-critical: 8 nodes opened 500 connections")
    verdicts = [each.verdict for each in found.services]
    assert verdicts == sorted(verdicts, reverse=True) == ["time-critical", "deferrable", "deferrable"]


def test_contacts_and_covered_time() -> None:
    rows = [make_row(NODE, SMS, TCP, 25, opened=16), make_row(NODE, SMS, UDP, 514, opened=8, contacts_steady=640)]
    found = run(rows, gap_s=600, remarks=("the same file is given twice",))
    assert {one.name: one.contacts for one in found.services} == {"postfix": 16, "rsyslog": 640}
    assert (found.capture.duration_s, found.capture.covered_s) == (3600, 3000)
    assert "the same file is given twice" in found.capture.remarks


def test_gaps_between_files_lower_the_confidence() -> None:
    rows = [make_row(NODE, SMS, TCP, 4000, opened=20), make_row(NODE, SMS, TCP, 6817, opened=9)]
    whole, gaps = (service(run(rows, duration_s=86400, gap_s=gap_s), "tcp/4000") for gap_s in (0, 86000))
    assert gaps.confidence < whole.confidence


def test_only_what_opens_counts_as_opening() -> None:
    """A DHCP server's broadcast is an answer, although it goes to another port."""
    rows = [
        make_row(NODE, GROUP, UDP, 67, opened=4, contacts_boot=4, client_hosts=1, client_indexes=(11,)),
        make_row(SMS, GROUP, UDP, 68, opened=1, contacts_steady=4),
        make_row(SMS, NODE, UDP, 68, opened=1, contacts_steady=1),
    ]
    found = service(run(rows, boots=[boot()]), "provisioning")
    assert (found.initiator, found.phase, found.connections.sms) == ("node", "boot", 0)
    assert found.packets == sum(sum(row.packets) for row in rows)
    assert found.clients == 1


def confidence(**changes: Any) -> float:
    known = {"opened": 20, "client_hosts": 8, "nodes": 8, "duration_s": 3600.0, "port": 4000, **changes}
    nodes, duration_s, port = known.pop("nodes"), known.pop("duration_s"), known.pop("port")
    rows = [make_row(NODE, SMS, TCP, port, **known), make_row(NODE, SMS, TCP, 6817, opened=8)]
    (found,) = (one for one in run(rows, nodes=nodes, duration_s=duration_s).services if one.name != "slurmctld")
    return found.confidence


@given(st.integers(4, 10**6), st.integers(1, 400), st.floats(60, 10**7), st.integers(1, 50))
def test_confidence_grows_and_stays_below_one(opened: int, clients: int, duration_s: float, more: int) -> None:
    known = {"opened": opened, "client_hosts": clients, "nodes": 450, "duration_s": duration_s}
    first = confidence(**known)
    assert 0 < first < 1
    assert confidence(**{**known, "opened": opened + more}) >= first
    assert confidence(**{**known, "client_hosts": min(clients + more, 450)}) >= first
    assert confidence(**{**known, "duration_s": duration_s * (1 + more)}) >= first


def test_confidence_differs_where_it_should() -> None:
    assert confidence(duration_s=86400) > confidence(duration_s=3600) > confidence(duration_s=60)
    assert confidence(opened=2000) > confidence(opened=20)
    assert confidence(client_hosts=8) > confidence(client_hosts=1)
    assert confidence(port=25) > confidence(port=4000), "the catalogue agrees"
    assert confidence(port=25) > confidence(port=80), "HTTP carries anything"


def test_a_capture_of_nothing() -> None:
    found = run([])
    assert found.services == () and found.capture.packets == 0
    assert found.capture.start == ""
    assert {one.name for one in found.unseen} == {one.name for one in SIGNATURES} - {"munge"}


def test_pings_between_nodes_and_management_node_are_not_a_service() -> None:
    found = run([make_row(SMS, NODE, ICMP, 0, opened=5)])
    assert found.services == ()
    assert found.elsewhere.top[0].what == "nodes and the management node: icmp"
