"""What a verb does to the world: it receives one object for that in its context, and a test gives it another one."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from appliance.config.model import AdminHost, Site
from appliance.errors import Busy
from appliance.host.base import CommandError, Host
from appliance.host.local import Local
from appliance.progress import Progress, Silent
from appliance.shared.history import AppendLine
from appliance.shared.lease import read_file
from appliance.tools.agent import Agents

Event = Mapping[str, object]
"""A line of the history: ``at``, ``host``, ``verb``, ``event``, and facts that depend on these two."""
LOCKED = 75
"""Exit status of flock if another run holds the lock (EX_TEMPFAIL, sysexits.h)."""


class Clock(Protocol):
    """Time on this machine, as of the module ``time``. The clocks of other hosts do not belong here."""

    def time(self) -> float:
        """Return the Unix time in seconds."""

    def monotonic(self) -> float:
        """Return seconds since some moment, which no change of the time of day affects."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class Hosts:
    """How this machine reaches the admin hosts. Other machines (old node, VM, nodes) do not belong here."""

    def __init__(self) -> None:
        self._opened: dict[str, Host] = {}
        self._opening = threading.Lock()

    def separate(self) -> Hosts:
        """Return the same hosts, each to be connected to again."""
        return Hosts()

    @property
    def here(self) -> str:
        """The name of this machine."""
        return socket.gethostname()

    @property
    def this(self) -> Host:
        """This machine, which need not be an admin host."""
        return Local(self.here)

    def read_here(self, path: str) -> bytes | None:
        """Return a small file of this machine as ``read_file`` does: ``Host.read`` would run a command."""
        return read_file(path)

    def open(self, site: Site, admin: AdminHost) -> Host:
        """Return an admin host of the site. Always the same object, so connections are reused."""
        with self._opening:
            if admin.name not in self._opened:
                self._opened[admin.name] = Local(admin.name) if admin.name == self.here else _over_ssh(site, admin)
            return self._opened[admin.name]


class Locks:
    """Locks on hosts, which end with their holder: how long a run waits for another one.

    Locks that an agent holds, and those of files on this machine alone, do not belong here.
    """

    wait_s = 5.0
    """A snapshot holds the lock of its host for less than a second: wait instead of refusing."""

    @contextmanager
    def hold(self, host: Host, path: str, what: str) -> Iterator[None]:
        """Hold the lock at ``path`` on the host.

        Raises:
            Busy: another run still holds it after the wait; ``what`` is its message.
        """
        try:
            with host.lock(path, wait_s=self.wait_s):
                yield
        except CommandError as error:
            if error.result.status == LOCKED:
                raise Busy(what, hint="wait for it, then run this again") from error
            raise


@dataclass(frozen=True)
class History:
    """The histories of hosts: events for the user and for runs that resume an interrupted one.

    Records of one run (a migration's, an upgrade's) do not belong here.
    """

    agents: Agents

    def append(self, host: Host, path: str, event: str) -> None:
        """Append a line; it is synced to the disk when this returns.

        Raises:
            SmsError: it could not be written.
        """
        self.agents.perform(host, AppendLine(path, event))

    def read(self, host: Host, path: str) -> list[Event]:
        """Return the events, the oldest first; lines truncated by a crash are skipped."""
        lines: list[Event] = []
        for text in (host.read(path) or b"").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines


@dataclass(frozen=True)
class Env:
    """All that a verb does to the world goes through this; ``Cluster`` has it, and the command line makes the real one.

    A part belongs here if several subjects use it. Programs on a host are run by the host itself (``Host``), and what
    one verb alone does stays with the verb.

    ``progress``: receives the reports of the verb. ``pool``: makes a pool of that many threads. ``new_uuid``: returns a
    UUID that nobody has.
    """

    clock: Clock = time
    progress: Progress = field(default_factory=Silent)
    pool: Callable[[int], Executor] = ThreadPoolExecutor
    agents: Agents = field(default_factory=Agents)
    hosts: Hosts = field(default_factory=Hosts)
    locks: Locks = field(default_factory=Locks)
    new_uuid: Callable[[], str] = lambda: str(uuid.uuid4())

    @property
    def history(self) -> History:
        """The histories of hosts, which their agents write."""
        return History(self.agents)


def _over_ssh(site: Site, host: AdminHost) -> Host:
    from appliance.host.ssh import Ssh  # importing paramiko takes 0.1 s, and most verbs act locally

    others = [other.name for other in site.admin_hosts if other.name != host.name]
    ssh = Ssh(host.name, host.address, user=host.user, port=host.port, key=host.key, known_hosts=site.known_hosts)
    ssh.failed = f"If it has the lease and has failed: sms failover {' or '.join(others)}" if others else ""
    return ssh
