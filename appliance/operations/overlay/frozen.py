"""Ends a freeze of the overlay that nobody would end: the run that began it was killed together with its watchdog."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.shared.overlay import frozen_mark


def may_be_frozen(cluster: Cluster) -> bool:
    """Return whether the overlay of this machine is frozen, or was when a run was killed."""
    return bool(cluster.env.hosts.read_here(frozen_mark(str(cluster.places.overlay))))


def thaw_lost(cluster: Cluster, host: Host) -> bool:
    """Let the services write again where a killed run has left the overlay frozen; return whether one had.

    Raises:
        SmsError: it could not be ended.
    """
    overlay = str(cluster.places.overlay)
    mark = frozen_mark(overlay)
    if not host.read(mark):
        return False
    request = {"overlay": overlay, "mark": mark}
    thawed: bool = cluster.env.agents.call(host, "thaw", request, cluster.env.progress)["thawed"]
    return thawed


def end_lost_freeze(cluster: Cluster, host: Host) -> None:
    """As ``thaw_lost``, and report it.

    Where that fails, it is reported, too: what can be done nevertheless, such as a status or a stop, is done.
    """
    try:
        if not thaw_lost(cluster, host):
            return
        note(cluster, host, "overlay", "thawed")
    except SmsError as error:
        message = f"whether the overlay of {host.name} is frozen is not known: {error.message}"
    else:
        message = f"the overlay of {host.name} was frozen by a run that was killed; its services write again"
    cluster.env.progress.warn(message)
