"""Settings by which slurmctld ends running jobs although their partitions and nodes stay.

The rules are those of ``job_time_limit`` (src/slurmctld/job_mgr.c of Slurm), ``ping_nodes`` (ping_nodes.c), and
preempt/partition_prio. Preemption by QOS is decided by Slurm's database: not known here, nor is when a held job may
start. ``InactiveLimit`` ends interactive jobs whose srun does not answer, and slurmctld asks before: those that answer
go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from appliance.plan.services.admission import read_limit
from appliance.plan.services.defined import NOT_DEFINED, Defined
from appliance.plan.services.jobs import Job
from appliance.text import one_line

TIMEOUT_S, MOST_JOBS = 300, 10000
"""Defaults of ``SlurmdTimeout``, in seconds, and of ``MaxJobCount`` (slurm.conf(5))."""
ENDS = {"CANCEL", "REQUEUE"}
"""Modes of preemption that end a job."""


@dataclass(frozen=True)
class Ending:
    """What a slurm.conf says about jobs that run.

    ``silent_s``: seconds after which a node that does not answer loses its jobs, infinite if never. ``over``: minutes
    by which jobs of each partition may exceed their time limit. ``modes``: by which jobs of a partition are ended for
    others, empty if not; ``tiers``: a higher one comes first.
    """

    silent_s: float
    over: Mapping[str, float]
    modes: Mapping[str, str]
    tiers: Mapping[str, int]


def find_ending(defined: Defined) -> Ending:
    """Return what these files say about it."""
    limits, partitions = defined.limits, defined.partitions
    over = read_limit(limits.get("OverTimeLimit", ""), 0)
    by_tier = limits.get("PreemptType", "").lower().rpartition("/")[2] == "partition_prio"
    mode = limits.get("PreemptMode", "")
    return Ending(
        _number(limits.get("SlurmdTimeout", ""), TIMEOUT_S) or math.inf,
        {name: read_limit(one.get("overtimelimit", ""), over) for name, one in partitions.items()},
        {name: _mode(one.get("preemptmode", mode)) if by_tier else "" for name, one in partitions.items()},
        {name: _number(one.get("prioritytier", one.get("priority", "")), 1) for name, one in partitions.items()},
    )


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def _mode(text: str) -> str:
    return next((one for one in text.upper().split(",") if one in ENDS), "")


def may_end(old: Defined, new: Defined) -> bool:
    """Return whether a change of these settings can end a job, whatever there is."""
    before, after = find_ending(old), find_ending(new)
    sooner = any(minutes < before.over.get(name, 0) for name, minutes in after.over.items())
    others = (after.modes, after.tiers) != (before.modes, before.tiers)
    return sooner or after.silent_s < before.silent_s or (others and any(after.modes.values()))


def count_allowed(defined: Defined) -> int:
    """Return how many jobs slurmctld keeps, also those that ended less than ``MinJobAge`` ago: it takes no more."""
    return _number(defined.limits.get("MaxJobCount", ""), MOST_JOBS)


def find_ended(
    jobs: Sequence[Job], silent: Set[str], now: float, old: Defined, new: Defined
) -> Iterator[tuple[str, str]]:
    """Yield running jobs that only the new settings end, by id, each with the reason.

    Args:
        silent: nodes that do not answer.
        now: when ``jobs`` were listed, Unix time; 0 if it is not known.
    """
    if not may_end(old, new):
        return
    before, after = find_ending(old), find_ending(new)
    preempts = any(after.modes.values())
    waiting = [job for job in jobs if preempts and job.waits and job.depends in NOT_DEFINED]
    members = (old.members, new.members) if waiting else ({}, {})
    for job in (one for one in jobs if one.state == "RUNNING"):
        name = job.partitions[0] if job.partitions else ""
        late_min = (now - job.ends) / 60 if now and job.ends else -math.inf
        shown = one_line(name, 60)
        if after.over.get(name, math.inf) <= late_min < before.over.get(name, math.inf):
            yield job.id, f"its time limit has passed, and OverTimeLimit of partition {shown} would no longer keep it"
        elif after.silent_s < before.silent_s and (nodes := sorted(job.nodes & silent)):
            why = f"it runs on {one_line(nodes[0], 60)}, which does not answer, and SlurmdTimeout is lowered"
            yield job.id, f"{why} to {after.silent_s:.0f} s"
        elif (one := find_preempting(job, name, waiting, after, members[1])) and not find_preempting(
            job, name, waiting, before, members[0]
        ):
            yield job.id, f"job {one.id}, which waits in a partition of a higher PriorityTier, would take its place"


def find_preempting(
    job: Job, name: str, waiting: Sequence[Job], ending: Ending, members: Mapping[str, Set[str] | None]
) -> Job | None:
    """Return a waiting job that would end a running one of partition ``name`` at once."""
    if not ending.modes.get(name):
        return None
    for one in waiting:
        for other in one.partitions:
            nodes = members.get(other)
            if ending.tiers.get(other, 0) > ending.tiers.get(name, 0) and (nodes is None or nodes & job.nodes):
                return one
    return None
