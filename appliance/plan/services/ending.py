"""Settings by which slurmctld ends running jobs although their partitions and nodes stay.

The rules are those of ``job_time_limit`` (src/slurmctld/job_mgr.c of Slurm), ``ping_nodes`` (ping_nodes.c), and
preempt/partition_prio. Not known here: preemption by QOS, which Slurm's database decides; when a held job may start;
``ResvOverRun``, ``ResumeTimeout``, ``BatchStartTimeout`` and ``PreemptExemptTime``. ``InactiveLimit`` ends interactive
jobs whose srun does not answer, and slurmctld asks before: those that answer go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache

from appliance.plan.services.admission import UNLIMITED, read_limit
from appliance.plan.services.defined import NOT_DEFINED, Defined
from appliance.plan.services.jobs import Job
from appliance.text import one_line, whole_number

TIMEOUT_S, MOST_JOBS = 300, 10000
"""Defaults of ``SlurmdTimeout``, in seconds, and of ``MaxJobCount`` (slurm.conf(5))."""
TIMED = {"RUNNING", "CONFIGURING", "STOPPED", "SIGNALING"}
"""States in which time passes; the others than RUNNING are flags of it."""
ENDS = {"CANCEL", "REQUEUE"}
"""Modes of preemption that end a job."""
Preempting = Callable[[str, frozenset[str]], str]


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
    mode, silent = limits.get("PreemptMode", ""), limits.get("SlurmdTimeout", "")
    return Ending(
        math.inf if silent.upper() in UNLIMITED else _number(silent, TIMEOUT_S) or math.inf,
        {name: read_limit(one.get("overtimelimit", ""), over) for name, one in partitions.items()},
        {name: _mode(one.get("preemptmode", mode)) if by_tier else "" for name, one in partitions.items()},
        {name: _number(one.get("prioritytier", one.get("priority", "")), 1) for name, one in partitions.items()},
    )


def _number(text: str, default: int) -> int:
    found = whole_number(text)
    return default if found is None else found


def _mode(text: str) -> str:
    return next((one for one in text.upper().split(",") if one in ENDS), "")


def may_end(old: Defined, new: Defined) -> bool:
    """Return whether a change of these settings can end a job, whatever there is."""
    before, after = find_ending(old), find_ending(new)
    sooner = any(minutes < before.over[name] for name, minutes in after.over.items() if name in before.over)
    return sooner or after.silent_s < before.silent_s or _preempts_more(before, after)


def _preempts_more(before: Ending, after: Ending) -> bool:
    """Return whether jobs of a partition can be ended for those of another one, and could not before."""
    both = before.tiers.keys() & after.tiers.keys()
    return any(
        after.tiers[other] > after.tiers[name] and not (before.modes[name] and before.tiers[other] > before.tiers[name])
        for name in both
        if after.modes[name]
        for other in both
    )


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
    waiting: dict[str, str] = {}
    if _preempts_more(before, after):
        for job in (one for one in jobs if one.waits and one.depends in NOT_DEFINED):
            waiting |= {name: job.id for name in job.partitions if name not in waiting}
    members = (old.members, new.members) if waiting else ({}, {})
    was, becomes = _preempting(waiting, before, members[0]), _preempting(waiting, after, members[1])
    for job in (one for one in jobs if not one.waits):
        name = job.partitions[0] if job.partitions else ""
        late_min = (now - job.ends) / 60 if now and job.ends and job.state in TIMED else -math.inf
        if after.over.get(name, math.inf) <= late_min < before.over.get(name, math.inf):
            shown = one_line(name, 60)
            yield job.id, f"its time limit has passed, and OverTimeLimit of partition {shown} would no longer keep it"
        elif after.silent_s < before.silent_s and (nodes := sorted(job.nodes & silent)):
            why = f"it runs on {one_line(nodes[0], 60)}, which does not answer, and SlurmdTimeout is lowered"
            yield job.id, f"{why} to {after.silent_s:.0f} s"
        elif (one := becomes(name, job.nodes)) and not was(name, job.nodes):
            yield job.id, f"job {one}, which waits in a partition of a higher PriorityTier, would take its place"


def _preempting(waiting: Mapping[str, str], ending: Ending, members: Mapping[str, Set[str] | None]) -> Preempting:
    """Return a function that gives a waiting job which would end one that runs in a partition on some nodes at once."""

    @cache
    def find(name: str, nodes: frozenset[str]) -> str:
        tier = ending.tiers.get(name, 0)
        for other, job in waiting.items() if ending.modes.get(name) else ():
            has = members.get(other)
            if ending.tiers.get(other, 0) > tier and (has is None or not nodes.isdisjoint(has)):
                return job
        return ""

    return find
