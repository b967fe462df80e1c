"""``sms guard``: stops the appliance on a host once another host has taken over from it."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.hosts.preflight import only_one
from appliance.operations.migration.lease import Leases
from appliance.operations.overlay.overlay import put_aside
from appliance.operations.services.stop import take_down
from appliance.plan.machine import instance_name
from appliance.plan.migration.lease import Lease, View, find_newer, is_apart
from appliance.tools import apptainer, ext3, ports

OWN_S = 1
"""Seconds between two looks at the own lease file, which may be one that hosts share."""
OTHERS_S = 5
"""Seconds between two looks at another host's."""
SETTLED_S = 60
"""Seconds between two looks whether the appliance runs where another host has the lease."""
START_S = 2
"""Seconds that a guard waits for its lock, which others look at for a moment."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class GaveWay:
    """A host that gave way: to whom, and whether the appliance still ran here; ``seconds`` until it had ended."""

    host: str
    holder: str
    generation: int
    ran: bool
    seconds: float = 0.0


@contextmanager
def only_guard(cluster: Cluster) -> Iterator[None]:
    """Be the one guard of this cluster on this host.

    Raises:
        Busy: there is one already.
    """
    path = Path(cluster.places.guard_lock)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        deadline = time.monotonic() + START_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise Busy("a guard runs here already", hint="`sms stop` ends it with the appliance") from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Guard:
    """What a guard knows of all hosts' leases."""

    def __init__(self, cluster: Cluster, host: Host, say: Say) -> None:
        self.cluster = cluster
        self.host = host
        self.say = say
        self.leases = Leases(host, cluster)
        self._said: dict[str, str] = {}
        self._settled: Lease | None = None
        self._stopping: float | None = None
        """Since when it is being stopped here; None where that is done."""
        self._asked = 0.0

    def look(self, name: str) -> None:
        """Ask a host what its file says; one that cannot be asked now is believed as before."""
        try:
            view = self.leases.ask(name, runs=False)
        except SmsError as error:
            self._complain(name, error.message)
            return
        if view.lease:
            self.leases.views[name] = view
            self._said.pop(name, None)
            self.tell(name)

    def tell(self, name: str) -> None:
        """Tell a host what this one holds: it may have been away when that was taken."""
        mine = self.leases.views.get(self.host.name, View(None)).lease
        if mine and mine.holder == self.host.name and name != self.host.name:
            self.leases.tell(mine, names=[name])

    def look_at_own(self) -> None:
        """The own file, without a command: once a second is often."""
        name = self.host.name
        try:
            path = Path(self.cluster.places.lease)
            data = path.read_bytes() if path.exists() else None
            self.leases.views[name] = self.leases.read(name, data)
        except OSError as error:
            self._complain(name, str(error))
        except SmsError as error:
            self._complain(name, error.message)

    def _complain(self, name: str, words: str) -> None:
        """Say it, once as long as it is the same."""
        if self._said.get(name) != words:
            self._said[name] = words
            self.say(words)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Whatever goes wrong inside is said: a guard that ended would be missed by nobody."""
        try:
            yield
        except Exception as error:
            self._complain(threading.current_thread().name, f"{type(error).__name__}: {error}")

    def check(self) -> GaveWay | None:
        """Give way when another host has taken over; say what was done."""
        newer = self.newer()
        if not newer:
            return None
        try:
            return self._give_way(newer)
        except Busy:
            pass  # another sms is at work here, and knows what it does
        except SmsError as error:
            self._complain("", f"{self.host.name}: {error.message}")
        return None

    def newer(self) -> Lease | None:
        """The lease of the host that has taken over from this one, by all that is known."""
        views = dict(self.leases.views)  # others are asked meanwhile
        return find_newer(self.host.name, views) if self.host.name in views else None

    def _give_way(self, newer: Lease) -> GaveWay | None:
        if self._is_settled(newer):
            return None
        busy = f"another sms is at work on {self.host.name}"
        with only_one(self.host, str(self.cluster.places.lock), busy):
            self.look(self.host.name)  # it may have been changed by who had the lock
            again = self.newer()
            return self._stop(again) if again else None

    def _is_settled(self, newer: Lease) -> bool:
        """Whether the own file says so as well, and nothing runs here; that is asked for now and then only."""
        mine, now = self.leases.views[self.host.name].lease, time.monotonic()
        if self._stopping is not None:
            return False
        if not mine or (mine.holder, mine.generation) != (newer.holder, newer.generation):
            return False
        if self._settled != newer or now - self._asked > SETTLED_S:
            if self._running():
                return False
            self._settled, self._asked = newer, now
        return True

    def _running(self) -> apptainer.Instance | None:
        return apptainer.find_instance(self.host, instance_name(self.cluster.site))

    def _stop(self, newer: Lease) -> GaveWay:
        """Off the networks first, then the end; the newer lease is written down last. What fails is tried again."""
        name, holder = self.host.name, str(newer.holder)
        running = self._running()
        facts: dict[str, object] = {"holder": holder, "generation": newer.generation}
        if running:
            self._stopping = self._stopping or time.monotonic()
            with suppress(CommandError):
                ports.detach(self.host, ports.find_ports(self.host, running.pid).values(), down=True)
            self._tell(
                "stale", f"{holder} has taken over (generation {newer.generation}): stopping it on {name}", facts
            )
            if self.is_shared():
                with suppress(SmsError):  # not one more byte into what the other host writes
                    ext3.cut_off(self.host, str(self.cluster.places.overlay), python=sys.executable)
        began, mine = self._stopping, self.leases.views[name].lease
        if began is not None:
            take_down(self.cluster, self.host)
        # Its own file says that it holds: then the other host's overlay is another one.
        if mine and (mine.holder == name or (began is not None and is_apart(mine, name))):
            facts["kept"] = put_aside(self.cluster, self.host, newer.generation)
        took = round(time.monotonic() - began, 3) if began is not None else 0.0
        if began is not None:
            self._tell("stopped", f"it has ended on {name} after {took:.1f} s", facts)
        self._stopping = None
        self.leases.adopt(newer)
        if began is None and mine and mine.holder == name:
            note(self.cluster, self.host, "guard", "gave way", **facts)
        return GaveWay(name, holder, newer.generation, began is not None, took)

    def _tell(self, event: str, words: str, facts: dict[str, object]) -> None:
        """Standard error, syslog and history; a log that cannot be written must not keep it running."""
        self.say(words)
        tag = f"sms-guard-{self.cluster.site.cluster}"
        with suppress(SmsError):
            self.host.run("logger", "--tag", tag, "--priority", "daemon.crit", "--", words, ok=None)
        with suppress(SmsError):
            note(self.cluster, self.host, "guard", event, **facts)

    def is_shared(self) -> bool:
        """Whether the host that took over has the same overlay."""
        mine = self.leases.views[self.host.name].lease
        return mine is not None and is_apart(mine, self.host.name) is False


def guard_once(cluster: Cluster, host: Host, say: Say) -> GaveWay | None:
    """Look at all hosts' leases once, and give way if another host has taken over."""
    guard = Guard(cluster, host, say)
    guard.leases.look()
    for name in guard.leases.hosts:
        guard.tell(name)
    return guard.check()


def guard(cluster: Cluster, host: Host, say: Say, *, on_gave_way: Callable[[GaveWay], None]) -> None:
    """Look again and again; never returns.

    Raises:
        Busy: a guard of this cluster runs here already.
    """
    with only_guard(cluster):
        watch = Guard(cluster, host, say)
        for name in watch.leases.hosts:
            if name != host.name:
                threading.Thread(target=_look_for_ever, args=(watch, name), daemon=True).start()
        while True:
            gave = None
            with watch.going_on():
                watch.look_at_own()
                gave = watch.check()
            if gave:
                on_gave_way(gave)
            time.sleep(OWN_S)


def _look_for_ever(watch: Guard, name: str) -> None:
    while True:
        with watch.going_on():
            watch.look(name)
        time.sleep(OTHERS_S)
