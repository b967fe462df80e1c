"""Machines that serve the management node: their services are theirs, and they are not nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.model import Classification
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.wire import Station

PLAN = Plan(nodes=4, duration_s=1200, boots=0, services=("syslog", "ganglia", "slurm", "ntp", "ssh", "routing", "arp"))
FILER = Station("filer", "52:54:00:0b:00:01", "10.1.0.50")
NAMES = Station("names", "52:54:00:0b:00:02", "10.1.0.51")


def found(folder: Path, made: Made) -> Classification:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return classify(ClassifyOptions((str(file),)), Silent())


def mount(made: Made, client: Station, server: Station, *, opened: bool = True) -> None:
    """An NFS mount that is used every ten seconds."""
    messages = []
    for xid in range(110):
        messages += [(10.0, "c", p.rpc_call(xid, 1, bytes(40))), (0.001, "s", p.rpc_reply(xid, bytes(112)))]
    made.connect(START_S + 1, "nfs", client, server, 2049, messages, own=700, opened=opened, closed=False)


def query(made: Made, client: Station, server: Station) -> None:
    """A lookup every five seconds."""
    for number in range(200):
        request = bytes((0, number, 1, 0, 0, 1)) + bytes(6) + b"\4node\0\0\1\0\1"
        answer = bytes((0, number, 0x85, 0x80, 0, 1)) + bytes(6) + b"\4node\0\0\1\0\1"
        exchange = [(0.0, "c", request), (0.001, "s", answer)]
        made.exchange(START_S + 5 * number, "dns", client, server, (client.port(), 53), exchange)


def as_client(made: Made) -> None:
    mount(made, made.sms, FILER)
    query(made, made.sms, NAMES)


def mounted_before(made: Made) -> None:
    mount(made, made.sms, FILER, opened=False)
    query(made, made.sms, NAMES)


def with_callbacks(made: Made) -> None:
    """statd of the filer notifies, the name server synchronizes its clock and sends its log."""
    as_client(made)
    made.connect(START_S + 90, "nfs", FILER, made.sms, 111, [(0.01, "c", bytes(60)), (0.01, "s", bytes(30))])
    request, answer = (p.ntp(mode, stratum=2, poll=6, sent_ns=10**18) for mode in (3, 4))
    made.exchange(START_S + 95, "ntp", NAMES, made.sms, (123, 123), [(0, "c", request), (0.001, "s", answer)])
    made.exchange(START_S + 99, "syslog", NAMES, made.sms, (5140, 514), [(0, "c", b"<30>named: running")])
    made.connect(START_S + 100, "ssh", made.sms, FILER, 22, [(0.01, "s", b"SSH-2.0-x\r\n"), (0.01, "c", bytes(9))])


@pytest.mark.parametrize("make", [as_client, mounted_before, with_callbacks])
def test_the_management_node_as_a_client(make: Callable[[Made], None], tmp_path: Path) -> None:
    made = simulate(PLAN)
    before = found(tmp_path, made)
    make(made)
    seen = found(tmp_path, made)
    assert {one.name for one in seen.services} == {one.name for one in before.services}
    assert seen.nodes == before.nodes
    # The capture is a few seconds longer.
    assert [one.confidence for one in seen.services] == pytest.approx(
        [one.confidence for one in before.services], abs=0.002
    )
    elsewhere = {one.what: one.packets for one in seen.elsewhere.top}
    assert elsewhere["the management node and other servers: udp/53 (dns)"] == made.truth()["dns"].packets
    assert elsewhere["the management node and other servers: tcp/2049 (nfs)"] >= 200


def test_a_node_that_serves_the_management_node_is_still_a_node(tmp_path: Path) -> None:
    """It runs slurmd and a name server."""
    made = simulate(PLAN)
    query(made, made.sms, made.nodes[0])
    seen = found(tmp_path, made)
    assert seen.nodes.count == PLAN.nodes
    assert "dns" not in {one.name for one in seen.services}
    assert {one.what for one in seen.elsewhere.top} >= {"the management node as a client: dns"}


def test_both_sides_open_the_service(tmp_path: Path) -> None:
    """The management node forwards what nodes query: it serves them."""
    made = simulate(PLAN)
    query(made, made.sms, NAMES)
    for node in made.nodes:
        query(made, node, made.sms)
    seen = {one.name: one for one in found(tmp_path, made).services}
    assert (seen["dns"].verdict, seen["dns"].connections.sms) == ("time-critical", 0)


def test_all_nodes_with_a_daemon_are_nodes(tmp_path: Path) -> None:
    """Nothing but a web page of every machine, which the management node reads."""
    made = simulate(Plan(nodes=4, duration_s=600, boots=0, services=("arp",)))
    for number, node in enumerate(made.nodes):
        made.connect(START_S + 5 + number, "http", made.sms, node, 8080, [(0.1, "c", b"GET /"), (0.1, "s", b"x")])
    made.connect(START_S + 90, "other", made.nodes[0], made.sms, 4000, [(0.1, "c", b"x"), (0.1, "s", b"y")])
    assert found(tmp_path, made).nodes.count == 4
