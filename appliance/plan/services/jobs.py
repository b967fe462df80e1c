"""Jobs known to the controller of Slurm: the command that lists them, its parser, and which of them are lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

JOBS = ("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%i %T")
"""Lists every job: also in hidden partitions, finished ones, and each task of an array."""

JOBS_BYTES = 64 << 20
"""Maximum size of that list: about two million tasks."""

ASK_NODES = ("sh", "-c", "sinfo --noheader --dead --format=%n | grep -q . && exec timeout 15 scontrol reconfigure")
"""Makes the controller query its nodes at once if some count as not responding.

A controller that started without reaching its nodes queries them again only after a third of SlurmdTimeout
(slurm.conf(5)), and starts no job until then.
"""
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT")
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
LOST = ("NODE_FAIL", "BOOT_FAIL")


@dataclass(frozen=True)
class Job:
    """A job that runs or waits; an array's waiting tasks are one. One that completes has ended: it cannot be lost.

    ``nodes``: allocated; ``least_nodes``, ``most_nodes``: how many it asks for. ``minutes``: its time limit, or the
    least that it accepts; 0 if it has none of its own. ``reservation``: the one that it uses. ``submitted``:
    Unix time, 0 if it is not known; ``host``: where that was. ``depends``: on which jobs, as squeue(1) prints it.
    ``began``: Unix time, 0 if it is not known; ``ends``: when its time limit passes, 0 without one. ``priority``: 0 if
    it is held. ``batch``: whether it has a script; ``prolog``: whether it waits for the Prolog on its nodes.
    ``license_counts``: how many it asks for of each; ``gres_counts``: of each generic resource on one node, at least;
    ``gres_total``, ``total_cpus``: on all its nodes.
    """

    id: str
    state: str
    user: str
    partitions: tuple[str, ...]
    nodes: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    licenses: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    gres: frozenset[str] = frozenset()
    submitted: int = 0
    memory_mb: int = 0
    cpus: int = 0
    disk_mb: int = 0
    minutes: float = 0
    least_nodes: int = 0
    most_nodes: int = 0
    account: str = ""
    qos: str = ""
    reservation: str = ""
    host: str = ""
    depends: str = ""
    ends: int = 0
    began: int = 0
    priority: int = 1
    batch: bool = True
    prolog: bool = False
    license_counts: frozenset[tuple[str, int]] = frozenset()
    gres_counts: frozenset[tuple[str, int]] = frozenset()
    gres_total: frozenset[tuple[str, int]] = frozenset()
    total_cpus: int = 0

    @property
    def waits(self) -> bool:
        """Whether it has not begun."""
        return self.state in WAITS


def read_jobs(output: str) -> dict[str, str]:
    """Return job states by id from the output of ``JOBS``; other lines are messages of squeue and are ignored."""
    pairs = (line.split() for line in output.splitlines())
    return {words[0]: words[1] for words in pairs if len(words) == 2}


def read_ended(log: str) -> dict[str, str]:
    """Return completed jobs of slurmctld's log: lines such as ``_job_complete: JobId=5 done``; arrays as 12_3(15)."""
    return dict.fromkeys(re.findall(r"job_complete: JobId=([0-9]+(?:_[0-9]+)?)[ (]", log), "COMPLETED")


def is_active(state: str) -> bool:
    """Return whether a job has not ended."""
    return state in RUNS or state in WAITS


def lost_jobs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe each job that was lost.

    A job that ended meanwhile, successfully or not, is not lost; Slurm reports it for some minutes.
    """
    lost = []
    for job, state in before.items():
        now = after.get(job)
        if not is_active(state) or (now is None and state == "COMPLETING"):
            continue
        if now is None:
            lost.append(f"job {job} was {state} and is now unknown")
        elif now in LOST or (state in RUNS and now in WAITS):
            lost.append(f"job {job} was {state} and is now {now}")
    return lost


def active_jobs(jobs: Mapping[str, str]) -> dict[str, str]:
    """Return the jobs that run or wait."""
    return {job: state for job, state in jobs.items() if is_active(state)}


def count_jobs(jobs: Mapping[str, str]) -> str:
    """Format the numbers of running and waiting jobs."""
    running = sum(state in RUNS for state in jobs.values())
    waiting = sum(state in WAITS for state in jobs.values())
    return f"{running} running, {waiting} waiting"


def read_fields(line: str) -> dict[str, str]:
    """Parse the key=value words of a line of ``scontrol --oneliner show``."""
    return dict(word.partition("=")[::2] for word in line.split() if "=" in word)
