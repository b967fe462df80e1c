"""The plan of a migration: the order in which services stop, and each predicted outage against its budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from appliance.catalog import Service
from appliance.text import whole_number

MUNGE_LIMIT_S = 300
"""Lifetime of a credential (munge(7), TTL); a larger difference of clocks breaks every message of Slurm."""
SKEW_LIMIT_S = MUNGE_LIMIT_S / 5
"""Limit for the clocks of admin hosts: those of nodes may differ in the opposite direction."""
SKEW_WARN_S = 2.0
PARTS = ("stop", "last changes", "start", "switch")
DEFAULTS = {"stop": 0.5, "last changes": 0.5, "start": 1.5, "switch": 0.2}
"""Seconds, when no migration of this cluster has been measured on either host."""
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()  # noqa: SIM905
)
"""States of finished jobs (squeue(1))."""


@dataclass(frozen=True)
class ServiceOutage:
    """The predicted outage of a service and its budget, in seconds."""

    name: str
    predicted_s: float
    budget_s: float

    @property
    def over(self) -> bool:
        """Whether the prediction exceeds the budget."""
        return self.predicted_s > self.budget_s


def stop_groups(services: Sequence[Service]) -> list[list[str]]:
    """Return the names of the services that keep state, in groups that may stop together, in the order of stopping.

    A service stops before those that it needs.
    """
    left = {service.name: service for service in services if not service.live}
    groups: list[list[str]] = []
    while left:
        needed = {need for service in left.values() for need in (*service.needs, *service.after)}
        # No remaining service needs these. The catalogue refuses dependency cycles.
        group = [name for name in left if name not in needed] or list(left)
        groups.append(group)
        for name in group:
            del left[name]
    return groups


def stream_ports(services: Sequence[Service]) -> tuple[int, ...]:
    """Return the TCP ports of services, in their order."""
    return _numbers(port for service in services for port in service.ports)


def reset_ports(services: Sequence[Service]) -> tuple[int, ...]:
    """Return those of ``stream_ports`` whose sessions may be reset."""
    return _numbers(port for service in services for port in service.resets)


def _numbers(ports: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(port.removeprefix("tcp/")) for port in ports if port.startswith("tcp/"))


def predict_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each part of a migration: the median of recent measurements, else a default."""
    found = {part: [one[part] for one in measured if part in one] for part in PARTS}
    return {part: round(median(found[part]), 3) if found[part] else DEFAULTS[part] for part in PARTS}


def predict_outages(services: Sequence[Service], parts: Mapping[str, float], *, shared: bool) -> list[ServiceOutage]:
    """Return the predicted outage of each service.

    Args:
        shared: both hosts use one overlay: nothing can serve from the source while the target uses it.
    """
    whole, switch = sum(parts[part] for part in PARTS), parts["switch"]
    return [
        ServiceOutage(service.name, round(switch if service.live and not shared else whole, 3), service.outage.budget_s)
        for service in services
    ]


def needs_outside(services: Sequence[Service]) -> set[str]:
    """Return the services whose probe needs a machine outside the container."""
    return {service.name for service in services if service.probe and service.probe.outside}


def missing_jobs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the jobs that the source knew and that the target lost or requeued; both arguments map id to state.

    Finished jobs may have been purged meanwhile (MinJobAge of slurm.conf(5)).
    """
    lost = [job for job, state in before.items() if job not in after and state not in ENDED]
    requeued = [job for job, state in before.items() if state == "RUNNING" and after.get(job) == "PENDING"]
    return sorted([*lost, *requeued], key=_job_order)


def _job_order(job: str) -> tuple[int, str]:
    number = job.partition("_")[0]  # for a task, that of its array
    return whole_number(number) or 0, job
