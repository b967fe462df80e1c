"""``sms overlay diff``, and single files and folders restored or extracted from a snapshot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.lease import query_lease
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.operations.preflight import check_programs, find_instance
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.restore import Judge, forget_recorded, other_image, real_path, restore_reason
from appliance.operations.snapshots.snapshot import OverlayUse, SnapshotOptions, take_snapshot
from appliance.progress import Silent
from appliance.shared.results import PathResult as PathResult  # for the cli, too
from appliance.tools.agent import Bounds
from appliance.tools.programs import has_program

DIFF_BOUNDS = Bounds(size=1 << 30)
"""Bytes of the rows of millions of files, which are kept on disk."""
MAX_LINES = 1000
"""Differences that are reported unless all are requested."""
MAX_REASON_CHARS = 200
"""Characters of a snapshot's reason."""

Row = dict[str, Any]
"""A difference: ``path``, ``change`` (added, changed, gone), ``kind``, and further facts."""


class Rows:
    """Differences, in an unnamed temporary file: there may be a million."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass")  # noqa: SIM115

    def add(self, rows: list[Row]) -> None:
        """Append differences."""
        self.file.writelines(json.dumps(row) + "\n" for row in rows)

    def __iter__(self) -> Iterator[Row]:
        self.file.seek(0)
        for line in self.file:
            yield json.loads(line)


@dataclass(frozen=True)
class DiffOptions:
    """What to compare.

    Attributes:
        before: a number, or ``latest``.
        after: the same; None for the present overlay, in use or not.
        paths: compare only these and what is below them.
        everything: report all lines, and new and removed folders file by file.
    """

    before: str
    after: str | None = None
    paths: Sequence[str] = ()
    everything: bool = False


@dataclass(frozen=True)
class Comparison:
    """Two snapshots to compare; None is the present overlay.

    ``limit``: lines to report; None for all, and new and removed folders file by file. ``lock``: lock the overlay
    meanwhile.
    """

    before: int | None
    after: int | None
    paths: Sequence[str]
    limit: int | None = MAX_LINES
    lock: bool = False


@dataclass(frozen=True)
class ExtractOptions:
    """The snapshot (a number, or ``latest``), the paths in it, and the new folder to extract them to."""

    selector: str
    paths: Sequence[str]
    folder: str


@dataclass(frozen=True)
class Diff:
    """The differences between two snapshots; None is the present overlay.

    ``counts`` has every file and folder; ``lines`` counts a new or removed folder as one line. ``rows`` holds the
    first ``shown`` of these lines.
    """

    host: str
    before: int | None
    after: int | None
    counts: dict[str, int]
    lines: int
    shown: int
    rows: Rows = field(compare=False)


@dataclass(frozen=True)
class RestoredPaths:
    """Paths copied from a snapshot: into the overlay, where ``kept`` is the snapshot of its previous state, or
    into ``folder``. ``paths`` are as the agent reports them: path, kind, entries, bytes, removed. ``changed`` is
    False when all of them were as in the snapshot already."""

    host: str
    snapshot: int
    paths: tuple[PathResult, ...]
    notes: tuple[str, ...]
    seconds: float
    changed: bool = True
    kept: int | None = None
    folder: str = ""
    other_image: bool = False


def diff(cluster: Cluster, host: Host, options: DiffOptions) -> Diff:
    """Compare two snapshots, or one with the present overlay.

    Raises:
        Refused: there is no such snapshot, or the services container runs on another host.
        SmsError: a snapshot is damaged.
    """
    check_programs(host)
    listing = list_snapshots(cluster, host)
    first = find_snapshot(listing, options.before)["number"]
    second = None if options.after is None else find_snapshot(listing, options.after)["number"]
    if second is None:
        _check_lease_holder(cluster, host)
    limit = None if options.everything else MAX_LINES
    comparison = Comparison(first, second, options.paths, limit, lock=second is None)
    return _query_diff(cluster, host, comparison)


def _check_lease_holder(cluster: Cluster, host: Host) -> None:
    holder = query_lease(host, cluster).holder
    if holder not in (None, host.name):
        raise Refused(f"the services container runs on {holder}", hint=f"sms overlay diff --host {holder}")


def _query_diff(cluster: Cluster, host: Host, comparison: Comparison) -> Diff:
    rows, before, after = Rows(), comparison.before, comparison.after
    request = {
        "store": store(cluster),
        "overlay": str(cluster.places.overlay),
        "a": before,
        "b": after,
        "paths": list(comparison.paths),
        "limit": comparison.limit,
        "lock": str(cluster.places.lock) if comparison.lock else "",
    }
    progress = cluster.env.progress
    reply = cluster.env.agents.call(host, "diff", request, progress, on_rows=rows.add, bounds=DIFF_BOUNDS)
    return Diff(host.name, before, after, reply["counts"], reply["lines"], reply["told"], rows)


def restore_paths(
    cluster: Cluster, host: Host, selector: str, paths: Sequence[str], *, judge: Judge = lambda taken: ()
) -> RestoredPaths:
    """Restore ``paths`` in the overlay of the stopped services container from a snapshot; nothing else changes.

    The present overlay is taken as a snapshot before it is replaced by a copy with the restored paths.

    Args:
        judge: if the state of Slurm's controller is among the paths.

    Raises:
        Refused: the services container runs, another host has the lease, a path cannot be restored on its own, or
            ``judge`` refuses it.
        SmsError: something is damaged, or there is no room; the overlay is unchanged.
    """
    chosen = _check_restore(cluster, host, selector)
    number = chosen["number"]
    with keep_stopped(cluster.showing(Silent()), host) as lease:
        before = _query_diff(cluster, host, Comparison(None, number, paths, limit=0))
        if not before.lines:
            same = tuple(PathResult(path=path) for path in paths)
            return RestoredPaths(host.name, number, same, (), 0.0, changed=False)
        if has_jobs := _has_jobs(cluster, paths):
            judge(chosen["taken"])
        overlay = real_path(cluster, host)
        request = {"store": store(cluster), "overlay": overlay, "snapshot": str(number), "paths": list(paths)}
        reply = cluster.env.agents.call(host, "restore_paths", request, cluster.env.progress)
        try:
            why = f"{restore_reason(chosen)}: {' '.join(one['path'] for one in reply['paths'])}"
            taking = SnapshotOptions(reason=why[:MAX_REASON_CHARS])
            kept = take_snapshot(cluster, host, OverlayUse(lease), taking)
            if has_jobs:
                forget_recorded(cluster, host)
            cluster.env.agents.call(
                host, "place_paths", {"overlay": overlay, "was": reply["was"]}, cluster.env.progress
            )
        except BaseException:
            host.remove(reply["staged"])
            raise
    return RestoredPaths(
        host.name,
        number,
        tuple(reply["paths"]),
        tuple(reply["notes"]),
        reply["seconds"],
        kept=kept["number"],
        other_image=other_image(cluster, host, chosen),
    )


def rehearse_paths(
    cluster: Cluster, host: Host, selector: str, paths: Sequence[str], *, judge: Judge = lambda taken: ()
) -> Diff:
    """Check what ``restore_paths`` checks and return what it would change. Changes nothing.

    Raises:
        Refused: as a restore would.
    """
    chosen = _check_restore(cluster, host, selector)
    check_stopped(cluster, host)
    _check_lease_holder(cluster, host)
    if _has_jobs(cluster, paths):
        judge(chosen["taken"])
    return _query_diff(cluster.showing(Silent()), host, Comparison(None, chosen["number"], paths, lock=True))


def _has_jobs(cluster: Cluster, paths: Sequence[str]) -> bool:
    """Return whether the state of Slurm's controller, or a part of it, is among the paths."""
    controller = cluster.find_role("controller")
    states = [PurePosixPath(state) for state in (controller.state if controller else ())]
    given = [PurePosixPath(path) for path in paths]
    return any(path.is_relative_to(state) or state.is_relative_to(path) for path in given for state in states)


def _check_rsync(host: Host) -> None:
    if not has_program(host, "rsync"):
        raise Refused(
            f"rsync is not installed on {host.name}",
            hint=f"`sms doctor --host {host.name}` prints the command that installs it",
        )


def _check_restore(cluster: Cluster, host: Host, selector: str) -> Snapshot:
    check_programs(host)
    _check_rsync(host)
    chosen = find_snapshot(list_snapshots(cluster, host), selector)
    if find_instance(cluster, host):
        raise Refused(
            f"the services container runs on {host.name}",
            hint=f"`sms stop --host {host.name}`; or extract the paths with --to DIR while it runs",
        )
    return chosen


def extract_paths(cluster: Cluster, host: Host, options: ExtractOptions, *, dry_run: bool = False) -> RestoredPaths:
    """Extract paths from a snapshot into a new folder of the host; the services container may run.

    Raises:
        Refused: the folder exists, or the snapshot has nothing at a path.
        SmsError: the snapshot is damaged, or there is no room; nothing is left behind.
    """
    check_programs(host)
    _check_rsync(host)
    chosen, folder = find_snapshot(list_snapshots(cluster, host), options.selector), options.folder
    if not folder.startswith("/"):
        if not isinstance(host, Local):
            raise ConfigError(f"--to {folder} is not an absolute path", hint=f"give one of {host.name}: /root/{folder}")
        folder = os.path.abspath(folder)  # noqa: PTH100 - does not resolve symbolic links
    request = {
        "store": store(cluster),
        "snapshot": str(chosen["number"]),
        "paths": list(options.paths),
        "folder": folder,
        "rehearse": dry_run,
    }
    reply = cluster.env.agents.call(host, "extract_paths", request, cluster.env.progress)
    return RestoredPaths(
        host.name,
        chosen["number"],
        tuple(reply["paths"]),
        tuple(reply["notes"]),
        reply.get("seconds", 0.0),
        changed=not dry_run,
        folder=reply["folder"],
    )
