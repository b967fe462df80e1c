"""What a failover starts from, and where an interrupted one goes on."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.plan.migration.failover import Begun, choose_snapshot, find_begun


def snapshot(number: int, generation: int, taken: float, *, ok: bool = True, reason: str = "") -> dict[str, Any]:
    health = {"ok": ok}
    return {"number": number, "generation": generation, "taken": taken, "health": health, "reason": reason}


CHOICES: list[tuple[list[dict[str, Any]], int | None]] = [
    ([], None),
    ([snapshot(1, 3, 10.0, ok=False)], None),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0)], 2),
    # A clock that was wrong does not win over the lease.
    ([snapshot(1, 4, 10.0), snapshot(2, 3, 20.0)], 1),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0, ok=False)], 1),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0, reason="before restore of 1")], 1),
    ([snapshot(2, 3, 20.0, reason="before restore of 1")], None),
]


@pytest.mark.parametrize(("snapshots", "number"), CHOICES)
def test_the_newest_verified_one_of_the_highest_generation(snapshots: list[dict[str, Any]], number: int | None) -> None:
    chosen = choose_snapshot(snapshots)
    assert (chosen and chosen["number"]) == number


BEGUN = {"verb": "failover", "event": "begun", "old": ["host-a"], "shared": False, "snapshot": 7}
RESTORED = {"verb": "failover", "event": "restored", "snapshot": 7}
STARTED = {"verb": "start", "event": "started"}
DONE = {"verb": "failover", "event": "done"}
OPEN = Begun(("host-a",), False, 7)

HISTORIES: list[tuple[list[dict[str, Any]], Begun | None]] = [
    ([], None),
    ([{"verb": "migrate", "event": "begun"}], None),
    ([BEGUN], OPEN),
    ([BEGUN, BEGUN], OPEN),
    ([BEGUN, {"verb": "guard", "event": "gave way"}], OPEN),
    ([BEGUN, RESTORED], Begun(("host-a",), False, 7, restored=True)),
    ([RESTORED], None),
    ([BEGUN, RESTORED, BEGUN], OPEN),
    ([BEGUN, RESTORED, STARTED], None),
    ([BEGUN, RESTORED, STARTED, DONE], None),
    ([BEGUN | {"shared": True, "snapshot": None}], Begun(("host-a",), True, None)),
]


@pytest.mark.parametrize(("history", "begun"), HISTORIES)
def test_what_was_begun(history: list[dict[str, Any]], begun: Begun | None) -> None:
    assert find_begun(history, top=0, mine=False) == begun


@pytest.mark.parametrize(
    ("top", "mine", "counts"),
    [(5, False, True), (4, False, True), (6, False, False), (1006, True, True), (1006, False, False)],
)
def test_what_was_begun_is_of_the_past_once_others_have_gone_on(top: int, mine: bool, counts: bool) -> None:
    began = BEGUN | {"generation": 5, "taken": 20.0}
    found = find_begun([began, RESTORED], top=top, mine=mine)
    assert (found is not None) == counts
    assert found is None or (found.generation, found.taken, found.restored) == (5, 20.0, True)


@pytest.mark.parametrize("old", [5, None, [5], {"a": 1}])
def test_a_line_that_is_none(old: Any) -> None:
    found = find_begun([BEGUN | {"old": old, "snapshot": "x"}], top=0, mine=False)
    assert found == Begun((), False, None)
