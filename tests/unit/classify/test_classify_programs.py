"""What programs on execution nodes open: the catalogue's "can wait" is of people and of monitors."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.model import LOW_CONFIDENCE, Service
from analysis.observed import Link
from analysis.protocols.dhcp import is_firmware, is_renewed
from analysis.signatures import TCP, UDP, Signature
from analysis.verdict import CRITICAL
from bench.calibration import Stated, state
from tests.captures import packets as p
from tests.captures.clusters.families import draw
from tests.unit.classify_cases import NODE, SIGNATURES, SMS, make_row, run, service

SLURMD, MOM, COMM = Link(0, 2, TCP, 6818, 10, 1000), Link(0, 2, TCP, 15002, 9, 900), Link(2, 0, TCP, 17001, 9, 900)
SERVER = Link(2, 0, TCP, 6817, 9, 900)
MONITOR = Signature("snmp", "alarms", ((UDP, 161), (UDP, 162)), sms_opens=True, every_s=300)


def ssh(*links: Link, **known: object) -> Service:
    """SSH that node 2 opened once, in five minutes."""
    row = make_row(NODE, SMS, TCP, 22, **{"opened": 1, "client_hosts": 1, "client_indexes": (2,), **known})
    return service(run([row, make_row(SMS, NODE, TCP, 6818, opened=9)], links=links, duration_s=300), "ssh")


@pytest.mark.parametrize("link", [SLURMD, MOM, COMM])
def test_ssh_of_an_execution_node_is_a_programs(link: Link) -> None:
    found = ssh(link)
    assert found.verdict == "time-critical"
    assert "jobs run on 1 of these nodes: programs use it there, not people" in found.reasons[0]
    assert found.confidence < LOW_CONFIDENCE


@pytest.mark.parametrize("links", [(), (SERVER,), (SLURMD._replace(server=3),)])
def test_ssh_of_a_login_node_can_wait(links: tuple[Link, ...]) -> None:
    """It uses the scheduler, but runs no daemon of it."""
    assert ssh(*links).verdict == "deferrable"


def test_a_connection_that_was_open_is_a_use() -> None:
    found = ssh(SLURMD, opened=0, midstream=2)
    assert found.verdict == "time-critical"
    assert "by the port nodes opened them; jobs run on" in found.reasons[0]
    assert ssh(opened=0, midstream=2).verdict == "deferrable"


@pytest.mark.parametrize(
    ("links", "back", "verdict"), [((SLURMD,), 1, CRITICAL), ((), 0, CRITICAL), ((), 1, "deferrable")]
)
def test_a_trap_is_lost(links: tuple[Link, ...], back: int, verdict: str) -> None:
    """Of an execution node, and of any machine if nobody answers."""
    row = make_row(NODE, SMS, UDP, 162, opened=1, client_hosts=1, client_indexes=(2,), packets=(1, back))
    slurm = make_row(SMS, NODE, TCP, 6818, opened=9)
    found = run([row, slurm], links=links, duration_s=300, signatures=[*SIGNATURES, MONITOR])
    assert service(found, "snmp").verdict == verdict


def test_polls_and_boots_stay_what_they_are() -> None:
    puppet = Signature("puppet", "files", ((TCP, 8140),), poll=True, sms_opens=True, every_s=1800)
    row = make_row(NODE, SMS, TCP, 8140, opened=1, client_hosts=1, client_indexes=(2,))
    found = run([row], links=[SLURMD], duration_s=300, signatures=[*SIGNATURES, puppet])
    assert service(found, "puppet").verdict == "deferrable"


def test_two_dynamic_ports_do_not_show_who_opened() -> None:
    found = service(run([make_row(SMS, NODE, TCP, 0, opened=0, midstream=1)]), "tcp/dynamic")
    assert found.verdict == "time-critical"
    assert "both ports are dynamic" in found.reasons[0]
    assert found.confidence < LOW_CONFIDENCE
    low = service(run([make_row(SMS, NODE, TCP, 9999, opened=0, midstream=1)]), "tcp/9999")
    assert low.verdict == "deferrable"


# Plain HTTP at regular intervals.

HTTP = Signature("http", "files", ((TCP, 80), (TCP, 8080)), critical=True, every_s=3600)


@pytest.mark.parametrize(("every", "verdict"), [(300, "deferrable"), (0, "time-critical")])
def test_http_that_the_catalogue_knows_by_its_port_may_be_a_poll(every: float, verdict: str) -> None:
    found = run([make_row(NODE, SMS, TCP, 80, opened=96, every=every)], signatures=[*SIGNATURES, HTTP])
    assert service(found, "http").verdict == verdict


# Leases of systems and of firmware.

PXE, ARCH = (60, b"PXEClient:Arch:00007"), (93, b"\0\7")


@pytest.mark.parametrize(
    ("options", "firmware"),
    [
        ([PXE], True),
        ([(60, b"HTTPClient:Arch:00016")], True),
        ([ARCH], True),
        ([(175, b"\1")], True),
        ([(60, b"udhcp 1.36.1")], False),
        ([], False),
    ],
)
def test_firmware_says_so(options: list[tuple[int, bytes]], *, firmware: bool) -> None:
    assert is_firmware(p.bootp(1, mac="52:54:00:00:00:07", xid=7, options=options)) == firmware


RENEWED = {
    "a renewal": (5, "10.1.1.1", "10.1.1.1", True),
    "an address for a node without one": (5, "0.0.0.0", "10.1.1.1", False),
    "another address": (5, "10.1.1.9", "10.1.1.1", False),
    "an offer": (2, "10.1.1.1", "10.1.1.1", False),
    "a request": (3, "10.1.1.1", "10.1.1.1", False),
}


@pytest.mark.parametrize("case", RENEWED)
def test_an_answer_alone_shows_a_renewal(case: str) -> None:
    kind, own, yours, renewed = RENEWED[case]
    assert is_renewed(p.bootp(kind, mac="52:54:00:00:00:07", xid=7, own=own, yours=yours)) == renewed


def provisioning(folder: Path, family: str, seed: int, *, renewals: bool) -> Stated:
    """Return the verdict on provisioning of a cluster with boots and a short capture."""
    drawn = draw(family, seed)
    assert ("renewals" in drawn.activities) == renewals
    return next(each for each in state(drawn, folder).stated if each.name == "provisioning")


@pytest.mark.parametrize(("family", "seed"), [("slurm-lustre", 1), ("idle", 17)])
def test_a_lease_of_a_nodes_system_may_be_renewed(tmp_path: Path, family: str, seed: int) -> None:
    """The capture ends long before half of the lease."""
    found = provisioning(tmp_path, family, seed, renewals=True)
    assert found.verdict == "time-critical"
    assert "systems of nodes, not only their firmware, got leases" in found.reason
    assert found.confidence < LOW_CONFIDENCE


@pytest.mark.parametrize(("family", "seed"), [("slurm-warewulf4", 1), ("slurm-warewulf4", 4)])
def test_a_long_lease_of_firmware_means_nothing(tmp_path: Path, family: str, seed: int) -> None:
    found = provisioning(tmp_path, family, seed, renewals=False)
    assert found.verdict == "deferrable"
    assert found.confidence > 0.9
