"""The mirror that an overlay lies on, opened before it is used and closed after; what is known of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.plan.overlay.mirror import Device, Made, Mirror, Scrubbed, Seen, choose, read_mirror, trouble, warnings
from appliance.progress import Progress, Silent, Step
from appliance.tools import ext3, loop
from appliance.tools.btrfs import Btrfs
from appliance.tools.mdadm import Md
from appliance.tools.space import query_space

ADOPT = "sms overlay mirror adopt DIR"


class Tool(Protocol):
    """What mirrors: see ``Btrfs``."""

    kind: str

    def lacks(self, host: Host) -> str: ...
    def make(self, host: Host, loops: Sequence[str], label: str) -> Made: ...
    def look(self, host: Host, path: str) -> Seen: ...
    def mount(self, host: Host, uuid: str, loops: Sequence[str], folder: str, *, degraded: bool) -> None: ...
    def unmount(self, host: Host, uuid: str, folder: str) -> None: ...
    def mounted(self, host: Host, uuid: str, folder: str) -> bool: ...
    def devices(self, host: Host, uuid: str, folder: str) -> list[Device]: ...
    def scrub(self, host: Host, uuid: str, folder: str, step: Step) -> Scrubbed: ...
    def cancel(self, host: Host, uuid: str, folder: str) -> None: ...
    def replace(self, host: Host, uuid: str, folder: str, devid: int, loop: str) -> None: ...
    def settle(self, host: Host, uuid: str, folder: str) -> None: ...
    def enlarge(self, host: Host, uuid: str, folder: str) -> None: ...


TOOLS: dict[str, Tool] = {tool.kind: tool for tool in (Btrfs(), Md())}
"""The better one first."""


@dataclass(frozen=True)
class MirrorState:
    """A mirror as it stands; sizes in bytes, ``scrubbed`` in Unix seconds, 0 when it never was.

    ``problems`` is empty when it is healthy. ``size`` and ``free`` are 0 while it is closed.
    """

    kind: str
    open: bool
    members: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    size: int = 0
    free: int = 0
    scrubbed: float = 0.0
    mended: int = 0

    @property
    def healthy(self) -> bool:
        """Whether losing one member would lose nothing."""
        return not self.problems


def find_mirror(cluster: Cluster, host: Host) -> Mirror | None:
    """What is written down of the overlay's mirror; None where there is none.

    Raises:
        SmsError: the note cannot be read.
    """
    path = str(cluster.places.mirror_note)
    try:
        return read_mirror(host.read(path), cluster.site.cluster)
    except SmsError as error:
        if isinstance(error, CommandError):
            raise
        raise SmsError(f"{host.name}: {path}: {error.message}", hint=error.hint) from error


def write_note(cluster: Cluster, host: Host, mirror: Mirror) -> None:
    """Write down what is known: beside the overlay, where it counts, and beside every member that can be reached."""
    main = str(cluster.places.mirror_note)
    host.write(main, mirror.text(), mode=0o600)
    host.run("sync", str(cluster.places.mirror_note.parent))
    for member in mirror.members:
        copy = note_copy(mirror, member.folder)
        # A folder that is gone is most often a disk that is: nothing is to be made in its place.
        if copy != main and host.works("test", "-d", member.folder):
            try:
                host.write(copy, mirror.text(), mode=0o600)
            except CommandError:
                continue  # a disk that fails: it is told by what reads the member


def note_copy(mirror: Mirror, folder: str) -> str:
    """Where the note lies beside a member."""
    return f"{folder}/{mirror.cluster}.mirror.json"


def is_linked(cluster: Cluster, host: Host) -> bool:
    """Whether the overlay lies on its mirror: its path is a link then. The link is what decides."""
    return host.works("test", "-L", str(cluster.places.overlay))


def open_mirror(cluster: Cluster, host: Host, progress: Progress, *, patience_s: float = 0) -> Mirror | None:
    """Have the overlay's mirror mounted, degraded where a member is lost, which is said and written down; give it.

    Whoever asks holds the lease: two hosts that have it open destroy it.

    Args:
        patience_s: seconds to wait for files of members: after a boot, a disk may come late.

    Raises:
        Refused: no member is whole, or another host has it open.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None or not is_linked(cluster, host):
        return None
    if mirror.mounted_on not in (None, host.name):
        raise Refused(
            f"the mirror was left open on {mirror.mounted_on}",
            hint=f"sms stop --host {mirror.mounted_on}; where that host is off for good, set mounted_on in "
            f"{cluster.places.mirror_note} to null",
        )
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    if tool.mounted(host, mirror.uuid, folder):
        return mirror
    with progress.step("open the mirror") as step:
        mirror = replace(_choose(tool, host, mirror, patience_s), mounted_on=host.name)
        write_note(cluster, host, mirror)
        mount_members(cluster, host, mirror)
        step.detail(", ".join(member.folder for member in mirror.counting))
    for said in warnings(mirror, {}):
        progress.say(f"WARNING: {said}")
    return mirror


def mount_members(cluster: Cluster, host: Host, mirror: Mirror) -> None:
    """Mount what counts of a mirror; its loop devices end with the mount, however that ends."""
    folder = str(cluster.places.mirror)
    host.run("mkdir", "-p", "-m", "0700", folder)
    loops = [loop.attach(host, mirror.path(member)) for member in mirror.counting]
    try:
        degraded = len(loops) < len(mirror.members) or mirror.pending is not None
        TOOLS[mirror.kind].mount(host, mirror.uuid, loops, folder, degraded=degraded)
    finally:
        for one in loops:
            loop.let_go(host, one)


def _choose(tool: Tool, host: Host, mirror: Mirror, patience_s: float) -> Mirror:
    deadline = time.monotonic() + patience_s
    while True:
        seen = {member.number: tool.look(host, mirror.path(member)) for member in mirror.members}
        late = [member for member in mirror.counting if not seen[member.number].there]
        if not late or time.monotonic() > deadline:
            return choose(mirror, seen)
        time.sleep(1)


def close_mirror(cluster: Cluster, host: Host) -> None:
    """Unmount the mirror, if this host has it open, and see that nothing has its members open.

    Raises:
        SmsError: something still uses it.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None or mirror.mounted_on != host.name:
        return
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    if mirror.uuid and tool.mounted(host, mirror.uuid, folder):
        tool.cancel(host, mirror.uuid, folder)
        try:
            tool.unmount(host, mirror.uuid, folder)
        except CommandError as error:
            raise SmsError(
                f"the mirror at {folder} cannot be closed: {error.message}",
                hint=f"find who uses it: fuser -vm {folder}",
            ) from error
    for path in mirror.files:
        loop.wait_free(host, path)
    write_note(cluster, host, replace(mirror, mounted_on=None))


@contextmanager
def opened(cluster: Cluster, host: Host, progress: Progress | None = None) -> Iterator[Mirror | None]:
    """The mirror of a stopped appliance, open for as long as the context lasts; None where there is none."""
    try:
        yield open_mirror(cluster, host, progress or Silent())
    finally:
        close_mirror(cluster, host)


def look_at_mirror(cluster: Cluster, host: Host) -> MirrorState | None:
    """How the overlay's mirror stands, open or closed; changes nothing. None where there is none.

    Raises:
        SmsError: its note cannot be read.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None:
        return None
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    if not is_linked(cluster, host):
        said = "a mirror was begun, or its removal: `sms overlay mirror create` or `remove` goes on with it"
        return MirrorState(mirror.kind, False, (), (said,))
    if mirror.mounted_on in (None, host.name) and tool.mounted(host, mirror.uuid, folder):
        return _look_open(host, mirror, tool, folder)
    if mirror.mounted_on not in (None, host.name):
        said = f"{mirror.mounted_on} has the mirror open: `sms overlay mirror status --host {mirror.mounted_on}`"
        return MirrorState(mirror.kind, False, _members(mirror, {}, {}), (said,))
    try:
        judged = choose(mirror, {one.number: tool.look(host, mirror.path(one)) for one in mirror.members})
    except Refused as error:
        return MirrorState(mirror.kind, False, _members(mirror, {}, {}), (error.message,))
    said_of = tuple(warnings(judged, {}))
    members = _members(judged, {}, {})
    return MirrorState(mirror.kind, False, members, said_of, scrubbed=mirror.scrubbed, mended=mirror.mended)


def _look_open(host: Host, mirror: Mirror, tool: Tool, folder: str) -> MirrorState:
    devices = {device.devid: device for device in tool.devices(host, mirror.uuid, folder)}
    problems = find_troubles(host, mirror, devices)
    space = query_space(host, folder)
    said = tuple(warnings(mirror, problems, size=space.size, free=space.free))
    members = _members(mirror, devices, problems)
    return MirrorState(mirror.kind, True, members, said, space.size, space.free, mirror.scrubbed, mirror.mended)


def find_troubles(host: Host, mirror: Mirror, devices: dict[int, Device]) -> dict[int, str]:
    """What is wrong with members of an open mirror that count, by their number."""
    found = {}
    for member in mirror.counting:
        device = devices.get(member.devid)
        behind = device is not None and device.path in ext3.users_of(host, mirror.path(member))
        if said := trouble(device, behind=behind):
            found[member.number] = said
    return found


def _members(mirror: Mirror, devices: dict[int, Device], problems: dict[int, str]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "number": member.number,
            "file": mirror.path(member),
            "state": "lost" if member.lost else "sick" if member.number in problems else "whole",
            "detail": member.lost or problems.get(member.number, ""),
            "errors": dict(devices[member.devid].errors) if member.devid in devices and not member.lost else {},
        }
        for member in mirror.members
    )
