"""Releases jobs that Slurm holds because nodes could not launch them in the first seconds after a failover."""

from __future__ import annotations

from collections.abc import Collection

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.machine import inside_argv
from appliance.plan.services.jobs import QUEUE, read_refused

WATCH_S = 30
"""Seconds within which slurmctld has started the first waiting jobs, and nodes have refused those that they run."""
EVERY_S = 5


def release_refused(cluster: Cluster, host: Host, since: float) -> list[str]:
    """Release jobs that were scheduled since then and that nodes could not launch; return their identifiers.

    As long as nodes may refuse one, but for ``WATCH_S`` at most. One that fails again is left as it is.

    Args:
        since: Unix time in seconds; jobs that were held before stay held.
    """
    if not cluster.find_role("controller"):
        return []
    released: list[str] = []
    with cluster.env.progress.step("release jobs that nodes refused") as step:
        for _ in range(WATCH_S // EVERY_S):
            try:
                waiting, refused = _query(cluster, host, since, released)
                for job in refused:  # one that was cancelled meanwhile does not keep the others
                    host.run(*inside_argv(cluster.site, cluster.services, "scontrol", "release", job), ok=None)
                    released.append(job)
            except SmsError as error:
                cluster.env.progress.report(f"note: jobs that nodes refuse are not released: {error.message}")
                break
            if not (waiting or refused):
                break
            cluster.env.clock.sleep(EVERY_S)
        step.detail(str(len(released)))
    return released


def _query(cluster: Cluster, host: Host, since: float, released: Collection[str]) -> tuple[bool, list[str]]:
    """Return whether nodes may yet refuse a job, and those to release."""
    output = host.run(*inside_argv(cluster.site, cluster.services, *QUEUE), timeout=30).text
    waiting, refused = read_refused(output, since)
    return waiting, [job for job in refused if job not in released]
