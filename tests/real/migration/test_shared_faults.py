"""Every fault at every step of a move with a shared overlay, as in test_migrate_faults.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real import faults
from tests.real.faults import Cell, World

pytestmark = pytest.mark.real

STEPS = ("hand", "start", "probe", "arm", "up", "check", "finish")
"""Words that the ends of a move get, in their order; ``check`` is the second ``probe``."""
RETURNED_S = 150
"""Seconds until the command ends whose target is gone: its source waits 90 s for the lease."""


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The overlay is in a folder that both hosts share."""
    with faults.watched_world("t-shared", "/srv/shared/overlays") as made:
        yield made
        faults.show(request, made.rows)


def cells() -> Iterator[Cell]:
    """All of them. The target has the lease from its start on, and needs nothing more of the source."""
    up = STEPS.index("up")
    source, target, either, none = (
        frozenset(names) for names in (("source",), ("target",), ("source", "target"), ("none",))
    )
    for number, step in enumerate(STEPS):
        mine = source if number < up else target if number > up else either
        for name, work in (
            ("SIGKILL", faults.kill),
            ("Ctrl-C", faults.interrupt),
            ("SSH cut", faults.cut),
            ("SSH to the target cut", faults.cut_target),
        ):
            yield Cell(name, work, step, mine)
        yield Cell("SSH to the source cut", faults.cut_source, step, source if step == "hand" else target)
        # Nobody but the target may use the overlay until it returns, or `sms failover` is run.
        gone = source if step == "hand" else source | none if step == "start" else none
        yield Cell("target gone", faults.target_gone, step, gone, noticed_s=RETURNED_S)
        yield Cell("source gone", faults.source_gone, step, none if step == "hand" else target)
    for step in ("hand", "arm"):
        yield Cell("clocks jump", faults.clocks_apart, step, target, clocks=True)


@pytest.mark.parametrize("cell", faults.as_parameters(cells()))
def test_a_fault(world: World, cell: Cell) -> None:
    faults.run_cell(world, cell)
