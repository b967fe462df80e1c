"""A move planned: what ends before what, how long each service will be away, and whether that is too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from appliance.catalog import Service

MUNGE_LIMIT_S = 300
"""A credential lives so long (munge(7), TTL); clocks further apart break every message of Slurm."""
SKEW_LIMIT_S = MUNGE_LIMIT_S / 5
"""Clocks of admin hosts: nodes may be off as well, to the other side."""
SKEW_WARN_S = 2.0
PARTS = ("stop", "last changes", "start", "switch")
DEFAULTS = {"stop": 0.5, "last changes": 0.5, "start": 1.5, "switch": 0.2}
"""Seconds, where no move of this cluster has been measured on either host."""
UNKNOWN_RATE = 20e6
"""Bytes a second over SSH, where nothing has been measured."""
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()  # noqa: SIM905
)
"""States of jobs that do nothing any more (squeue(1))."""
TYPICAL_CHANGE = 8 << 20
"""Bytes that are written between the last pass over a running overlay and the stop: see agent/take.py, SMALL."""


@dataclass(frozen=True)
class Away:
    """How long a service will be away, and how long it may, in seconds."""

    name: str
    predicted_s: float
    budget_s: float

    @property
    def over(self) -> bool:
        """Whether that is too long."""
        return self.predicted_s > self.budget_s


def stop_groups(services: Sequence[Service]) -> list[list[str]]:
    """Names of the services that keep state, in groups that may end at once, the first of them first.

    Whoever needs another service ends before it.
    """
    left = {service.name: service for service in services if not service.live}
    groups: list[list[str]] = []
    while left:
        needed = {need for service in left.values() for need in (*service.needs, *service.after)}
        # Nobody needs the ones that end now. A ring cannot be: the catalogue refuses it.
        group = [name for name in left if name not in needed] or list(left)
        groups.append(group)
        for name in group:
            del left[name]
    return groups


def predict_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each part of a move: the median of those measured lately, else a default."""
    found = {part: [one[part] for one in measured if part in one] for part in PARTS}
    return {part: round(median(found[part]), 3) if found[part] else DEFAULTS[part] for part in PARTS}


def predict(services: Sequence[Service], parts: Mapping[str, float], *, shared: bool) -> list[Away]:
    """How long each service will be away.

    Args:
        shared: both hosts see one overlay: nothing can serve from the source while the target has it.
    """
    whole, switch = sum(parts[part] for part in PARTS), parts["switch"]
    return [
        Away(service.name, round(switch if service.live and not shared else whole, 3), service.outage.budget_s)
        for service in services
    ]


def needs_outside(services: Sequence[Service]) -> set[str]:
    """Services whose probe takes a machine beyond the container."""
    return {service.name for service in services if service.probe and service.probe.outside}


def missing_jobs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Jobs that the source knew and the target does not, or has put back into the queue; both are id to state.

    What had ended may be forgotten meanwhile (MinJobAge of slurm.conf(5)).
    """
    lost = [job for job, state in before.items() if job not in after and state not in ENDED]
    requeued = [job for job, state in before.items() if state == "RUNNING" and after.get(job) == "PENDING"]
    return sorted([*lost, *requeued], key=_job_order)


def _job_order(job: str) -> tuple[int, str]:
    number = job.partition("_")[0]  # of an array, the array's
    return int(number) if number.isdigit() else 0, job
