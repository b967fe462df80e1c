"""``sms overlay create``: create and seed the overlay without starting the services container."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import deliver, trust
from appliance.operations.lease import check_lease, hold_lease_still
from appliance.operations.overlay.generation import find_lost, mark_overlay, refuse_second, retire_overlay
from appliance.operations.overlay.mirrored import opened
from appliance.operations.overlay.overlay import (
    archive_for,
    check_overlay,
    fitting,
    overlay_commands,
    overlay_mark,
    ready_overlay,
    seeded_with,
)
from appliance.operations.preflight import check_programs, find_instance, lock_host
from appliance.tools import files


@dataclass(frozen=True)
class Created:
    """The overlay at ``path`` on ``host``; whether this run created it, and whether this run seeded it."""

    host: str
    path: str
    created: bool
    seeded: bool


def create(cluster: Cluster, host: Host) -> Created:
    """Create the overlay where there is none, and seed it from the site file.

    An overlay that is older than the newest one, which is gone, is renamed first: no start uses it.

    Raises:
        Refused: another host holds the lease or has an overlay, something has it open, or there is no room; nothing was
            changed.
        SmsError: it is damaged, or cannot be seeded.
    """
    check_programs(host)
    path = str(cluster.places.overlay)
    with lock_host(cluster, host):
        if find_instance(cluster, host):
            return Created(host.name, path, False, False)
        with hold_lease_still(host, cluster), opened(cluster, host):
            exists = check_overlay(cluster, host)
            exists = exists and not _set_aside(cluster, host)
            generation = 0 if exists else refuse_second(cluster, host)
            folders = (cluster.places.images, cluster.places.public_keys)
            files.make_folders(host, *map(str, folders))
            image = trust(cluster, host, *deliver(cluster, host, None))
            if exists and seeded_with(host, path) == overlay_mark(archive_for(fitting(cluster, host)), image):
                return Created(host.name, path, False, False)
            ready_overlay(cluster, host, image)
            if not exists:
                mark_overlay(cluster, host, generation)
    return Created(host.name, path, not exists, True)


def _set_aside(cluster: Cluster, host: Host) -> str:
    """Rename an overlay that is older than the newest one, which is gone; return its new path, else an empty string."""
    lost = find_lost(cluster, host)
    kept = retire_overlay(cluster, host, lost.generation) if lost else ""
    if kept:
        cluster.env.progress.report(
            f"note: the overlay of {host.name} is older than the newest one, which is gone: kept as {kept}"
        )
    return kept


def rehearse_create(cluster: Cluster, host: Host) -> list[str]:
    """Check all that ``create`` checks and return its commands. Sends the image, changes nothing else.

    Raises:
        Refused: as ``create`` would.
    """
    check_programs(host)
    if find_instance(cluster, host):
        return []
    check_lease(host, cluster)
    exists = check_overlay(cluster, host) and not find_lost(cluster, host)
    if not exists:
        refuse_second(cluster, host)
    image = trust(cluster, host, *deliver(cluster, host, None))
    mark = overlay_mark(archive_for(fitting(cluster, host) if exists else cluster), image)
    if exists and seeded_with(host, str(cluster.places.overlay)) == mark:
        return []
    return overlay_commands(cluster, host, image, mark, exists)
