"""What a move that was killed has left on a host: finished or undone before anything else is done there."""

from __future__ import annotations

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.progress import Progress
from appliance.tools import agent


def mark_path(cluster: Cluster) -> str:
    """Where a host keeps how far a move is. Not below /run: a host that was switched off goes on as well."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.move"


def take_up(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Finish or undo what a move that was killed has left on a host; where there is nothing, nothing is done.

    Raises:
        Busy: a move is under way.
    """
    if not host.works("test", "-e", mark_path(cluster)):
        return
    told = agent.ask(host, "resume", {"mark": mark_path(cluster), "lock": str(cluster.places.lock)})
    if told["found"]:
        progress.say(f"note: a move was cut off on {host.name} ({told['found']}); it is {told['state']} there now")
