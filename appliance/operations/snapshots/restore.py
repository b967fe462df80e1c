"""``sms overlay restore``: replace the overlay by a snapshot, or write it to a new file; the old overlay is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.lease import check_lease, raise_lease
from appliance.operations.overlay.generation import mark_overlay, query_overlay
from appliance.operations.overlay.newest import as_seen_by_all, make_newest, outdated_by_restore, query_others
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.operations.preflight import check_programs
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.snapshot import OverlayUse, SnapshotOptions, take_snapshot
from appliance.plan.migration.lease import check_plausible
from appliance.progress import Silent
from appliance.shared.identity import uuid_of
from appliance.shared.lease import Lease

Judge = Callable[[float], Sequence[str]]
"""Returns what the restore of a state of a Unix time costs, as lines; raises Refused if it is too much."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A name for ``--as``: a file beside the overlay, without its .img."""


@dataclass(frozen=True)
class KeptOverlay:
    """Where the replaced overlay is kept: a snapshot, or a file at ``path`` if it was too damaged for one.

    ``same``: it was identical to the snapshot to restore, and nothing was done.
    """

    snapshot: int | None = None
    path: str = ""
    why: str = ""
    same: bool = False


@dataclass(frozen=True)
class Restored:
    """A snapshot restored to ``target`` on ``host``. ``kept`` is the overlay it replaced, None if there was none."""

    host: str
    snapshot: int
    target: str
    size: int
    seconds: float
    kept: KeptOverlay | None = None
    other_image: bool = False

    @property
    def same(self) -> bool:
        """Whether the overlay was identical to the snapshot, and nothing was done."""
        return self.kept is not None and self.kept.same


def restore(
    cluster: Cluster,
    host: Host,
    selector: str,
    *,
    name: str = "",
    fenced: Collection[str] | None = None,
    judge: Judge = lambda taken: (),
) -> Restored:
    """Replace the overlay by a snapshot; with ``name``, write it to a new file.

    Before it is replaced, the lease gets the snapshot's generation as its floor. If nobody holds it, a restore by hand
    raises it above that of all hosts, which learn that the newest overlay is here now: somebody has decided to use it.
    A failover raises it when it takes it: if it is interrupted before that, the overlay of the failed host is still the
    newest one, and may be used again.

    Args:
        selector: its number, or ``latest``.
        name: a name beside the overlay, or an absolute path.
        fenced: of a failover, admin hosts known to be off; leases that they hold are ignored. None for a restore by
            hand.
        judge: for a replacement only.

    Raises:
        Refused: the services container runs, another host has the lease, there is no such snapshot, the name is
            taken, or ``judge`` refuses it.
        SmsError: the snapshot is damaged, or there is no room; the overlay is unchanged.
    """
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), selector)
    if name:
        return _restore_beside(cluster, host, chosen, resolve_target(cluster, host, name))
    with keep_stopped(cluster.showing(Silent()), host, fenced=fenced or ()) as lease:
        others = query_others(cluster, host) if fenced is None and lease.holder is None else None
        lease = as_seen_by_all(lease, others) if others else lease
        free = others if lease.holder is None else None
        judge(chosen["taken"])
        if free:
            for note in outdated_by_restore(cluster, free):
                cluster.env.progress.report(f"note: {note}")
        generation = chosen["generation"]
        if fenced:
            check_plausible(generation, lease)
        elif note := raise_lease(host, cluster, generation, cluster_uuid=uuid_of(chosen), locked=True):
            cluster.env.progress.report(note)
        restored = _replace(cluster, host, chosen, lease)
        if free:
            make_newest(cluster, host, free, generation)
        else:
            mark_overlay(cluster, host, restored_generation(lease, host.name, failover=bool(fenced)))
    return restored if restored.same else replace(restored, other_image=other_image(cluster, host, chosen))


def restore_own(cluster: Cluster, host: Host, selector: str) -> None:
    """Replace the overlay by a snapshot of its own past, as an upgrade does: it counts as old as before.

    Raises:
        As ``restore``.
    """
    chosen = find_snapshot(list_snapshots(cluster, host), selector)
    with keep_stopped(cluster.showing(Silent()), host) as lease:
        generation = query_overlay(cluster, host).generation
        _replace(cluster, host, chosen, lease)
        mark_overlay(cluster, host, generation)


def _replace(cluster: Cluster, host: Host, chosen: Snapshot, lease: Lease) -> Restored:
    """Replace the stopped overlay, and keep it. ``other_image`` of the result is not known yet."""
    path = real_path(cluster, host)
    kept = _keep_overlay(cluster, host, chosen, lease, path)
    size, seconds = chosen["used_bytes"], 0.0
    if not (kept and kept.same):
        forget_recorded(cluster, host)
        size, seconds = _request_restore(cluster, host, chosen, path, True)
    return Restored(host.name, chosen["number"], path, size, seconds, kept)


def forget_recorded(cluster: Cluster, host: Host) -> None:
    """Remove what the last stop has recorded of jobs: a restored state has others."""
    host.remove(str(cluster.places.jobs))


def restored_generation(lease: Lease, me: str, *, failover: bool = False) -> int:
    """Return the generation of the mark of a restored overlay.

    It is the newest one, because somebody has decided to use it; unless another host holds the lease and goes on: then
    it is older than that host's, as in a failover until that has marked it.
    """
    if failover or lease.holder not in (None, me):
        return max(lease.generation - 1, 0)
    return lease.generation


def rehearse_restore(
    cluster: Cluster, host: Host, selector: str, *, name: str = "", judge: Judge = lambda taken: ()
) -> list[str]:
    """Check all that a restore checks and return its steps. Changes nothing.

    Raises:
        Refused: as a restore would.
    """
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), selector)
    if name:
        return [f"write snapshot {chosen['number']} into {resolve_target(cluster, host, name)}, and check it"]
    lease = check_lease(host, cluster)
    check_stopped(cluster, host)
    overlay = real_path(cluster, host)
    exists = host.works("test", "-e", overlay)
    others = query_others(cluster, host) if lease.holder is None else None
    free = others if others and as_seen_by_all(lease, others).holder is None else None
    return [
        *([f"take {overlay} as a snapshot: {restore_reason(chosen)}"] if exists else []),
        f"write snapshot {chosen['number']} beside {overlay}, check it, and rename it over that",
        *(outdated_by_restore(cluster, free) if free else ()),
        *judge(chosen["taken"]),
    ]


def restore_reason(chosen: Snapshot) -> str:
    """Return the reason for the snapshot of the overlay that a restore replaces."""
    return f"before restore of {chosen['number']}"


def resolve_target(cluster: Cluster, host: Host, name: str) -> str:
    """Return the path for ``--as``; it must not exist.

    Raises:
        ConfigError: it is neither a name nor an absolute path.
        Refused: the path exists.
    """
    if name.startswith("/"):
        path = str(PurePosixPath(name))
    elif NAME.fullmatch(name):
        path = f"{cluster.places.overlay.parent}/{name.removesuffix('.img')}.img"
    else:
        raise ConfigError(f"invalid name {name!r} for --as", hint="give a name such as tuesday, or an absolute path")
    if path == str(cluster.places.overlay):
        raise ConfigError(f"{path} is the overlay in use", hint="leave --as out to replace it")
    if host.works("test", "-e", path):
        raise Refused(f"{path} already exists on {host.name}", hint="--as never replaces a file: give another name")
    return path


def _restore_beside(cluster: Cluster, host: Host, chosen: Snapshot, target: str) -> Restored:
    size, seconds = _request_restore(cluster, host, chosen, target, False)
    return Restored(host.name, chosen["number"], target, size, seconds)


def _request_restore(cluster: Cluster, host: Host, chosen: Snapshot, target: str, over: bool) -> tuple[int, float]:
    request = {"store": store(cluster), "snapshot": str(chosen["number"]), "target": target, "replace": over}
    reply = cluster.env.agents.call(host, "restore", request, cluster.env.progress)
    return reply["bytes"], reply["seconds"]


def real_path(cluster: Cluster, host: Host) -> str:
    """Return the overlay's path with its link resolved: on a mirror its name is a link, which must stay one.

    Raises:
        Refused: it is a dangling link.
    """
    overlay = str(cluster.places.overlay)
    if not host.works("test", "-L", overlay):
        return overlay
    found = host.run("readlink", "-e", overlay, ok=None)
    if found.status:
        raise Refused(f"{overlay} is a link to a missing file", hint="it is mirrored: is the mirror mounted?")
    return found.text


def _keep_overlay(cluster: Cluster, host: Host, chosen: Snapshot, lease: Lease, overlay: str) -> KeptOverlay | None:
    """Take the overlay as a snapshot before it is replaced; hard-link it to a second name if it is too damaged.

    Raises:
        Refused, SmsError: it can be kept neither way.
    """
    if not host.works("test", "-e", overlay):
        return None
    try:
        options = SnapshotOptions(reason=restore_reason(chosen))
        taken = take_snapshot(cluster, host, OverlayUse(lease), options)
        same = all(taken[key] == chosen[key] for key in ("digests", "size"))
        return KeptOverlay(taken["number"], same=same)
    except (Refused, CommandError, Unreachable):
        raise
    except SmsError as error:
        why = error.message
    name = f"{overlay}.before-{chosen['number']}"
    path = _link_beside(host, overlay, name)
    if not path:
        raise SmsError(
            f"the overlay can be kept neither as a snapshot ({why}) nor as {name}; nothing is replaced",
            hint=f"if you do not need it, move it away: mv {overlay} /elsewhere",
        )
    cluster.env.progress.report(f"note: the overlay cannot be taken as a snapshot ({why}); it is kept as {path}")
    return KeptOverlay(path=path, why=why)


def _link_beside(host: Host, overlay: str, name: str) -> str:
    """Hard-link the overlay to a name that begins with ``name``; return it, empty if that is not possible.

    The overlay remains: there is one at every moment.
    """
    for kept in (name, *(f"{name}.{number}" for number in range(2, 10))):
        if host.works("test", overlay, "-ef", kept):
            return kept
        if not host.works("test", "-e", kept) and host.works("ln", "-T", "--", overlay, kept):
            host.run("sync", str(PurePosixPath(kept).parent), timeout=600)
            return kept
    return ""


def other_image(cluster: Cluster, host: Host, chosen: Snapshot) -> bool:
    """Whether the next start uses another image than the snapshot was taken under, as far as both are known."""
    before = chosen["image"].get("key", "")
    current = Path(cluster.places.current)
    if current.is_file():  # the one that a start delivers to the host
        key = current.resolve().stem
    else:
        key = PurePosixPath(host.run("readlink", "-f", str(current), ok=None).text).stem
    return bool(before and key and key != current.stem and key != before)
