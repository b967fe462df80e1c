"""The effect of an outage that the page predicts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.model import Service
from analysis.report import outage
from analysis.report.html import render_html
from tests.unit import classification_example as example

DAY = example.DAY


def at(service: Service, length_s: float, covered_s: float = DAY) -> tuple[str, str, str]:
    found = outage.effect(service, length_s, covered_s)
    return found.state, found.nodes, found.contacts


@pytest.mark.parametrize(
    ("service", "length_s", "expected"),
    [
        (example.GANGLIA, 80.0, ("tolerated", "~450 nodes", "~3,600 contacts")),
        (example.GANGLIA, 80.1, ("noticed", "~450 nodes", "~3,600 contacts")),
        (example.RSYSLOG, 0.001, ("noticed", "hardly a node", "hardly a contact")),
        (example.POSTFIX, 3600.0, ("tolerated", "~44 nodes", "~50 contacts")),
        (example.SSH, 3600.0, ("tolerated", "not by nodes", "")),
        (example.PROVISIONING, 40 * DAY, ("noticed", "nodes that boot", "")),
        (Service("x", "deferrable", clients=3, contacts=9), 9.0, ("unknown", "~0 nodes", "~0 contacts")),
        (Service("x", "time-critical", clients=0, contacts=9), 9.0, ("noticed", "", "")),
    ],
)
def test_an_effect(service: Service, length_s: float, expected: tuple[str, str, str]) -> None:
    found = at(service, length_s)
    if expected[1] == "~0 nodes":
        expected = (expected[0], "hardly a node", "hardly a contact")
    assert found == expected


def test_nodes_are_those_that_try() -> None:
    """A contact per node and length: 63 % of the nodes are expected to try (1 - 1/e)."""
    one = replace(example.CHRONY, contacts=450, clients=450)
    assert at(one, 3600.0, 3600.0)[1:] == ("~280 nodes", "~450 contacts")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
def test_numbers_that_cannot_be(bad: float) -> None:
    for service in (replace(example.NFS, budget_s=bad), replace(example.NFS, contacts=10**18, clients=1)):
        for length_s in outage.LENGTHS:
            for found in (at(service, length_s), at(service, length_s, bad)):
                assert not re.search(r"\b(nan|inf)", " ".join(found))


def test_services_are_in_the_order_in_which_nodes_notice() -> None:
    found = example.paper()
    lengths, rows = outage.predict(found, list(enumerate(found.services, 1)))
    assert [row.service.name for row in rows[:5]] == ["nat", "rsyslog", "nfs", "ganglia", "slurmctld"]
    for index in range(len(lengths)):
        noticed = [row.effects[index].state == "noticed" for row in rows]
        assert noticed == sorted(noticed, reverse=True), "those that are noticed come first"
    assert lengths[0].summary == "10 s: noticed in 2 of 10 services: nat and rsyslog."
    assert lengths[-1].summary.startswith("7 days: noticed in 8 of 10 services: nat, rsyslog, nfs, ")
    quiet = [(1, replace(example.SSH, budget_s=1e9))]
    assert outage.predict(found, quiet)[0][3].summary == "15 min: tolerated in every service."
    unknown = [*quiet, (2, Service("x", "deferrable"))]
    assert outage.predict(found, unknown)[0][3].summary == "15 min: noticed in no service, unknown in 1 of 2."


def test_every_length_has_its_rule_in_the_style_sheet() -> None:
    style = (Path(outage.__file__).parent / "report.css").read_text(encoding="utf-8")
    rules = re.findall(r"#length-(\d+):checked\) ~ \.effects \.at-(\d+)", style)
    assert rules == [(str(number), str(number)) for number in range(1, len(outage.LENGTHS) + 1)]
    assert f"repeat({len(outage.LENGTHS)}, " in style
    assert re.findall(r'id="length-(\d+)" checked', render_html(example.paper())) == [str(outage.CHOSEN + 1)]
