"""The mirror of an overlay: which members it has, which of them still count, what is wrong with it. Pure.

What counts is written down before a mirror is opened: a member that missed writes never counts again until it
is made anew, so that two halves that went different ways are never taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import Refused, SmsError

GIB = 1 << 30
FULL_PART = 10
"""A mirror with less than this part of it free is a warning."""
REBUILD = "sms overlay mirror rebuild"
SCRUB = "sms overlay mirror scrub"
SCRUB_EVERY_S = 7 * 86400


@dataclass(frozen=True)
class Member:
    """One half: a file in ``folder``. ``devid`` and ``uuid`` are what its tool knows it by.

    ``number`` is in the file's name, and no name is used twice. ``lost``: why it does not count any more.
    """

    number: int
    folder: str
    devid: int = 0
    uuid: str = ""
    lost: str = ""


@dataclass(frozen=True)
class Mirror:
    """What is written down beside the overlay, and beside every member. Sizes in bytes, times in Unix seconds.

    ``pending`` is a member being made by a rebuild. ``due``: why a scrub is due. ``mounted_on``: the host that
    has it open, or had when it went down.
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

    def text(self) -> bytes:
        """As it lies in its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def path(self, member: Member) -> str:
        """A member's file."""
        return f"{member.folder}/{self.cluster}.member-{member.number}.img"

    @property
    def files(self) -> list[str]:
        """All files that are its, a half made one too."""
        return [self.path(member) for member in (*self.members, *([self.pending] if self.pending else []))]

    @property
    def counting(self) -> tuple[Member, ...]:
        """Members that are not lost."""
        return tuple(member for member in self.members if not member.lost)

    @property
    def next_number(self) -> int:
        """A number that no member had yet."""
        return max(member.number for member in (*self.members, *([self.pending] if self.pending else []))) + 1


@dataclass(frozen=True)
class Seen:
    """A member's file as it is while nobody has it open; ``mark`` grows with every change of the whole."""

    there: bool
    mirror: str = ""
    uuid: str = ""
    mark: int = 0


@dataclass(frozen=True)
class Device:
    """A member while the mirror is open. ``errors``: how many of what kind since they were counted anew."""

    devid: int
    path: str
    errors: Mapping[str, int] = field(default_factory=dict)
    missing: bool = False


@dataclass(frozen=True)
class Made:
    """A mirror that was just made: its name, and (devid, uuid) of its members in their order."""

    uuid: str
    devices: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Scrubbed:
    """What reading all of it has found: mended, and past mending."""

    mended: int
    lost: int
    seconds: float = 0.0


def read_mirror(data: bytes | None, cluster: str) -> Mirror | None:
    """The mirror of a note's bytes; None where there is no note.

    Raises:
        SmsError: the note cannot be read, or is another cluster's.
    """
    if data is None:
        return None
    try:
        said: dict[str, Any] = json.loads(data)
        members = tuple(Member(**one) for one in said.pop("members"))
        pending = said.pop("pending")
        mirror = Mirror(members=members, pending=Member(**pending) if pending else None, **said)
        fine = bool(members)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SmsError(
            f"the mirror's note cannot be read: {error!r}",
            hint="another lies beside each member: `sms overlay mirror adopt DIR` puts it back",
        ) from error
    if not fine or mirror.cluster != cluster:
        raise SmsError(f"the mirror's note is of cluster {mirror.cluster}", hint="do two clusters share a folder?")
    return mirror


def member_bytes(overlay: int) -> int:
    """How long a member's file is for an overlay of so many bytes: blocks that are written anew lie beside the old
    ones for a while, and a whole extent stays as long as a part of it is in use.
    """
    return 2 * overlay + GIB


def room_bytes(overlay: int) -> int:
    """What the file system of a member must be able to give it."""
    return overlay + overlay // 4


def refuse_same(folders: Sequence[str], file_systems: Sequence[str], *, same_fs: bool) -> None:
    """Whether two folders can be lost apart.

    Raises:
        Refused: they cannot.
    """
    if len(folders) != 2:
        raise Refused("a mirror has two members", hint="sms overlay mirror create --on DIR1 --on DIR2")
    if folders[0] == folders[1]:
        raise Refused("both members would lie in one folder", hint="give two: --on DIR1 --on DIR2")
    if file_systems[0] == file_systems[1] and not same_fs:
        raise Refused(
            f"{folders[0]} and {folders[1]} are one file system: who loses one loses both",
            hint="give folders on two disks; --same-fs makes it all the same, to try it out",
        )


def choose(mirror: Mirror, seen: Mapping[int, Seen]) -> Mirror:
    """The mirror with every member marked lost that must not be used, and a scrub due where one missed writes.

    Raises:
        Refused: no member is left that holds all that was written.
    """
    members = tuple(_judge(mirror, member, seen[member.number]) for member in mirror.members)
    judged = replace(mirror, members=members)
    if not judged.counting:
        why = "; ".join(f"{mirror.path(member)}: {member.lost}" for member in members)
        raise Refused(
            f"no member of the mirror is whole: {why}",
            hint="bring its disk back; else give the mirror up and put a snapshot in its place: "
            "sms overlay mirror remove --abandon, sms overlay restore latest",
        )
    marks = {member.number: seen[member.number].mark for member in judged.counting}
    # A host that goes down may leave one behind by the last write of all; more is a disk that failed meanwhile.
    behind = [number for number, mark in marks.items() if max(marks.values()) - mark > 1]
    if behind and mirror.kind == "btrfs":
        late = ", ".join(mirror.path(member) for member in judged.counting if member.number in behind)
        judged = replace(judged, due=f"{late} missed writes")
    return judged


def _judge(mirror: Mirror, member: Member, seen: Seen) -> Member:
    if member.lost:
        return member
    if not seen.there:
        return replace(member, lost="its file is not there")
    if seen.mirror != mirror.uuid or (member.uuid and seen.uuid != member.uuid):
        return replace(member, lost="its file holds something else now")
    return member


def warnings(mirror: Mirror, problems: Mapping[int, str], *, size: int = 0, free: int = 0) -> list[str]:
    """What a person should do something about, each with the command; none: it is healthy.

    Args:
        problems: what is wrong with a member by its number, besides that it is lost.
        size: bytes that the mirror can take, and ``free`` of it; 0 where it is not open.
    """
    said = []
    for member in mirror.members:
        if member.lost:
            said.append(
                f"the mirror has lost {mirror.path(member)} ({member.lost}): the overlay is on one disk only; "
                f"`{REBUILD}` makes it anew"
            )
        elif member.number in problems:
            said.append(f"the mirror: {mirror.path(member)}: {problems[member.number]}")
    if mirror.due:
        said.append(f"the mirror: {mirror.due}: `{SCRUB}` mends it")
    if mirror.pending:
        said.append(f"a rebuild of the mirror was cut off: `{REBUILD}` goes on with it")
    if size and free * FULL_PART < size:
        left = f"{free >> 20} of {size >> 20} MiB are free"
        said.append(f"the mirror is full: {left}; `sms overlay grow` makes it larger")
    return said


def trouble(device: Device | None, *, behind: bool) -> str:
    """What is wrong with a member of an open mirror; empty: nothing.

    Args:
        behind: whether the file of its name is the one that is in use.
    """
    if device is None or device.missing:
        return f"it is missing; `{REBUILD}` makes it anew"
    if not behind:
        return f"its file was removed while in use; `{REBUILD}` makes it anew"
    errors = {name: count for name, count in device.errors.items() if count}
    if errors:
        counted = ", ".join(f"{count} {name.replace('_errs', '').replace('_', ' ')}" for name, count in errors.items())
        return f"errors were found and mended from the other: {counted}; `{REBUILD}` makes it whole"
    return ""


def scrub_is_due(mirror: Mirror, *, now: float) -> bool:
    """Whether a scheduled scrub should run: both members are there, the last one was a week ago or is in the future."""
    return not any(member.lost for member in mirror.members) and not 0 <= now - mirror.scrubbed < SCRUB_EVERY_S
