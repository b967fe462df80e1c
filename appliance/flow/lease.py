"""Takes and releases the lease on a host, by compare and swap under a lock."""

from __future__ import annotations

import time

from appliance.errors import Refused
from appliance.flow.context import Cluster
from appliance.host.base import SHORT, CommandError, Host
from appliance.plan.lease import Lease, digest, read_lease, release, take

LOST_RACE = 76
SWAP = f"""\
mkdir -p "$(dirname "$1")" && exec 9>"$1.lock" && flock -w 10 9 || exit 75
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
    return read_lease(host.read(str(cluster.places.lease)), cluster.site.cluster)


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
        raise
