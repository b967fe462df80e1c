"""``sms guard``: stops the services container on a host once another host has superseded it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.hosts.guarded import guard_version, version_path
from appliance.operations.lease import Leases
from appliance.operations.overlay.frozen import may_be_frozen, thaw_lost
from appliance.operations.overlay.generation import retire_overlay, set_aside_older
from appliance.operations.preflight import find_instance, lock_host, lock_ports
from appliance.operations.services.holding import find_hold, lock_path, release
from appliance.operations.services.names import NameWatch
from appliance.operations.services.stop import stop_gateway, take_down
from appliance.operations.services.unfinished import is_interrupted, resume_migration, was_killed
from appliance.operations.services.uplink import UplinkWatch
from appliance.operations.under_way import read_move
from appliance.plan.migration.lease import View, find_holder, find_newer, has_own_overlay
from appliance.shared.lease import Lease
from appliance.shared.locks import Locked, hold_lock
from appliance.tools import carrier, ext3, ports

OWN_INTERVAL_S = 1
"""Seconds between two reads of this host's lease file, which may be shared with other hosts."""
OTHERS_INTERVAL_S = 5
"""Seconds between two queries of another host's lease file."""
NAMES_INTERVAL_S = 60
"""Seconds between two looks whether names of nodes have other addresses."""
FREEZE_INTERVAL_S = 2
"""Seconds between two looks whether the overlay was left frozen."""
MOVE_INTERVAL_S = 15
"""Seconds between two looks for what a killed run has left: of a migration, the other agent decides within 10 s."""
RECHECK_S = 60
"""Seconds between two checks for an instance while another host holds the lease."""
CURRENT_S, FAILED_S = 10, 30
"""Seconds since a query of another host's lease file began within which its result, or its failure, is current."""
LOCK_WAIT_S = 2
"""Seconds that a guard waits for its lock, which status queries hold for a moment."""

LOCK_FD = "SMS_LOCK_FD"
"""Environment variable with the descriptor of an inherited lock (definitions/scripts/start-daemon)."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class SteppedDown:
    """A host that stepped down: the new holder, whether an instance still ran here, and ``seconds`` until it ended."""

    host: str
    holder: str
    generation: int
    ran: bool
    seconds: float = 0.0


@contextmanager
def only_guard(cluster: Cluster) -> Iterator[None]:
    """Hold the lock that makes this process the only guard of this cluster on this host.

    Raises:
        Busy: a guard runs already.
    """
    path = cluster.places.guard_lock
    with ExitStack() as stack:
        try:
            if not _has_inherited(Path(path)):
                stack.enter_context(hold_lock(str(path), wait_s=LOCK_WAIT_S))
        except Locked:
            raise Busy("a guard runs here already", hint="`sms stop` stops it with the services container") from None
        owner = str(os.getpid())
        Path(version_path(cluster)).write_text(f"{owner} {guard_version(cluster)}")
        Path(path).write_text(owner)
        yield


def _has_inherited(path: Path) -> bool:
    """Return whether this process was started with the lock: it then holds it until its end."""
    number = os.environ.pop(LOCK_FD, "")
    try:
        return number.isdigit() and os.path.samestat(os.fstat(int(number)), path.stat())
    except OSError:
        return False


class Guard:
    """The leases of all hosts as known to a guard, and what it does when its host is superseded."""

    def __init__(self, cluster: Cluster, host: Host, report: Report) -> None:
        self.cluster = cluster
        self.host = host
        self.report = report
        self.leases = Leases(host, cluster)
        self._reported: dict[str, str] = {}
        self._queried: dict[str, tuple[float, bool]] = {}
        """When the last query of each host began, and whether it read a lease."""
        self._settled: Lease | None = None
        self._stopping: float | None = None
        """Monotonic time since which the instance is being stopped; None when it is not."""
        self._checked_at = 0.0
        self._frozen = False
        self._killed = False

    def query(self, name: str) -> None:
        """Query the lease file of a host; keep the last known one if the host is unreachable."""
        if name not in self.leases.hosts:
            return  # an engine, which has no such file
        holds = self.holds()
        began, read = self.cluster.env.clock.monotonic(), False
        try:
            # How long ago a failed host was last heard from is known on the others by these queries.
            view = self.leases.query_host(name, runs=False, alive=holds and name != self.host.name)
            read = view.lease is not None
        except SmsError as error:
            self._report_once(name, error.message)
            return
        finally:
            self._queried[name] = (began, read)
        if view.lease:
            self.leases.views[name] = view
            self._reported.pop(name, None)
            self.publish(name)

    def learn(self, name: str, view: View) -> None:
        """Take over the view of another host that was queried elsewhere."""
        if name != self.host.name:
            self.leases.views[name] = view

    def is_current(self) -> bool:
        """Return whether the leases of all other hosts have just been read, or their hosts are known not to answer."""
        now = self.cluster.env.clock.monotonic()
        queried = [
            self._queried.get(name, (-FAILED_S * 1.0, False)) for name in self.leases.hosts if name != self.host.name
        ]
        return not self.newer() and all(now - began < (CURRENT_S if read else FAILED_S) for began, read in queried)

    def publish(self, name: str) -> None:
        """Copy the lease of this host to another one, which may have been unreachable when it was taken."""
        mine = self.leases.views.get(self.host.name, View(None)).lease
        if mine and mine.holder == self.host.name and name != self.host.name:
            self.leases.publish(mine, names=[name])

    def read_own(self) -> None:
        """Read the own lease file directly: a command every second would be too expensive."""
        name = self.host.name
        try:
            data = self.cluster.env.hosts.read_here(str(self.cluster.places.lease))
            self.leases.views[name] = self.leases.read(name, data)
        except OSError as error:
            self._report_once(name, str(error))
        except SmsError as error:
            self._report_once(name, error.message)

    def _report_once(self, name: str, message: str) -> None:
        """Report a message unless it is the last one reported for this name."""
        if self._reported.get(name) != message:
            self._reported[name] = message
            self.report(message)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report any exception instead of raising it: nobody would notice a guard that has died."""
        try:
            yield
        except Exception as error:
            self._report_once(threading.current_thread().name, f"{type(error).__name__}: {error}")

    def check(self) -> SteppedDown | None:
        """Step down if another host has taken over; return what was done."""
        newer = self.newer()
        if not newer:
            return None
        try:
            return self._step_down(newer)
        except Busy:
            pass  # another sms is at work here and is responsible
        except SmsError as error:
            self._report_once("", f"{self.host.name}: {error.message}")
        return None

    def newer(self) -> Lease | None:
        """Return the lease of the host that superseded this one, as far as known."""
        views = dict(self.leases.views)  # other threads update it
        return find_newer(self.host.name, views) if self.host.name in views else None

    def _step_down(self, newer: Lease) -> SteppedDown | None:
        if self._is_settled(newer):
            return None
        if is_interrupted(self.cluster, self.host):  # what a killed migration wrote there may be undone by now
            self.query(str(newer.holder))
        self._disconnect(at_once=True)  # another sms may hold the lock of the host for as long as it waits
        with lock_host(self.cluster, self.host):
            self.query(self.host.name)  # the previous holder of the lock may have changed it
            if is_interrupted(self.cluster, self.host):  # what a killed migration wrote there may be undone by now
                self.query(str(newer.holder))
            again = self.newer()
            return self._stop(again) if again else None

    def _disconnect(self, *, at_once: bool = False) -> None:
        """Disconnect the superseded instance, if one runs.

        Args:
            at_once: without the lock of the host. A migration that moves ports itself is left alone: its target takes
                the lease before the source has ended.
        """
        with lock_ports(self.cluster, self.host):
            self.query(self.host.name)
            newer, move = self.newer(), read_move(self.cluster, self.host) if at_once else None
            running = find_instance(self.cluster, self.host) if newer and not (move and move.moves_ports) else None
            if not newer or not running:
                return
            first, self._stopping = self._stopping is None, self._stopping or self.cluster.env.clock.monotonic()
            with suppress(CommandError):
                ports.detach(self.host, ports.find_ports(self.host, running.pid).values(), down=True)
        if first:
            facts: dict[str, object] = {"holder": str(newer.holder), "generation": newer.generation}
            message = f"{newer.holder} has taken over (generation {newer.generation}): stopping it on {self.host.name}"
            self.record("stale", message, facts)
        if self.is_shared():
            with suppress(SmsError):  # no further byte may reach the other host's overlay
                ext3.shut_down(self.host, str(self.cluster.places.overlay), python=sys.executable)

    def _is_settled(self, newer: Lease) -> bool:
        """Return whether the own file agrees and no instance runs here, which is checked only every ``RECHECK_S``."""
        mine, now = self.leases.views[self.host.name].lease, self.cluster.env.clock.monotonic()
        if self._stopping is not None:
            return False
        if not mine or (mine.holder, mine.generation) != (newer.holder, newer.generation):
            return False
        if self._settled != newer or now - self._checked_at > RECHECK_S:
            if find_instance(self.cluster, self.host):
                return False
            self._set_aside_older(newer)
            self._settled, self._checked_at = newer, now
        return True

    def _set_aside_older(self, newer: Lease) -> None:
        """Set the overlay aside if it is older than the lease, which the guard of the other host has written here."""
        with lock_host(self.cluster, self.host):
            kept = set_aside_older(self.cluster, self.host)
        if kept:
            self.report(f"the overlay of {self.host.name} was out of date, and was renamed to {kept}")
            facts = {"holder": newer.holder, "generation": newer.generation, "kept": kept}
            note(self.cluster, self.host, "guard", "gave way", **facts)

    def _stop(self, newer: Lease) -> SteppedDown:
        """Disconnect the instance, stop it, and write the newer lease last. The next check retries a failed step."""
        name, holder = self.host.name, str(newer.holder)
        facts: dict[str, object] = {"holder": holder, "generation": newer.generation}
        self._disconnect()
        began, mine = self._stopping, self.leases.views[name].lease
        if began is not None:
            take_down(self.cluster, self.host)
        # When the own file names this host as the holder, the other host uses a different overlay.
        if mine and (mine.holder == name or (began is not None and has_own_overlay(mine, name))):
            facts["kept"] = retire_overlay(self.cluster, self.host, newer.generation)
        took = round(self.cluster.env.clock.monotonic() - began, 3) if began is not None else 0.0
        if began is not None:
            self.record("stopped", f"stopped on {name} after {took:.1f} s", facts)
        self._stopping = None
        self.leases.adopt(newer)
        if began is None and mine and mine.holder == name:
            note(self.cluster, self.host, "guard", "gave way", **facts)
        return SteppedDown(name, holder, newer.generation, began is not None, took)

    def record(self, event: str, message: str, facts: dict[str, object]) -> None:
        """Write an event to standard error, syslog and history; a failure to log must not keep the instance running."""
        self.report(message)
        tag = f"sms-guard-{self.cluster.site.cluster}"
        with suppress(SmsError):
            self.host.run("logger", "--tag", tag, "--priority", "daemon.crit", "--", message, ok=None)
        with suppress(SmsError):
            note(self.cluster, self.host, "guard", event, **facts)

    def end_freeze(self) -> None:
        """End a freeze of the overlay whose run was killed, once its mark has been there for two rounds."""
        before, self._frozen = self._frozen, may_be_frozen(self.cluster)
        if before and self._frozen and thaw_lost(self.cluster, self.host):
            self.record("thawed", f"the overlay was frozen by a run that was killed on {self.host.name}: thawed", {})

    def resume_move(self) -> None:
        """Complete or roll back a migration or switch that was killed with its agents, once it was seen twice.

        Its services with state would be stopped until somebody calls a verb.
        """
        before, self._killed = self._killed, was_killed(self.cluster, self.host)
        if not (before and self._killed):
            return
        with suppress(Busy):  # a verb does it
            found = resume_migration(self.cluster, self.host)
            if state := found["found"]:
                now = f"it is {found['state']} there now"
                self.record("resumed", f"a migration was killed on {self.host.name} ({state}); {now}", {"found": state})

    def end_hold(self) -> None:
        """Let jobs start again where an apply that was killed keeps them from it, once nobody is at work."""
        locked = self.cluster.env.hosts.read_here(
            lock_path(self.cluster)
        )  # since the boot, after which a start does it
        if locked is None or not self.holds() or is_interrupted(self.cluster, self.host):
            return
        found = find_hold(self.cluster, self.host)
        with suppress(Busy):  # it lives, or another run is at work and does it
            if found and not found.written:
                with lock_host(self.cluster, self.host):
                    released = release(self.cluster, self.host)
                if released:
                    what = ", ".join(filter(None, [*found.partitions, found.nodes]))
                    facts: dict[str, object] = {"partitions": [*found.partitions], "nodes": found.nodes}
                    self.record("reopened", f"sms {found.verb} was killed: jobs may start again in {what}", facts)

    def may_return(self) -> bool:
        """Return whether ports may be on their bridges again, once the leases of this cluster permit it."""
        return True

    def end_gateway(self) -> None:
        """Stop what stays here while an engine has the other services, once an admin host has all of them."""
        holder = self.find_admin()
        if not holder:
            return
        try:
            # A start of all services stops it itself, as late as possible: it may still be refused.
            with lock_host(self.cluster, self.host):
                ran = stop_gateway(self.cluster, self.host)
            if ran:
                self.report(f"{holder.holder} has the services again: what stayed on {self.host.name} was stopped")
        except Busy:
            pass  # another sms is at work here and is responsible
        except SmsError as error:
            self._report_once("gateway", f"{self.host.name}: {error.message}")

    def find_admin(self) -> Lease | None:
        """Return the lease that an admin host holds, as far as known; None if an engine has it, or nobody."""
        views = dict(self.leases.views)
        holder = find_holder(views) if self.host.name in views else None
        return holder if holder and not holder.engine else None

    def holds(self) -> bool:
        """Return whether this host has the lease, by its own file as it was read last."""
        mine = self.leases.views.get(self.host.name, View(None)).lease
        return mine is not None and mine.holder == self.host.name

    def is_shared(self) -> bool:
        """Return whether the host that took over uses the same overlay."""
        mine = self.leases.views[self.host.name].lease
        return mine is not None and has_own_overlay(mine, self.host.name) is False


class GatewayGuard(Guard):
    """That of what stays while an engine has the other services. It ends once an admin host has all of them."""

    def __init__(self, whole: Guard) -> None:
        super().__init__(whole.cluster.of_gateway(), whole.host, whole.report)
        self.whole = whole

    def may_return(self) -> bool:
        """Read the leases of the whole; return whether no admin host has it, and so the addresses."""
        leases = Leases(self.host, self.whole.cluster.reconnecting())
        for name, view in leases.query_readable().items():
            if view.lease:
                self.whole.learn(name, view)
        return self.whole.find_admin() is None


def guard_once(cluster: Cluster, host: Host, report: Report) -> SteppedDown | None:
    """Query the leases of all hosts once, and step down if another host has taken over."""
    guard = Guard(cluster, host, report)
    guard.leases.query()
    for name in guard.leases.hosts:
        guard.publish(name)
    stepped_down = guard.check()
    if guard.holds():
        with guard.reporting_errors():
            NameWatch(cluster, host, report).check()
    part = GatewayGuard(guard)
    with part.reporting_errors():
        if _has_lease(part):
            part.leases.query()
            part.check()
            guard.end_gateway()
    return stepped_down


def guard(cluster: Cluster, host: Host, report: Report, *, on_step_down: Callable[[SteppedDown], None]) -> None:
    """Check the leases of all hosts periodically; never returns.

    Raises:
        Busy: a guard of this cluster runs here already.
    """
    with only_guard(cluster):
        whole = Guard(cluster, host, report)
        part, watchers = GatewayGuard(whole), [_watch(whole)]
        while True:
            # What stays while an engine has the other services has a lease from its first start on.
            if len(watchers) == 1 and _has_lease(part):
                watchers.append(_watch(part))
            for watcher in watchers:
                stepped_down = None
                with watcher.reporting_errors():
                    watcher.read_own()
                    stepped_down = watcher.check()
                if stepped_down:
                    on_step_down(stepped_down)
            if part.holds():
                with whole.reporting_errors():
                    whole.end_gateway()
            cluster.env.clock.sleep(OWN_INTERVAL_S)


def _has_lease(watcher: Guard) -> bool:
    return Path(watcher.cluster.places.lease).exists()


def _watch(watcher: Guard) -> Guard:
    """Query the other hosts and watch the uplinks in threads."""
    for name in watcher.leases.hosts:
        if name != watcher.host.name:
            threading.Thread(target=_query_forever, args=(watcher, name), daemon=True).start()
    threading.Thread(target=_watch_uplinks, args=(watcher,), daemon=True).start()
    threading.Thread(target=_watch_freezes, args=(watcher,), daemon=True).start()
    threading.Thread(target=_watch_moves, args=(watcher,), daemon=True).start()
    threading.Thread(target=_watch_names, args=(watcher,), daemon=True).start()
    return watcher


def _watch_freezes(watcher: Guard) -> None:
    # A thread of its own: on a failing disk it may wait for long, and the lease is watched nevertheless.
    while True:
        with watcher.reporting_errors():
            watcher.end_freeze()
        watcher.cluster.env.clock.sleep(FREEZE_INTERVAL_S)


def _watch_moves(watcher: Guard) -> None:
    while True:
        with watcher.reporting_errors():
            watcher.resume_move()
        with watcher.reporting_errors():
            watcher.end_hold()
        watcher.cluster.env.clock.sleep(MOVE_INTERVAL_S)


def _watch_names(watcher: Guard) -> None:
    watch = NameWatch(watcher.cluster, watcher.host, watcher.report)
    while True:
        with watcher.reporting_errors():
            if watcher.holds():
                watch.check()
        watcher.cluster.env.clock.sleep(NAMES_INTERVAL_S)


def _query_forever(watcher: Guard, name: str) -> None:
    while True:
        with watcher.reporting_errors():
            watcher.query(name)
        watcher.cluster.env.clock.sleep(OTHERS_INTERVAL_S)


def _watch_uplinks(watcher: Guard) -> None:
    watch: UplinkWatch | None = None
    with watcher.reporting_errors(), carrier.link_events() as wait:
        while True:
            with watcher.reporting_errors():
                watch = watch or UplinkWatch(watcher.cluster, watcher.host, watcher.record, watcher)
                watch.check()
            wait(OWN_INTERVAL_S)
