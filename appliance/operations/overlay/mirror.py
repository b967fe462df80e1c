"""``sms overlay mirror``: keep the overlay on two file systems, each repaired from the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.lease import hold_lease_still
from appliance.operations.overlay.mirrored import (
    TOOLS,
    Tool,
    close_mirror,
    find_mirror,
    find_problems,
    is_linked,
    mount_members,
    note_copy,
    open_mirror,
    query_mirror,
    write_note,
)
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.operations.preflight import check_programs, find_instance, lock_host
from appliance.plan.overlay.mirror import (
    GIB,
    REBUILD,
    Member,
    Mirror,
    check_separate,
    member_bytes,
    read_mirror,
    room_bytes,
    select_members,
)
from appliance.tools import ext3, files, loop
from appliance.tools.space import need_space


@dataclass(frozen=True)
class MirrorOptions:
    """A mirror to create: the folders of its two files, bytes of each file (0: as much as the overlay may need).

    ``same_fs``: allow both folders on one file system.
    """

    folders: Sequence[str]
    size: int = 0
    same_fs: bool = False


@dataclass(frozen=True)
class RebuildOptions:
    """The folder of the new member (None: that of the old one), and the member to replace (None: lost or faulty).

    ``same_fs``: allow both members on one file system.
    """

    folder: str | None = None
    number: int | None = None
    same_fs: bool = False


@dataclass(frozen=True)
class MirrorChange:
    """What a verb on the mirror did, or would do; ``steps`` is for display, empty when there was nothing to do."""

    host: str
    changed: bool
    steps: tuple[str, ...] = ()
    mended: int = 0


def create(cluster: Cluster, host: Host, options: MirrorOptions, *, dry_run: bool = False) -> MirrorChange:
    """Move the overlay of the stopped services container onto a mirror of two files.

    Raises:
        Refused: the services container runs, a folder is missing, or there is no room; nothing was changed.
        SmsError: it failed; the overlay is unchanged.
    """
    check_programs(host)
    with keep_stopped(cluster, host):
        mirror, linked = find_mirror(cluster, host), is_linked(cluster, host)
        if mirror and linked:
            if sorted(member.folder for member in mirror.members) == sorted(options.folders):
                host.remove(_before(cluster))
                return MirrorChange(host.name, False)
            places = " and ".join(member.folder for member in mirror.members)
            raise Refused(f"the overlay is mirrored already, in {places}", hint="sms overlay mirror rebuild --on DIR")
        new = _plan(cluster, host, options)
        steps = [
            *(f"create {path}, {new.size >> 20} MiB, sparse" for path in new.files),
            f"create a mirror of both ({new.kind}), mounted at {cluster.places.mirror}",
            f"copy {cluster.places.overlay} there, read the copy and compare",
            f"replace {cluster.places.overlay} by a link to the copy",
        ]
        if not dry_run:
            if mirror:
                clear(cluster, host, mirror)
            _make(cluster, host, new)
    return MirrorChange(host.name, True, tuple(steps))


def _plan(cluster: Cluster, host: Host, options: MirrorOptions) -> Mirror:
    """Plan the mirror.

    Raises:
        Refused: it cannot be created.
    """
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path):
        raise Refused(f"there is no overlay {path} on {host.name}", hint="`sms overlay create` creates it")
    return plan_members(cluster, host, options, ext3.sizes_of(host, path)[0])


def plan_members(cluster: Cluster, host: Host, options: MirrorOptions, length: int) -> Mirror:
    """Plan a mirror for an overlay of ``length`` bytes.

    Raises:
        Refused: it cannot be created.
    """
    folders, size = options.folders, options.size
    check_separate(folders, [_file_system(host, folder) for folder in folders], same_fs=options.same_fs)
    if size and size < room_bytes(length):
        raise Refused(
            f"a member of {size >> 20} MiB is too small for an overlay of {length >> 20} MiB",
            hint=f"give at least {room_bytes(length) >> 20}M, better {member_bytes(length) >> 20}M; files are sparse",
        )
    shared = 2 if _file_system(host, folders[0]) == _file_system(host, folders[1]) else 1
    for folder in folders:
        _check_room(host, folder, room_bytes(length) * shared)
    kind = _find_tool(host).kind
    members = tuple(Member(number, folder) for number, folder in enumerate(folders, 1))
    return Mirror(cluster.site.cluster, kind, size or member_bytes(length), members, mounted_on=host.name)


def _find_tool(host: Host) -> Tool:
    reasons = {kind: tool.lacks(host) for kind, tool in TOOLS.items()}
    for kind, why in reasons.items():
        if not why:
            return TOOLS[kind]
    missing = "; ".join(f"{kind}: {why}" for kind, why in reasons.items())
    raise Refused(f"{host.name} has no mirroring tool: {missing}", hint=f"sms host prepare {host.name}")


def _file_system(host: Host, folder: str) -> str:
    """Return an identifier of a folder's file system; subvolumes of one Btrfs have the same.

    Raises:
        Refused: there is no such folder.
    """
    if not folder.startswith("/") or not host.works("test", "-d", folder):
        raise Refused(
            f"there is no folder {folder} on {host.name}", hint=f"is its disk mounted? else: mkdir -m 700 {folder}"
        )
    argv = ("findmnt", "--noheadings", "--nofsroot", "--output", "SOURCE,MAJ:MIN", "--target", folder)
    source, number = host.run(*argv).words(2)
    return source if source.startswith("/") else number


def _check_room(host: Host, folder: str, needed: int) -> None:
    need_space(
        host, folder, needed, "MiB free, its member may need %d", hint="free space there, or give another folder"
    )


def _make(cluster: Cluster, host: Host, new: Mirror) -> None:
    """Create the mirror, copy the overlay, switch to it; a failure before the switch leaves the overlay unchanged."""
    path = str(cluster.places.overlay)
    try:
        new = make_members(cluster, host, new)
        with cluster.env.progress.step("check the overlay"):
            ext3.check(host, path, whole=True)
        cluster.env.agents.call(
            host, "carry", {"source": path, "target": str(cluster.places.mirrored)}, cluster.env.progress
        )
        # Kept until the overlay has been checked through its new path.
        host.run("ln", "-fT", path, _before(cluster))
        with cluster.env.progress.step("switch to the mirror"):
            host.run("sync", timeout=600)
            files.link(host, path, _link(cluster))
            ext3.check(host, path, whole=True)
    except BaseException:
        if is_linked(cluster, host) and host.works("test", "-f", _before(cluster)):
            files.rename(host, _before(cluster), path, replace=True)
        clear(cluster, host, new)
        host.remove(_before(cluster))
        raise
    host.remove(_before(cluster))


def make_members(cluster: Cluster, host: Host, new: Mirror) -> Mirror:
    """Create the files of a planned mirror, and mount it; return it, complete. It has a note before it has files.

    Raises:
        SmsError: it failed; ``clear`` removes what was made.
    """
    write_note(cluster, host, new)
    with cluster.env.progress.step("create the mirror"):
        for file in new.files:
            files.make_file(host, file, new.size)
        loops = [loop.attach(host, file) for file in new.files]
        made = TOOLS[new.kind].make(host, loops, f"sms-{new.cluster}"[:32])
        pairs = zip(new.members, made.devices, strict=True)
        members = tuple(replace(member, devid=devid, uuid=uuid) for member, (devid, uuid) in pairs)
        new = replace(new, uuid=made.uuid, members=members)
        write_note(cluster, host, new)
        mount_members(cluster, host, new)
    return new


def _link(cluster: Cluster) -> str:
    """Return the link target of the overlay's path; relative, because hosts may mount the folder at other paths."""
    return f"{cluster.places.mirror.name}/{cluster.places.overlay.name}"


def _before(cluster: Cluster) -> str:
    return f"{cluster.places.overlay}.before-mirror"


def clear(cluster: Cluster, host: Host, mirror: Mirror) -> None:
    """Remove all files of a mirror that holds no overlay."""
    close_mirror(cluster, host)
    for path in mirror.files:
        loop.wait_free(host, path)
        host.remove(path)
    for member in mirror.members:
        host.remove(note_copy(mirror, member.folder))
    host.run("rmdir", str(cluster.places.mirror), ok=None)
    host.remove(str(cluster.places.mirror_note))


def abandon(cluster: Cluster, host: Host, *, dry_run: bool = False) -> MirrorChange:
    """Remove a mirror without an intact member: afterwards there is no overlay.

    Raises:
        Refused: the services container runs.
        SmsError: a member is intact.
    """
    check_programs(host)
    with lock_host(cluster, host), hold_lease_still(host, cluster):
        check_stopped(cluster, host)
        mirror = find_mirror(cluster, host)
        if mirror is None:
            return MirrorChange(host.name, False)
        seen = {member.number: TOOLS[mirror.kind].inspect(host, mirror.path(member)) for member in mirror.members}
        with suppress(Refused):
            left = mirror.path(select_members(mirror, seen).active[0])
            raise SmsError(f"{left} is intact", hint="sms overlay mirror remove")
        if not dry_run:
            with cluster.env.progress.step("abandon the mirror"):
                if is_linked(cluster, host):
                    host.remove(str(cluster.places.overlay))
                clear(cluster, host, mirror)
    return MirrorChange(host.name, True, (f"remove {cluster.places.overlay} and all files of its mirror",))


def remove(cluster: Cluster, host: Host, *, dry_run: bool = False) -> MirrorChange:
    """Move the overlay of the stopped services container back into one plain file, and remove the mirror.

    Raises:
        Refused: the services container runs, or there is no room.
        SmsError: it failed; the overlay is still on the mirror.
    """
    check_programs(host)
    with keep_stopped(cluster, host):
        mirror, path = find_mirror(cluster, host), str(cluster.places.overlay)
        if mirror is None:
            return MirrorChange(host.name, False)
        steps = [f"remove {file}" for file in mirror.files]
        if is_linked(cluster, host):
            length = ext3.sizes_of(host, path)[0]
            _check_room(host, str(cluster.places.overlay.parent), length)
            steps = [f"copy the overlay to {path}, read the copy and compare", *steps]
            if not dry_run:
                with cluster.env.progress.step("check the overlay"):
                    ext3.check(host, path, whole=True)
                request = {"source": str(cluster.places.mirrored), "target": f"{path}.new"}
                cluster.env.agents.call(host, "carry", request, cluster.env.progress)
                files.rename(host, f"{path}.new", path, replace=True)
        if not dry_run:
            with cluster.env.progress.step("remove the mirror"):
                clear(cluster, host, mirror)
    return MirrorChange(host.name, True, tuple(steps))


@contextmanager
def _lock_mirror(cluster: Cluster, host: Host) -> Iterator[Mirror]:
    """Lock the mirror and yield it, open, whether the services container runs or is stopped.

    Only the mirror is locked, not the host: a running services container may be stopped and snapshots taken meanwhile.

    Raises:
        Refused: there is no mirror.
    """
    check_programs(host)
    with ExitStack() as stack:
        busy = f"another run is at work on the mirror on {host.name}"
        stack.enter_context(cluster.env.locks.hold(host, f"{cluster.places.lock}.mirror", busy))
        if not find_instance(cluster, host):
            stack.enter_context(keep_stopped(cluster, host))
        mirror = find_mirror(cluster, host)
        if mirror is None or not is_linked(cluster, host):
            raise _not_mirrored(host)
        yield mirror


def _not_mirrored(host: Host) -> Refused:
    return Refused(f"the overlay on {host.name} is not mirrored", hint="sms overlay mirror create --on DIR1 --on DIR2")


def scrub(cluster: Cluster, host: Host, *, dry_run: bool = False) -> MirrorChange:
    """Read both members, and repair corrupt blocks from the other member. The services container may run.

    Raises:
        Refused: a member is lost.
        SmsError: a block is corrupt on both.
    """
    if dry_run:
        return _rehearse_scrub(cluster, host)
    with _lock_mirror(cluster, host) as mirror:
        if gone := [member for member in mirror.members if member.lost]:
            raise Refused(f"the mirror has lost {mirror.path(gone[0])}: no copy to repair from", hint=REBUILD)
        mended = _scrub(cluster, host, mirror)
    return MirrorChange(host.name, bool(mended), mended=mended)


def _rehearse_scrub(cluster: Cluster, host: Host) -> MirrorChange:
    """Return what a scrub would do; a closed mirror stays closed."""
    mirror, state = find_mirror(cluster, host), query_mirror(cluster, host)
    if mirror is None or state is None or not is_linked(cluster, host):
        raise _not_mirrored(host)
    for member in state.members:
        if member["state"] == "lost":
            raise Refused(f"the mirror has lost {member['file']}: no copy to repair from", hint=REBUILD)
    steps = (*(f"read {file}" for file in mirror.files), "repair corrupt blocks from the other member")
    return MirrorChange(host.name, True, steps if state.open else ("open the mirror", *steps, "close it"))


def _scrub(cluster: Cluster, host: Host, mirror: Mirror) -> int:
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    with cluster.env.progress.step("scrub the mirror") as step:
        found = tool.scrub(host, mirror.uuid, folder, step)
    due = "" if not found.lost else f"{found.lost} blocks are corrupt on both members"
    now = find_mirror(cluster, host) or mirror  # a stop may have changed the note meanwhile
    write_note(cluster, host, replace(now, scrubbed=cluster.env.clock.time(), mended=found.mended, due=due))
    if found.lost:
        raise SmsError(
            f"{found.lost} blocks of the mirror cannot be repaired ({found.mended} were repaired)",
            hint="restore a snapshot: sms stop; sms overlay restore latest",
        )
    return found.mended


def rebuild(cluster: Cluster, host: Host, options: RebuildOptions, *, dry_run: bool = False) -> MirrorChange:
    """Rebuild a lost or faulty member, or move one to another folder. The services container may run.

    Raises:
        Refused: it is unclear which member to replace, or the folder cannot hold one.
        SmsError: it failed; running it again resumes it.
    """
    if dry_run:
        return _rehearse(cluster, host, options)
    with _lock_mirror(cluster, host) as mirror:
        tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
        devices = {device.devid: device for device in tool.devices(host, mirror.uuid, place)}
        problems = find_problems(host, mirror, devices)
        member = _find_faulty(mirror, problems, options)
        if member is None:
            return MirrorChange(host.name, False)
        present = not member.lost and member.devid in devices and not devices[member.devid].missing
        current = present and devices[member.devid].path in ext3.users_of(host, mirror.path(member))
        if current and options.folder is None and not mirror.pending and mirror.kind == "btrfs":
            return MirrorChange(host.name, True, ("repaired",), mended=_scrub(cluster, host, mirror))
        target = Member(mirror.next_number, options.folder or member.folder, member.devid)
        _check_target(host, mirror, member, target, options.same_fs)
        (length,) = host.run("stat", "--dereference", "--format=%s", str(cluster.places.overlay)).numbers(1)
        _check_room(host, target.folder, room_bytes(length))
        _replace(cluster, host, mirror, member, target)
    return MirrorChange(host.name, True, _steps(mirror, member, target))


def _steps(mirror: Mirror, old: Member, new: Member) -> tuple[str, ...]:
    return (f"create {mirror.path(new)}", f"copy to it the contents of {mirror.path(old)}")


def _rehearse(cluster: Cluster, host: Host, options: RebuildOptions) -> MirrorChange:
    """Return what a rebuild would do. A closed mirror stays closed: opening it degraded would mark a member as lost.

    Raises:
        Refused: there is no mirror, or it cannot be done.
    """
    mirror, state = find_mirror(cluster, host), query_mirror(cluster, host)
    if mirror is None or state is None or not is_linked(cluster, host):
        raise _not_mirrored(host)
    lost = {one["number"]: one["detail"] for one in state.members if one["state"] == "lost"}
    faulty = {one["number"]: one["detail"] for one in state.members if one["state"] == "sick"}
    members = tuple(replace(member, lost=lost.get(member.number, "")) for member in mirror.members)
    mirror = replace(mirror, members=members)
    member = _find_faulty(mirror, faulty, options)
    if member is None:
        return MirrorChange(host.name, False)
    target = Member(mirror.next_number, options.folder or member.folder, member.devid)
    _check_target(host, mirror, member, target, options.same_fs)
    if options.folder is None and not member.lost and not mirror.pending:
        return MirrorChange(host.name, True, (f"repair {mirror.path(member)} from the other member",))
    return MirrorChange(host.name, True, _steps(mirror, member, target))


def _find_faulty(mirror: Mirror, problems: dict[int, str], options: RebuildOptions) -> Member | None:
    """Return the member to replace; None where all are intact.

    Raises:
        Refused: it is unclear which.
    """
    if options.number is not None:
        found = [member for member in mirror.members if member.number == options.number]
        if not found:
            numbers = ", ".join(str(member.number) for member in mirror.members)
            raise Refused(f"the mirror has no member {options.number}", hint=f"it has: {numbers}")
        return found[0]
    faulty = [member for member in mirror.members if member.lost or member.number in problems]
    if mirror.pending:
        faulty = [member for member in mirror.members if member.devid == mirror.pending.devid]
    if faulty:
        # If both are, each is repaired from the other.
        return next((member for member in faulty if member.lost), faulty[0])
    if mirror.due:
        return mirror.members[0]
    if options.folder and options.folder not in [member.folder for member in mirror.members]:
        raise Refused("both members are intact: it is unclear which one to move", hint="name it: --member NUMBER")
    return None


def _check_target(host: Host, mirror: Mirror, old: Member, new: Member, same_fs: bool) -> None:
    others = [member for member in mirror.members if member.number != old.number]
    was_same = known_same(host, [member.folder for member in mirror.members])
    for other in others:
        if other.folder != new.folder:
            folders = (other.folder, new.folder)
            file_systems = [_file_system(host, folder) for folder in folders]
            check_separate(folders, file_systems, same_fs=same_fs or was_same)
        elif not (same_fs or was_same):
            raise Refused(f"the other member is in {new.folder}", hint="give a folder on another disk: --on DIR")


def known_same(host: Host, folders: list[str]) -> bool:
    """Whether the members already share a file system: then they may again."""
    try:
        return len({_file_system(host, folder) for folder in folders}) < len(folders)
    except Refused:
        return False


def _replace(cluster: Cluster, host: Host, mirror: Mirror, old: Member, new: Member) -> None:
    tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
    # An interrupted rebuild may still be running in the kernel, or be complete but for its note.
    if mirror.pending:
        done = _is_done(host, tool, mirror, place, mirror.pending)
        if done:
            _finish(cluster, host, mirror, old, mirror.pending)
            return
        tool.cancel(host, mirror.uuid, place)
        loop.wait_free(host, mirror.path(mirror.pending))
        host.remove(mirror.path(mirror.pending))
    pending = replace(mirror, pending=new)
    write_note(cluster, host, pending)
    survivors = [member for member in mirror.active if member.number != old.number]
    size = max(host.run("stat", "-c", "%s", mirror.path(member)).numbers(1)[0] for member in survivors)
    if old.lost:
        # Writes while a member was missing may have used all space: mirroring them needs more.
        size += GIB
        for member in survivors:
            host.run("truncate", "-s", str(size), mirror.path(member))
            loop.reread(host, mirror.path(member))
        if mirror.kind == "btrfs":
            tool.enlarge(host, mirror.uuid, place)
    files.make_file(host, mirror.path(new), size)
    device = loop.attach(host, mirror.path(new))
    try:
        with cluster.env.progress.step(f"rebuild the member in {new.folder}"):
            tool.replace(host, mirror.uuid, place, new.devid, device)
    finally:
        loop.detach(host, device)
    _finish(cluster, host, pending, old, new)


def _is_done(host: Host, tool: Tool, mirror: Mirror, place: str, new: Member) -> bool:
    users = ext3.users_of(host, mirror.path(new))
    return any(one.devid == new.devid and one.path in users for one in tool.devices(host, mirror.uuid, place))


def _finish(cluster: Cluster, host: Host, mirror: Mirror, old: Member, new: Member) -> None:
    """Record the complete new member as active, and remove the old one."""
    tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
    with cluster.env.progress.step("mirror what was written to one member only"):
        tool.settle(host, mirror.uuid, place)
    now = find_mirror(cluster, host) or mirror
    fresh = replace(new, uuid=old.uuid if mirror.kind == "btrfs" else "", lost="")
    members = tuple(fresh if member.number == old.number else member for member in mirror.members)
    write_note(cluster, host, replace(now, members=members, pending=None, due=""))
    try:
        host.remove(mirror.path(old))
        if old.folder not in [member.folder for member in members]:
            host.remove(note_copy(mirror, old.folder))
    except CommandError:
        cluster.env.progress.report(f"note: {mirror.path(old)} cannot be removed; it is no longer a member")


def adopt(cluster: Cluster, host: Host, folder: str, *, dry_run: bool = False) -> MirrorChange:
    """Recover a mirror from one of its members, after the overlay's folder was lost with the other.

    Raises:
        Refused: there is an overlay, or no member in ``folder``.
    """
    check_programs(host)
    with keep_stopped(cluster, host):
        path = str(cluster.places.overlay)
        if is_linked(cluster, host) and find_mirror(cluster, host):
            return MirrorChange(host.name, False)
        if host.works("test", "-f", path):
            raise Refused(f"there is an overlay {path} on {host.name}", hint=f"mv {path} {path}.old")
        name = f"{folder}/{cluster.site.cluster}.mirror.json"
        mirror = read_mirror(host.read(name), cluster.site.cluster)
        if mirror is None:
            raise Refused(f"there is no {name} on {host.name}", hint="give the folder of a member")
        if dry_run:
            seen = {member.number: TOOLS[mirror.kind].inspect(host, mirror.path(member)) for member in mirror.members}
            paths = " and ".join(mirror.path(member) for member in select_members(mirror, seen).active)
            steps = (
                f"write {cluster.places.mirror_note}",
                f"create {path} as a link to the mirror",
                f"open it with {paths}",
            )
            return MirrorChange(host.name, True, steps)
        host.run("mkdir", "-p", "-m", "0700", str(cluster.places.overlay.parent))
        write_note(cluster, host, mirror)
        files.link(host, path, _link(cluster))
        with cluster.env.progress.step("check that the mirror can be opened"):
            open_mirror(cluster, host)
    return MirrorChange(host.name, True, (f"{path} is a link to the mirror again",))


def enlarge(cluster: Cluster, host: Host, mirror: Mirror, size: int) -> None:
    """Enlarge the members of the open mirror for an overlay of ``size`` bytes.

    The caller holds the host's lock and has read ``mirror`` since: its note is written back.
    """
    member_size = max(mirror.size, member_bytes(size))
    for member in mirror.active:
        path = mirror.path(member)
        if host.run("stat", "-c", "%s", path).numbers(1)[0] < member_size:
            host.run("truncate", "-s", str(member_size), path)
        loop.reread(host, path)
    TOOLS[mirror.kind].enlarge(host, mirror.uuid, str(cluster.places.mirror))
    write_note(cluster, host, replace(mirror, size=member_size))


def check_members_room(host: Host, mirror: Mirror, size: int) -> None:
    """Check that the members' file systems have room for an overlay of ``size`` bytes.

    Raises:
        Refused: one has not.
    """
    folders = [member.folder for member in mirror.active]
    shared = 2 if known_same(host, folders) and len(folders) > 1 else 1
    for member in mirror.active:
        taken = host.run("stat", "-c", "%b", mirror.path(member)).numbers(1)[0] * 512
        _check_room(host, member.folder, max(0, room_bytes(size) - taken) * shared)
