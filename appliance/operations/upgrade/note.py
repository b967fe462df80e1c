"""How far the last upgrade came: written down before each step, so that the next run goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.plan.machine import instance_name
from appliance.plan.upgrade.upgrade import DONE, LAYING, RESTORED, RETURNING, STARTING, Upgrade, read_upgrade
from appliance.progress import Progress
from appliance.tools import apptainer

CAME = {("migrate", "up"), ("migrate", "arrived"), ("failover", "restored")}
"""Verbs and events of the history: another overlay has come to the host."""


def note_path(cluster: Cluster, *, done: bool = False) -> str:
    """Where it lies on the host; with ``done`` that of the last one that was done."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.{'upgraded' if done else 'upgrade'}.json"


def read_last(cluster: Cluster, host: Host, *, done: bool = False) -> Upgrade | None:
    """The last upgrade on the host, ended or not, with ``done`` the last one that was done; None where there was none.

    One that was cut off is of the past where an overlay has come from elsewhere since.

    Raises:
        SmsError: its note cannot be read.
    """
    last = read_upgrade(host.read(note_path(cluster, done=done)), cluster.site.cluster)
    if last is None or last.ended:
        return last
    for line in read_history(cluster, host):
        at = line.get("at")
        if (line.get("verb"), line.get("event")) in CAME and isinstance(at, int | float) and at > last.began:
            return None
    return last


def write_phase(cluster: Cluster, host: Host, upgrade: Upgrade, **facts: Any) -> Upgrade:
    """Write down how far it has come, for good, with ``facts`` for the history; give it back."""
    if upgrade.phase == DONE:
        host.write(note_path(cluster, done=True), upgrade.text(), mode=0o600)
    host.write(note_path(cluster), upgrade.text(), mode=0o600)
    keys = {"before": upgrade.before.key, "after": upgrade.after.key}
    note(cluster, host, "upgrade", upgrade.phase, **keys, **facts)
    return upgrade


def put_back(cluster: Cluster, host: Host, upgrade: Upgrade, progress: Progress) -> Upgrade:
    """The stopped overlay as it was before the upgrade; what is there now is kept as a snapshot.

    Raises:
        Refused, SmsError: as a restore.
    """
    from appliance.operations.snapshots.restore import restore  # it imports what imports this

    if upgrade.kept:
        restore(cluster, host, str(upgrade.kept), progress)
    return write_phase(cluster, host, upgrade.at(RESTORED))


def image_of_unfinished(cluster: Cluster, host: Host, progress: Progress) -> Path | None:
    """The image that goes with the overlay as an upgrade left it that was cut off; None where none was.

    Where it was cut off on its way back, the overlay of before is put back first.

    Raises:
        Refused, SmsError: it cannot be.
    """
    last = read_last(cluster, host)
    if last is None or last.ended or apptainer.find_instance(host, instance_name(cluster.site)):
        return None
    if last.phase in (LAYING, RETURNING):
        last = put_back(cluster, host, last, progress)
    side = last.after if last.phase == STARTING else last.before
    progress.say(
        f"note: an upgrade to {last.after.key[:12]} was cut off; {side.key[:12]} goes with the overlay as it is, "
        "and `sms upgrade` goes on"
    )
    return Path(side.path)
