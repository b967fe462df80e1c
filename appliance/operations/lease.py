"""Takes and releases the lease: writes the files of all reachable admin hosts, by compare and swap under a lock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, CommandTimeout, Host, Stuck, Unreachable
from appliance.operations.context import Cluster
from appliance.plan.machine import instance_name
from appliance.plan.migration.lease import (
    DamagedLease,
    View,
    find_holder,
    find_identity,
    has_own_overlay,
    may_take,
    merge_update,
    raise_floor,
    read_lease,
    release,
    take,
)
from appliance.shared.lease import BUSY, LOST_RACE, SAME, WRITTEN, Lease, SwapLease, digest
from appliance.tools import files

QUERY = """\
runs=0
if [ -n "$2" ] && command -v apptainer >/dev/null; then
    ! apptainer instance list --json "$2" | grep -q '"pid"' || runs=1
fi
if [ -n "$4" ]; then mkdir -p -m 0700 "${3%/*}" && printf %s "$4" >"$3"; fi
[ ! -e "$1" ] || [ -f "$1" ] || { echo "$1: not a regular file" >&2; exit 1; }
if [ -e "$1" ]; then echo "$runs file"; exec head -c 4096 -- "$1"; else echo "$runs none"; fi
"""
"""Shell: print whether instance $2 runs, if given, and then the lease file $1; write $4, if given, to file $3."""
QUERY_TIMEOUT_S = 15
"""Seconds until a host whose disk hangs counts as unreachable."""
OWN_WAIT_S, OTHERS_WAIT_S = 10, 2


class Leases:
    """The lease files of all admin hosts, as seen by one run that acts for ``host``."""

    def __init__(self, host: Host, cluster: Cluster, *, without: Collection[str] = (), tolerant: bool = False) -> None:
        """Query nothing yet.

        Args:
            without: hosts that are known to be off; they are not queried, and leases that they hold are ignored.
            tolerant: another host whose file is not a lease of this cluster counts as unreachable.
        """
        self.me = host.name
        self.tolerant = tolerant
        self.cluster = cluster
        self.without = frozenset(without)
        self.hosts: dict[str, Host] = {host.name: host}
        for admin in cluster.site.admin_hosts:
            if admin.name != host.name and admin.name not in self.without:
                self.hosts[admin.name] = cluster.host(admin.name)
        self.views: dict[str, View] = {}
        self.unwritten: dict[str, SmsError] = {}
        """Hosts that answer, but whose files ``take`` could not write, and the reason."""
        self.unread: dict[str, str] = {}
        """Hosts that answer, but count as unreachable because a file of theirs is invalid, and the reason."""
        self.queried_at = 0.0
        self.floor = 0
        """The highest generation known from elsewhere than lease files; a new one is above it."""
        self._data: dict[str, bytes | None] = {}

    @property
    def unreachable(self) -> list[str]:
        """The hosts that could not be queried."""
        return [name for name, view in self.views.items() if view.lease is None]

    @property
    def top(self) -> int:
        """The highest generation in the files of all hosts that answer."""
        return max((view.lease.generation for view in self.views.values() if view.lease), default=0)

    def query(self, *, patience_s: float = 0) -> dict[str, View]:
        """Query all hosts in parallel.

        Args:
            patience_s: seconds to retry hosts that do not answer.

        Raises:
            SmsError: a file is not a lease of this cluster; if ``tolerant``, that of ``me``.
            Unreachable: ``me`` itself.
        """
        deadline = self.cluster.env.clock.monotonic() + patience_s
        self.unread = {}
        self.views = self._query_hosts(list(self.hosts))
        while self.unread.keys() < set(self.unreachable) and self.cluster.env.clock.monotonic() < deadline:
            self.cluster.env.clock.sleep(1)
            self.views |= self._query_hosts(self.unreachable)
        self.queried_at = self.cluster.env.clock.monotonic()
        return self.views

    def query_readable(self) -> dict[str, View]:
        """Query all hosts in parallel; one whose file is not a lease of this cluster counts as unreachable, too."""
        with self.cluster.env.pool(max(1, len(self.hosts))) as pool:
            self.views = dict(zip(self.hosts, pool.map(self._query_readable, self.hosts), strict=True))
        return self.views

    def _query_readable(self, name: str) -> View:
        try:
            return self.query_host(name, runs=False)
        except SmsError:
            return View(None)

    def prepare(self) -> None:
        """Do in parallel what a take needs: query all hosts, and copy the agent to those that are other machines.

        Raises:
            As ``query``.
        """
        self.query()
        with self.cluster.env.pool(max(1, len(self.hosts))) as pool:
            list(pool.map(self._prepare_host, self.hosts))

    def _prepare_host(self, name: str) -> None:
        if self.hosts[name].remote and name not in self.unreachable:
            with suppress(SmsError):  # the write reports it
                self.cluster.env.agents.install(self.hosts[name])

    def _query_hosts(self, names: list[str]) -> dict[str, View]:
        with self.cluster.env.pool(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(self.query_host, names), strict=True))

    def query_host(self, name: str, *, runs: bool = True, alive: bool = False) -> View:
        """Query one host.

        Args:
            runs: also query whether an instance runs there.
            alive: leave a sign there that ``me`` is alive.

        Raises:
            SmsError: its file is not a lease of this cluster; if ``tolerant``, that of ``me``.
            Unreachable, CommandError: ``me`` itself.
        """
        path, instance = str(self.cluster.places.lease), instance_name(self.cluster.site) if runs else ""
        values = (path, instance, str(self.cluster.places.sign), self.me if alive else "")
        try:
            output = self.hosts[name].run("sh", "-c", QUERY, "query", *values, timeout=QUERY_TIMEOUT_S).stdout
        except (Unreachable, CommandError) as error:
            if name == self.me:
                raise
            return View(None, stuck=isinstance(error, Stuck | CommandTimeout))
        head, _, data = output.partition(b"\n")
        started = head.startswith(b"1")
        try:
            view = self.read(name, data if head.endswith(b"file") else None, runs=started)
        except SmsError as error:
            if name == self.me or not self.tolerant:
                raise
            self.unread[name] = error.message
            return View(None, started)
        self.unread.pop(name, None)
        return view

    def read(self, name: str, data: bytes | None, *, runs: bool = False) -> View:
        """Parse the bytes of a host's file; the next swap requires the file to be unchanged.

        Raises:
            SmsError: they are not a lease of this cluster.
        """
        view = View(_read(data, self.cluster, self.hosts[name]), runs)
        self._data[name] = data
        return view

    def check(self, *, generation_bump: int = 1) -> Lease:
        """Return the lease that ``me`` may take, according to the last query.

        Raises:
            Refused: another host holds it, or runs an instance.
        """
        cluster, now = self.cluster.site.cluster, self.cluster.env.clock.time()
        lease = may_take(self.me, self.views, cluster, now=now, generation_bump=generation_bump, without=self.without)
        return replace(lease, generation=max(lease.generation, self.floor + generation_bump))

    def take(self, *, generation_bump: int = 1) -> Lease:
        """Take the lease according to the last query: write it to all files, in the same order in every run.

        Of two concurrent runs, the first file that both write decides: one of them finds it changed. The file of
        ``me``, which others believe, names it as the holder only at the end: nobody steps down for a refused run.

        Raises:
            Refused: another host holds it, or took it first.
        """
        lease, before = self.check(generation_bump=generation_bump), dict(self.views)
        mine, written = before[self.me].lease, dict[str, str]()
        reserved = lease if mine and mine.holder == self.me else replace(lease, holder=None, last=self.me)
        try:
            self.unwritten = {}
            order = sorted(name for name, view in before.items() if view.lease or name == self.me)
            first = order[:-1] if order[-1] == self.me else order
            locked = [name for name in first if not self._write(name, reserved if name == self.me else lease, written)]
            # A host that takes the lease concurrently either sees our file or is found here.
            self._refuse_if_taken(locked + self.unreachable, lease)
            self._write(self.me, lease, written)
            # It may have written our file before we queried it, and its own since.
            self._refuse_if_taken([name for name in self.hosts if name != self.me], lease)
            for name in self.unreachable:
                self.unwritten.pop(name, None)
        except Refused:
            with suppress(SmsError):
                self._withdraw(lease, list(written), before)
            raise
        return lease

    def _write(self, name: str, lease: Lease, written: dict[str, str]) -> bool:
        """Write the lease to a host's file; return False if another run holds the lock of that file.

        Raises:
            Refused: the file has changed since the query.
        """
        copy = replace(lease, file=name)
        try:
            outcome = self._swap(name, copy, written)
        except SmsError as error:  # it is unreachable, lacks Python, or its disk may be full or have failed
            if name == self.me:
                raise
            self.views[name], self.unwritten[name] = View(None), error
            return True
        if outcome == BUSY and name != self.me:
            return False
        _check_outcome(outcome)
        written[name] = digest(copy.text())
        return True

    def _swap(self, name: str, lease: Lease, written: Mapping[str, str] = MappingProxyType({})) -> str:
        """Replace a host's file with the lease if it is unchanged since the query; return the outcome."""
        text, before, own = lease.text(), digest(self._data.get(name)), name == self.me
        request = SwapLease(
            str(self.cluster.places.lease),
            text.decode(),
            before,
            written=tuple(written.values()),
            own=own,
            wait_s=OWN_WAIT_S if own else OTHERS_WAIT_S,
        )
        outcome: str = self.cluster.env.agents.perform(self.hosts[name], request, timeout=QUERY_TIMEOUT_S + OWN_WAIT_S)
        if outcome in (WRITTEN, SAME):
            self._data[name], self.views[name] = text, View(lease)
        return outcome

    def _refuse_if_taken(self, names: list[str], mine: Lease) -> None:
        """Refuse if one of the hosts has taken the lease meanwhile, runs an instance, or has the newest overlay.

        Args:
            mine: what ``me`` takes. A host with this generation has served and stopped, or has restored its overlay.
        """
        for name, view in self._query_hosts(names).items():
            self.views[name] = view
            newest = view.lease and view.lease.taker == name and view.lease.generation >= mine.generation
            if view.stuck or view.runs or newest or (view.lease and view.lease.holder == name):
                raise Refused(f"{name} took the lease first", hint="see `sms status`")

    def _withdraw(self, lease: Lease, names: list[str], before: Mapping[str, View]) -> None:
        """Correct the files that were written before another run won.

        Args:
            before: what the lease was taken according to. A host that claims an older one has not won: it was
                unreachable and is superseded, so the holder is the one of before.
        """
        self.query()
        top = max((view.lease.generation for view in before.values() if view.lease), default=0)
        winner = find_holder(self.views, without=self.without | {self.me})
        if winner is None or winner.generation < top:
            winner = find_holder(before, without=self.without)
        for name in names:
            current = self.views[name].lease
            ours = current and (current.generation, current.since) == (lease.generation, lease.since)
            if current and ours and current.holder in (None, self.me):
                corrected = replace(current, holder=winner.holder if winner else None, last=self.me)
                with suppress(SmsError):
                    self._swap(name, corrected)

    def publish(self, lease: Lease, *, names: Collection[str] | None = None) -> list[str]:
        """Copy the lease that ``me`` holds or has released to other hosts; return those whose file was changed.

        Args:
            names: the hosts to update; all reachable ones by default.
        """
        outdated = [name for name in (self.views if names is None else names) if self._update_for(name, lease)]
        with self.cluster.env.pool(max(1, len(outdated))) as pool:
            changed = list(pool.map(lambda name: self._publish_to(name, lease), outdated))
        return [name for name, done in zip(outdated, changed, strict=True) if done]

    def publish_to_all(self, lease: Lease) -> None:
        """Copy the lease to all other hosts, and once more to those that have another one then.

        ``unwritten`` gets the hosts whose files could not be written. They do not know the lease until another host's
        guard or the next run writes it.
        """
        self.unwritten = {}
        others = [name for name in self.hosts if name != self.me]
        self.publish(lease, names=[name for name in others if self.views[name].lease])
        left = [name for name in others if self._lacks(name, lease)]
        if not left:
            return
        with suppress(SmsError):  # a damaged file of another host
            self.views |= self._query_hosts(left)
        self.publish(lease, names=[name for name in left if self.views[name].lease])
        for name in left:
            if self._lacks(name, lease):
                answers = self.views[name].lease is not None
                why = "another run changes its lease file, or that cannot be written" if answers else "no answer"
                self.unwritten[name] = SmsError(why, hint=f"`sms status --host {name}`")

    def _lacks(self, name: str, lease: Lease) -> bool:
        """Return whether a host has no file with this lease or a later one, as far as that is known."""
        return self.views[name].lease is None or self._update_for(name, lease) is not None

    @property
    def notes(self) -> list[str]:
        """A warning for each host that ``hand_over`` could not tell who has the services."""
        return [
            f"warning: {name} does not know who has the services: {error.message}; do not start them there"
            for name, error in self.unwritten.items()
        ]

    def _update_for(self, name: str, lease: Lease) -> Lease | None:
        current = self.views[name].lease
        return merge_update(current, replace(lease, file=name), sender=self.me) if current and name != self.me else None

    def _publish_to(self, name: str, lease: Lease) -> bool:
        with suppress(SmsError):
            return self._swap(name, replace(lease, file=name)) == WRITTEN
        return False

    def name_cluster(self, name: str, cluster_uuid: str, adopted: int, *, above: int | None = None) -> bool:
        """Write the cluster's UUID to a host's file, which stays the same otherwise; return whether it was written.

        Args:
            adopted: generation up to which snapshots without a UUID are the cluster's own.
            above: replace another UUID, too, and raise the generation above this one.

        Raises:
            SmsError: the file cannot be written.
        """
        current = self.views[name].lease
        if current is None or (current.cluster_uuid not in ("", cluster_uuid) and above is None):
            return False
        generation = max(current.generation, 0 if above is None else above + 1)
        named = replace(current, generation=generation, cluster_uuid=cluster_uuid, adopted=adopted)
        return named != current and self._swap(name, named) == WRITTEN

    def adopt(self, lease: Lease) -> None:
        """Write a copy of another host's newer lease into the file of ``me``.

        Raises:
            Refused: the file has changed since the query, to something older.
        """
        if self._is_known(lease):
            return
        mine, copied = self.views[self.me].lease, replace(lease, file=self.me)
        outcome = self._swap(self.me, copied.written_over(mine) if mine else copied)
        if outcome == WRITTEN:
            return
        self.views[self.me] = self.query_host(self.me, runs=False)
        if not self._is_known(lease):  # the holder may have written it here meanwhile
            _check_outcome(outcome)

    def _is_known(self, lease: Lease) -> bool:
        mine = self.views[self.me].lease
        return mine is not None and mine.holder != self.me and mine.generation >= lease.generation


def _read(data: bytes | None, cluster: Cluster, host: Host) -> Lease:
    try:
        return read_lease(data, cluster.site.cluster)
    except Refused as error:
        path, hint = cluster.places.lease, error.hint
        if isinstance(error, DamagedLease):
            hint = (
                f"if nothing runs on {host.name} (`sms host list`): `mv {path} {path}.damaged` there, then "
                f"`sms start --host {host.name}`, which takes a generation above every known one"
            )
        raise type(error)(f"{host.name}: {path}: {error.message}", hint=hint) from error


def query_lease(host: Host, cluster: Cluster) -> Lease:
    """Return the lease in the host's own file."""
    return _read(host.read(str(cluster.places.lease)), cluster, host)


def query_all_leases(host: Host, cluster: Cluster) -> Leases:
    """Query the leases of all admin hosts, for a run that acts for ``host``."""
    leases = Leases(host, cluster)
    leases.query()
    return leases


def take_lease(host: Host, cluster: Cluster, *, leases: Leases | None = None, generation_bump: int = 1) -> Lease:
    """Take the lease for ``host``, in the files of all reachable admin hosts.

    Args:
        leases: the result of a recent query; queried when not given.

    Raises:
        Refused: another host holds it, or took it first.
    """
    return (leases or query_all_leases(host, cluster)).take(generation_bump=generation_bump)


def release_lease(host: Host, cluster: Cluster, *, leases: Leases | None = None) -> None:
    """Release the lease if ``host`` holds it, and update the copies on the other hosts.

    Args:
        leases: the result of a recent query; queried when not given.
    """
    before = host.read(str(cluster.places.lease))
    lease = read_lease(before, cluster.site.cluster)
    if lease.holder != host.name:
        return
    free = release(lease, host.name, now=cluster.env.clock.time())
    path = str(cluster.places.lease)
    swap = SwapLease(path, free.text().decode(), digest(before), wait_s=OWN_WAIT_S)
    _check_outcome(cluster.env.agents.perform(host, swap))
    with suppress(SmsError):  # their guards and the next start work without the update
        (leases or query_all_leases(host, cluster)).publish(free)


@contextmanager
def hold_lease_still(host: Host, cluster: Cluster, *, fenced: Collection[str] = ()) -> Iterator[Lease]:
    """Keep everybody from taking the lease within the context, on all hosts that share it; ends with this process.

    Args:
        fenced: as for ``check_lease``.

    Raises:
        Refused: another run has it locked, or another host holds it.
    """
    busy = f"another run is at work on the overlay of {cluster.site.cluster}"
    files.make_folders(host, str(cluster.places.lease.parent))
    with cluster.env.locks.hold(host, f"{cluster.places.lease}.lock", busy):
        yield check_lease(host, cluster, fenced=fenced)


@contextmanager
def hold_taken_lease(host: Host, cluster: Cluster, lease: Lease) -> Iterator[None]:
    """Keep everybody from taking the lease from ``host`` within the context, in which its instance is started.

    A run that writes the lease file before is noticed here, one that writes it afterwards finds the instance.

    Args:
        lease: the lease that this run has taken.

    Raises:
        Refused: another run has it locked, or has taken it since.
    """
    busy = f"another run changes the lease of {cluster.site.cluster}"
    with cluster.env.locks.hold(host, f"{cluster.places.lease}.lock", busy):
        now = query_lease(host, cluster)
        if (now.holder, now.generation) != (lease.holder, lease.generation):
            raise Refused(f"{now.holder or 'another run'} took the lease first", hint="see `sms status`")
        yield


def check_lease(host: Host, cluster: Cluster, *, fenced: Collection[str] = ()) -> Lease:
    """Return the lease after checking that the stopped overlay of ``host`` may be changed.

    Args:
        fenced: admin hosts that are known to be off; leases that they hold are ignored.

    Raises:
        Refused: another host holds it and may use that overlay.
    """
    lease = query_lease(host, cluster)
    if not has_own_overlay(lease, host.name) and lease.holder not in fenced:
        take(lease, host.name, now=cluster.env.clock.time())
    return lease


def raise_lease(host: Host, cluster: Cluster, generation: int, *, cluster_uuid: str = "", locked: bool = False) -> str:
    """Record in the lease of ``host``, unless another host holds it, that it got a snapshot of ``generation``.

    The next start takes a higher one, so that snapshots taken later are newer. Return a note if the lease got a UUID,
    else an empty text.

    Args:
        cluster_uuid: of the snapshot; a lease that was never taken gets it.
        locked: the caller holds the lock of the lease file (``hold_lease_still``).

    Raises:
        Refused: another run changes the lease, or as ``raise_floor``.
    """
    path = str(cluster.places.lease)
    data = host.read(path)
    before = _read(data, cluster, host)
    raised = raise_floor(before, host.name, generation, cluster_uuid=cluster_uuid)
    if raised:
        swap = SwapLease(path, raised.text().decode(), digest(data), wait_s=OWN_WAIT_S, locked=locked)
        _check_outcome(cluster.env.agents.perform(host, swap))
    if raised is None or raised.cluster_uuid == before.cluster_uuid:
        return ""
    return (
        f"note: this cluster had no UUID, and continues {raised.cluster_uuid}, which took the snapshot; if it is a "
        "copy of that cluster: `sms overlay identity new`"
    )


def set_last(host: Host, cluster: Cluster, above: int, *, locked: bool = False) -> Lease:
    """Note in the file of ``host``, whose lease nobody holds, that its overlay is the newest; return the lease.

    Args:
        above: its generation becomes higher than this one.
        locked: as for ``raise_lease``.

    Raises:
        Refused: another run changes the lease.
    """
    path = str(cluster.places.lease)
    data = host.read(path)
    before = _read(data, cluster, host)
    lease = replace(before, generation=max(before.generation, above + 1), last=host.name, file=host.name)
    swap = SwapLease(path, lease.text().decode(), digest(data), locked=locked)
    _check_outcome(cluster.env.agents.perform(host, swap))
    return lease


def hand_over(
    host: Host, cluster: Cluster, leases: Leases, *, holder: str | None, generation: int, locked: bool = False
) -> Lease:
    """Write into the file of ``host`` that an engine has the services from now on, then into those of the other hosts.

    The first write decides. Return the lease; ``leases.unwritten`` has the hosts that do not know it.

    Args:
        leases: queried just before.
        holder: the engine, as a lease names it; None: ``host`` may start them, with the newest overlay.
        generation: above all known ones.
        locked: as for ``raise_lease``.

    Raises:
        Refused: another run changes the lease, or it is not what ``leases`` has.
    """
    return give_lease(leases, holder, generation, "" if holder else host.name, locked=locked)


def give_lease(leases: Leases, holder: str | None, generation: int, last: str, *, locked: bool = False) -> Lease:
    """Write the lease as ``hand_over`` does; ``last``: as a lease has it."""
    host, cluster = leases.hosts[leases.me], leases.cluster
    path = str(cluster.places.lease)
    data = host.read(path)
    before, known = _read(data, cluster, host), leases.views[host.name].lease
    if known is None or (before.holder, before.generation) != (known.holder, known.generation):
        raise Refused("the lease has changed meanwhile", hint="see `sms status`")
    lease = replace(
        before, generation=generation, holder=holder, since=leases.cluster.env.clock.time(), file=host.name, last=last
    ).with_identity_of(find_identity(leases.views) or before)
    swap = SwapLease(path, lease.text().decode(), digest(data), wait_s=OWN_WAIT_S, locked=locked)
    _check_outcome(leases.cluster.env.agents.perform(host, swap))
    leases.publish_to_all(lease)
    return lease


def restore_lease(host: Host, cluster: Cluster, before: Lease) -> None:
    """Release a lease that was just taken, unless ``host`` held it before; its generation stays."""
    if before.holder != host.name:
        release_lease(host, cluster)


def _check_outcome(outcome: str) -> None:
    """Raise Refused for a lease that was not written."""
    if outcome == LOST_RACE:
        raise Refused("the lease changed while it was taken", hint="another run took it first; see `sms status`")
    if outcome == BUSY:
        raise Refused(
            "the lease is locked by another run",
            hint="a snapshot or a restore of the stopped overlay is under way: wait for it, then run this again",
        )
