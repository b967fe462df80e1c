"""Ends a freeze of the overlay that nobody would end: the run that began it was killed together with its watchdog."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.shared.overlay import frozen_mark


def has_mark(cluster: Cluster) -> bool:
    """Return whether the overlay of this machine is frozen, or was when a run was killed."""
    return cluster.env.hosts.read_here(frozen_mark(str(cluster.places.overlay))) is not None


def end_lost_freeze(cluster: Cluster, host: Host) -> bool:
    """Let the services write again where a killed run has left the overlay frozen; return whether one had.

    Where that fails, it is reported: what can be done nevertheless, such as a status or a stop, is done.
    """
    overlay = str(cluster.places.overlay)
    mark = frozen_mark(overlay)
    if host.read(mark) is None:
        return False
    try:
        request = {"overlay": overlay, "mark": mark}
        if not cluster.env.agents.call(host, "thaw", request, cluster.env.progress)["thawed"]:
            return False
        note(cluster, host, "overlay", "thawed")
    except SmsError as error:
        cluster.env.progress.report(
            f"WARNING: whether the overlay of {host.name} is frozen is not known: {error.message}"
        )
        return False
    cluster.env.progress.report(
        f"WARNING: the overlay of {host.name} was frozen by a run that was killed; its services write again"
    )
    return True
