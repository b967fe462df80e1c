"""Folders of rehearsals: create and lock one for each, and remove those of killed runs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.host.base import CommandError
from appliance.host.local import Local
from appliance.lab import down
from appliance.lab.layout import LOCKS
from appliance.operations.context import Cluster
from appliance.operations.env import LOCKED
from appliance.shared.records import RecordError, from_json

RECORD = "rehearsal.json"


@dataclass(frozen=True)
class Record:
    """Record of a rehearsal in its folder. ``kept``: kept for inspection; ``made`` is Unix time."""

    name: str
    image: str
    snapshot: int
    made: float
    kept: bool = False


def root(cluster: Cluster) -> Path:
    """Return the folder of this cluster's rehearsals."""
    return Path(cluster.site.state) / "rehearsals" / cluster.site.cluster


@contextmanager
def new_folder(cluster: Cluster, image: str, snapshot: int) -> Iterator[tuple[str, Path]]:
    """Create a folder with a unique name, locked as long as the context lasts; it is not removed."""
    with ExitStack() as stack:
        name = f"rh-{secrets.token_hex(4)}"
        stack.enter_context(Local().lock(_lock(name)))
        folder = root(cluster) / name
        # Created before anything else, so that all leftovers can be found by their folders.
        Local().run("mkdir", "-p", "-m", "0700", str(root(cluster)), str(folder))
        write_record(folder, Record(name, image, snapshot, cluster.env.clock.time()))
        yield name, folder


def write_record(folder: Path, record: Record) -> None:
    """Write the record of a rehearsal."""
    Local().write(str(folder / RECORD), json.dumps(asdict(record), indent=1).encode(), mode=0o600)


def read_record(folder: Path) -> Record:
    """Read the record of a rehearsal; without a valid one return only its name."""
    try:
        return from_json(Record, (folder / RECORD).read_bytes())
    except (OSError, RecordError):
        return Record(folder.name, "", 0, 0.0)


def remove_leftovers(cluster: Cluster, *, kept: bool = False) -> list[str]:
    """Remove rehearsals that are not running, with ``kept`` also the kept ones; return their names."""
    removed = []
    for folder in sorted(root(cluster).glob("rh-*")):
        with ExitStack() as stack:
            if not _try_lock(folder.name, stack):
                continue
            if read_record(folder).kept and not kept:
                continue
            with cluster.env.progress.step(f"remove rehearsal {folder.name}"):
                remove(folder)
            removed.append(folder.name)
    return removed


def refuse_if_running(cluster: Cluster) -> None:
    """Check that no rehearsal is running.

    Raises:
        Refused: one is.
    """
    for folder in sorted(root(cluster).glob("rh-*")):
        with ExitStack() as stack:
            if not _try_lock(folder.name, stack):
                raise Refused(f"rehearsal {folder.name} is running", hint="it is removed when it ends, or with Ctrl-C")


def remove(folder: Path) -> None:
    """Remove a rehearsal: processes, namespaces, loop devices, files. The caller holds its lock."""
    down(folder.name)
    Local().run("rm", "-rf", "--one-file-system", str(folder), timeout=300)
    lock = Path(_lock(folder.name))
    for path in (lock, LOCKS / f"sms-lab-{folder.name}.lock", LOCKS / f"sms-lab-{folder.name}.busy"):
        path.unlink(missing_ok=True)


def _lock(name: str) -> str:
    return str(LOCKS / f"sms-rehearsal-{name}.lock")


def _try_lock(name: str, stack: ExitStack) -> bool:
    try:
        # The lock of a run that was just killed is released a moment later.
        stack.enter_context(Local().lock(_lock(name), wait_s=1))
    except CommandError as error:
        if error.result.status != LOCKED:
            raise
        return False
    return True
