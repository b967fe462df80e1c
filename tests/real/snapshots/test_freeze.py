"""A freeze of the overlay ends: by its limit, by its watchdog, or by the next run that sees that nobody ends it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from appliance.shared.locks import hold_lock
from appliance.shared.overlay import frozen_mark
from tests.real.overlays import Bed
from tests.real.snapshots.test_take import KILL

pytestmark = pytest.mark.real


@pytest.mark.parametrize("how", ["the next run", "another one"])
def test_killed_with_its_watchdog(overlay: Bed, how: str) -> None:
    """Then the writers wait, until somebody lets them go."""
    kill_both = KILL.format(step="frozen").replace(
        "os.kill(os.getpid()", "os.kill(frozen.watcher, signal.SIGKILL); os.kill(os.getpid()"
    )
    kill_both += """
from appliance.agent import freeze
start = freeze.Frozen._start_watchdog
def remember(self):
    global frozen
    frozen = self
    start(self)
freeze.Frozen._start_watchdog = remember
"""
    assert overlay.ask("take", before=kill_both).status == -9
    held = subprocess.Popen(["touch", str(overlay.upper / "held")])
    time.sleep(0.3)
    assert held.poll() is None
    if how == "the next run":
        overlay.take()
    else:  # as the guard, status and other verbs do
        for there_is_one in (True, False):
            said = overlay.ask("thaw", overlay=str(overlay.overlay), mark=frozen_mark(str(overlay.overlay)))
            assert said.last["thawed"] is there_is_one
    assert held.wait(60) == 0


def test_a_freeze_whose_run_lives_is_not_ended(overlay: Bed) -> None:
    mark = Path(frozen_mark(str(overlay.overlay)))
    with hold_lock(str(mark)):
        mark.write_text("frozen")
        assert overlay.ask("thaw", overlay=str(overlay.overlay), mark=str(mark)).last["thawed"] is False
        assert mark.read_text() == "frozen"
        assert overlay.ask("take").status == 3, "nor is it joined"
    assert overlay.ask("thaw", overlay=str(overlay.overlay), mark=str(mark)).last["thawed"] is False
    assert mark.read_text() == ""


def test_the_watchdog_ends_a_freeze_that_lasts(overlay: Bed) -> None:
    slow = """
import time
from appliance.agent import take
freeze = take.SnapshotRun._freeze
take.SnapshotRun._freeze = lambda self, loop, work: freeze(self, loop, lambda: (work(), time.sleep(30))[0])
"""
    process = subprocess.Popen(["sh", "-c", "sleep 1.2; touch $1", "t", str(overlay.upper / "t")])
    said = overlay.ask("take", before=slow.replace("30", "3"), freeze_limit_s=1)
    assert said.status == 1
    assert "writers waited longer than 1 s" in said.last["message"]
    assert process.wait(60) == 0
    assert overlay.numbers() == []
