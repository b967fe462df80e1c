"""Settings by which slurmctld ends running jobs although their partitions and nodes stay.

The rules are those of Slurm's ``job_time_limit`` and ``_purge_missing_jobs`` (src/slurmctld/job_mgr.c), ``ping_nodes``
(ping_nodes.c), ``_do_power_work`` (power_save.c) and ``check_reboot_nodes`` (node_mgr.c). For whom others make room:
`preemption`. Not judged: settings that only jobs which begin later feel, see docs/running.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from appliance.plan.services.admission import UNLIMITED, read_limit
from appliance.plan.services.defined import Defined
from appliance.plan.services.jobs import Job
from appliance.plan.services.nodes import NodeState
from appliance.text import one_line, whole_number

TIMEOUT_S, BOOT_S, START_S, MOST_JOBS = 300, 60, 10, 10000
"""Defaults of ``SlurmdTimeout``, ``ResumeTimeout``, ``BatchStartTimeout``, in seconds, and of ``MaxJobCount``
(slurm.conf(5))."""
MESSAGE_S = 10
"""By which slurmctld extends ``BatchStartTimeout`` at most."""
TIMED = {"RUNNING", "CONFIGURING", "STOPPED", "SIGNALING"}
"""States in which time passes; the others than RUNNING are flags of it."""
POWERED, REBOOTED = "powering_up", "reboot_issued"
ALLOC_FLAGS = {"alloc", "contain", "x11", "runinjob", "forcerequeueonfail"}
"""With one of ``PrologFlags``, slurmctld knows which jobs wait for the Prolog."""


@dataclass(frozen=True)
class Ending:
    """What a slurm.conf says about jobs that run.

    ``silent_s``: seconds after which a node that does not answer loses its jobs, infinite if never. ``over``: minutes
    by which jobs of each partition may exceed their time limit; ``over_reservation``: by which they may exceed their
    reservation. ``start_s``: seconds that the start of a batch job may take.
    """

    silent_s: float
    over: Mapping[str, float]
    over_reservation: float
    start_s: int


def find_ending(defined: Defined) -> Ending:
    """Return what these files say about it."""
    limits = defined.limits
    over = read_limit(limits.get("OverTimeLimit", ""), 0)
    return Ending(
        _seconds(limits.get("SlurmdTimeout", ""), TIMEOUT_S) or math.inf,
        {name: read_limit(one.get("overtimelimit", ""), over) for name, one in defined.partitions.items()},
        read_limit(limits.get("ResvOverRun", ""), 0),
        _number(limits.get("BatchStartTimeout", ""), START_S),
    )


def _number(text: str, default: int) -> int:
    found = whole_number(text)
    return default if found is None else found


def _seconds(text: str, default: int) -> float:
    return math.inf if text.upper() in UNLIMITED else _number(text, default)


def may_end(old: Defined, new: Defined) -> bool:
    """Return whether a change of these settings can end a job, or bar new ones, whatever there is."""
    before, after = find_ending(old), find_ending(new)
    less = after.silent_s < before.silent_s or after.over_reservation < before.over_reservation
    less = less or after.start_s < before.start_s or count_allowed(new) < count_allowed(old)
    less = less or any(minutes < before.over[name] for name, minutes in after.over.items() if name in before.over)
    boots = (_find_boot_s(old), _find_boot_s(new))
    return less or any(now < boots[0].get(name, 0) for name, now in boots[1].items())


def count_allowed(defined: Defined) -> int:
    """Return how many jobs slurmctld keeps, also those that ended less than ``MinJobAge`` ago: it takes no more."""
    return _number(defined.limits.get("MaxJobCount", ""), MOST_JOBS)


def _find_boot_s(defined: Defined) -> dict[str, float]:
    """Return in how many seconds each node has to boot, and with an empty name what holds for reboots."""
    usual = _seconds(defined.limits.get("ResumeTimeout", ""), BOOT_S)
    found = dict.fromkeys(("", *defined.nodes), usual)
    own = {name: one["resumetimeout"] for name, one in defined.partitions.items() if "resumetimeout" in one}
    members = defined.members if own else {}
    for name, text in sorted(own.items(), key=lambda one: _seconds(one[1], BOOT_S)):  # the longest one counts
        found |= dict.fromkeys(members[name] or (), _seconds(text, BOOT_S))
    return found


def find_hurried(nodes: Iterable[NodeState], old: Defined, new: Defined) -> dict[str, float]:
    """Return the nodes that boot, and get less time for it, with the seconds: one that needs longer becomes DOWN."""
    booting = {one.name: set(re.split(r"[^a-z_]+", one.state.lower())) & {POWERED, REBOOTED} for one in nodes}
    before, after = _find_boot_s(old), _find_boot_s(new)
    keys = {name: "" if REBOOTED in parts else name for name, parts in booting.items() if parts}
    return {name: after[key] for name, key in keys.items() if after.get(key, 0) < before.get(key, 0)}


def find_ended(
    jobs: Sequence[Job], nodes: Sequence[NodeState], reservations: Mapping[str, int], now: float,
    old: Defined, new: Defined,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield running jobs that only the new settings end, by id, each with the reason.

    Args:
        reservations: when they end that end the jobs in them, Unix time.
        now: when ``jobs`` were listed, Unix time; 0 if it is not known.
    """
    if not may_end(old, new):
        return
    before, after = find_ending(old), find_ending(new)
    silent = {one.name for one in nodes if "not_responding" in one.state.lower()}
    hurried = find_hurried(nodes, old, new)
    flags = {one.strip().lower() for one in old.limits.get("PrologFlags", "").split(",")}
    sees_prologs = bool(flags & ALLOC_FLAGS) and "nohold" not in flags
    for job in (one for one in jobs if not one.waits):
        name = job.partitions[0] if job.partitions else ""
        late_min = (now - job.ends) / 60 if now and job.ends and job.state in TIMED else -math.inf
        ends = reservations.get(job.reservation, math.inf) if job.state in TIMED else math.inf
        limits = [ends + 60 * one.over_reservation for one in (after, before)]
        age_s = now - job.began if now and job.began else 0
        slow = job.prolog if sees_prologs else "Prolog" in old.programs
        if after.over.get(name, math.inf) <= late_min < before.over.get(name, math.inf):
            shown = one_line(name, 60)
            yield job.id, f"its time limit has passed, and OverTimeLimit of partition {shown} would no longer keep it"
        elif ends_sooner(job, now, *limits):
            shown = one_line(job.reservation, 60)
            yield job.id, f"ResvOverRun would no longer let it exceed its reservation {shown}, which ends before it"
        elif lost := sorted(job.nodes & hurried.keys()):
            why = f"it waits for {one_line(lost[0], 60)}, which boots, and ResumeTimeout is lowered"
            yield job.id, f"{why} to {hurried[lost[0]]:.0f} s"
        elif after.silent_s < before.silent_s and (lost := sorted(job.nodes & silent)):
            why = f"it runs on {one_line(lost[0], 60)}, which does not answer, and SlurmdTimeout is lowered"
            yield job.id, f"{why} to {after.silent_s:.0f} s"
        elif job.batch and job.state == "RUNNING" and slow and after.start_s <= age_s < before.start_s + MESSAGE_S:
            why = f"it began {age_s:.0f} s ago and may still be in its Prolog, and BatchStartTimeout is lowered"
            yield job.id, f"{why} to {after.start_s} s"


def ends_sooner(job: Job, now: float, after: float, before: float) -> bool:
    """Return whether a job would be ended at one time, and not yet at another one or by its time limit."""
    return after < min(before, max(job.ends or math.inf, now)) and now < before
