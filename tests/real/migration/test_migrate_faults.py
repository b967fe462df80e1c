"""Every fault at every step of a move: one host serves afterwards, no job is lost, the next run finishes or undoes it.

A sample runs always; all cells, or those of some faults, with their table:

    SMS_MATRIX_OUT=table.md tests/machine .venv/bin/python -m pytest tests/real/migration/test_migrate_faults.py
    tests/machine .venv/bin/python -m pytest tests/real/migration/test_migrate_faults.py -s -k "SIGKILL or cut"
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real import faults
from tests.real.faults import Cell, World

pytestmark = pytest.mark.real

STEPS = (
    *("offer", "build", "send", "round", "verify", "stop", "place", "start", "probe", "ask"),
    *("flush", "connections", "arm", "release", "up", "check", "given", "tails", "commit", "finish"),
)
"""Words that the ends of a move get, in their order; ``check`` is the second ``probe``."""


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each host has an overlay of its own."""
    with faults.watched_world("t-faults") as made:
        yield made
        faults.show(request, made.rows)


def cells() -> Iterator[Cell]:
    """All of them."""
    up = STEPS.index("up")
    given = STEPS.index("given")
    source, target, either, none = (
        frozenset(names) for names in (("source",), ("target",), ("source", "target"), ("none",))
    )
    for number, step in enumerate(STEPS):
        # At the very word to go up both may come out; never both at once.
        mine = source if number < up else target if number > up else either
        # With the network interrupted, a target that was ordered to go up does; the command may not learn of it.
        yield Cell("SIGKILL", faults.kill, step, mine, sample=step == "arm")
        yield Cell("Ctrl-C", faults.interrupt, step, mine, sample=step == "finish")
        # Nothing is left of it on the source: the guard there ends what it had begun.
        yield Cell("all killed", faults.kill_all, step, mine, here=True)
        for name, work in (
            ("SSH cut", faults.cut),
            ("SSH to the source cut", faults.cut_source),
            ("SSH to the target cut", faults.cut_target),
        ):
            yield Cell(name, work, step, mine)
        # A target that has been handed the addresses and dies then has died after the move.
        yield Cell("target gone", faults.target_gone, step, source if number < given else none)
        # Not running on any other host yet: the host returns, or `sms failover` is needed.
        without = none if number < STEPS.index("stop") else target if step != "stop" else none | target
        yield Cell("source gone", faults.source_gone, step, without, sample=step == "release")
    for name, work in (
        ("SSH to the source cut", faults.cut_source),
        ("SSH to the target cut", faults.cut_target),
        ("target gone", faults.target_gone),
    ):
        yield Cell(name, work, "trust", source)
    yield Cell("source gone", faults.source_gone, "trust", none)
    for step in ("verify", "stop", "start", "arm", "release", "up", "check", "finish"):
        yield Cell("clocks jump", faults.clocks_apart, step, target, clocks=True)
    for step in ("stop", "arm", "up"):
        yield Cell("clocks jump, the other way", faults.clocks_apart_again, step, target, clocks=True)
    for step in (
        *("<build", "build", "send", "round", "verify", "<stop", "stop", "place", "<start", "start"),
        *("probe", "<arm", "<up", "<commit"),
    ):
        yield Cell("disk full", faults.disk_full, step, either, small=True, wait_s=15)
    for step in ("<build", "send", "<stop", "<start", "<arm", "<up", "<commit"):
        yield Cell("inodes full", faults.inodes_full, step, either, small=True, wait_s=15)
    for step in ("<build", "<place", "<start", "<arm", "<up", "up", "<commit"):
        mine = either if step == "<commit" else target if step == "up" else source
        yield Cell("target's journal read-only", faults.read_only_target, step, mine, journal="target", wait_s=15)
    for step in ("<offer", "<stop", "stop", "<release", "<given", "<finish"):
        mine = target if step in ("<given", "<finish") else source
        yield Cell("source's journal read-only", faults.read_only_source, step, mine, journal="source")
    yield Cell("tampered image", faults.tampered_image, "<inspect_hosts", target)  # it is sent again
    yield Cell("tampered image", faults.tampered_image, "<trust", source)
    for step in ("<round", "<verify"):
        yield Cell("damaged copy", faults.damaged_copy, step, source)
    for name in ("munge", "slurmctld", "rsyslog", "postfix"):
        yield Cell(f"{name} not up", faults.service_down(name), "<probe", source, wait_s=6)
    for name in ("chrony", "slurmctld"):
        yield Cell(f"{name} not up", faults.service_down(name), "<check", source, wait_s=30)
    for step in ("<start", "<arm", "<up"):
        yield Cell("bridge missing", faults.no_bridge, step, source)
    yield Cell("clock 10 min off", faults.clock_off, "<inspect_hosts", source, clocks=True)
    yield Cell("clock 10 min off", faults.clock_off, "<start", target, clocks=True)  # known to be right when it began


@pytest.mark.parametrize("cell", faults.as_parameters(cells()))
def test_a_fault(world: World, cell: Cell) -> None:
    faults.run_cell(world, cell)
