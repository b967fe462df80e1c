"""The mirror of a host without an overlay: opened for a migration to it, kept with a stale copy after one from it."""

from __future__ import annotations

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.overlay.mirror import (
    MirrorOptions,
    check_members_room,
    clear,
    enlarge,
    known_same,
    make_members,
    plan_members,
)
from appliance.operations.overlay.mirrored import TOOLS, find_mirror, is_linked, open_members
from appliance.plan.overlay.mirror import Mirror, member_bytes, select_members, target_folders


def plan_standby(cluster: Cluster, source: Host, target: Host) -> tuple[tuple[str, ...], list[str]]:
    """Return the folders of the mirror that ``target`` gets in a migration, none without one; and what prevents it."""
    theirs, own = _mirror_in_use(cluster, source), find_mirror(cluster, target)
    wanted = next(host.mirror for host in cluster.site.admin_hosts if host.name == target.name)
    folders = target_folders(own, [str(folder) for folder in wanted], theirs)
    if not folders:
        return (), []
    try:
        length = overlay_length(cluster, source)
        if own and own.uuid:
            seen = {one.number: TOOLS[own.kind].inspect(target, own.path(one)) for one in own.members}
            check_members_room(target, select_members(own, seen), length)
        else:
            _plan_new(cluster, source, target, folders, length)
    except Refused as error:
        return folders, [f"the mirror of {target.name}: {error.message} ({error.hint})"]
    return folders, []


def overlay_length(cluster: Cluster, host: Host) -> int:
    """Return the size of the overlay on a host in bytes, also while it is in use."""
    return host.run("stat", "--dereference", "--format=%s", str(cluster.places.overlay)).numbers(1)[0]


def _mirror_in_use(cluster: Cluster, host: Host) -> Mirror | None:
    return find_mirror(cluster, host) if is_linked(cluster, host) else None


def _plan_new(cluster: Cluster, source: Host, target: Host, folders: tuple[str, ...], length: int) -> Mirror:
    """Plan a mirror on the target. As on the source, both members may be on one file system."""
    theirs = _mirror_in_use(cluster, source)
    same_fs = theirs is not None and known_same(source, [member.folder for member in theirs.members])
    new = plan_members(cluster, target, MirrorOptions(folders, same_fs=same_fs), length)
    for file in new.files:
        # Folders that both hosts share would be those of the mirror that is in use.
        if find_mirror(cluster, target) is None and target.works("test", "-e", file):
            raise Refused(
                f"{file} exists already, but {target.name} has no mirror",
                hint="if no other host uses it, remove it; else set other folders: admin_hosts[].mirror",
            )
    return new


def open_standby(cluster: Cluster, source: Host, target: Host, folders: tuple[str, ...]) -> None:
    """Open the mirror of ``target`` for a copy of the overlay of ``source``; create it if there is none.

    The caller holds the lock of ``target``.

    Raises:
        Refused, SmsError: it cannot be opened or created; a new one was removed.
    """
    mirror, length = find_mirror(cluster, target), overlay_length(cluster, source)
    if mirror and mirror.uuid:
        mirror = open_members(cluster, target, mirror)
        if mirror.size < member_bytes(length):
            enlarge(cluster, target, mirror, length)
        return
    if mirror:  # its creation was interrupted
        clear(cluster, target, mirror)
    new = _plan_new(cluster, source, target, folders, length)
    try:
        make_members(cluster, target, new)
    except BaseException:
        clear(cluster, target, find_mirror(cluster, target) or new)
        raise
