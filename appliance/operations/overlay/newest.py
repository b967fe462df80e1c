"""Makes an overlay that was restored while nobody holds the lease the newest one of all admin hosts."""

from __future__ import annotations

from dataclasses import replace

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.lease import Leases, set_last
from appliance.operations.overlay.generation import mark_overlay, query_overlays
from appliance.plan.migration.lease import find_foreign, find_holder
from appliance.shared.lease import Lease


def query_others(cluster: Cluster, host: Host) -> Leases:
    """Return the leases of all admin hosts that are of this cluster.

    Raises:
        Unreachable, CommandError: ``host`` itself cannot be queried.
    """
    leases = Leases(host, cluster, tolerant=True)
    leases.query()
    _drop_foreign(leases)
    return leases


def _drop_foreign(leases: Leases) -> None:
    for name in find_foreign(leases.me, leases.views):
        del leases.views[name]


def held_elsewhere(leases: Leases) -> Lease | None:
    """Return the lease if another host than ``leases.me`` holds it; None otherwise."""
    found = find_holder(leases.views)
    return found if found and found.holder != leases.me else None


def outdated_by_restore(cluster: Cluster, leases: Leases) -> list[str]:
    """Return notes: whose overlays a restore on ``leases.me`` makes older ones, and which hosts do not answer."""
    overlays = query_overlays(cluster, leases)
    there = sorted(name for name, one in overlays.items() if one and one.exists and not _is_of_me(leases, name))
    silent = sorted(name for name, one in overlays.items() if one is None)
    return [
        *(f"the overlay of {name} counts as older than the restored one of {leases.me} then" for name in there),
        *(f"{name} does not answer: an overlay there may be newer than is known here" for name in silent),
    ]


def _is_of_me(leases: Leases, name: str) -> bool:
    """Return whether what is found on a host is the overlay of ``leases.me``, as in a folder that hosts share."""
    me, files = leases.me, {one: view.lease.file for one, view in leases.views.items() if view.lease}
    return name == me or files.get(me, me) not in ("", me) or files.get(name, name) not in ("", name)


def make_newest(cluster: Cluster, host: Host, leases: Leases, generation: int) -> None:
    """Raise the lease of ``host`` above all others, mark the restored overlay with it, and publish it.

    The caller holds the lock of the lease file of ``host``. A host that takes the lease meanwhile either finds its own
    file changed, and is refused, or is found here: then it goes on. A host that does not answer may serve, in the
    generation of the snapshot or a later one: nothing that is written here is newer than that.

    Args:
        generation: of the snapshot.

    Raises:
        Refused: another host has taken the lease; its overlay stays the newest one.
    """
    above = leases.top if leases.unreachable else max(leases.top, generation)
    mine = set_last(host, cluster, above, locked=True)
    mark_overlay(cluster, host, mine.generation)
    leases.publish(mine)
    leases.query()
    _drop_foreign(leases)
    winner = held_elsewhere(leases)
    if winner and winner.generation >= mine.generation:
        mark_overlay(cluster, host, mine.generation - 1)
        raise Refused(
            f"{winner.holder} took the lease meanwhile: its overlay is the newest one, the restored one is not used",
            hint=f"`sms status --host {winner.holder}` shows what runs there",
        )


def as_seen_by_all(own: Lease, leases: Leases) -> Lease:
    """Return the lease as ``own`` has it, with the holder that other hosts know and it does not."""
    winner = held_elsewhere(leases)
    return replace(own, holder=winner.holder, generation=winner.generation) if winner else own
