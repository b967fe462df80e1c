"""``sms overlay restore``: a snapshot in the overlay's place, or beside it; what was there before is kept."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_programs
from appliance.operations.migration.lease import check_lease
from appliance.operations.overlay.overlay import check_stopped, keep_stopped
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.snapshot import Wanted, ask_take
from appliance.plan.migration.lease import Lease
from appliance.progress import Progress
from appliance.tools import agent

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What ``--as`` takes for a name: a file beside the overlay, without its .img."""
KEEP = """\
for try in "" .2 .3 .4 .5 .6 .7 .8 .9; do
  kept=$2$try
  [ ! "$1" -ef "$kept" ] || exec echo "$kept"
  [ ! -e "$kept" ] && ln -T "$1" "$kept" && sync "$(dirname "$kept")" && exec echo "$kept"
done
exit 1
"""
"""Shell: a second name for file $1, beginning with $2. It keeps its own: at no moment is there no overlay."""


@dataclass(frozen=True)
class Kept:
    """What became of the overlay that was replaced: a snapshot, or a file where it was too damaged for one.

    ``same``: it was to the byte what was to be restored, and nothing was done.
    """

    snapshot: int | None = None
    path: str = ""
    why: str = ""
    same: bool = False


@dataclass(frozen=True)
class Restored:
    """A snapshot at ``target`` on ``host``. ``kept`` is what was there before, None where nothing was."""

    host: str
    snapshot: int
    target: str
    size: int
    seconds: float
    kept: Kept | None = None
    other_image: bool = False


def restore(
    cluster: Cluster, host: Host, wanted: str, progress: Progress, *, name: str = "", fenced: Collection[str] = ()
) -> Restored:
    """Put a snapshot in the overlay's place; with ``name``, into a new file beside it.

    Args:
        wanted: its number, or ``latest``.
        name: a name beside the overlay, or a whole path.
        fenced: admin hosts that are surely off; what they hold does not count.

    Raises:
        Refused: the appliance runs, another host has the lease, there is no such snapshot, or the name is taken.
        SmsError: the snapshot is damaged, or there is no room; what was there is there.
    """
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), wanted)
    if name:
        return _beside(cluster, host, chosen, free_target(cluster, host, name), progress)
    with keep_stopped(cluster, host, fenced=fenced) as lease:
        path = real_path(cluster, host)
        kept = _keep(cluster, host, chosen, lease, path, progress)
        if kept and kept.same:
            return Restored(host.name, chosen["number"], path, chosen["used_bytes"], 0.0, kept)
        size, seconds = _ask(cluster, host, chosen, path, True, progress)
    return Restored(host.name, chosen["number"], path, size, seconds, kept, other_image(cluster, host, chosen))


def rehearse_restore(cluster: Cluster, host: Host, wanted: str, *, name: str = "") -> list[str]:
    """Check all that a restore checks; give what it would do. Changes nothing.

    Raises:
        Refused: as a restore would.
    """
    check_programs(host)
    chosen = find_snapshot(list_snapshots(cluster, host), wanted)
    if name:
        return [f"write snapshot {chosen['number']} into {free_target(cluster, host, name)}, and check it"]
    check_lease(host, cluster)
    check_stopped(cluster, host)
    overlay = real_path(cluster, host)
    exists = host.works("test", "-e", overlay)
    return [
        *([f"take {overlay} as a snapshot: {reason(chosen)}"] if exists else []),
        f"write snapshot {chosen['number']} beside {overlay}, check it, and rename it over that",
    ]


def reason(chosen: Snapshot) -> str:
    """Why the overlay that is replaced is taken as a snapshot."""
    return f"before restore of {chosen['number']}"


def free_target(cluster: Cluster, host: Host, name: str) -> str:
    """The path that ``--as`` means, where there is nothing yet.

    Raises:
        ConfigError: it is neither a name nor a whole path.
        Refused: there is something.
    """
    if name.startswith("/"):
        path = str(PurePosixPath(name))
    elif NAME.fullmatch(name):
        path = f"{cluster.places.overlay.parent}/{name.removesuffix('.img')}.img"
    else:
        raise ConfigError(f"--as {name} is no name", hint="give a name such as tuesday, or a whole path")
    if path == str(cluster.places.overlay):
        raise ConfigError(f"{path} is the appliance's own overlay", hint="without --as it is restored in its place")
    if host.works("test", "-e", path):
        raise Refused(f"{path} is there already on {host.name}", hint="--as never replaces a file: give another name")
    return path


def _beside(cluster: Cluster, host: Host, chosen: Snapshot, target: str, progress: Progress) -> Restored:
    size, seconds = _ask(cluster, host, chosen, target, False, progress)
    return Restored(host.name, chosen["number"], target, size, seconds)


def _ask(
    cluster: Cluster, host: Host, chosen: Snapshot, target: str, replace: bool, progress: Progress
) -> tuple[int, float]:
    request = {"store": store(cluster), "snapshot": str(chosen["number"]), "target": target, "replace": replace}
    said = agent.ask(host, "restore", request, progress)
    return said["bytes"], said["seconds"]


def real_path(cluster: Cluster, host: Host) -> str:
    """Where the overlay really lies: its name may be a link, into a mirror above all, and stays one.

    Raises:
        Refused: it is a link to nothing.
    """
    overlay = str(cluster.places.overlay)
    script = 'if [ -L "$1" ]; then [ -e "$1" ] || exit 44; exec readlink -f "$1"; fi; echo "$1"'
    found = host.run("sh", "-c", script, "real", overlay, ok=(0, 44))
    if found.status:
        raise Refused(f"{overlay} leads to a file that is not there", hint="it is mirrored: is the mirror mounted?")
    return found.text


def _keep(
    cluster: Cluster, host: Host, chosen: Snapshot, lease: Lease, overlay: str, progress: Progress
) -> Kept | None:
    """Take the overlay as a snapshot before it is replaced; one that is too damaged for that gets a second name.

    Raises:
        Refused, SmsError: it can be kept in neither way.
    """
    if not host.works("test", "-e", overlay):
        return None
    try:
        wanted = Wanted(reason=reason(chosen))
        taken = ask_take(cluster, host, progress, lease, wanted, running=None)
        same = all(taken[key] == chosen[key] for key in ("digests", "size"))
        return Kept(taken["number"], same=same)
    except (Refused, CommandError, Unreachable):
        raise
    except SmsError as error:
        why = error.message
    name = f"{overlay}.before-{chosen['number']}"
    told = host.run("sh", "-c", KEEP, "keep", overlay, name, ok=None)
    if told.status:
        raise SmsError(
            f"the overlay can be kept neither as a snapshot ({why}) nor as {name}; nothing is replaced",
            hint=f"move it away yourself, if you can do without it: mv {overlay} /elsewhere",
        )
    path = told.text
    progress.say(f"note: the overlay cannot be taken as a snapshot ({why}); it is kept as {path}")
    return Kept(path=path, why=why)


def other_image(cluster: Cluster, host: Host, chosen: Snapshot) -> bool:
    """Whether the next start has another image than the snapshot was taken under, as far as both are known."""
    before = chosen["image"].get("key", "")
    current = Path(cluster.places.current)
    if current.is_file():  # it is the one that a start delivers
        key = current.resolve().stem
    else:
        key = PurePosixPath(host.run("readlink", "-f", str(current), ok=None).text).stem
    return bool(before and key and key != current.stem and key != before)
