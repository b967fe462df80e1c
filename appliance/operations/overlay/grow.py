"""``sms overlay grow``: enlarge the overlay, whether the services container runs or is stopped."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.lease import query_lease
from appliance.operations.overlay.mirror import check_members_room, enlarge
from appliance.operations.overlay.mirrored import find_mirror, is_linked
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.preflight import check_programs, find_instance, lock_host
from appliance.plan.overlay.grow import MIB, SizeSpec, grown, new_size
from appliance.plan.overlay.grow import parse_size as parse_size  # for the cli, too
from appliance.progress import Progress
from appliance.tools import ext3, files
from appliance.tools.space import need_space


@dataclass(frozen=True)
class Grown:
    """An overlay that has grown from ``before`` to ``size`` bytes, or would; ``steps`` is for display."""

    host: str
    path: str
    before: int
    size: int
    running: bool
    changed: bool
    steps: tuple[str, ...] = ()


def grow(cluster: Cluster, host: Host, spec: SizeSpec, *, dry_run: bool = False) -> Grown:
    """Enlarge the overlay, or finish an interrupted run.

    Raises:
        Refused: it would shrink, there is no room, another host has the lease, or this host cannot do it while
            the services container runs; nothing was changed.
        SmsError: it failed; running it again resumes it.
    """
    check_programs(host)
    if find_instance(cluster, host):
        lease = query_lease(host, cluster)
        if lease.holder != host.name:
            raise Refused(
                f"the services container runs on {host.name}, but {lease.holder or 'no host'} holds the lease",
                hint="sms status",
            )
        done = _grow(cluster, host, spec, running=True, dry_run=dry_run)
    else:
        with keep_stopped(cluster, host):
            done = _grow(cluster, host, spec, running=False, dry_run=dry_run)
    if done.size // MIB != cluster.site.overlay.size_mb:
        cluster.env.progress.report(
            f"note: a new overlay is made by the site file: set overlay.size_mb to {done.size // MIB} there"
        )
    return done


def _grow(cluster: Cluster, host: Host, spec: SizeSpec, *, running: bool, dry_run: bool) -> Grown:
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path):
        raise Refused(f"there is no overlay {path} on {host.name}", hint="`sms overlay create` creates it")
    file, system, used = ext3.sizes_of(host, path)
    size = new_size(spec, file=file, system=system)
    if grown(file, system, size):
        return Grown(host.name, path, system, size, running, False)
    request = {"overlay": path, "size": size, "lock": str(cluster.places.lock)}
    if running:
        cluster.env.agents.call(host, "grow", {**request, "rehearse": True})
    mirror = find_mirror(cluster, host) if is_linked(cluster, host) else None
    if mirror:
        check_members_room(host, mirror, size)
    else:
        # A stopped overlay is copied and the copy grown: both exist for a while.
        more, hint = size - used if running else size, "free space there, or grow it by less"
        need_space(host, str(cluster.places.overlay.parent), more, "MiB free, the overlay may need %d more", hint=hint)
    steps = (
        *([f"enlarge the mirror's members for {size // MIB} MiB"] if mirror else []),
        f"enlarge {path} to {size // MIB} MiB, sparse" + ("" if running else ", in a copy that replaces it"),
        "grow its file system online" if running else "grow its file system, and check it",
    )
    if not dry_run:
        if mirror:
            with cluster.env.progress.step("enlarge the mirror"):
                _enlarge_mirror(cluster, host, size, running=running)
        if running:
            cluster.env.agents.call(host, "grow", request, cluster.env.progress)
        else:
            _grow_stopped(host, path, size, cluster.env.progress)
    return Grown(host.name, path, system, size, running, True, steps)


def _enlarge_mirror(cluster: Cluster, host: Host, size: int, *, running: bool) -> None:
    """Enlarge the mirror while holding the host's lock: a concurrent stop would close it and make the note stale.

    The agent takes the lock itself afterwards; with a stopped services container the caller holds it already.

    Raises:
        Busy: another run is in progress.
        Refused: the services container was stopped meanwhile.
    """
    with ExitStack() as stack:
        if running:
            stack.enter_context(lock_host(cluster, host))
            if not find_instance(cluster, host):
                raise Refused("the services container was stopped meanwhile", hint="run it again")
        mirror = find_mirror(cluster, host)
        if mirror is None:
            raise Refused("the mirror was removed meanwhile", hint="run it again")
        enlarge(cluster, host, mirror, size)


def _grow_stopped(host: Host, path: str, size: int, progress: Progress) -> None:
    """Grow a copy and rename it: after an interrupted resize2fs, e2fsck may not be able to repair automatically."""
    path = host.run("readlink", "-f", path).text  # the copy must be on the mirror, as the overlay is
    beside = f"{path}.new"
    with progress.step("check the overlay"):
        ext3.check(host, path, whole=True)
    try:
        with progress.step("copy the overlay"):
            files.copy_sparse(host, path, beside, timeout=None)
        with progress.step("grow the copy, and check it"):
            host.run("truncate", "-s", str(size), beside)
            ext3.resize(host, beside)
            ext3.check(host, beside, whole=True)
        files.place(host, beside, path)
    except BaseException:
        host.remove(beside)
        raise
