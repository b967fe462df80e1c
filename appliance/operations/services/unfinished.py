"""What an interrupted migration, upgrade or failover left on a host: a start recovers it first, or reports it.

An upgrade writes its record before each step, so that the next run can resume it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import Busy
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.operations.lease import Leases
from appliance.operations.overlay.generation import refuse_older
from appliance.operations.overlay.mirrored import DISK_WAIT_S, close_mirror, find_mirror, open_members
from appliance.operations.overlay.overlay import seeded_with
from appliance.operations.preflight import find_instance, lock_host
from appliance.operations.snapshots.restore import restore_own
from appliance.operations.under_way import explain_busy, mark_path, second_paths
from appliance.plan.migration.failover import OpenFailover, find_open_failover, measure_loss
from appliance.plan.upgrade.upgrade import (
    DONE,
    LAYING,
    RESTORED,
    RETURNING,
    STARTING,
    SWITCHING,
    Upgrade,
    read_upgrade,
)
from appliance.progress import Silent
from appliance.shared.records import to_json
from appliance.tools import files

OVERLAY_REPLACED = {("migrate", "up"), ("migrate", "arrived"), ("failover", "restored")}
"""Verbs and events of the history after which the host has another overlay."""


def moved_path(cluster: Cluster) -> str:
    """Return the path of the record of the last move between the services container and an engine."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.moved.json"


def recover_migration(cluster: Cluster, host: Host) -> None:
    """Complete or roll back a killed migration on a host; does nothing when there is none.

    Raises:
        Busy: a migration is under way.
    """
    if not is_interrupted(cluster, host):
        return
    try:
        found = resume_migration(cluster, host)
    except Busy as error:
        raise explain_busy(cluster, host, error) from error
    if found["found"]:
        what = "switch to a second instance" if found.get("second") else "migration"
        now = f"it is {found['state']} there now"
        cluster.env.progress.report(f"note: a {what} was interrupted on {host.name} ({found['found']}); {now}")


def is_interrupted(cluster: Cluster, host: Host) -> bool:
    """Return whether a migration was killed on a host, or is under way there."""
    return host.works("test", "-e", mark_path(cluster), "-o", "-e", second_paths(cluster)[0])


def was_killed(cluster: Cluster, host: Host) -> bool:
    """Return whether a migration or switch was killed on this machine with its agents: nobody is at work there."""
    marks = (mark_path(cluster), second_paths(cluster)[0])
    there = any(cluster.env.hosts.read_here(mark) is not None for mark in marks)
    return there and not files.is_locked(host, str(cluster.places.lock))


def refuse_interrupted(cluster: Cluster, host: Host) -> None:
    """Refuse if a migration was killed since it was recovered, while the caller waited for the lock of the host.

    Raises:
        Busy: it was; what it left in place may not be the newest overlay.
    """
    if is_interrupted(cluster, host):
        raise Busy(f"a migration was interrupted on {host.name} just now", hint="run this again: it recovers it first")


def resume_migration(cluster: Cluster, host: Host) -> dict[str, Any]:
    """Make the agent complete or roll back a killed migration; return the state that it found, and the present one.

    Raises:
        Busy: a migration is under way.
    """
    _reopen_mirror(cluster, host)
    mark, lock = second_paths(cluster)
    own = {"mark": mark_path(cluster), "lock": str(cluster.places.lock)}
    found = cluster.env.agents.call(host, "resume", {**own, "second_mark": mark, "second_lock": lock})
    close_idle_mirror(cluster, host)
    return found


def _reopen_mirror(cluster: Cluster, host: Host) -> None:
    """Open the mirror that a killed migration to a host used: after a reboot the agent finds its copy there.

    Raises:
        Refused: it cannot be opened.
    """
    try:
        mark = json.loads(host.read(mark_path(cluster)) or b"{}")
        used = mark["side"] == "arrive" and mark["request"].get("mirror")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return  # the agent reports it
    mirror = find_mirror(cluster, host) if used else None
    if mirror and mirror.uuid and not find_instance(cluster, host):
        busy = f"another run is at work on the mirror on {host.name}"
        with cluster.env.locks.hold(host, f"{cluster.places.lock}.mirror", busy):
            open_members(cluster.showing(Silent()), host, mirror, patience_s=DISK_WAIT_S)


def close_idle_mirror(cluster: Cluster, host: Host) -> None:
    """Close the mirror of a host on which nothing uses it, as after a migration from there, or one that failed.

    Raises:
        SmsError: it cannot be closed.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None or mirror.mounted_on != host.name:
        return
    with suppress(Busy), lock_host(cluster, host):
        if not find_instance(cluster, host) and not is_interrupted(cluster, host):
            close_mirror(cluster, host)


def note_path(cluster: Cluster, *, done: bool = False) -> str:
    """Return the path of the record on the host; with ``done`` of the last completed upgrade."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.{'upgraded' if done else 'upgrade'}.json"


def read_last_upgrade(cluster: Cluster, host: Host, *, done: bool = False) -> Upgrade | None:
    """Return the last upgrade on the host, with ``done`` the last completed one; None if there was none.

    An interrupted upgrade is ignored if the overlay was replaced since, by a migration or failover.

    Raises:
        SmsError: its record is invalid.
    """
    last = read_upgrade(host.read(note_path(cluster, done=done)), cluster.site.cluster)
    if last is None or last.ended:
        return last
    for line in read_history(cluster, host):
        at = line.get("at")
        replaced = (line.get("verb"), line.get("event")) in OVERLAY_REPLACED
        if replaced and isinstance(at, int | float) and at > last.began:
            return None
    return last


def write_phase(cluster: Cluster, host: Host, upgrade: Upgrade, **facts: Any) -> Upgrade:
    """Write the record durably, and its phase with ``facts`` to the history; return the record."""
    if upgrade.phase == DONE:
        host.write(note_path(cluster, done=True), to_json(upgrade), mode=0o600)
    host.write(note_path(cluster), to_json(upgrade), mode=0o600)
    keys = {"before": upgrade.before.key, "after": upgrade.after.key}
    note(cluster, host, "upgrade", upgrade.phase, **keys, **facts)
    return upgrade


def restore_overlay(cluster: Cluster, host: Host, upgrade: Upgrade) -> Upgrade:
    """Restore the stopped overlay of before the upgrade; the present one is kept as a snapshot.

    Raises:
        Refused, SmsError: as ``restore_own``.
    """
    if upgrade.kept:
        restore_own(cluster, host, str(upgrade.kept))
    return write_phase(cluster, host, upgrade.at(RESTORED))


def image_of_unfinished(cluster: Cluster, host: Host) -> Path | None:
    """Return the image that matches the overlay after an interrupted upgrade; None if none was interrupted.

    If its rollback was interrupted, the old overlay is restored first, unless another host has a newer one. A switch
    that was interrupted has been recovered before (``recover_migration``).

    Raises:
        Refused, SmsError: the restore failed, or another host has a newer overlay.
    """
    last = read_last_upgrade(cluster, host)
    if last is None or last.ended or find_instance(cluster, host):
        return None
    if last.phase in (LAYING, RETURNING):
        leases = Leases(host, cluster, tolerant=True)
        leases.query()
        refuse_older(cluster, host, leases, set_aside=False)
        last = restore_overlay(cluster, host, last)
    side = last.after if last.phase == STARTING or has_switched(cluster, host, last) else last.before
    cluster.env.progress.report(
        f"note: an upgrade to {last.after.key[:12]} was interrupted; image {side.key[:12]} matches the overlay, "
        "`sms upgrade` resumes the upgrade"
    )
    return Path(side.path)


def has_switched(cluster: Cluster, host: Host, upgrade: Upgrade) -> bool:
    """Return whether an interrupted switch, which has been recovered, was completed: the overlay is the new image's.

    The file of before is the old one's. Another one, such as a restored or a grown copy, has the key of the image that
    it was seeded for; without that, the old image must not be started on it.
    """
    if upgrade.phase != SWITCHING:
        return False
    if running := find_instance(cluster, host):
        return running.image == upgrade.after.path
    if overlay_inode(cluster, host) in (None, 0, upgrade.inode):
        return False
    return seeded_with(host, str(cluster.places.overlay)).rpartition(" ")[2] in ("", upgrade.after.key)


@dataclass(frozen=True)
class FailoverLoss:
    """What an interrupted failover lost that a start has ended. Times in Unix seconds; the others as in ``Loss``.

    ``alive``: when a failed host was last heard from; 0 if that is not known.
    """

    old: tuple[str, ...]
    snapshot: int | None
    taken: float
    alive: float
    lost_s: float
    dead_s: float | None
    taken_on: str = ""


def last_sign(cluster: Cluster, host: Host, old: tuple[str, ...]) -> float:
    """Return the Unix time in seconds when the guard of a failed host last queried ``host``; 0 if it never did."""
    path = str(cluster.places.sign)
    if (host.read(path) or b"").decode(errors="replace") not in old:
        return 0.0
    shown = host.run("stat", "-c", "%Y", path, ok=None)
    return 0.0 if shown.status else float(shown.numbers(1)[0])


def overlay_inode(cluster: Cluster, host: Host) -> int | None:
    """Return the inode of the overlay on ``host``: 0 without one, None if its mirror is not mounted."""
    path = str(cluster.places.overlay)
    found = host.run("stat", "-L", "-c", "%i", path, ok=None)
    if found.status == 0:
        return found.numbers(1)[0]
    return None if host.works("test", "-L", path) else 0


def find_restored(cluster: Cluster, host: Host, *, top: int, holds_lease: bool) -> OpenFailover | None:
    """Return the interrupted failover whose snapshot is the overlay on ``host``; None without one.

    Args:
        top, holds_lease: as for ``find_open_failover``.
    """
    found = find_open_failover(read_history(cluster, host), top=top, holds_lease=holds_lease)
    return found if found and found.has_restored(overlay_inode(cluster, host)) else None


def end_failover(cluster: Cluster, host: Host, found: OpenFailover) -> FailoverLoss:
    """Return what an interrupted failover lost, now that its snapshot serves; write it to the history."""
    alive = last_sign(cluster, host, found.old)
    loss = measure_loss(taken=found.taken, alive=alive, began=found.began, served=cluster.env.clock.time())
    note(cluster, host, "failover", "done", lost_s=loss.lost_s, dead_s=loss.dead_s, alive=alive)
    return FailoverLoss(found.old, found.snapshot, found.taken, alive, loss.lost_s, loss.dead_s)
