"""A restored controller and allocations whose `salloc` has ended since the snapshot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground
from tests.real.processes import below
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]


SAVED_S = 6
"""slurmctld saves a changed state within 5 s (SAVE_MAX_WAIT, src/slurmctld/state_save.c)."""


def test_a_restored_allocation_without_its_salloc_ends(running: Playground) -> None:
    """Without InactiveLimit it stays RUNNING until its time limit; the default of ten minutes is shortened here."""
    node = running.host("node1")
    short = running.variant("short.yaml", lambda document: document["slurm"].update(extra=["InactiveLimit=20"]))
    running.sms("--site", short, "-q", "apply")
    demo.wait_idle(node, NODES)
    argv = ("runuser", "-u", "alice", "--", "env", "-C", "/home/alice", "salloc", "-J", "kept", "sleep", "1000")
    with subprocess.Popen([*node.prefix, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as salloc:
        wait_until(lambda: states(running) == ["RUNNING"], "the allocation")
        time.sleep(SAVED_S)
        taken = json.loads(running.sms("-q", "overlay", "snapshot", "--json").stdout)
        for pid in below(salloc.pid):
            os.kill(pid, signal.SIGKILL)
    node.run("scancel", "--name", "kept", "--user", "alice")
    wait_until(lambda: states(running) == [], "the end of the allocation")
    running.sms("-q", "stop")
    running.sms("-q", "overlay", "restore", str(taken["number"]))
    running.sms("--site", short, "-q", "start")
    assert states(running) == ["RUNNING"], "as in the snapshot"
    wait_until(lambda: states(running) == [], "slurmctld ends it", timeout_s=180)
    running.sms("-q", "apply")


def states(playground: Playground) -> list[str]:
    """State of each allocation of this test that slurmctld has as active."""
    return playground.sms("exec", "--", "squeue", "-h", "--name", "kept", "-o", "%T").text.split()
