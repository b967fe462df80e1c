"""Budgets of the tests: what is over is named, and the totals stay within what the project may take."""

from __future__ import annotations

import pytest

from tests import run
from tests.budgets import Budgets, Spent, compare, read_budgets

BUDGETS = Budgets({"from nothing": 2, "engines built": 1}, {"real": 1, "unit": 0.5})
LINES = {
    "within": (
        [Spent("real", "passed", 60)],
        60.0,
        ["real: passed, 60 s, budget 60 s"],
        "all, engines built: 60 s, budget 60 s",
    ),
    "over": (
        [Spent("real", "passed", 90, [("tests/x.py::test_y", 12.34)]), Spent("unit", "failed, status 1", 20)],
        100.0,
        [
            "real: passed, 90 s, budget 60 s: OVER by 30 s",
            "      12.3 s  tests/x.py::test_y",
            "unit: failed, status 1, 20 s, budget 30 s",
        ],
        "all, engines built: 100 s, budget 60 s: OVER by 40 s",
    ),
    "a group without a budget": (
        [Spent("tests/real/x.py", "passed", 9)],
        9.0,
        ["tests/real/x.py: passed, 9 s"],
        "all, engines built: 9 s, budget 60 s",
    ),
}


@pytest.mark.parametrize(("spent", "seconds", "lines", "total"), LINES.values(), ids=LINES)
def test_times_are_compared_with_budgets(spent: list[Spent], seconds: float, lines: list[str], total: str) -> None:
    assert list(compare(BUDGETS, spent, seconds, "engines built")) == [*lines, total]


def test_each_group_has_a_budget_and_the_totals_are_within_their_limits() -> None:
    budgets = read_budgets()
    assert set(budgets.groups) == {"images", "unit", "real", "alone", "engines built", "engines"}
    assert budgets.total["from nothing"] <= 65 and budgets.total["engines built"] <= 50
    assert set(budgets.total) == {run.FROM_NOTHING, run.BUILT}
