"""The folders of rehearsals: one each, told apart by name, and what killed runs left of them is cleared away."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.errors import Refused
from appliance.host.base import CommandError
from appliance.host.local import Local
from appliance.lab import down
from appliance.lab.layout import LOCKS
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import LOCKED
from appliance.progress import Progress

RECORD = "rehearsal.json"
TRIES = 10


@dataclass(frozen=True)
class Record:
    """What a rehearsal is, as it lies in its folder. ``kept``: somebody wants to look at it; ``made`` is Unix time."""

    name: str
    image: str
    snapshot: int
    made: float
    kept: bool = False


def root(cluster: Cluster) -> Path:
    """The folder of this cluster's rehearsals."""
    return Path(cluster.site.state) / "rehearsals" / cluster.site.cluster


@contextmanager
def own_folder(cluster: Cluster, image: str, snapshot: int) -> Iterator[tuple[str, Path]]:
    """A name and a folder that no other rehearsal has, for as long as the context lasts; nothing is removed."""
    with ExitStack() as stack:
        name = f"rh-{secrets.token_hex(4)}"
        stack.enter_context(Local().lock(_lock(name)))
        folder = root(cluster) / name
        # Before anything else of it: what is found here is all that there is to clear away.
        Local().run("mkdir", "-p", "-m", "0700", str(root(cluster)), str(folder))
        write_record(folder, Record(name, image, snapshot, time.time()))
        yield name, folder


def write_record(folder: Path, record: Record) -> None:
    """Write down what a rehearsal is."""
    Local().write(str(folder / RECORD), json.dumps(asdict(record), indent=1).encode(), mode=0o600)


def read_record(folder: Path) -> Record:
    """What a rehearsal is; as much as is known where its record was never written."""
    try:
        said: dict[str, Any] = json.loads((folder / RECORD).read_text())
        return Record(**said)
    except (OSError, ValueError, TypeError):
        return Record(folder.name, "", 0, 0.0)


def clear_left(cluster: Cluster, progress: Progress, *, kept: bool = False) -> list[str]:
    """Remove rehearsals that nobody is at work on, with ``kept`` those too that were left up; give their names."""
    removed = []
    for folder in sorted(root(cluster).glob("rh-*")):
        with ExitStack() as stack:
            if not _try_lock(folder.name, stack):
                continue
            if read_record(folder).kept and not kept:
                continue
            with progress.step(f"remove rehearsal {folder.name}"):
                remove(folder)
            removed.append(folder.name)
    return removed


def need_none_at_work(cluster: Cluster) -> None:
    """Whether nobody is at work on any rehearsal.

    Raises:
        Refused: somebody is.
    """
    for folder in sorted(root(cluster).glob("rh-*")):
        with ExitStack() as stack:
            if not _try_lock(folder.name, stack):
                raise Refused(f"rehearsal {folder.name} is under way", hint="it is removed at its end, or with Ctrl-C")


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
    # The lock of a run that was killed just now is let go a moment later.
    for _ in range(TRIES):
        try:
            stack.enter_context(Local().lock(_lock(name)))
        except CommandError as error:
            if error.result.status != LOCKED:
                raise
            time.sleep(0.1)
        else:
            return True
    return False
