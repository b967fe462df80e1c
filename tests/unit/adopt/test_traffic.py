"""Who still speaks to the old node: a table of flows."""

from __future__ import annotations

import pytest

from appliance.catalog import read_catalog, select
from appliance.plan.adopt.model import Listener, Survey
from appliance.plan.adopt.traffic import THROUGH, Speaker, find_speakers, no_ssh, ssh_ports
from appliance.share import share

NODE, OTHER, OLD, MOVED, ADMIN, OUTSIDE = "10.77.0.101", "10.77.0.102", "10.77.0.5", "10.77.0.1", "10.77.0.2", "9.9.9.9"
TCP, UDP, ICMP = 6, 17, 1
SURVEY = Survey(
    host="sms-old",
    listeners=(
        Listener(port="tcp/2049", address="0.0.0.0", service="nfs"),
        Listener(port="udp/123", address="0.0.0.0", process="chronyd", service="chrony"),
        Listener(port="tcp/2222", address="0.0.0.0", process="sshd", service="ssh"),
        Listener(port="tcp/9100", address="0.0.0.0", process="exporter"),
    ),
)


@pytest.mark.parametrize(
    ("flow", "seen"),
    [
        ((NODE, OLD, TCP, 2049), ("nfs", "tcp/2049", True)),
        ((NODE, OLD, TCP, 9100), ("exporter", "tcp/9100", True)),
        ((NODE, OLD, UDP, 123), ("chrony", "udp/123", False)),  # the container has it; here it goes away
        ((NODE, OLD, UDP, 53), ("", "udp/53", False)),
        ((NODE, MOVED, UDP, 123), ("chrony", "udp/123", False)),  # sent to the old MAC address
        ((NODE, OUTSIDE, TCP, 443), (THROUGH, "", False)),
        ((NODE, OLD, ICMP, 0), None),
        ((OLD, NODE, TCP, 6818), None),  # answers to what it has asked
        ((MOVED, OLD, TCP, 2049), None),
        ((ADMIN, OLD, TCP, 9100), None),
        ((NODE, ADMIN, TCP, 22), None),
        (("", OLD, TCP, 9100), None),
    ],
)
def test_a_flow(flow: tuple[str, str, int, int], seen: tuple[str, str, bool] | None) -> None:
    found = speakers([flow])
    assert [(one.service, one.port, one.planned) for one in found] == ([seen] if seen else [])


def test_addresses_of_one_use_are_one_speaker_and_the_unplanned_come_first() -> None:
    flows = [(NODE, OLD, TCP, 2049), (OTHER, OLD, TCP, 2049), (NODE, OLD, TCP, 2049), (NODE, OLD, UDP, 53)]
    assert speakers(flows) == [
        Speaker("", "udp/53", (NODE,), 1, planned=False),
        Speaker("nfs", "tcp/2049", (NODE, OTHER), 2, planned=True),
    ]


def test_of_many_addresses_some_are_named() -> None:
    [found] = speakers([(f"10.77.1.{last}", OLD, TCP, 2049) for last in range(200)])
    assert found.count == 200 and len(found.addresses) < 20


def test_a_capture_never_has_its_own_transfer() -> None:
    assert ssh_ports(SURVEY) == [2222]
    assert no_ssh([2222]) == "not (tcp port 22 or tcp port 2222)"


def speakers(flows: list[tuple[str, str, int, int]]) -> list[Speaker]:
    services = select(read_catalog(share("definitions", "services")), ["chrony", "slurmctld", "munge"])
    return find_speakers(flows, own={OLD, MOVED}, others={ADMIN}, survey=SURVEY, services=services)
