"""The mirror of an overlay: its members, which of them are active, and its problems. Pure.

The active members are recorded before a mirror is opened: a member that missed writes stays lost until it is rebuilt,
so that diverged members are never combined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from appliance.errors import Refused, SmsError
from appliance.shared.records import RecordError, from_json

GIB = 1 << 30
FULL_PART = 10
"""Warn when less than 1/FULL_PART of a mirror is free."""
REBUILD = "sms overlay mirror rebuild"
SCRUB = "sms overlay mirror scrub"
SCRUB_EVERY_S = 7 * 86400


@dataclass(frozen=True)
class Member:
    """One half: a file in ``folder``. ``devid`` and ``uuid`` identify it to the mirroring tool.

    ``number`` is part of the file's name and never reused. ``lost``: why it is no longer active; else empty.
    """

    number: int
    folder: str
    devid: int = 0
    uuid: str = ""
    lost: str = ""


@dataclass(frozen=True)
class Mirror:
    """The note beside the overlay and beside every member. Sizes in bytes, times in Unix seconds.

    ``pending``: a member that a rebuild is creating. ``due``: why a scrub is due. ``mounted_on``: the host that
    has it open, or had when it went down. ``mended``: errors that the last scrub repaired.
    """

    cluster: str
    kind: str
    size: int
    members: tuple[Member, ...]
    uuid: str = ""
    pending: Member | None = None
    due: str = ""
    mounted_on: str | None = None
    scrubbed: float = 0.0
    mended: int = 0

    def path(self, member: Member) -> str:
        """Return the path of a member's file."""
        return f"{member.folder}/{self.cluster}.member-{member.number}.img"

    @property
    def files(self) -> list[str]:
        """The files of all members, a pending one included."""
        return [self.path(member) for member in (*self.members, *([self.pending] if self.pending else []))]

    @property
    def active(self) -> tuple[Member, ...]:
        """Members that are not lost."""
        return tuple(member for member in self.members if not member.lost)

    @property
    def next_number(self) -> int:
        """A number that no member has used."""
        return max(member.number for member in (*self.members, *([self.pending] if self.pending else []))) + 1


@dataclass(frozen=True)
class Seen:
    """A member's file while it is not open; ``mark`` is a counter that grows with every change of the mirror."""

    there: bool
    mirror: str = ""
    uuid: str = ""
    mark: int = 0


@dataclass(frozen=True)
class Device:
    """A member while the mirror is open. ``errors``: counts by kind since the last reset."""

    devid: int
    path: str
    errors: Mapping[str, int] = field(default_factory=dict)
    missing: bool = False


@dataclass(frozen=True)
class Made:
    """A new mirror: its uuid, and (devid, uuid) of its members in order."""

    uuid: str
    devices: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Scrubbed:
    """Result of a scrub: numbers of repaired (``mended``) and of unrepairable (``lost``) errors."""

    mended: int
    lost: int


def read_mirror(data: bytes | None, cluster: str) -> Mirror | None:
    """Parse a mirror's note; None where there is no note.

    Raises:
        SmsError: the note cannot be read, or belongs to another cluster.
    """
    if data is None:
        return None
    try:
        mirror = from_json(Mirror, data)
    except RecordError as error:
        raise SmsError(
            f"the mirror's note cannot be read: {error}",
            hint="each member has a copy: `sms overlay mirror adopt DIR` restores it",
        ) from error
    if not mirror.members or mirror.cluster != cluster:
        raise SmsError(f"the mirror's note is of cluster {mirror.cluster}", hint="do two clusters share a folder?")
    return mirror


def member_bytes(overlay: int) -> int:
    """Return the size of a member's file for an overlay of ``overlay`` bytes: rewritten blocks are stored beside the
    old ones for a while, and a whole extent stays allocated as long as a part of it is in use.
    """
    return 2 * overlay + GIB


def room_bytes(overlay: int) -> int:
    """Return the space that a member needs on its file system, in bytes."""
    return overlay + overlay // 4


def check_separate(folders: Sequence[str], file_systems: Sequence[str], *, same_fs: bool) -> None:
    """Check that the two folders are on separate file systems.

    Raises:
        Refused: they are not.
    """
    if len(folders) != 2:
        raise Refused("a mirror has two members", hint="sms overlay mirror create --on DIR1 --on DIR2")
    if folders[0] == folders[1]:
        raise Refused("both members would be in one folder", hint="give two: --on DIR1 --on DIR2")
    if file_systems[0] == file_systems[1] and not same_fs:
        raise Refused(
            f"{folders[0]} and {folders[1]} are on one file system: both would be lost together",
            hint="give folders on two disks; --same-fs allows it, for a trial",
        )


def target_folders(own: Mirror | None, wanted: Sequence[str], source: Mirror | None) -> tuple[str, ...]:
    """Return the folders of the mirror that a host gets as the target of a migration; empty if it gets none.

    Args:
        own: the mirror that it has already; it is used again, if its creation was completed.
        wanted: of the site file; else those of the source's mirror.
    """
    for mirror in (own if own and own.uuid else None, None if wanted else source):
        if mirror:
            return tuple(member.folder for member in mirror.members)
    return tuple(wanted)


def select_members(mirror: Mirror, seen: Mapping[int, Seen]) -> Mirror:
    """Return the mirror with unusable members marked as lost, and a scrub due where one missed writes.

    Raises:
        Refused: no intact member is left.
    """
    members = tuple(_check_member(mirror, member, seen[member.number]) for member in mirror.members)
    checked = replace(mirror, members=members)
    if not checked.active:
        why = "; ".join(f"{mirror.path(member)}: {member.lost}" for member in members)
        raise Refused(
            f"no member of the mirror is intact: {why}",
            hint="reattach its disk; else abandon the mirror and restore a snapshot: "
            "sms overlay mirror remove --abandon, sms overlay restore latest",
        )
    marks = {member.number: seen[member.number].mark for member in checked.active}
    # A host that crashes may leave one member behind by the last write; a larger gap is a disk that failed.
    behind = [number for number, mark in marks.items() if max(marks.values()) - mark > 1]
    if behind and mirror.kind == "btrfs":
        late = ", ".join(mirror.path(member) for member in checked.active if member.number in behind)
        checked = replace(checked, due=f"{late} missed writes")
    return checked


def _check_member(mirror: Mirror, member: Member, seen: Seen) -> Member:
    if member.lost:
        return member
    if not seen.there:
        return replace(member, lost="its file is missing")
    if seen.mirror != mirror.uuid or (member.uuid and seen.uuid != member.uuid):
        return replace(member, lost="its file has other contents")
    return member


def warnings(mirror: Mirror, problems: Mapping[int, str], *, size: int = 0, free: int = 0) -> list[str]:
    """Return the problems that need action, each with the command; empty when the mirror is healthy.

    Args:
        problems: problems of members that are not lost, by their number.
        size: bytes of the mirror's file system, and ``free`` of it; 0 where it is not open.
    """
    found = []
    for member in mirror.members:
        if member.lost:
            found.append(
                f"the mirror has lost {mirror.path(member)} ({member.lost}): the overlay is on one disk only; "
                f"`{REBUILD}` recreates it"
            )
        elif member.number in problems:
            found.append(f"the mirror: {mirror.path(member)}: {problems[member.number]}")
    if mirror.due:
        found.append(f"the mirror: {mirror.due}: `{SCRUB}` repairs it")
    if mirror.pending:
        found.append(f"a rebuild of the mirror was interrupted: `{REBUILD}` resumes it")
    if size and free * FULL_PART < size:
        left = f"{free >> 20} of {size >> 20} MiB are free"
        found.append(f"the mirror is almost full: {left}; `sms overlay grow` enlarges it")
    return found


def member_problem(device: Device | None, *, current: bool) -> str:
    """Return the problem of a member of an open mirror; empty where there is none.

    Args:
        current: whether the file at its path is the one in use.
    """
    if device is None or device.missing:
        return f"it is missing; `{REBUILD}` recreates it"
    if not current:
        return f"its file was removed while in use; `{REBUILD}` recreates it"
    errors = {name: count for name, count in device.errors.items() if count}
    if errors:
        counted = ", ".join(f"{count} {name.replace('_errs', '').replace('_', ' ')}" for name, count in errors.items())
        return f"errors were found and repaired from the other member: {counted}; `{REBUILD}` rebuilds it"
    return ""


def scrub_is_due(mirror: Mirror, *, now: float) -> bool:
    """Whether a scheduled scrub is due: no member is lost, and the last scrub was a week ago or is in the future."""
    return not any(member.lost for member in mirror.members) and not 0 <= now - mirror.scrubbed < SCRUB_EVERY_S
