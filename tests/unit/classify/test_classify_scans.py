"""Port scans: reported as such, and no service, no role and no node of a capture differs because of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.model import Classification
from analysis.observed import Host
from analysis.scans import PORTS, RETRIES, find_scans
from analysis.signatures import UDP
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.native import run_core
from tests.captures.scans import USUAL, scan, scan_udp
from tests.captures.wire import Station

PLAN = Plan(nodes=4, duration_s=1200, boots=0)
SERVED = (25, 80, 2049, 6817)
OTHER = Station("other", "52:54:00:0a:00:01", "10.1.0.77")
AT_S = START_S + 300


def found(folder: Path, made: Made, **options: str) -> Classification:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return classify(ClassifyOptions((str(file),), **options), Silent())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Classification:
    return found(tmp_path_factory.mktemp("without"), simulate(PLAN))


def verdicts(one: Classification) -> dict[str, tuple[str, float]]:
    return {service.name: (service.verdict, service.confidence) for service in one.services}


def by_node_unanswered(made: Made) -> str:
    scan(made, AT_S, made.nodes[0], made.sms)
    return "10.1.1.1"


def by_node_refused(made: Made) -> str:
    scan(made, AT_S, made.nodes[0], made.sms, answer="reset", open_ports=SERVED)
    return "10.1.1.1"


def by_another_machine(made: Made) -> str:
    scan(made, AT_S, OTHER, made.sms, answer="reset", open_ports=SERVED)
    return OTHER.address


def of_high_ports_too(made: Made) -> str:
    scan(made, AT_S, OTHER, made.sms, ports=(*USUAL, *range(40000, 40500)), answer="reset", every_s=0.001)
    return OTHER.address


def over_udp(made: Made) -> str:
    scan_udp(made, AT_S, OTHER, made.sms)
    return OTHER.address


def slowly(made: Made) -> str:
    scan(made, AT_S, OTHER, made.sms, ports=USUAL[:PORTS], every_s=30)
    return OTHER.address


def of_nodes_by_the_sms(made: Made) -> str:
    at_s: float = AT_S
    for node in made.nodes:
        at_s = scan(made, at_s, made.sms, node, answer="reset", open_ports=(22, 6818), every_s=0.001)
    return made.sms.address


def of_a_few_ports_of_each(made: Made) -> str:
    """No machine sees more than five ports."""
    for number, node in enumerate(made.nodes):
        scan(made, AT_S + number, made.sms, node, ports=USUAL[5 * number : 5 * number + 5])
    return made.sms.address


SCANS = (
    by_node_unanswered,
    by_node_refused,
    by_another_machine,
    of_high_ports_too,
    over_udp,
    slowly,
    of_nodes_by_the_sms,
    of_a_few_ports_of_each,
)


@pytest.mark.parametrize("make", SCANS)
def test_a_scan_is_reported_and_changes_no_service(make: object, without: Classification, tmp_path: Path) -> None:
    made = simulate(PLAN)
    source = make(made)  # type: ignore[operator]
    seen = found(tmp_path, made)
    assert verdicts(seen) == verdicts(without)
    assert (seen.nodes, seen.sms.addresses, seen.unseen) == (without.nodes, without.sms.addresses, without.unseen)
    (remark,) = [one for one in seen.capture.remarks if "port scan" in one]
    assert remark.startswith(f"{source} tried ")
    assert {one.what: one.packets for one in seen.unclassified.top} == {"port scan": made.truth()["scan"].packets}


def test_what_a_remark_says(tmp_path: Path) -> None:
    made = simulate(PLAN)
    scan(made, AT_S, OTHER, made.sms, ports=range(1, 101), answer="reset", open_ports=(25, 80), every_s=0.1)
    (remark,) = found(tmp_path, made).capture.remarks
    assert remark == (
        "10.1.0.77 tried 100 ports of 10.1.0.1 within 9.9 s, 98 of them refused or did not answer: a port scan; no "
        "service includes its 202 packets"
    )


@pytest.mark.parametrize(
    ("ports", "every_s"), [(USUAL[: PORTS - 1], 0.01), (USUAL[:100], 60.0)], ids=["few", "over hours"]
)
def test_fewer_or_slower_attempts_are_no_scan(ports: tuple[int, ...], every_s: float, tmp_path: Path) -> None:
    made = simulate(PLAN)
    scan(made, AT_S, OTHER, made.sms, ports=ports, every_s=every_s)
    assert not any("port scan" in one for one in found(tmp_path, made).capture.remarks)


def test_services_that_are_down_are_no_scan(tmp_path: Path) -> None:
    """Every node tries all its services again and again, and none answers."""
    made = simulate(PLAN)
    for node in made.nodes:
        for round_s in range(0, 600, 30):
            scan(made, AT_S + round_s, node, made.sms, ports=(389, 636, 88, 53, 3260, 111, 749, 27000))
    seen = found(tmp_path, made)
    assert seen.capture.remarks == ()
    assert {"ldap", "kerberos", "iscsi"} <= {one.name for one in seen.services}


def test_a_scanned_node_is_not_the_management_node(tmp_path: Path) -> None:
    """On a mirror port, the machine with most services is the management node, and a scan finds no service."""
    made = simulate(PLAN)
    between = made.nodes[2]
    for number in range(600):
        made.connect(START_S + number, "between", made.nodes[0], made.nodes[1], 5000, [(0, "c", b"x" * 90)])
    scan(made, AT_S, made.nodes[3], between, answer="reset", open_ports=USUAL)
    assert found(tmp_path, made).sms.addresses == (made.sms.address,)


def test_a_scan_displaces_no_service() -> None:
    """The table of pairs is bounded: ports without a known service are counted as one when a scan has filled half."""
    made = simulate(Plan(nodes=3, duration_s=60, boots=0, services=()))
    for target in (made.sms, made.nodes[1]):
        scan(made, START_S, made.nodes[0], target, ports=range(10000, 10600), answer="reset", every_s=0.001)
    made.connect(START_S + 30, "nfs", made.nodes[2], made.sms, 2049, [(0.1, "c", b"x"), (0.1, "s", b"y")])
    counter = run_core(files.pcap(made.packets()), max_pairs=1024)
    links = counter.links()
    assert counter.totals()["beyond"] == (0, 0)
    assert 512 <= len(links) <= 600
    assert [link[4] for link in links if link[3] == 2049] == [made.truth()["nfs"].packets]
    assert sum(link[4] for link in links) == len(made.frames)
    (found,) = find_scans(counter.attempts(), lambda: [Host(index, f"10.1.1.{index}") for index in range(9)])
    assert (found.ports, found.failed, found.packets) == (600, 600, made.truth()["scan"].packets)


def test_one_direction_is_no_scan(tmp_path: Path) -> None:
    """A mirror of one direction has no answers, but clients acknowledge them."""
    made = simulate(PLAN)
    for port in range(5000, 5020):
        made.connect(AT_S + port - 5000, "more", made.nodes[0], made.sms, port, [(0.1, "c", b"x"), (0.1, "s", b"y")])
    made.frames = [(time, frame) for time, frame in made.frames if frame[6:12] != bytes.fromhex("525400000001")]
    assert not any("port scan" in one for one in found(tmp_path, made, sms="10.1.0.1").capture.remarks)


@pytest.mark.parametrize(("sent", "scans"), [(1, 1), (RETRIES, 1), (RETRIES + 1, 0)])
def test_reports_over_udp_that_nobody_answers_are_no_scan(sent: int, scans: int) -> None:
    """To as many collectors, each datagram from another port."""
    attempts = [
        (port, 1, 0, UDP, 8000 + port, sent, sent, sent, 0, port * 10**9, (port + 60 * sent) * 10**9)
        for port in range(PORTS)
    ]
    assert len(find_scans(attempts, lambda: [Host(0, "10.1.0.1"), Host(1, "10.1.1.1")])) == scans
