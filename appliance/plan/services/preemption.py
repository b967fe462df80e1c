"""Which running jobs make room for one that waits: by the tier of its partition, or by its QOS.

The rules are those of Slurm's preempt/partition_prio and preempt/qos, of ``_is_job_preempt_exempt`` (preempt.c in
src/slurmctld) and ``acct_policy_get_preemptable_time`` (acct_policy.c). A job that is only suspended is not lost. A
reservation keeps its nodes for its jobs. Not known here: the flag ``OverPartQOS`` of a QOS, ``min_exempt_priority`` of
``PreemptParameters``, and whether a job that waits fits on the nodes: each that has one of them may take it, unless it
requires as many nodes as it asks for, and these are others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache

from appliance.plan.services.admission import read_seconds
from appliance.plan.services.defined import NOT_DEFINED, Defined
from appliance.plan.services.ending import TIMED, ends_sooner
from appliance.plan.services.jobs import Job
from appliance.text import one_line, whole_number

QOS = ("sacctmgr", "--noheader", "--parsable2", "list", "qos", "format=name,preempt,preemptmode,preemptexempttime")
"""Prints each QOS in a line. slurmctld itself does not print which ones a QOS preempts."""
ENDS = {"CANCEL", "REQUEUE"}
"""Modes of preemption that end a job."""
OF_CLUSTER = {"", "CLUSTER", "OFF"}
"""Modes of a QOS that has none of its own: ``OFF`` is 0 there."""


Key = tuple[str, str, str]
"""Partition, QOS and reservation of a job that waits."""


@dataclass(frozen=True)
class Qos:
    """A QOS. ``modes``: words of its PreemptMode, none if it has that of the cluster; ``exempt_s``: None likewise."""

    preempts: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    exempt_s: float | None = None


@dataclass(frozen=True)
class Preemption:
    """What a slurm.conf says about it.

    ``by``: ``partition_prio``, ``qos``, or another word for none. ``modes``: words of PreemptMode. Of partitions:
    ``ending``, whose jobs are ended; ``tiers``, a higher one comes first; ``qos``. ``exempt_s``: seconds after its
    start in which no job is.
    """

    by: str
    modes: frozenset[str]
    ending: frozenset[str]
    tiers: Mapping[str, int]
    qos: Mapping[str, str]
    exempt_s: float

    def find_rule(
        self, waits: tuple[str, str], runs: tuple[str, str], known: Mapping[str, Qos] | None
    ) -> Callable[[int, int], bool] | None:
        """Return by which priorities a job that waits takes the place of one that runs; None if it never does.

        Args:
            waits, runs: partition and QOS of both.
        """
        if self.by == "partition_prio":
            higher = self.tiers.get(waits[0], 0) > self.tiers.get(runs[0], 0)
            return _always if runs[0] in self.ending and higher else None
        if self.by != "qos" or not waits[1] or not runs[1]:
            return None
        same = waits[1] == runs[1]
        if known is None:
            return _is_higher if same and "WITHIN" in self.modes else None if same else _always
        theirs, own = known.get(waits[1]), known.get(runs[1])
        if theirs is None or own is None or not (own.modes or self.modes) & ENDS:
            return None
        flags = theirs.modes | self.modes
        if same:
            return _is_higher if "WITHIN" in flags else None
        if runs[1] not in theirs.preempts:
            return None
        return _is_higher if "PRIORITY" in flags else _always

    def find_time(self, job: Job, known: Mapping[str, Qos] | None) -> float:
        """Return when a job is no longer exempt, Unix time."""
        names = (self.qos.get(_partition(job), ""), job.qos)
        own = [known[name].exempt_s for name in names if name in known] if known else []
        return job.began + next((one for one in own if one is not None), self.exempt_s)


def _always(waits: int, runs: int) -> bool:
    return True


def _is_higher(waits: int, runs: int) -> bool:
    return waits > runs


def _partition(job: Job) -> str:
    return job.partitions[0] if job.partitions else ""


def find_preemption(defined: Defined) -> Preemption:
    """Return what these files say about it."""
    limits, partitions = defined.limits, defined.partitions
    mode = limits.get("PreemptMode", "")
    return Preemption(
        limits.get("PreemptType", "").lower().rpartition("/")[2],
        _read_modes(mode),
        frozenset(name for name, one in partitions.items() if _read_modes(one.get("preemptmode", mode)) & ENDS),
        {name: _read_tier(one.get("prioritytier", one.get("priority", ""))) for name, one in partitions.items()},
        {name: one["qos"] for name, one in partitions.items() if "qos" in one},
        _read_exempt(limits.get("PreemptExemptTime", "")) or 0,
    )


def _read_modes(text: str) -> frozenset[str]:
    return frozenset(one.strip() for one in text.strip('"').upper().split(","))


def _read_tier(text: str) -> int:
    found = whole_number(text)
    return 1 if found is None else found


def _read_exempt(text: str) -> float | None:
    found = read_seconds(text)
    return None if found is None or math.isinf(found) else found


def read_qos(output: str) -> dict[str, Qos]:
    """Parse the output of ``QOS``; other lines are ignored."""
    rows = (line.split("|") for line in output.splitlines())
    return {
        row[0]: Qos(frozenset(row[1].split(",")) - {""}, _read_modes(row[2]) - OF_CLUSTER, _read_exempt(row[3]))
        for row in rows
        if len(row) == 4
    }


def preempts_more(old: Defined, new: Defined) -> bool:
    """Return whether jobs can be ended for others, and could not before, or only later."""
    before, after = find_preemption(old), find_preemption(new)
    if after.by not in ("partition_prio", "qos"):
        return False
    if after.by != before.by:
        return bool(after.by == "qos" or _rises(before, after))
    sooner = after.exempt_s < before.exempt_s
    if after.by == "partition_prio":
        return sooner or _rises(before, after)
    begins = bool(after.modes & ENDS) > bool(before.modes & ENDS) or "WITHIN" in after.modes - before.modes
    return sooner or begins or "PRIORITY" in before.modes - after.modes


def _rises(before: Preemption, after: Preemption) -> bool:
    both = before.tiers.keys() & after.tiers.keys()

    def ends(one: Preemption, name: str, other: str) -> bool:
        return one.by == "partition_prio" and name in one.ending and one.tiers[other] > one.tiers[name]

    return any(ends(after, name, other) and not ends(before, name, other) for name in both for other in both)


def find_preempted(
    jobs: Sequence[Job], reservations: Set[str], qos: Mapping[str, Qos] | None, now: float, old: Defined, new: Defined
) -> Iterator[tuple[str, str]]:
    """Yield running jobs that one which waits would end only with the new settings, by id, each with the reason.

    Args:
        reservations: those whose nodes only their own jobs use.
        qos: None if they are not known: any QOS may preempt another one.
        now: when ``jobs`` were listed, Unix time; 0 if it is not known.
    """
    if not preempts_more(old, new):
        return
    before, after = find_preemption(old), find_preemption(new)
    waiting: dict[Key, Job] = {}
    places: dict[Key, Set[str] | None] = {}
    for job in (one for one in jobs if one.waits and one.priority and one.depends in NOT_DEFINED):
        place = job.required if 0 < job.most_nodes <= len(job.required) else None
        for key in ((name, one, job.reservation) for name in job.partitions for one in job.qos.split(",")):
            if key not in waiting or job.priority > waiting[key].priority:
                waiting[key] = job
            known = places.get(key, frozenset())
            places[key] = None if known is None or place is None else known | place
    was = _find_taker(waiting, places, reservations, qos, before, old)
    becomes = _find_taker(waiting, places, reservations, qos, after, new)
    for job in (one for one in jobs if one.state in TIMED):
        if not (taker := becomes(job)):
            continue
        since = before.find_time(job, qos) if was(job) else math.inf
        if ends_sooner(job, now, after.find_time(job, qos), since):
            how = "waits in a partition of a higher PriorityTier" if after.by == "partition_prio" else "waits"
            named = f" by QOS {one_line(taker.qos, 60)}" if after.by == "qos" else ""
            unknown = ", as the QOS are not known" if after.by == "qos" and qos is None else ""
            yield job.id, f"job {taker.id}, which {how}, {'may' if unknown else 'would'} take its place{named}{unknown}"


def _find_taker(
    waiting: Mapping[Key, Job], places: Mapping[Key, Set[str] | None], reservations: Set[str],
    qos: Mapping[str, Qos] | None, preemption: Preemption, defined: Defined,
) -> Callable[[Job], Job | None]:  # fmt: skip
    """Return what finds a job that waits and takes the place of one that runs, on one of its nodes.

    Args:
        waiting: the one with the highest priority of each kind.
        places: the nodes that all of a kind require; None if one of them may have others.
    """
    members = defined.members if waiting else {}

    @cache
    def able(runs: tuple[str, str], reservation: str) -> list[tuple[Callable[[int, int], bool], Job, Set[str] | None]]:
        return [
            (rule, job, members.get(name) if (place := places[name, own, reserved]) is None else place)
            for (name, own, reserved), job in waiting.items()
            if reservation not in reservations or reserved == reservation
            if (rule := preemption.find_rule((name, own), runs, qos))
        ]

    def find(job: Job) -> Job | None:
        found = able((_partition(job), job.qos), job.reservation)
        return next(
            (
                other
                for rule, other, nodes in found
                if rule(other.priority, job.priority) and (nodes is None or not job.nodes.isdisjoint(nodes))
            ),
            None,
        )

    return find
