"""``sms overlay mirror``: the overlay on two file systems at once, mended from one another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_programs, only_one
from appliance.operations.migration.lease import hold_lease_still
from appliance.operations.overlay.mirrored import (
    TOOLS,
    MirrorState,
    Tool,
    close_mirror,
    find_mirror,
    find_troubles,
    is_linked,
    look_at_mirror,
    mount_members,
    note_copy,
    open_mirror,
    write_note,
)
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.plan.machine import instance_name
from appliance.plan.overlay.mirror import (
    GIB,
    REBUILD,
    Member,
    Mirror,
    choose,
    member_bytes,
    read_mirror,
    refuse_same,
    room_bytes,
)
from appliance.progress import Progress
from appliance.tools import agent, apptainer, ext3, loop
from appliance.tools.space import query_space

SWITCH = 'ln -sfn "$2" "$1.new" && sync && mv -T "$1.new" "$1" && sync "$(dirname "$1")"'
"""Shell: path $1 becomes a link to $2, at once."""
PUT_BACK = 'mv -T "$2" "$1" && sync "$(dirname "$1")"'


@dataclass(frozen=True)
class Done:
    """What a verb on the mirror did, or would do: ``steps``, in words. Nothing: it was as wanted already."""

    host: str
    changed: bool
    steps: tuple[str, ...] = ()
    mended: int = 0


def status(cluster: Cluster, host: Host) -> MirrorState | None:
    """How the mirror stands; None where there is none."""
    return look_at_mirror(cluster, host)


def create(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    folders: Sequence[str],
    *,
    size: int = 0,
    same_fs: bool = False,
    dry_run: bool = False,
) -> Done:
    """Bring the overlay of the stopped appliance onto a mirror of two files.

    Args:
        folders: where the two files are to lie.
        size: bytes of each; what the overlay may come to need when 0.
        same_fs: although both are one file system.

    Raises:
        Refused: it runs, a folder is missing, or there is no room; nothing was changed.
        SmsError: it failed; the overlay is as it was.
    """
    check_programs(host)
    with keep_stopped(cluster, host, progress):
        mirror, linked = find_mirror(cluster, host), is_linked(cluster, host)
        if mirror and linked:
            if sorted(member.folder for member in mirror.members) == sorted(folders):
                host.remove(_before(cluster))
                return Done(host.name, False)
            lie = " and ".join(member.folder for member in mirror.members)
            raise Refused(f"the overlay is mirrored already, in {lie}", hint="sms overlay mirror rebuild --on DIR")
        new = _plan(cluster, host, folders, size, same_fs)
        steps = [
            *(f"make {path}, {new.size >> 20} MiB, sparse" for path in new.files),
            f"make a mirror of both ({new.kind}), mounted at {cluster.places.mirror}",
            f"copy {cluster.places.overlay} there, read it again and compare",
            f"make {cluster.places.overlay} a link to it",
        ]
        if not dry_run:
            if mirror:
                _clear(cluster, host, mirror)
            _make(cluster, host, progress, new)
    return Done(host.name, True, tuple(steps))


def _plan(cluster: Cluster, host: Host, folders: Sequence[str], size: int, same_fs: bool) -> Mirror:
    """The mirror to be.

    Raises:
        Refused: it cannot be made.
    """
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path):
        raise Refused(f"there is no overlay {path} on {host.name}", hint="`sms overlay create` makes one")
    refuse_same(folders, [_file_system(host, folder) for folder in folders], same_fs=same_fs)
    length = ext3.sizes_of(host, path)[0]
    if size and size < room_bytes(length):
        raise Refused(
            f"a member of {size >> 20} MiB is too small for an overlay of {length >> 20} MiB",
            hint=f"give at least {room_bytes(length) >> 20}M, better {member_bytes(length) >> 20}M; both are sparse",
        )
    shared = 2 if _file_system(host, folders[0]) == _file_system(host, folders[1]) else 1
    for folder in folders:
        _need_room(host, folder, room_bytes(length) * shared)
    kind = _find_tool(host).kind
    members = tuple(Member(number, folder) for number, folder in enumerate(folders, 1))
    return Mirror(cluster.site.cluster, kind, size or member_bytes(length), members, mounted_on=host.name)


def _find_tool(host: Host) -> Tool:
    reasons = {kind: tool.lacks(host) for kind, tool in TOOLS.items()}
    for kind, why in reasons.items():
        if not why:
            return TOOLS[kind]
    said = "; ".join(f"{kind}: {why}" for kind, why in reasons.items())
    raise Refused(f"{host.name} can mirror nothing: {said}", hint=f"sms host prepare {host.name}")


def _file_system(host: Host, folder: str) -> str:
    """What tells the file system of a folder from others: subvolumes of one Btrfs are one.

    Raises:
        Refused: there is no such folder.
    """
    if not folder.startswith("/") or not host.works("test", "-d", folder):
        raise Refused(
            f"there is no folder {folder} on {host.name}", hint=f"is its disk mounted? else: mkdir -m 700 {folder}"
        )
    argv = ("findmnt", "--noheadings", "--nofsroot", "--output", "SOURCE,MAJ:MIN", "--target", folder)
    source, number = host.run(*argv).text.splitlines()[-1].split()
    return source if source.startswith("/") else number


def _need_room(host: Host, folder: str, wanted: int) -> None:
    free = query_space(host, folder).free
    if free < wanted:
        raise Refused(
            f"{folder} on {host.name} has {free >> 20} MiB free, its member may come to need {wanted >> 20}",
            hint="make room there, or give another folder",
        )


def _make(cluster: Cluster, host: Host, progress: Progress, new: Mirror) -> None:
    """Make it, fill it, switch to it; a failure before the switch leaves all as it was."""
    path, tool = str(cluster.places.overlay), TOOLS[new.kind]
    write_note(cluster, host, new)
    try:
        with progress.step("make the mirror"):
            for file in new.files:
                _make_file(host, file, new.size)
            made = tool.make(host, [loop.attach(host, file) for file in new.files], f"sms-{new.cluster}"[:32])
            pairs = zip(new.members, made.devices, strict=True)
            members = tuple(replace(member, devid=devid, uuid=uuid) for member, (devid, uuid) in pairs)
            new = replace(new, uuid=made.uuid, members=members)
            write_note(cluster, host, new)
            mount_members(cluster, host, new)
        with progress.step("check the overlay"):
            ext3.check(host, path, whole=True)
        agent.ask(host, "carry", {"source": path, "target": _inside(cluster)}, progress)
        # Kept until the overlay has been read through its new path.
        host.run("ln", "-fT", path, _before(cluster))
        with progress.step("switch to the mirror"):
            host.run("sh", "-c", SWITCH, "switch", path, _link(cluster), timeout=600)
            ext3.check(host, path, whole=True)
    except BaseException:
        if is_linked(cluster, host) and host.works("test", "-f", _before(cluster)):
            host.run("mv", "-T", _before(cluster), path)
        _clear(cluster, host, new)
        host.remove(_before(cluster))
        raise
    host.remove(_before(cluster))


def _make_file(host: Host, path: str, size: int) -> None:
    host.remove(path)
    host.run("sh", "-c", 'umask 077 && exec truncate -s "$2" "$1"', "make", path, str(size))


def _inside(cluster: Cluster) -> str:
    """The overlay itself, in the open mirror."""
    return f"{cluster.places.mirror}/{cluster.places.overlay.name}"


def _link(cluster: Cluster) -> str:
    """What the overlay's path is a link to; relative, for hosts may see the folder under other paths."""
    return f"{cluster.places.mirror.name}/{cluster.places.overlay.name}"


def _before(cluster: Cluster) -> str:
    return f"{cluster.places.overlay}.before-mirror"


def _clear(cluster: Cluster, host: Host, mirror: Mirror) -> None:
    """Remove all that there is of a mirror on which no overlay lies."""
    close_mirror(cluster, host)
    for path in mirror.files:
        loop.wait_free(host, path)
        host.remove(path)
    for member in mirror.members:
        host.remove(note_copy(mirror, member.folder))
    host.run("rmdir", str(cluster.places.mirror), ok=None)
    host.remove(str(cluster.places.mirror_note))


def abandon(cluster: Cluster, host: Host, progress: Progress, *, dry_run: bool = False) -> Done:
    """Give up a mirror of which no member is whole: afterwards there is no overlay.

    Raises:
        Refused: the appliance runs, or a member is whole.
    """
    check_programs(host)
    busy = f"another sms is at work on {host.name}"
    with only_one(host, str(cluster.places.lock), busy), hold_lease_still(host, cluster):
        check_stopped(cluster, host)
        mirror = find_mirror(cluster, host)
        if mirror is None:
            return Done(host.name, False)
        seen = {member.number: TOOLS[mirror.kind].look(host, mirror.path(member)) for member in mirror.members}
        with suppress(Refused):
            left = mirror.path(choose(mirror, seen).counting[0])
            raise SmsError(f"{left} is whole", hint="sms overlay mirror remove")
        if not dry_run:
            with progress.step("give the mirror up"):
                if is_linked(cluster, host):
                    host.remove(str(cluster.places.overlay))
                _clear(cluster, host, mirror)
    return Done(host.name, True, (f"remove {cluster.places.overlay} and all of its mirror",))


def remove(cluster: Cluster, host: Host, progress: Progress, *, dry_run: bool = False) -> Done:
    """Bring the overlay of the stopped appliance back into one plain file, and remove the mirror.

    Raises:
        Refused: it runs, or there is no room.
        SmsError: it failed; the overlay lies on the mirror as before.
    """
    check_programs(host)
    with keep_stopped(cluster, host, progress):
        mirror, path = find_mirror(cluster, host), str(cluster.places.overlay)
        if mirror is None:
            return Done(host.name, False)
        steps = [f"remove {file}" for file in mirror.files]
        if is_linked(cluster, host):
            length = ext3.sizes_of(host, path)[0]
            _need_room(host, str(cluster.places.overlay.parent), length)
            steps = [f"copy the overlay to {path}, read it again and compare", *steps]
            if not dry_run:
                with progress.step("check the overlay"):
                    ext3.check(host, path, whole=True)
                agent.ask(host, "carry", {"source": _inside(cluster), "target": f"{path}.new"}, progress)
                host.run("sh", "-c", PUT_BACK, "put", path, f"{path}.new", timeout=600)
        if not dry_run:
            with progress.step("remove the mirror"):
                _clear(cluster, host, mirror)
    return Done(host.name, True, tuple(steps))


@contextmanager
def _at_work(cluster: Cluster, host: Host, progress: Progress) -> Iterator[Mirror]:
    """The open mirror, of the running appliance or of the stopped one; one verb at a time.

    A running appliance may be stopped and snapshots taken meanwhile: only the mirror is held, not the host.

    Raises:
        Refused: there is no mirror.
    """
    check_programs(host)
    with ExitStack() as stack:
        busy = f"another run is at work on the mirror on {host.name}"
        stack.enter_context(only_one(host, f"{cluster.places.lock}.mirror", busy))
        if not apptainer.find_instance(host, instance_name(cluster.site)):
            stack.enter_context(keep_stopped(cluster, host, progress))
        mirror = find_mirror(cluster, host)
        if mirror is None or not is_linked(cluster, host):
            raise _not_mirrored(host)
        yield mirror


def _not_mirrored(host: Host) -> Refused:
    return Refused(f"the overlay on {host.name} is not mirrored", hint="sms overlay mirror create --on DIR1 --on DIR2")


def scrub(cluster: Cluster, host: Host, progress: Progress, *, dry_run: bool = False) -> Done:
    """Read both members, and mend from the other what is not as it was written. The appliance may run.

    Raises:
        Refused: a member is lost.
        SmsError: something is lost on both.
    """
    if dry_run:
        return _rehearse_scrub(cluster, host)
    with _at_work(cluster, host, progress) as mirror:
        if gone := [member for member in mirror.members if member.lost]:
            raise Refused(f"the mirror has lost {mirror.path(gone[0])}: there is nothing to mend from", hint=REBUILD)
        mended = _scrub(cluster, host, progress, mirror)
    return Done(host.name, bool(mended), mended=mended)


def _rehearse_scrub(cluster: Cluster, host: Host) -> Done:
    """What a scrub would do; a closed mirror stays closed."""
    mirror, state = find_mirror(cluster, host), look_at_mirror(cluster, host)
    if mirror is None or state is None or not is_linked(cluster, host):
        raise _not_mirrored(host)
    for member in state.members:
        if member["state"] == "lost":
            raise Refused(f"the mirror has lost {member['file']}: there is nothing to mend from", hint=REBUILD)
    steps = (*(f"read {file}" for file in mirror.files), "mend from the other what is not as it was written")
    return Done(host.name, True, steps if state.open else ("open the mirror", *steps, "close it"))


def _scrub(cluster: Cluster, host: Host, progress: Progress, mirror: Mirror) -> int:
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    with progress.step("scrub the mirror") as step:
        found = tool.scrub(host, mirror.uuid, folder, step)
    due = "" if not found.lost else f"{found.lost} blocks are on no member as they were written"
    now = find_mirror(cluster, host) or mirror  # a stop may have been at it meanwhile
    write_note(cluster, host, replace(now, scrubbed=time.time(), mended=found.mended, due=due))
    if found.lost:
        raise SmsError(
            f"{found.lost} blocks of the mirror are past mending ({found.mended} are mended)",
            hint="put a snapshot in the overlay's place: sms stop; sms overlay restore latest",
        )
    return found.mended


def rebuild(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    *,
    folder: str | None = None,
    number: int | None = None,
    same_fs: bool = False,
    dry_run: bool = False,
) -> Done:
    """Make a lost or sick member whole, or move one to another folder. The appliance may run.

    Args:
        folder: where the new member is to lie; without it, where the old one was.
        number: the member to replace; without it, the one that is lost or sick.

    Raises:
        Refused: no member is, or the folder cannot take one.
        SmsError: it failed; run again, it goes on.
    """
    if dry_run:
        return _rehearse(cluster, host, folder, number, same_fs)
    with _at_work(cluster, host, progress) as mirror:
        tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
        devices = {device.devid: device for device in tool.devices(host, mirror.uuid, place)}
        troubles = find_troubles(host, mirror, devices)
        member = _find_sick(mirror, troubles, folder, number)
        if member is None:
            return Done(host.name, False)
        present = not member.lost and member.devid in devices and not devices[member.devid].missing
        behind = present and devices[member.devid].path in ext3.users_of(host, mirror.path(member))
        if behind and folder is None and not mirror.pending and mirror.kind == "btrfs":
            return Done(host.name, True, ("mended",), mended=_scrub(cluster, host, progress, mirror))
        target = Member(mirror.next_number, folder or member.folder, member.devid)
        _check_target(host, mirror, member, target, same_fs)
        length = int(host.run("stat", "--dereference", "--format=%s", str(cluster.places.overlay)).text)
        _need_room(host, target.folder, room_bytes(length))
        _replace(cluster, host, progress, mirror, member, target)
    return Done(host.name, True, _steps(mirror, member, target))


def _steps(mirror: Mirror, old: Member, new: Member) -> tuple[str, ...]:
    return (f"make {mirror.path(new)}", f"copy to it what {mirror.path(old)} should hold")


def _rehearse(cluster: Cluster, host: Host, folder: str | None, number: int | None, same_fs: bool) -> Done:
    """What a rebuild would do. A closed mirror stays closed: opened with one member, the other would be lost for good.

    Raises:
        Refused: there is no mirror, or it cannot be done.
    """
    mirror, state = find_mirror(cluster, host), look_at_mirror(cluster, host)
    if mirror is None or state is None or not is_linked(cluster, host):
        raise _not_mirrored(host)
    lost = {one["number"]: one["detail"] for one in state.members if one["state"] == "lost"}
    sick = {one["number"]: one["detail"] for one in state.members if one["state"] == "sick"}
    members = tuple(replace(member, lost=lost.get(member.number, "")) for member in mirror.members)
    mirror = replace(mirror, members=members)
    member = _find_sick(mirror, sick, folder, number)
    if member is None:
        return Done(host.name, False)
    target = Member(mirror.next_number, folder or member.folder, member.devid)
    _check_target(host, mirror, member, target, same_fs)
    if folder is None and not member.lost and not mirror.pending:
        return Done(host.name, True, (f"mend {mirror.path(member)} from the other member",))
    return Done(host.name, True, _steps(mirror, member, target))


def _find_sick(mirror: Mirror, troubles: dict[int, str], folder: str | None, number: int | None) -> Member | None:
    """The member to replace; None where all are whole.

    Raises:
        Refused: it is not clear which.
    """
    if number is not None:
        found = [member for member in mirror.members if member.number == number]
        if not found:
            there = ", ".join(str(member.number) for member in mirror.members)
            raise Refused(f"the mirror has no member {number}", hint=f"it has: {there}")
        return found[0]
    sick = [member for member in mirror.members if member.lost or member.number in troubles]
    if mirror.pending:
        sick = [member for member in mirror.members if member.devid == mirror.pending.devid]
    if len(sick) > 1:
        # Each is mended from the other.
        return next((member for member in sick if member.lost), sick[0])
    if sick:
        return sick[0]
    if mirror.due:
        return mirror.members[0]
    if folder and folder not in [member.folder for member in mirror.members]:
        raise Refused("both members are whole: which one is to move?", hint="--member NUMBER says which")
    return None


def _check_target(host: Host, mirror: Mirror, old: Member, new: Member, same_fs: bool) -> None:
    others = [member for member in mirror.members if member.number != old.number]
    was_same = _known_same(host, [member.folder for member in mirror.members])
    for other in others:
        if other.folder != new.folder:
            folders = (other.folder, new.folder)
            file_systems = [_file_system(host, folder) for folder in folders]
            refuse_same(folders, file_systems, same_fs=same_fs or was_same)
        elif not (same_fs or was_same):
            raise Refused(f"the other member lies in {new.folder}", hint="give a folder on another disk: --on DIR")


def _known_same(host: Host, folders: list[str]) -> bool:
    """Whether the members lay on one file system before: then they may again."""
    try:
        return len({_file_system(host, folder) for folder in folders}) < len(folders)
    except Refused:
        return False


def _replace(cluster: Cluster, host: Host, progress: Progress, mirror: Mirror, old: Member, new: Member) -> None:
    tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
    # One that was cut off may still be under way, or done but for its note.
    if mirror.pending:
        done = _is_done(host, tool, mirror, place, mirror.pending)
        if done:
            _finish(cluster, host, progress, mirror, old, mirror.pending)
            return
        tool.cancel(host, mirror.uuid, place)
        loop.wait_free(host, mirror.path(mirror.pending))
        host.remove(mirror.path(mirror.pending))
    pending = replace(mirror, pending=new)
    write_note(cluster, host, pending)
    survivors = [member for member in mirror.counting if member.number != old.number]
    size = max(int(host.run("stat", "-c", "%s", mirror.path(member)).text) for member in survivors)
    if old.lost:
        # What was written while one was missing may have taken all there is: room to put it on both is needed.
        size += GIB
        for member in survivors:
            host.run("truncate", "-s", str(size), mirror.path(member))
            loop.reread(host, mirror.path(member))
        if mirror.kind == "btrfs":
            tool.enlarge(host, mirror.uuid, place)
    _make_file(host, mirror.path(new), size)
    device = loop.attach(host, mirror.path(new))
    try:
        with progress.step(f"rebuild the member in {new.folder}"):
            tool.replace(host, mirror.uuid, place, new.devid, device)
    finally:
        loop.let_go(host, device)
    _finish(cluster, host, progress, pending, old, new)


def _is_done(host: Host, tool: Tool, mirror: Mirror, place: str, new: Member) -> bool:
    users = ext3.users_of(host, mirror.path(new))
    return any(one.devid == new.devid and one.path in users for one in tool.devices(host, mirror.uuid, place))


def _finish(cluster: Cluster, host: Host, progress: Progress, mirror: Mirror, old: Member, new: Member) -> None:
    """The new member holds all: from now on it counts, and the old one is removed."""
    tool, place = TOOLS[mirror.kind], str(cluster.places.mirror)
    with progress.step("bring onto both what one had alone"):
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
        progress.say(f"note: {mirror.path(old)} cannot be removed; it is no member any more")


def adopt(cluster: Cluster, host: Host, progress: Progress, folder: str, *, dry_run: bool = False) -> Done:
    """Take up a mirror by one of its members, where the folder of the overlay was lost with the other.

    Raises:
        Refused: there is an overlay, or no member lies in ``folder``.
    """
    check_programs(host)
    with keep_stopped(cluster, host, progress):
        path = str(cluster.places.overlay)
        if is_linked(cluster, host) and find_mirror(cluster, host):
            return Done(host.name, False)
        if host.works("test", "-f", path):
            raise Refused(f"there is an overlay {path} on {host.name}", hint=f"mv {path} {path}.old")
        name = f"{folder}/{cluster.site.cluster}.mirror.json"
        mirror = read_mirror(host.read(name), cluster.site.cluster)
        if mirror is None:
            raise Refused(f"there is no {name} on {host.name}", hint="give the folder that a member lies in")
        if dry_run:
            seen = {member.number: TOOLS[mirror.kind].look(host, mirror.path(member)) for member in mirror.members}
            files = " and ".join(mirror.path(member) for member in choose(mirror, seen).counting)
            steps = (
                f"write {cluster.places.mirror_note}",
                f"make {path} a link to the mirror",
                f"open it with {files}",
            )
            return Done(host.name, True, steps)
        host.run("mkdir", "-p", "-m", "0700", str(cluster.places.overlay.parent))
        write_note(cluster, host, mirror)
        host.run("sh", "-c", SWITCH, "switch", path, _link(cluster))
        with progress.step("open the mirror, to see that it can be"):
            open_mirror(cluster, host, progress)
    return Done(host.name, True, (f"{path} is a link to the mirror again",))


def enlarge(cluster: Cluster, host: Host, mirror: Mirror, size: int) -> None:
    """Have the members of the open mirror take an overlay of ``size`` bytes.

    Whoever asks holds the host's lock, and has read ``mirror`` since: it is written back.
    """
    wanted = max(mirror.size, member_bytes(size))
    for member in mirror.counting:
        path = mirror.path(member)
        if int(host.run("stat", "-c", "%s", path).text) < wanted:
            host.run("truncate", "-s", str(wanted), path)
        loop.reread(host, path)
    TOOLS[mirror.kind].enlarge(host, mirror.uuid, str(cluster.places.mirror))
    write_note(cluster, host, replace(mirror, size=wanted))


def check_members_room(host: Host, mirror: Mirror, size: int) -> None:
    """Whether the file systems of the members can take an overlay of ``size`` bytes.

    Raises:
        Refused: one cannot.
    """
    folders = [member.folder for member in mirror.counting]
    shared = 2 if _known_same(host, folders) and len(folders) > 1 else 1
    for member in mirror.counting:
        taken = int(host.run("stat", "-c", "%b", mirror.path(member)).text) * 512
        _need_room(host, member.folder, max(0, room_bytes(size) - taken) * shared)
