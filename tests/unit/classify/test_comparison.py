"""What is different between two classifications."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from analysis.classification import read_classification
from analysis.comparison import compare
from analysis.model import Change, Classification, Provenance, Sms, Unseen
from tests.unit import classification_example as example

PAPER = example.paper()


def changes(before: Classification, now: Classification) -> tuple[Change, ...]:
    return compare(read_classification(json.dumps(before.as_dict())), "before.json", now).changes


def with_service(name: str, **fields: Any) -> Classification:
    """Return the example, with other fields of one service."""
    services = tuple(replace(one, **fields) if one.name == name else one for one in PAPER.services)
    return replace(PAPER, services=services)


def without(name: str, *unseen: Unseen) -> Classification:
    """Return the example, with one service less."""
    return replace(PAPER, services=tuple(one for one in PAPER.services if one.name != name), unseen=unseen)


def test_the_same_is_the_same() -> None:
    found = compare(read_classification(json.dumps(PAPER.as_dict())), "a", PAPER)
    assert (found.context, found.changes, found.same) == ((), (), 10)


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "budget": ("ganglia", {"budget_s": 100.0}, ("tolerated outage 100 s, was 80 s",)),
    "budget, a little": ("ganglia", {"budget_s": 99.0}, ()),
    "budget, now some": ("rsyslog", {"budget_s": 924.0}, ("tolerated outage 15.4 min, was none",)),
    "budget, now none": ("ganglia", {"budget_s": 0.0}, ("tolerated outage none, was 80 s",)),
    "confidence": ("nfs", {"confidence": 0.8}, ("confidence 80 %, was 96 %",)),
    "confidence, a little": ("nfs", {"confidence": 0.87}, ()),
    "users": ("nfs", {"clients": 100}, ("100 of 450 nodes, was 450 of 450",)),
    "users, a little": ("nfs", {"clients": 400}, ()),
    "overridden": ("nfs", {"overridden": True, "confidence": 0.1}, ("now set by the site",)),
    "not overridden": ("ssh", {"overridden": False, "confidence": 0.1}, ("no longer set by the site",)),
    "contacts": ("nfs", {"contacts": 7, "packets": 7}, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_service_that_changed(name: str) -> None:
    service, fields, details = CASES[name]
    found = changes(PAPER, with_service(service, **fields))
    assert [one.details for one in found] == ([details] if details else [])
    assert all((one.name, one.kind, one.before) == (service, "changed", one.after) for one in found)


def test_a_service_that_moved() -> None:
    (found,) = changes(PAPER, with_service("nfs", verdict="deferrable", budget_s=86_400.0))
    assert found == Change("nfs", "verdict", "time-critical", "deferrable", ("tolerated outage 24 h, was 1 min",))


@pytest.mark.parametrize(
    ("unseen", "details"),
    [
        (Unseen("nfs", 2 * example.DAY), ("this capture is too short: 2 days would show it",)),
        (Unseen("nfs", 60.0, finding="not shown"), ("this capture cannot show it, whatever its length",)),
        (Unseen("nfs", 60.0, finding="hardly used"), ("hardly used now (95 % confidence)",)),
        (Unseen("nfs", 60.0, finding="elsewhere"), ("nodes use it at other machines now",)),
        (Unseen("ldap", 60.0), ()),
    ],
)
def test_a_service_that_is_gone(unseen: Unseen, details: tuple[str, ...]) -> None:
    (found,) = changes(PAPER, without("nfs", unseen))
    assert found == Change("nfs", "gone", "time-critical", "", details)


def test_a_service_that_appeared() -> None:
    (found,) = changes(without("nfs", Unseen("nfs", 3600.0, finding="hardly used")), PAPER)
    assert found == Change("nfs", "appeared", "", "time-critical", ("confidence 96 %",))
    (found,) = changes(without("nfs", Unseen("nfs", 1e7)), PAPER)
    assert found.details[1] == "the earlier capture was too short to show it"


def test_what_moved_comes_first() -> None:
    services = tuple(
        replace(one, verdict="deferrable") if one.name == "nat" else replace(one, clients=0)
        for one in PAPER.services
        if one.name != "ssh"
    )
    kinds = [one.kind for one in changes(without("chrony"), replace(PAPER, services=services))]
    assert kinds[:3] == ["verdict", "appeared", "gone"]
    assert set(kinds[3:]) == {"changed"}


def test_differences_of_the_captures() -> None:
    now = replace(
        PAPER,
        sms=Sms("", ("10.9.0.1",), ""),
        nodes=replace(PAPER.nodes, count=1),
        capture=replace(PAPER.capture, covered_s=3600.0),
        made=Provenance("2.0"),
    )
    before = replace(PAPER, made=Provenance("1.0"))
    assert compare(read_classification(json.dumps(before.as_dict())), "a", now).context == (
        "captured 1 h, was 24 h",
        "1 node, was 450",
        "management node 10.9.0.1, was 10.1.0.1, fe80::5054:ff:fe0a:101",
        "sms 2.0, was 1.0",
    )


def test_a_file_made_by_hand_has_verdicts_only() -> None:
    text = "services:\n- {name: nfs, verdict: deferrable}\n- {name: chrony, verdict: time-critical}\n"
    found = compare(read_classification(text), "hand.yaml", PAPER)
    assert found.context == ()
    assert [(one.name, one.kind, one.details) for one in found.changes if one.kind != "appeared"] == [
        ("nfs", "verdict", ())
    ]
    assert found.same == 1


WRONG: list[Any] = [None, "x", -1, True, [], {}, 1e300, float("inf"), "\x1b[31m"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_values_of_any_kind_in_the_earlier_file(value: Any) -> None:
    data = PAPER.as_dict()
    for key in ("budget_s", "clients", "confidence"):
        data["services"][0][key] = value
    data["nodes"]["count"] = data["made"]["version"] = data["sms"]["addresses"] = data["capture"]["covered_s"] = value
    found = compare(read_classification(json.dumps(data)), "a", PAPER)
    assert not any("nan" in text for one in found.changes for text in one.details)
