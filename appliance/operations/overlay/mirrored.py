"""The mirror of an overlay: its note, opening it before use and closing it afterwards, and its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.plan.overlay.mirror import (
    Device,
    Mirror,
    member_problem,
    read_mirror,
    select_members,
    warnings,
)
from appliance.shared.records import to_json
from appliance.tools import ext3, loop
from appliance.tools.btrfs import Btrfs
from appliance.tools.mdadm import Md
from appliance.tools.space import query_space

DISK_WAIT_S = 60
"""Seconds to wait at boot for the disks of a mirror; then it is opened without the missing one."""
ADOPT = "sms overlay mirror adopt DIR"


Tool = Btrfs | Md
TOOLS: dict[str, Tool] = {tool.kind: tool for tool in (Btrfs(), Md())}
"""The mirroring tools, in order of preference."""


@dataclass(frozen=True)
class MirrorState:
    """The state of a mirror; sizes in bytes, ``scrubbed`` in Unix seconds, 0 if it was never scrubbed.

    ``problems`` is empty when it is healthy. ``size`` and ``free`` are 0 while it is closed. ``mended``: errors that
    the last scrub repaired.
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
    """Read the note of the overlay's mirror; None where there is none.

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
    """Write the mirror's note: the authoritative one beside the overlay, and a copy beside every reachable member."""
    main = str(cluster.places.mirror_note)
    host.write(main, to_json(mirror), mode=0o600)
    for member in mirror.members:
        copy = note_copy(mirror, member.folder)
        # A missing folder is most often a missing disk: do not create the folder on another file system.
        if copy != main and host.works("test", "-d", member.folder):
            try:
                host.write(copy, to_json(mirror), mode=0o600)
            except CommandError:
                continue  # a failing disk: reported by whatever reads the member


def note_copy(mirror: Mirror, folder: str) -> str:
    """Return the path of the note's copy beside a member."""
    return f"{folder}/{mirror.cluster}.mirror.json"


def is_linked(cluster: Cluster, host: Host) -> bool:
    """Whether the overlay is on its mirror: its path is a link then. Only the link is authoritative."""
    return host.works("test", "-L", str(cluster.places.overlay))


def open_mirror(cluster: Cluster, host: Host, *, patience_s: float = 0) -> Mirror | None:
    """Mount the overlay's mirror and return it; a lost member is recorded and reported, and the mount is degraded.

    The caller holds the lease: two hosts that have the mirror open destroy it.

    Args:
        patience_s: seconds to wait for the members' files: after a boot, a disk may appear late.

    Raises:
        Refused: no member is intact, or another host has it open.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None or not is_linked(cluster, host):
        return None
    return open_members(cluster, host, mirror, patience_s=patience_s)


def open_members(cluster: Cluster, host: Host, mirror: Mirror, *, patience_s: float = 0) -> Mirror:
    """Mount a mirror that nothing else has open, as ``open_mirror``, also one without an overlay.

    Raises:
        Refused: as for ``open_mirror``.
    """
    if mirror.mounted_on not in (None, host.name):
        raise Refused(
            f"the mirror was left open on {mirror.mounted_on}",
            hint=f"sms stop --host {mirror.mounted_on}; if that host is permanently off, set mounted_on in "
            f"{cluster.places.mirror_note} to null",
        )
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    if tool.mounted(host, mirror.uuid, folder):
        return mirror
    with cluster.env.progress.step("open the mirror") as step:
        mirror = replace(_select_members(tool, host, mirror, cluster.env.clock, patience_s), mounted_on=host.name)
        write_note(cluster, host, mirror)
        mount_members(cluster, host, mirror)
        step.detail(", ".join(member.folder for member in mirror.active))
    for warning in warnings(mirror, {}):
        cluster.env.progress.warn(warning)
    return mirror


def mount_members(cluster: Cluster, host: Host, mirror: Mirror) -> None:
    """Mount the active members of a mirror; their loop devices are released with the mount."""
    folder = str(cluster.places.mirror)
    host.run("mkdir", "-p", "-m", "0700", folder)
    loops = [loop.attach(host, mirror.path(member)) for member in mirror.active]
    try:
        degraded = len(loops) < len(mirror.members) or mirror.pending is not None
        TOOLS[mirror.kind].mount(host, mirror.uuid, loops, folder, degraded=degraded)
    finally:
        for one in loops:
            loop.detach(host, one)


def _select_members(tool: Tool, host: Host, mirror: Mirror, clock: Clock, patience_s: float) -> Mirror:
    deadline = clock.monotonic() + patience_s
    while True:
        seen = {member.number: tool.inspect(host, mirror.path(member)) for member in mirror.members}
        late = [member for member in mirror.active if not seen[member.number].there]
        if not late or clock.monotonic() > deadline:
            return select_members(mirror, seen)
        clock.sleep(1)


def close_mirror(cluster: Cluster, host: Host) -> None:
    """Unmount the mirror if this host has it open, and wait until nothing has its members open.

    Raises:
        SmsError: it is still in use.
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
                hint=f"find the processes that use it: fuser -vm {folder}",
            ) from error
    for path in mirror.files:
        loop.wait_free(host, path)
    write_note(cluster, host, replace(mirror, mounted_on=None))


@contextmanager
def opened(cluster: Cluster, host: Host) -> Iterator[Mirror | None]:
    """Open the mirror of a stopped services container within the context; None where there is none."""
    try:
        yield open_mirror(cluster, host)
    finally:
        close_mirror(cluster, host)


def query_mirror(cluster: Cluster, host: Host) -> MirrorState | None:
    """Query the state of the overlay's mirror, open or closed; None where there is none. Changes nothing.

    Raises:
        SmsError: its note cannot be read.
    """
    mirror = find_mirror(cluster, host)
    if mirror is None:
        return None
    tool, folder = TOOLS[mirror.kind], str(cluster.places.mirror)
    if not is_linked(cluster, host) and (not mirror.uuid or host.works("test", "-e", str(cluster.places.overlay))):
        problem = "the overlay is not on its mirror: `sms overlay mirror create` moves it there, `remove` clears it"
        return MirrorState(mirror.kind, False, (), (problem,))
    if mirror.mounted_on in (None, host.name) and tool.mounted(host, mirror.uuid, folder):
        return _query_open(host, mirror, tool, folder)
    if mirror.mounted_on not in (None, host.name):
        problem = f"{mirror.mounted_on} has the mirror open: `sms overlay mirror status --host {mirror.mounted_on}`"
        return MirrorState(mirror.kind, False, _members(mirror, {}, {}), (problem,))
    try:
        selected = select_members(mirror, {one.number: tool.inspect(host, mirror.path(one)) for one in mirror.members})
    except Refused as error:
        return MirrorState(mirror.kind, False, _members(mirror, {}, {}), (error.message,))
    problems = tuple(warnings(selected, {}))
    members = _members(selected, {}, {})
    return MirrorState(mirror.kind, False, members, problems, scrubbed=mirror.scrubbed, mended=mirror.mended)


def _query_open(host: Host, mirror: Mirror, tool: Tool, folder: str) -> MirrorState:
    devices = {device.devid: device for device in tool.devices(host, mirror.uuid, folder)}
    problems = find_problems(host, mirror, devices)
    space = query_space(host, folder)
    texts = tuple(warnings(mirror, problems, size=space.size, free=space.free))
    members = _members(mirror, devices, problems)
    return MirrorState(mirror.kind, True, members, texts, space.size, space.free, mirror.scrubbed, mirror.mended)


def find_problems(host: Host, mirror: Mirror, devices: dict[int, Device]) -> dict[int, str]:
    """Return the problems of an open mirror's active members, by their number."""
    found = {}
    for member in mirror.active:
        device = devices.get(member.devid)
        current = device is not None and device.path in ext3.users_of(host, mirror.path(member))
        if problem := member_problem(device, current=current):
            found[member.number] = problem
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
