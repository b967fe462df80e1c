"""What a failover starts from, and where an interrupted one resumes."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.plan.migration.failover import Loss, OpenFailover, choose_snapshot, find_open_failover, measure_loss


def snapshot(number: int, generation: int, taken: float, *, ok: bool = True, reason: str = "") -> dict[str, Any]:
    health = {"ok": ok}
    return {"number": number, "generation": generation, "taken": taken, "health": health, "reason": reason}


CHOICES: list[tuple[list[dict[str, Any]], int | None]] = [
    ([], None),
    ([snapshot(1, 3, 10.0, ok=False)], None),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0)], 2),
    # The generation outweighs the time, which may come from a wrong clock.
    ([snapshot(1, 4, 10.0), snapshot(2, 3, 20.0)], 1),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0, ok=False)], 1),
    ([snapshot(1, 3, 10.0), snapshot(2, 3, 20.0, reason="before restore of 1")], 1),
    ([snapshot(2, 3, 20.0, reason="before restore of 1")], None),
]


@pytest.mark.parametrize(("snapshots", "number"), CHOICES)
def test_choose_snapshot(snapshots: list[dict[str, Any]], number: int | None) -> None:
    chosen = choose_snapshot(snapshots)
    assert (chosen and chosen["number"]) == number


LOSSES = [
    ("a guard was heard from", {"alive": 122.0, "served": 148.0}, Loss(22.0, 26.0)),
    ("no guard", {"alive": 0.0}, Loss(40.0, None)),
    ("a guard that had ended long before the snapshot", {"alive": 80.0}, Loss(40.0, None)),
    ("the snapshot is the last sign", {"alive": 97.0, "served": 148.0}, Loss(0.0, 48.0)),
    ("a clock that is behind", {"alive": 160.0, "served": 148.0}, Loss(60.0, 0.0)),
]


@pytest.mark.parametrize(("times", "loss"), [case[1:] for case in LOSSES], ids=[case[0] for case in LOSSES])
def test_measure_loss(times: dict[str, float], loss: Loss) -> None:
    assert measure_loss(**{"taken": 100.0, "began": 140.0, "served": 148.0, **times}) == loss


BEGUN = {"verb": "failover", "event": "begun", "old": ["host-a"], "shared": False, "snapshot": 7}
RESTORED = {"verb": "failover", "event": "restored", "snapshot": 7}
STARTED = {"verb": "start", "event": "started"}
DONE = {"verb": "failover", "event": "done"}
OPEN = OpenFailover(("host-a",), False, 7)

HISTORIES: list[tuple[list[dict[str, Any]], OpenFailover | None]] = [
    ([], None),
    ([{"verb": "migrate", "event": "begun"}], None),
    ([BEGUN], OPEN),
    ([BEGUN, BEGUN], OPEN),
    ([BEGUN, {"verb": "guard", "event": "gave way"}], OPEN),
    ([BEGUN, RESTORED], OpenFailover(("host-a",), False, 7, restored=True)),
    ([RESTORED], None),
    ([BEGUN, RESTORED, BEGUN], OPEN),
    ([BEGUN, RESTORED, STARTED], None),
    ([BEGUN, RESTORED, STARTED, DONE], None),
    ([BEGUN | {"shared": True, "snapshot": None}], OpenFailover(("host-a",), True, None)),
]


@pytest.mark.parametrize(("history", "begun"), HISTORIES)
def test_find_open_failover(history: list[dict[str, Any]], begun: OpenFailover | None) -> None:
    assert find_open_failover(history, top=0, holds_lease=False) == begun


@pytest.mark.parametrize(
    ("top", "holds_lease", "counts"),
    [(5, False, True), (4, False, True), (6, False, False), (1006, True, True), (1006, False, False)],
)
def test_superseded_failover_is_not_resumed(top: int, holds_lease: bool, counts: bool) -> None:
    began = BEGUN | {"generation": 5, "taken": 20.0}
    found = find_open_failover([began, RESTORED], top=top, holds_lease=holds_lease)
    assert (found is not None) == counts
    assert found is None or (found.generation, found.taken, found.restored) == (5, 20.0, True)


RESTORES = [
    ("its last line", OpenFailover((), False, 7, restored=True), 5, True),
    ("its last line, and the overlay is gone since", OpenFailover((), False, 7, restored=True, overlay=5), 0, False),
    ("killed before that line", OpenFailover((), False, 7, overlay=5), 6, True),
    ("killed before that line, where there was no overlay", OpenFailover((), False, 7, overlay=0), 6, True),
    ("killed before it replaced the overlay", OpenFailover((), False, 7, overlay=5), 5, False),
    ("an older version, which did not write the inode", OpenFailover((), False, 7), 6, False),
    ("a shared overlay", OpenFailover((), True, None, overlay=5), 6, False),
]


@pytest.mark.parametrize(
    ("found", "overlay", "restored"), [one[1:] for one in RESTORES], ids=[one[0] for one in RESTORES]
)
def test_whether_an_interrupted_failover_has_restored(found: OpenFailover, overlay: int, restored: bool) -> None:
    assert found.has_restored(overlay) == restored


@pytest.mark.parametrize("old", [5, None, [5], {"a": 1}])
def test_history_lines_with_invalid_values(old: Any) -> None:
    found = find_open_failover([BEGUN | {"old": old, "snapshot": "x"}], top=0, holds_lease=False)
    assert found == OpenFailover((), False, None)
