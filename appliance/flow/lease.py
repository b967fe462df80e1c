"""Takes and releases the lease on a host, by compare and swap under a lock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from appliance.errors import Refused, SmsError
from appliance.flow.context import Cluster, find_host
from appliance.flow.preflight import only_one
from appliance.host.base import SHORT, CommandError, Host, Unreachable
from appliance.plan.lease import Lease, digest, read_lease, release, take

LOST_RACE = 76
BUSY = 75
SWAP = f"""\
mkdir -p "$(dirname "$1")" && exec 9>"$1.lock" && flock -w 10 9 || exit {BUSY}
now=none
[ ! -e "$1" ] || {{ now=$(sha256sum <"$1") && now=${{now%% *}}; }} || exit 1
[ "$now" = "$2" ] || exit {LOST_RACE}
trap 'rm -f "$1.new"' EXIT
trap 'exit 143' HUP INT TERM
umask 077
cat >"$1.new" || exit
[ "$(stat -c %s "$1.new")" = "$3" ] || exit {SHORT}
sync "$1.new" && mv -fT "$1.new" "$1" && sync "$(dirname "$1")"
"""
"""Shell: $3 bytes of standard input to lease file $1, if its digest is still $2."""


def look_at_lease(host: Host, cluster: Cluster) -> Lease:
    """The lease as it is."""
    path = str(cluster.places.lease)
    try:
        return read_lease(host.read(path), cluster.site.cluster)
    except Unreachable:
        raise
    except SmsError as error:
        raise SmsError(f"{host.name}: {path}: {error.message}", hint=error.hint) from error


def take_lease(host: Host, cluster: Cluster) -> Lease:
    """Take the lease for ``host``.

    Raises:
        Refused: another host holds it, or was faster.
    """
    before = host.read(str(cluster.places.lease))
    lease = take(read_lease(before, cluster.site.cluster), host.name, now=time.time())
    _swap(host, cluster, before, lease)
    return lease


def release_lease(host: Host, cluster: Cluster) -> None:
    """Let the lease go, if ``host`` holds it."""
    before = host.read(str(cluster.places.lease))
    lease = read_lease(before, cluster.site.cluster)
    if lease.holder == host.name:
        _swap(host, cluster, before, release(lease, host.name, now=time.time()))


def ask_others(host: Host, cluster: Cluster) -> list[str]:
    """Hold the other admin hosts' leases against the one that ``host`` has just taken; give who did not answer.

    Where hosts do not share the overlay's folder each has a lease file of its own. Every start takes
    its own before it looks at the others': of two at the same moment at least one sees the other's.

    Raises:
        Refused: another host holds a lease.
    """
    others = [admin.name for admin in cluster.site.admin_hosts if admin.name != host.name]

    def ask(name: str) -> str:
        try:
            holder = look_at_lease(find_host(cluster.site, name), cluster).holder
        except Unreachable:
            return "?"
        return holder or ""

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        holders = dict(zip(others, pool.map(ask, others), strict=True))
    for name, holder in holders.items():
        if holder not in ("", "?", host.name):
            raise Refused(
                f"{holder} holds the lease that lies on {name}",
                hint=f"stop the appliance there first: sms stop --host {holder}",
            )
    return [name for name, holder in holders.items() if holder == "?"]


@contextmanager
def hold_lease_still(host: Host, cluster: Cluster) -> Iterator[Lease]:
    """Nobody takes the lease for as long as the context lasts, on any host that shares it; let go with this process.

    Raises:
        Refused: another run does, or another host has it.
    """
    busy = f"another run is at work on the overlay of {cluster.site.cluster}"
    host.run("mkdir", "-p", "-m", "0700", str(cluster.places.lease.parent))
    with only_one(host, f"{cluster.places.lease}.lock", busy):
        yield check_lease(host, cluster)


def check_lease(host: Host, cluster: Cluster) -> Lease:
    """The lease as it is.

    Raises:
        Refused: another host holds it.
    """
    lease = look_at_lease(host, cluster)
    take(lease, host.name, now=time.time())
    return lease


def put_lease_back(host: Host, cluster: Cluster, before: Lease) -> None:
    """Give the lease to whom it belonged before it was taken; its generation stays grown."""
    now = host.read(str(cluster.places.lease))
    lease = read_lease(now, cluster.site.cluster)
    if lease.holder == host.name and before.holder != host.name:
        _swap(host, cluster, now, release(lease, host.name, now=time.time()))


def _swap(host: Host, cluster: Cluster, before: bytes | None, lease: Lease) -> None:
    path = str(cluster.places.lease)
    try:
        text = lease.text()
        host.run("sh", "-c", SWAP, "swap", path, digest(before), str(len(text)), input=text)
    except CommandError as error:
        if error.result.status == LOST_RACE:
            raise Refused(
                "the lease changed while it was taken", hint="another run was faster; look at `sms status`"
            ) from error
        if error.result.status == BUSY:
            raise Refused(
                "another run keeps the lease as it is",
                hint="a snapshot or a restore of the stopped overlay is under way: wait for it, then run this again",
            ) from error
        raise
