"""Recovery of a migration that was killed: completed or rolled back before anything else happens on the host."""

from __future__ import annotations

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.progress import Progress
from appliance.tools import agent


def mark_path(cluster: Cluster) -> str:
    """Return the path of the record of a migration's progress. Not in /run: it must survive a power loss."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.move"


def recover_migration(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Complete or roll back a killed migration on a host; does nothing when there is none.

    Raises:
        Busy: a migration is under way.
    """
    if not host.works("test", "-e", mark_path(cluster)):
        return
    found = agent.call(host, "resume", {"mark": mark_path(cluster), "lock": str(cluster.places.lock)})
    if found["found"]:
        progress.report(
            f"note: a migration was interrupted on {host.name} ({found['found']}); it is {found['state']} there now"
        )
