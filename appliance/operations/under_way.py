"""What is under way on a host, or was killed there: for status, and for verbs that have to wait for it."""

from __future__ import annotations

from appliance.errors import Busy, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import read_history
from appliance.plan.migration.under_way import Move, find_move
from appliance.shared.migration import MoveMark
from appliance.shared.records import RecordError, from_json
from appliance.tools import files


def mark_path(cluster: Cluster) -> str:
    """Return the path of the record of a migration's progress. Not in /run: it must survive a power loss."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.move"


def second_paths(cluster: Cluster) -> tuple[str, str]:
    """Return the paths of record and lock of the target of a switch on one host."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.second.move", f"{cluster.places.lock}.second"


def read_move(cluster: Cluster, host: Host) -> MoveMark | None:
    """Return the state of a migration that is under way on a host or was killed there; None without one.

    One that cannot be read counts as one that moves ports.
    """
    data = host.read(mark_path(cluster))
    try:
        return from_json(MoveMark, data) if data is not None else None
    except RecordError:
        return MoveMark("", "", 0, {})


def query_move(cluster: Cluster, host: Host) -> Move | None:
    """Return what is under way on a host, or was killed there; None if that is not known, or a moment's work."""
    mark, locked = read_move(cluster, host), files.is_locked(host, str(cluster.places.lock))
    if mark is None and not locked:
        return None
    move = find_move(host.name, mark, read_history(cluster, host), under_way=locked)
    if move and mark is None and move.on == host.name and not host.works("test", "-d", f"/proc/{move.process}"):
        return None  # it has ended without a line about that, and another run has the lock
    return move


def explain_busy(cluster: Cluster, host: Host, error: Busy) -> Busy:
    """Return the refusal of a verb that found another one at work on a host, with what that does if it is known."""
    try:
        move = query_move(cluster, host)
    except SmsError:
        return error
    return Busy(move.text, hint=move.hint) if move and move.under_way else error
