"""Jobs that nodes refuse after an end of slurmctld that was not in order: which are released, which nodes resumed."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.services.conftest import RUNTIME
from tests.waiting import alive, wait_until

PROGRAM = RUNTIME / "sms-slurm-refused"
HELD = "launch failed requeued held"


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(PROGRAM))


def row(job: str, priority: int, when: str, reason: str) -> str:
    return f"{job:<80}{priority:<20}{when:<20}{reason:<80}\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("", []),
        (row("12", 0, "1100", HELD) + row("13_4", 0, "1000", HELD), ["12", "13_4"]),
        (row("12", 0, "999", HELD), []),
        (row("12", 0, "N/A", HELD), []),
        (row("12", 0, "1100", "JobHeldUser") + row("14_[1-9]", 7, "1100", "Resources"), []),
        (row("12", 0, "1100", f"{HELD} x"), []),
        (row("12+0", 0, "1100", HELD) + row("14_[1-900]", 0, "1", "x"), ["12+0"]),
        (row("12", 7, "1100", HELD), []),
        ("squeue: error\nslurm_load_jobs error: x\n12; rm 0 1100 " + HELD, []),
    ],
)
def test_which_jobs_are_released(program: dict[str, Any], output: str, found: list[str]) -> None:
    assert program["find_refused"](output, 1000.7) == found


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("node1 1100 Duplicate jobid\nnode2 1000 Duplicate jobid \n", ["node1", "node2"]),
        ("node1 999 Duplicate jobid\n", []),
        ("node1 1191 Duplicate jobid\n", []),  # it may run the job still
        ("node1 1100 Duplicate jobid, says root\nnode2 1100 disk\nnode3 Unknown Duplicate jobid\n", []),
        ("sinfo: error\n", []),
    ],
)
def test_which_nodes_are_resumed(program: dict[str, Any], output: str, found: list[str]) -> None:
    assert program["find_drained"](output, 1000.7, 1190.0) == found


SLURM = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case $0:$* in
    *squeue:*) date "+12                    0          %s    launch failed requeued held" ;;
    *sinfo:*) date "+node1 %s Duplicate jobid" ;;
    *show*) echo "BatchStartTimeout       = 10 sec" ;;
    *) exit "$REFUSES" ;;
esac
"""
FAST = """\
import os, runpy, sys, time
found = runpy.run_path(sys.argv[1])
os.environ["SLURM_TIME_FORMAT"] = "%s"
found["watch"].__globals__.update(EVERY_S=0.3, ENDED_S=0, MARGIN_S=-19)
found["watch"](time.time(), time.monotonic() + float(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize("status", [0, 1])
def test_each_is_released_and_resumed_twice_at_most(tmp_path: Path, status: int) -> None:
    """A controller that does not answer, or says no, does not end it."""
    for name in ("squeue", "sinfo", "scontrol"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    calls, mark = tmp_path / "calls", tmp_path / "mark"
    mark.touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "REFUSES": str(status)}
    done = subprocess.run(
        [sys.executable, "-c", FAST, str(PROGRAM), "3", str(mark)], env=environment, capture_output=True, check=True
    )
    made = [line for line in calls.read_text().splitlines() if line.startswith("scontrol")]
    assert made.count("scontrol release 12") == 2
    assert made.count("scontrol update NodeName=node1 State=RESUME") == 2
    assert done.stdout.count(b"job 12 is released") == 2
    asked = made.count("scontrol reconfigure")
    assert mark.exists() == bool(status), "nodes were asked, or the next start asks them"
    assert asked > 1 if status else asked == 1


@pytest.mark.parametrize(("age_s", "since"), [(20, 20), (0, 0), (7200, 3600), (-50, 0), (None, 0)])
def test_a_stop_within_the_minute_forgets_nothing(
    program: dict[str, Any], tmp_path: Path, age_s: float | None, since: float
) -> None:
    """A migration right after: the node that was drained before it stayed so, and its job was held."""
    mark, now = tmp_path / "mark", 1_800_000_000.0
    if age_s is not None:
        mark.touch()
        os.utime(mark, (now - age_s, now - age_s))
    assert program["begun"](str(mark), now) == now - since


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ("", 25),
        ("BatchStartTimeout       = 60 sec\nMessageTimeout          = 100 sec\n", 75),
        ("BatchStartTimeout       = 30 sec\nMessageTimeout          = 5 sec\n", 40),
        ("BatchStartTimeout       = x\n", 25),
    ],
)
def test_after_which_time_a_job_counts_as_lost(program: dict[str, Any], config: str, seconds: int) -> None:
    """_purge_missing_jobs of src/slurmctld/job_mgr.c, and a margin."""
    assert program["count_lost_after"](config) == seconds


def test_without_slurm_it_only_watches(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FAST, str(PROGRAM), "1", "/nowhere"], env={"PATH": str(tmp_path)}, check=True)


@pytest.mark.parametrize("squeue", ["exit 1", "exec sleep 600"], ids=["refuses", "hangs"])
def test_it_ends_with_slurmctld(tmp_path: Path, squeue: str) -> None:
    """A stop of the container waits for all its processes. The leader of its process group is slurmctld."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    mark = tmp_path / "mark"
    mark.touch()
    words = [sys.executable, "-c", FAST, str(PROGRAM), "600", str(mark)]
    begin = f"{shlex.join(words)} & echo $!; exec sleep 600"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["sh", "-c", begin], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as slurmctld:
        assert slurmctld.stdout
        pid = int(slurmctld.stdout.readline())
        if "sleep" in squeue:
            wait_until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text(), "its first query")
        assert alive(pid)
        slurmctld.kill()
        slurmctld.wait()
        wait_until(lambda: not alive(pid), "its end")
    assert mark.exists(), "the next start goes on"
