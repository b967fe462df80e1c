"""Takes and lets go the lease: the files of all admin hosts that answer, each by compare and swap under a lock."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from appliance.errors import Refused, SmsError
from appliance.host.base import SHORT, CommandError, CommandTimeout, Host, Stuck, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import only_one
from appliance.plan.machine import instance_name
from appliance.plan.migration.lease import (
    Lease,
    View,
    digest,
    find_holder,
    is_apart,
    may_take,
    read_lease,
    release,
    take,
    told,
)

LOST_RACE = 76
BUSY = 75
SWAP = f"""\
mkdir -p -m 0700 "$(dirname "$1")" && exec 9>"$1.lock" && flock -w "$5" 9 || exit {BUSY}
now=none
[ ! -e "$1" ] || {{ now=$(sha256sum <"$1") && now=${{now%% *}}; }} || exit 1
case " $4 " in *" $now "*) [ "$6" = own ] || exit 0 ;; esac
case " $2 $4 " in *" $now "*) ;; *) exit {LOST_RACE} ;; esac
trap 'rm -f "$1.new"' EXIT
trap 'exit 143' HUP INT TERM
umask 077
cat >"$1.new" || exit
[ "$(stat -c %s "$1.new")" = "$3" ] || exit {SHORT}
sync "$1.new" && mv -fT "$1.new" "$1" && sync "$(dirname "$1")"
"""
"""Shell: $3 bytes of standard input to lease file $1, if its digest is $2, or one of $4.

$4 are digests of what this run has written elsewhere: a file that has one of them is the same file, in a folder that
hosts share; the holder's ``own`` text ($6) stays in it. $5 is how many seconds to wait for a run that keeps the file
as it is.
"""
LOOK = """\
runs=0
if [ -n "$2" ] && command -v apptainer >/dev/null; then
    ! apptainer instance list --json "$2" | grep -q '"pid"' || runs=1
fi
if [ -e "$1" ]; then echo "$runs file"; exec head -c 4096 -- "$1"; else echo "$runs none"; fi
"""
"""Shell: whether instance $2 runs, where one is given, and then the lease file $1."""
LOOK_S = 15
"""Seconds until a host whose disk hangs counts as one that cannot be asked."""
OWN_WAIT_S, OTHERS_WAIT_S = 10, 2


class Leases:
    """The lease files of all admin hosts, as one run sees them that acts for ``host``."""

    def __init__(self, host: Host, cluster: Cluster, *, without: Collection[str] = ()) -> None:
        """``without``: hosts that are known to be off; they are not asked, and what they hold does not count."""
        self.me = host.name
        self.cluster = cluster
        self.without = frozenset(without)
        self.hosts: dict[str, Host] = {host.name: host}
        for admin in cluster.site.admin_hosts:
            if admin.name != host.name and admin.name not in self.without:
                self.hosts[admin.name] = cluster.host(admin.name)
        self.views: dict[str, View] = {}
        self.looked = 0.0
        self._data: dict[str, bytes | None] = {}

    @property
    def silent(self) -> list[str]:
        """The hosts that could not be asked."""
        return [name for name, view in self.views.items() if view.lease is None]

    def look(self, *, patience_s: float = 0) -> dict[str, View]:
        """What all say now, asked at once.

        Args:
            patience_s: how long to ask again those that do not answer.

        Raises:
            SmsError: a file that is there is no lease of this cluster.
            Unreachable: ``me`` itself.
        """
        deadline = time.monotonic() + patience_s
        self.views = self._ask(list(self.hosts))
        while self.silent and time.monotonic() < deadline:
            time.sleep(1)
            self.views |= self._ask(self.silent)
        self.looked = time.monotonic()
        return self.views

    def _ask(self, names: list[str]) -> dict[str, View]:
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(self.ask, names), strict=True))

    def ask(self, name: str, *, runs: bool = True) -> View:
        """What one host says now.

        Args:
            runs: ask whether it runs the appliance, too.

        Raises:
            SmsError: its file is no lease of this cluster.
            Unreachable, CommandError: ``me`` itself.
        """
        path, instance = str(self.cluster.places.lease), instance_name(self.cluster.site) if runs else ""
        try:
            said = self.hosts[name].run("sh", "-c", LOOK, "look", path, instance, timeout=LOOK_S).stdout
        except (Unreachable, CommandError) as error:
            if name == self.me:
                raise
            return View(None, stuck=isinstance(error, Stuck | CommandTimeout))
        head, _, data = said.partition(b"\n")
        return self.read(name, data if head.endswith(b"file") else None, runs=head.startswith(b"1"))

    def read(self, name: str, data: bytes | None, *, runs: bool = False) -> View:
        """What the bytes of a host's file say; the next swap wants them there.

        Raises:
            SmsError: they are no lease of this cluster.
        """
        view = View(_read(data, self.cluster, self.hosts[name]), runs)
        self._data[name] = data
        return view

    def check(self, *, leap: int = 1) -> Lease:
        """The lease that ``me`` may take, by what was seen.

        Raises:
            Refused: another host holds it, or runs the appliance.
        """
        cluster = self.cluster.site.cluster
        return may_take(self.me, self.views, cluster, now=time.time(), leap=leap, without=self.without)

    def take(self, *, leap: int = 1) -> Lease:
        """Take it, by what was seen: write it to all files, in the order that every run has.

        Of two runs at the same moment the first file that both write decides: one of them finds it changed.

        Raises:
            Refused: another host holds it, or was faster.
        """
        lease = self.check(leap=leap)
        written: dict[str, str] = {}
        try:
            missed = [name for name in self._order() if not self._write(name, lease, written)]
            # Who takes the lease itself meanwhile sees ours, or is seen here.
            self._refuse_if_taken(missed + self.silent)
        except Refused:
            with suppress(SmsError):
                self._give_way(lease, list(written))
            raise
        return lease

    def _order(self) -> list[str]:
        return sorted(name for name, view in self.views.items() if view.lease or name == self.me)

    def _write(self, name: str, lease: Lease, written: dict[str, str]) -> bool:
        """Write the lease to a host's file; False where another run keeps that as it is.

        Raises:
            Refused: it is not any more what was seen.
        """
        text = replace(lease, file=name).text()
        try:
            self._swap(name, text, written.values())
        except CommandError as error:
            if name == self.me or error.result.status == LOST_RACE:
                raise _why(error) from error
            if error.result.status == BUSY:
                return False
            self.views[name] = View(None)  # its disk may be full, or gone
        except Unreachable:
            if name == self.me:
                raise
            self.views[name] = View(None)
        else:
            written[name] = digest(text)
            self._data[name], self.views[name] = text, View(replace(lease, file=name))
        return True

    def _swap(self, name: str, text: bytes, same: Collection[str] = ()) -> None:
        """Put ``text`` in the place of what was seen in a host's file."""
        own = name == self.me
        wait_s = str(OWN_WAIT_S if own else OTHERS_WAIT_S)
        words = (digest(self._data.get(name)), str(len(text)), " ".join(sorted(same)), wait_s, "own" if own else "")
        path = str(self.cluster.places.lease)
        self.hosts[name].run("sh", "-c", SWAP, "swap", path, *words, input=text, timeout=LOOK_S + OWN_WAIT_S)

    def _refuse_if_taken(self, names: list[str]) -> None:
        """Whether those whose file was kept as it is have taken the lease meanwhile."""
        for name, view in self._ask(names).items():
            self.views[name] = view
            if view.stuck or view.runs or (view.lease and view.lease.holder == name):
                raise Refused(f"{name} was faster", hint="look at `sms status`")

    def _give_way(self, lease: Lease, names: list[str]) -> None:
        """Another run was faster: what was written says so."""
        self.look()
        winner = find_holder(self.views, without=self.without | {self.me})
        for name in names:
            now = self.views[name].lease
            if now and (now.holder, now.generation, now.since) == (self.me, lease.generation, lease.since):
                left = replace(now, holder=winner.holder if winner else None)
                with suppress(Unreachable, CommandError):
                    self._swap(name, left.text())

    def tell(self, lease: Lease, *, names: Collection[str] | None = None) -> list[str]:
        """Tell other hosts what ``me`` holds, or has let go; give whose file was changed by it.

        Args:
            names: whom; all that answered when not given.
        """
        wanted = [name for name in (self.views if names is None else names) if self._news(name, lease)]
        with ThreadPoolExecutor(max(1, len(wanted))) as pool:
            changed = list(pool.map(lambda name: self._tell(name, lease), wanted))
        return [name for name, done in zip(wanted, changed, strict=True) if done]

    def _news(self, name: str, lease: Lease) -> Lease | None:
        mine = self.views[name].lease
        return told(mine, replace(lease, file=name), by=self.me) if mine and name != self.me else None

    def _tell(self, name: str, lease: Lease) -> bool:
        news = replace(lease, file=name)
        try:
            self._swap(name, news.text())
        except (Unreachable, CommandError):
            return False
        self._data[name], self.views[name] = news.text(), View(news)
        return True

    def adopt(self, lease: Lease) -> None:
        """Write another host's newer lease into the file of ``me``, as a copy.

        Raises:
            Refused: the file has changed since it was seen, and says something older.
        """
        text = replace(lease, file=self.me).text()
        if self._is_known(lease):
            return
        try:
            self._swap(self.me, text)
        except CommandError as error:
            self.views[self.me] = self.ask(self.me, runs=False)
            if self._is_known(lease):  # its holder has written it here meanwhile
                return
            raise _why(error) from error
        self._data[self.me], self.views[self.me] = text, View(replace(lease, file=self.me))

    def _is_known(self, lease: Lease) -> bool:
        mine = self.views[self.me].lease
        return mine is not None and mine.holder != self.me and mine.generation >= lease.generation


def _read(data: bytes | None, cluster: Cluster, host: Host) -> Lease:
    try:
        return read_lease(data, cluster.site.cluster)
    except SmsError as error:
        raise SmsError(f"{host.name}: {cluster.places.lease}: {error.message}", hint=error.hint) from error


def look_at_lease(host: Host, cluster: Cluster) -> Lease:
    """The lease as it is in the host's own file."""
    return _read(host.read(str(cluster.places.lease)), cluster, host)


def look_around(host: Host, cluster: Cluster, *, without: Collection[str] = ()) -> Leases:
    """What all admin hosts say of the lease, for a run that acts for ``host``."""
    leases = Leases(host, cluster, without=without)
    leases.look()
    return leases


def take_lease(host: Host, cluster: Cluster, *, leases: Leases | None = None, leap: int = 1) -> Lease:
    """Take the lease for ``host``, in the files of all admin hosts that answer.

    Args:
        leases: what was seen just now; they are asked when not given.

    Raises:
        Refused: another host holds it, or was faster.
    """
    return (leases or look_around(host, cluster)).take(leap=leap)


def release_lease(host: Host, cluster: Cluster, *, leases: Leases | None = None) -> None:
    """Let the lease go, if ``host`` holds it, and tell the others.

    Args:
        leases: what the others said just now; they are asked when not given.
    """
    before = host.read(str(cluster.places.lease))
    lease = read_lease(before, cluster.site.cluster)
    if lease.holder != host.name:
        return
    free = release(lease, host.name, now=time.time())
    _swap(host, cluster, before, free)
    with suppress(SmsError):  # their guards, and the next start, do without
        (leases or look_around(host, cluster)).tell(free)


@contextmanager
def hold_lease_still(host: Host, cluster: Cluster, *, fenced: Collection[str] = ()) -> Iterator[Lease]:
    """Nobody takes the lease for as long as the context lasts, on any host that shares it; let go with this process.

    Args:
        fenced: as of ``check_lease``.

    Raises:
        Refused: another run does, or another host has it.
    """
    busy = f"another run is at work on the overlay of {cluster.site.cluster}"
    host.run("mkdir", "-p", "-m", "0700", str(cluster.places.lease.parent))
    with only_one(host, f"{cluster.places.lease}.lock", busy):
        yield check_lease(host, cluster, fenced=fenced)


def check_lease(host: Host, cluster: Cluster, *, fenced: Collection[str] = ()) -> Lease:
    """The lease as it is, for who changes the overlay of ``host`` while it is stopped.

    Args:
        fenced: admin hosts that are surely off; what they hold does not count.

    Raises:
        Refused: another host holds it, and that overlay may be the one it uses.
    """
    lease = look_at_lease(host, cluster)
    if not is_apart(lease, host.name) and lease.holder not in fenced:
        take(lease, host.name, now=time.time())
    return lease


def put_lease_back(host: Host, cluster: Cluster, before: Lease, *, leases: Leases | None = None) -> None:
    """Give the lease to whom it belonged before it was taken; its generation stays grown."""
    if before.holder != host.name:
        release_lease(host, cluster, leases=leases)


def _swap(host: Host, cluster: Cluster, before: bytes | None, lease: Lease) -> None:
    """Put the lease in the place of what the host's own file held."""
    text = lease.text()
    words = (digest(before), str(len(text)), "", str(OWN_WAIT_S), "own")
    try:
        host.run("sh", "-c", SWAP, "swap", str(cluster.places.lease), *words, input=text)
    except CommandError as error:
        raise _why(error) from error


def _why(error: CommandError) -> SmsError:
    """What it means that a lease could not be written."""
    if error.result.status == LOST_RACE:
        return Refused("the lease changed while it was taken", hint="another run was faster; look at `sms status`")
    if error.result.status == BUSY:
        return Refused(
            "another run keeps the lease as it is",
            hint="a snapshot or a restore of the stopped overlay is under way: wait for it, then run this again",
        )
    return error
