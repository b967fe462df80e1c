"""Ends a freeze of the overlay that nobody would end: the run that began it was killed together with its watchdog."""

from __future__ import annotations

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note


def frozen_mark(cluster: Cluster) -> str:
    """Return the path of the file that is there, and locked by its run, while the overlay is frozen."""
    return str(cluster.places.snapshots / "frozen")


def end_lost_freeze(cluster: Cluster, host: Host) -> bool:
    """Let the services write again where a killed run has left the overlay frozen; return whether one had.

    Raises:
        SmsError: it could not be ended.
    """
    if host.read(frozen_mark(cluster)) is None:
        return False
    request = {"overlay": str(cluster.places.overlay), "mark": frozen_mark(cluster)}
    if not cluster.env.agents.call(host, "thaw", request, cluster.env.progress)["thawed"]:
        return False
    note(cluster, host, "overlay", "thawed")
    cluster.env.progress.report(
        f"WARNING: the overlay of {host.name} was frozen by a run that was killed; its services write again"
    )
    return True
