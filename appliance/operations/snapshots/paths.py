"""``sms overlay diff``, and single files and folders taken back out of a snapshot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_programs
from appliance.operations.migration.lease import look_at_lease
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.restore import other_image, real_path, reason
from appliance.operations.snapshots.snapshot import Wanted, ask_take
from appliance.plan.machine import instance_name
from appliance.progress import Progress, Silent
from appliance.tools import agent, apptainer

MOST_LINES = 1000
"""Differences that are told unless all are wanted."""
REASON = 200
"""Letters of the reason of a snapshot."""

Row = dict[str, Any]
"""A difference: ``path``, ``change`` (added, changed, gone), ``kind``, and what is known of it besides."""


class Rows:
    """Differences, in a file without a name: there may be a million."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass")  # noqa: SIM115

    def add(self, rows: list[Row]) -> None:
        """Some more."""
        self.file.writelines(json.dumps(row) + "\n" for row in rows)

    def __iter__(self) -> Iterator[Row]:
        self.file.seek(0)
        for line in self.file:
            yield json.loads(line)


@dataclass(frozen=True)
class Diff:
    """What differs between two snapshots; None stands for the overlay as it is now.

    ``counts`` has every file and folder, ``lines`` what they come to when a new or removed folder is one line;
    ``told`` of these are in ``rows``.
    """

    host: str
    before: int | None
    after: int | None
    counts: dict[str, int]
    lines: int
    told: int
    rows: Rows = field(compare=False)


@dataclass(frozen=True)
class Brought:
    """What came back from a snapshot: into the overlay, where ``kept`` is the snapshot of what it was before, or
    into ``folder``. ``paths`` are as the agent tells them: path, kind, entries, bytes, removed. Without ``changed``
    all was as in the snapshot already, and nothing was done."""

    host: str
    snapshot: int
    paths: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    seconds: float
    changed: bool = True
    kept: int | None = None
    folder: str = ""
    other_image: bool = False


def diff(
    cluster: Cluster,
    host: Host,
    before: str,
    after: str | None,
    progress: Progress,
    *,
    paths: Sequence[str] = (),
    everything: bool = False,
) -> Diff:
    """What differs between two snapshots, or between one and now.

    Args:
        before: a number, or ``latest``.
        after: the same; None for the overlay as it is now, in use or not.
        paths: limit it to these and what is below them.
        everything: tell all, and new and removed folders file by file.

    Raises:
        Refused: there is no such snapshot, or the appliance runs on another host.
        SmsError: a snapshot is damaged.
    """
    check_programs(host)
    listing = list_snapshots(cluster, host)
    first, second = (None if one is None else find_snapshot(listing, one)["number"] for one in (before, after))
    lock = ""
    if second is None:
        _check_here(cluster, host)
        lock = str(cluster.places.lock)
    return _ask_diff(
        cluster, host, (first, second), progress, paths, lock=lock, limit=None if everything else MOST_LINES
    )


def _check_here(cluster: Cluster, host: Host) -> None:
    holder = look_at_lease(host, cluster).holder
    if holder not in (None, host.name):
        raise Refused(f"the appliance runs on {holder}", hint=f"sms overlay diff --host {holder}")


def _ask_diff(
    cluster: Cluster,
    host: Host,
    pair: tuple[int | None, int | None],
    progress: Progress,
    paths: Sequence[str],
    *,
    lock: str = "",
    limit: int | None = MOST_LINES,
) -> Diff:
    rows = Rows()
    request = {
        "store": store(cluster),
        "overlay": str(cluster.places.overlay),
        "a": pair[0],
        "b": pair[1],
        "paths": list(paths),
        "limit": limit,
        "lock": lock,
    }
    said = agent.ask(host, "diff", request, progress, on_rows=rows.add)
    return Diff(host.name, pair[0], pair[1], said["counts"], said["lines"], said["told"], rows)


def restore_paths(cluster: Cluster, host: Host, wanted: str, paths: Sequence[str], progress: Progress) -> Brought:
    """Make ``paths`` in the overlay of the stopped appliance what a snapshot has there; nothing else changes.

    The overlay as it was is taken as a snapshot before it is replaced by a copy with the paths in it.

    Raises:
        Refused: the appliance runs, another host has the lease, or a path cannot be brought back on its own.
        SmsError: something is damaged, or there is no room; the overlay is as it was.
    """
    chosen = _check(cluster, host, wanted)
    number = chosen["number"]
    with keep_stopped(cluster, host) as lease:
        before = _ask_diff(cluster, host, (None, number), Silent(), paths, limit=0)
        if not before.lines:
            told = tuple({"path": path} for path in paths)
            return Brought(host.name, number, told, (), 0.0, changed=False)
        overlay = real_path(cluster, host)
        request = {"store": store(cluster), "overlay": overlay, "snapshot": str(number), "paths": list(paths)}
        said = agent.ask(host, "restore_paths", request, progress)
        try:
            why = f"{reason(chosen)}: {' '.join(one['path'] for one in said['paths'])}"
            kept = ask_take(cluster, host, progress, lease, Wanted(reason=why[:REASON]), running=None)
            agent.ask(host, "place_paths", {"overlay": overlay, "was": said["was"]}, progress)
        except BaseException:
            host.remove(said["staged"])
            raise
    return Brought(
        host.name,
        number,
        tuple(said["paths"]),
        tuple(said["notes"]),
        said["seconds"],
        kept=kept["number"],
        other_image=other_image(cluster, host, chosen),
    )


def rehearse_paths(cluster: Cluster, host: Host, wanted: str, paths: Sequence[str]) -> Diff:
    """Check what ``restore_paths`` checks; give what would differ afterwards. Changes nothing.

    Raises:
        Refused: as a restore would.
    """
    chosen = _check(cluster, host, wanted)
    check_stopped(cluster, host)
    _check_here(cluster, host)
    lock = str(cluster.places.lock)
    return _ask_diff(cluster, host, (None, chosen["number"]), Silent(), paths, lock=lock)


def _check(cluster: Cluster, host: Host, wanted: str) -> Snapshot:
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), wanted)
    if apptainer.find_instance(host, instance_name(cluster.site)):
        raise Refused(
            f"the appliance runs on {host.name}",
            hint=f"`sms stop --host {host.name}`; or take it out of the snapshot meanwhile, with --to DIR",
        )
    return chosen


def extract_paths(
    cluster: Cluster,
    host: Host,
    wanted: str,
    paths: Sequence[str],
    folder: str,
    progress: Progress,
    *,
    dry_run: bool = False,
) -> Brought:
    """Take ``paths`` out of a snapshot into a new folder of the host; the appliance may run.

    Raises:
        Refused: the folder is there, or the snapshot has nothing of a path.
        SmsError: the snapshot is damaged, or there is no room; nothing is left.
    """
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), wanted)
    if not folder.startswith("/"):
        if not isinstance(host, Local):
            raise ConfigError(f"--to {folder} is not a whole path", hint=f"give one of {host.name}: /root/{folder}")
        folder = os.path.abspath(folder)  # noqa: PTH100 - links are left as they are
    request = {
        "store": store(cluster),
        "snapshot": str(chosen["number"]),
        "paths": list(paths),
        "folder": folder,
        "rehearse": dry_run,
    }
    said = agent.ask(host, "extract_paths", request, progress)
    return Brought(
        host.name,
        chosen["number"],
        tuple(said["paths"]),
        tuple(said["notes"]),
        said.get("seconds", 0.0),
        changed=not dry_run,
        folder=said["folder"],
    )
