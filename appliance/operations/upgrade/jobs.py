"""Jobs before and after an upgrade."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.upgrade.state import UpgradeOptions
from appliance.plan.machine import inside_argv
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, active_jobs, count_jobs, lost_jobs, read_ended, read_jobs
from appliance.plan.upgrade.upgrade import Upgrade

SETTLE_S = 5
"""Seconds before jobs are checked again: by then nodes have reported their jobs to the controller."""


def query_jobs(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return the state by id of all jobs of the running controller.

    Raises:
        CommandError: it does not answer.
    """
    if not cluster.find_role("controller"):
        return {}
    return read_jobs(host.run(*inside_argv(cluster.site, cluster.services, *JOBS), limit=JOBS_BYTES).text)


def list_before(cluster: Cluster, host: Host, options: UpgradeOptions) -> dict[str, str]:
    """Return as ``query_jobs``; of a controller that does not answer, which is a reason for an undo, none.

    Raises:
        CommandError: it does not answer, and this is not an undo.
    """
    try:
        return query_jobs(cluster, host)
    except CommandError as error:
        if not options.undo:
            raise
        cluster.env.progress.warn(f"jobs are not compared: {error.message.splitlines()[-1].strip()}")
        return {}


def check_jobs(cluster: Cluster, host: Host, now: Upgrade) -> str:
    """Check that every job that ran or waited still does; return a summary.

    Raises:
        SmsError: some were lost.
    """
    if now.lay:
        return f"{count_jobs(query_jobs(cluster, host))}, as in snapshot {now.lay}"
    with cluster.env.progress.step("check every job") as step:
        for pause_s in (0, SETTLE_S):
            cluster.env.clock.sleep(pause_s if active_jobs(now.jobs) else 0)
            after = query_jobs(cluster, host)
            if lost := lost_jobs(now.jobs, {**_ended(cluster, host), **after}):
                raise SmsError("; ".join(lost[:10]) + (f"; and {len(lost) - 10} more" if len(lost) > 10 else ""))
        kept = active_jobs(now.jobs)
        summary = f"{len(kept)} previous jobs: none lost"
        step.detail(summary)
    return summary


def _ended(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return ended jobs from the controller's log: the controller forgets them after MinJobAge."""
    if not (controller := cluster.find_role("controller")):
        return {}
    argv = ("grep", "-h", "-a", "job_complete: JobId=", f"/var/log/sms/{controller.name}.log")
    return read_ended(host.run(*inside_argv(cluster.site, cluster.services, *argv), ok=None).text)
