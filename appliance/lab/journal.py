"""Record and lock of a lab that is up or being created.

Every name that a lab uses is derived from its own name and its number of nodes. One record, written
before the first of them is used, is therefore enough to find all parts of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import Refused
from appliance.host.base import CommandError
from appliance.host.local import Local
from appliance.lab.layout import LOCKS, RUNNING, USUAL, Layout, Plan


@dataclass(frozen=True)
class Journal:
    """Record of a lab. ``pids``: first process of each host, empty until all run; ``plan``: None for the default."""

    name: str
    nodes: int
    digest: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    metal: int = 0
    engines: Sequence[str] = ()
    legacy: bool = False

    @property
    def layout(self) -> Layout:
        """The layout that these names give."""
        plan = Plan.from_dict(self.plan) if self.plan else USUAL
        return Layout(self.name, self.nodes, plan, self.metal, tuple(self.engines), self.legacy)

    def write(self) -> None:
        """Write the record to disk."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        busy(self.name).write(str(_path(self.name)), text.encode())


def _path(name: str) -> Path:
    return RUNNING / name / "journal.json"


def read_journal(name: str) -> Journal | None:
    """Return the lab's record, or None if there is no lab of this name."""
    data = Local().read(str(_path(name)))
    return Journal(**json.loads(data)) if data else None


def busy(name: str) -> Local:
    """Return this machine, for commands that create or remove a part of the lab.

    Each holds a shared lock while it runs. It outlives a killed `sms`, and `changing` waits for
    it, so that such a command cannot create anything during `down`.
    """
    return Local(prefix=("flock", "--shared", "--close", _busy_path(name)))


def _busy_path(name: str) -> str:
    for folder in (LOCKS.parent, LOCKS):
        folder.mkdir(mode=0o700, exist_ok=True)
    return str(LOCKS / f"sms-lab-{name}.busy")


@contextmanager
def changing(name: str) -> Iterator[None]:
    """Hold the lab's lock, and wait for commands of a killed run.

    Raises:
        Refused: another run holds it.
    """
    with ExitStack() as stack:
        try:
            # The lock of a run that was just killed is released a moment later.
            stack.enter_context(Local().lock(str(LOCKS / f"sms-lab-{name}.lock"), wait_s=1))
        except CommandError as error:
            if error.result.status != 75:  # flock: held by another process
                raise
            raise Refused(f"another run is changing lab {name}", hint="wait until it ends") from None
        Local().run("flock", "--wait", "30", "--exclusive", _busy_path(name), "true")
        yield


def alive(journal: Journal) -> bool:
    """Return whether the lab is complete and every host is on."""
    return is_complete(journal) and not hosts_off(journal)


def is_complete(journal: Journal) -> bool:
    """Return whether the lab was completely created, and is on: a reboot of the machine ends all of its hosts."""
    hosts = {host.name for host in journal.layout.hosts}
    return hosts == set(journal.pids) and hosts_off(journal) != hosts


def hosts_off(journal: Journal) -> set[str]:
    """Return the hosts whose first process does not run, or is not in the host's namespace."""
    layout = journal.layout
    return {
        name
        for name, pid in journal.pids.items()
        if not _same_namespace(f"/proc/{pid}/ns/net", f"/run/netns/{layout.namespace(name)}")
    }


def _same_namespace(process: str, namespace: str) -> bool:
    try:
        return Path(process).samefile(namespace)
    except OSError:
        return False
