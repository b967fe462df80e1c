"""``sms overlay grow``: a larger overlay, whether the appliance runs or is stopped."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_programs, only_one
from appliance.operations.migration.lease import look_at_lease
from appliance.operations.overlay.mirror import check_members_room, enlarge
from appliance.operations.overlay.mirrored import find_mirror, is_linked
from appliance.operations.overlay.overlay import keep_stopped
from appliance.plan.machine import instance_name
from appliance.plan.overlay.grow import MIB, Wanted, grown, new_size, read_size
from appliance.progress import Progress
from appliance.tools import agent, apptainer, ext3
from appliance.tools.space import query_space

COPY = """\
rm -f "$2"; umask 077
cp --reflink=always "$1" "$2" 2>/dev/null || exec cp --sparse=always "$1" "$2"
"""
"""Shell: file $1 to $2, sharing its blocks where the file system can; else what it holds, not its holes."""
PLACE = 'sync "$1" && mv -fT "$1" "$2" && sync "$(dirname "$2")"'


@dataclass(frozen=True)
class Grown:
    """An overlay that has grown from ``before`` to ``size`` bytes, or would; ``steps`` in words."""

    host: str
    path: str
    before: int
    size: int
    running: bool
    changed: bool
    steps: tuple[str, ...] = ()


def read_wanted(text: str) -> Wanted:
    """The size that a person wrote.

    Raises:
        ConfigError: it is none.
    """
    return read_size(text)


def grow(cluster: Cluster, host: Host, progress: Progress, wanted: Wanted, *, dry_run: bool = False) -> Grown:
    """Make the overlay larger; finish what an earlier run left half done.

    Raises:
        Refused: it would shrink, there is no room, another host has the lease, or this host cannot do it while
            the appliance runs; nothing was changed.
        SmsError: it failed; run again, it goes on.
    """
    check_programs(host)
    if apptainer.find_instance(host, instance_name(cluster.site)):
        lease = look_at_lease(host, cluster)
        if lease.holder != host.name:
            raise Refused(
                f"the appliance runs on {host.name}, but {lease.holder or 'nobody'} holds the lease",
                hint="sms status",
            )
        done = _grow(cluster, host, progress, wanted, running=True, dry_run=dry_run)
    else:
        with keep_stopped(cluster, host, progress):
            done = _grow(cluster, host, progress, wanted, running=False, dry_run=dry_run)
    if done.size // MIB != cluster.site.overlay.size_mb:
        progress.say(f"note: a new overlay is made by the site file: set overlay.size_mb to {done.size // MIB} there")
    return done


def _grow(cluster: Cluster, host: Host, progress: Progress, wanted: Wanted, *, running: bool, dry_run: bool) -> Grown:
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path):
        raise Refused(f"there is no overlay {path} on {host.name}", hint="`sms overlay create` makes one")
    file, system, used = ext3.sizes_of(host, path)
    size = new_size(wanted, file=file, system=system)
    if grown(file, system, size):
        return Grown(host.name, path, system, size, running, False)
    request = {"overlay": path, "size": size, "lock": str(cluster.places.lock)}
    if running:
        agent.ask(host, "grow", {**request, "rehearse": True})
    mirror = find_mirror(cluster, host) if is_linked(cluster, host) else None
    if mirror:
        check_members_room(host, mirror, size)
    else:
        # Stopped, a copy of it is grown: for a while there are two.
        _check_room(host, str(cluster.places.overlay.parent), size - used if running else size)
    steps = (
        *([f"make the mirror's members large enough for {size // MIB} MiB"] if mirror else []),
        f"make {path} {size // MIB} MiB long, sparse" + ("" if running else ", in a copy that takes its place"),
        "grow its file system, in use" if running else "grow its file system, and check it",
    )
    if not dry_run:
        if mirror:
            with progress.step("make the mirror larger"):
                _enlarge_mirror(cluster, host, size, running=running)
        if running:
            agent.ask(host, "grow", request, progress)
        else:
            _grow_stopped(host, path, size, progress)
    return Grown(host.name, path, system, size, running, True, steps)


def _enlarge_mirror(cluster: Cluster, host: Host, size: int, *, running: bool) -> None:
    """Enlarge it with the host held: a stop closes it, and writes that down, while a note read before says otherwise.

    The agent takes the lock for itself afterwards; of a stopped appliance it is held already.

    Raises:
        Busy: another run is at work.
        Refused: it was stopped meanwhile.
    """
    with ExitStack() as stack:
        if running:
            busy = f"another sms is at work on {host.name}"
            stack.enter_context(only_one(host, str(cluster.places.lock), busy))
            if not apptainer.find_instance(host, instance_name(cluster.site)):
                raise Refused("the appliance was stopped meanwhile", hint="run it again")
        mirror = find_mirror(cluster, host)
        if mirror is None:
            raise Refused("the mirror was removed meanwhile", hint="run it again")
        enlarge(cluster, host, mirror, size)


def _grow_stopped(host: Host, path: str, size: int, progress: Progress) -> None:
    """Grow a copy beside it, and rename: a resize2fs that is cut off may leave what e2fsck does not mend by itself."""
    path = host.run("readlink", "-f", path).text  # the copy lies on the mirror, where the overlay does
    beside = f"{path}.new"
    with progress.step("check the overlay"):
        ext3.check(host, path, whole=True)
    try:
        with progress.step("copy the overlay"):
            host.run("sh", "-c", COPY, "copy", path, beside, timeout=None)
        with progress.step("grow the copy, and check it"):
            host.run("truncate", "-s", str(size), beside)
            ext3.resize(host, beside)
            ext3.check(host, beside, whole=True)
        host.run("sh", "-c", PLACE, "place", beside, path, timeout=600)
    except BaseException:
        host.remove(beside)
        raise


def _check_room(host: Host, folder: str, more: int) -> None:
    free = query_space(host, folder).free
    if free < more:
        raise Refused(
            f"{folder} on {host.name} has {free // MIB} MiB free, the overlay may come to need {more // MIB} more",
            hint="make room there, or grow it by less",
        )
