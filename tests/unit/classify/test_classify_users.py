"""The numbers of nodes agree: those of a service are never more than those of the capture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.model import Classification
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.wire import Station

PLAN = Plan(nodes=4, duration_s=1200, boots=1)
NAMED = re.compile(r"\b(\d[\d,]*) nodes?\b")


def found(folder: Path, made: Made) -> Classification:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return classify(ClassifyOptions((str(file),)), Silent())


def plain(made: Made) -> None:
    """As it is."""


def dual_stack(made: Made) -> None:
    """Every node and the management node have an IPv6 address, too, and use it for the same services."""
    for number, (time, frame) in enumerate(list(made.frames)):
        ends, protocol = (frame[26:30], frame[30:34]), frame[23]
        if number % 2 or frame[12:14] != b"\x08\0" or not all(one[:2] == b"\x0a\1" for one in ends):
            continue
        source, target = (f"fd00::{one[2]}:{one[3]}" for one in ends)
        size = int.from_bytes(frame[16:18])
        packet = p.ipv6(frame[34 : 14 + size], protocol, source, target)
        made.frames.append((time + 1000, frame[:12] + b"\x86\xdd" + packet))


def hardware(made: Made) -> None:
    """BMCs and switches synchronize clocks, log, and are managed."""
    for number in range(8):
        bmc = Station("bmc", f"52:54:00:0c:00:{number:02x}", f"10.1.2.{number + 1}")
        switch = Station("switch", f"52:54:00:0d:00:{number:02x}", f"10.1.3.{number + 1}")
        request, answer = (p.ntp(mode, stratum=2, poll=6, sent_ns=10**18) for mode in (3, 4))
        at_s = START_S + 10 + number
        made.exchange(at_s, "ntp", bmc, made.sms, (5000, 123), [(0, "c", request), (0.001, "s", answer)])
        made.exchange(at_s, "syslog", bmc, made.sms, (5001, 514), [(0, "c", b"<30>bmc")])
        made.exchange(at_s, "ipmi", made.sms, bmc, (5002, 623), [(0, "c", bytes(20)), (0.01, "s", bytes(20))])
        made.exchange(at_s, "snmp", made.sms, switch, (5003, 161), [(0, "c", bytes(40)), (0.01, "s", bytes(40))])


@pytest.mark.parametrize("change", [plain, dual_stack, hardware])
def test_no_service_has_more_nodes_than_the_capture(change: object, tmp_path: Path) -> None:
    made = simulate(PLAN)
    change(made)  # type: ignore[operator]
    seen = found(tmp_path, made)
    assert seen.nodes.count == PLAN.nodes
    used = {one.name: one.clients for one in seen.services}
    assert {name: count for name, count in used.items() if not 1 <= count <= PLAN.nodes} == {}
    assert (used["nfs"], used["ganglia"], used["provisioning"]) == (4, 4, 1)
    text = [reason for one in seen.services for reason in (*one.reasons, one.budget_why)]
    assert max(int(one.replace(",", "")) for line in text for one in NAMED.findall(line)) <= PLAN.nodes
