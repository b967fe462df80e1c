"""The outages that a switch on one host is predicted not to exceed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.plan.migration.here import BOUNDS, bound_outages, bound_parts, gate_rules, recent_switches
from appliance.plan.services.apply import find_exceeded

PARTS = {"stop": 0.4, "last changes": 0.02, "start": 4.0, "switch": 0.2}


def switched(**parts: Any) -> dict[str, Any]:
    return {"verb": "apply", "event": "switched", "parts": parts}


def test_the_last_switches_count() -> None:
    history = [switched(start=number) for number in range(7)]
    others: list[dict[str, Any]] = [
        {"event": "moved", "parts": {"start": 99}},
        {"event": "switched", "parts": "?"},
        switched(start="x"),
    ]
    assert recent_switches([*history, *others[:2]]) == [{"start": number} for number in range(2, 7)]
    assert recent_switches(others) == [{}]


@pytest.mark.parametrize(
    ("measured", "bounds"),
    [
        ([], BOUNDS),
        ([PARTS], {"stop": 0.6, "last changes": 0.1, "start": 6.0, "switch": 0.3}),
        ([PARTS, {"start": 6.0}], {"stop": 0.6, "last changes": 0.1, "start": 9.0, "switch": 0.3}),
        ([{}], BOUNDS),
    ],
)
def test_bounds(measured: list[dict[str, float]], bounds: dict[str, float]) -> None:
    assert bound_parts(measured) == pytest.approx(bounds)


def test_services_without_state_are_away_for_the_switch_only() -> None:
    services: Any = [
        SimpleNamespace(name=name, live=live, outage=SimpleNamespace(budget_s=3.0))
        for name, live in (("nat", True), ("db", False))
    ]
    away = {one.name: one.predicted_s for one in bound_outages(services, [PARTS])}
    assert away == pytest.approx({"nat": 0.3, "db": 7.0})
    assert find_exceeded(away, {"nat": 0.2, "db": 6.9}) == []
    (exceeded,) = find_exceeded(away, {"nat": 0.4, "db": 6.9})
    assert exceeded.startswith("nat:")


@pytest.mark.parametrize(
    ("ports", "matches"),
    [((514, 2514), ("tcp dport != { 514, 2514 } drop", "tcp sport != { 514, 2514 } drop")), ((), ("tcp drop",) * 2)],
)
def test_rules_that_isolate_services_with_state(ports: tuple[int, ...], matches: tuple[str, str]) -> None:
    rules = gate_rules(ports).split(" ; ")
    assert [line for line in rules if "drop" in line] == [
        line for line in rules if line.startswith("add rule") and any(line.endswith(one) for one in matches)
    ]
    assert len([line for line in rules if "drop" in line]) == 2
