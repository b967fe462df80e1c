"""What groups of tests may take, beside what they took."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGETS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Budgets:
    """Minutes: of a whole run, by what there was before it, and of each group."""

    total: Mapping[str, float]
    groups: Mapping[str, float]


NONE = Budgets({}, {})
"""Of a part of the run, or one of every case."""


@dataclass(frozen=True)
class Spent:
    """What a group took, in seconds, and its slowest tests."""

    name: str
    how: str
    seconds: float
    slowest: Sequence[tuple[str, float]] = ()


def read_budgets(path: Path = BUDGETS) -> Budgets:
    """Return the budgets of the tree."""
    return Budgets(**tomllib.loads(path.read_text()))


def compare(budgets: Budgets, spent: Sequence[Spent], seconds: float, before: str) -> Iterator[str]:
    """Yield a line for each group and the whole run, with its budget; under a group its slowest tests.

    Args:
        seconds: of the whole run without its lint, in which groups are side by side.
        before: what there was before it, as ``Budgets.total`` names it.
    """
    for one in spent:
        over = find_over(one.seconds, budgets.groups.get(one.name))
        yield f"{one.name}: {one.how}, {one.seconds:.0f} s{over}"
        yield from (f"    {took:6.1f} s  {name}" for name, took in one.slowest)
    yield f"all, {before}: {seconds:.0f} s{find_over(seconds, budgets.total.get(before))}"


def find_over(seconds: float, budget: float | None) -> str:
    """Return a budget in minutes as text, and by how much a time is over it."""
    if budget is None:
        return ""
    over = seconds - 60 * budget
    return f", budget {60 * budget:.0f} s" + (f": OVER by {over:.0f} s" if over > 0 else "")
