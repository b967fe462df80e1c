"""The UUID of the cluster: created once, found again after leases were lost."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.operations.history import note
from appliance.operations.lease import Leases
from appliance.plan.migration.lease import find_identity, refuse_other_cluster
from appliance.progress import Progress
from appliance.shared.lease import Lease

STORE_S = 10
"""Seconds that reading the snapshots of a host may take: a failed disk must not keep the services down."""
ATTEMPTS = 3
"""Attempts to write the file that decides, while other runs write it."""


def ensure_identity(leases: Leases, progress: Progress) -> None:
    """Give the cluster a UUID unless it has one; copy it to the lease files of all hosts that answer.

    It is created only while all admin hosts answer, one of which may know it: until then the cluster has none. Of runs
    at the same time the one decides that is the first to write it to the file of the first host by name.

    Args:
        leases: queried just before; they are queried again if any was written.

    Raises:
        Refused: hosts know different UUIDs; nothing was changed.
    """
    refuse_other_cluster(leases.views)
    named = find_identity(leases.views)
    if not named:
        named = _find_or_create(leases, progress)
        if not named:
            return
        leases.query()
        refuse_other_cluster(leases.views)
    # What was taken while no host that answered knew the UUID is the cluster's own, too.
    files = [view.lease for view in leases.views.values() if view.lease]
    unnamed = max((one.generation for one in files if one.since and not one.cluster_uuid), default=0)
    adopted = max(named.adopted, unnamed)
    failed: dict[str, str] = {}
    copied = [_copy(leases, name, named.cluster_uuid, adopted, failed) for name in leases.views]
    if any(copied):
        leases.query()
    _report_unnamed(leases, failed, progress)


def _copy(leases: Leases, name: str, cluster_uuid: str, adopted: int, failed: dict[str, str]) -> bool:
    """Write the UUID to a host's file; return whether it was written. ``failed`` gets the reason if it was not."""
    try:
        if leases.name_cluster(name, cluster_uuid, adopted):
            return True
        found = leases.views[name].lease
        if found and not found.cluster_uuid:
            failed[name] = "another run changes it"
            leases.views[name] = leases.query_host(name)  # which may have written the UUID
    except SmsError as error:
        failed[name] = error.message
    return False


def _report_unnamed(leases: Leases, failed: Mapping[str, str], progress: Progress) -> None:
    """Report which files could not get the UUID: to those hosts, snapshots that have it are another cluster's."""
    for name, why in failed.items():
        view = leases.views[name]
        if view.lease is None or not view.lease.cluster_uuid:
            progress.report(
                f"note: the UUID of this cluster could not be written to the lease of {name}, which has none: {why}; "
                "the next start or scheduled snapshot tries again"
            )


def _find_or_create(leases: Leases, progress: Progress) -> Lease | None:
    """Return a lease with the UUID that is now in a file of a host; None if there can be none yet."""
    silent = {*leases.unreachable, *leases.without}
    stores: dict[str, Mapping[str, Any]] = {}

    def query(name: str) -> None:
        try:
            stores[name] = _query_store(leases, name)
        except Refused:  # it has no Python, and so no store
            pass
        except SmsError:
            silent.add(name)

    asked = [name for name in leases.hosts if name not in silent]
    with leases.cluster.env.pool(max(1, len(asked))) as pool:
        list(pool.map(query, asked))
    known = {name: found["identity"] for name, found in stores.items() if found["identity"]["uuid"]}
    certain = {name: one for name, one in known.items() if not one["assumed"]}
    if known and not certain and not silent:
        each = ", ".join(f"{one['uuid']} on {name}" for name, one in sorted(known.items()))
        raise Refused(
            f"no lease has the UUID of this cluster, and its hosts have received snapshots of a cluster {each}",
            hint="if it is that one: `sms overlay identity UUID`; if another one uses the same folder of snapshots: "
            "`sms overlay identity new`",
        )
    chosen = certain or known  # a failover to a host that has only what the failed one has pushed
    if len({one["uuid"] for one in chosen.values()}) > 1:
        each = ", ".join(f"{one['uuid']} on {name}" for name, one in sorted(chosen.items()))
        raise Refused(
            f"no lease has the UUID of this cluster, and its hosts have snapshots of different ones: {each}",
            hint="`sms overlay identity UUID` decides which one it is",
        )
    for name, one in chosen.items():
        progress.report(f"note: no lease has the UUID of this cluster; by the snapshots of {name} it is {one['uuid']}")
        return _decide(leases, one["uuid"], one["adopted"], progress)
    if silent:
        progress.report(
            "note: this cluster has no UUID yet: a start or scheduled snapshot while all admin hosts answer creates it "
            f"(silent: {', '.join(sorted(silent))})"
        )
        return None
    adopted = max([leases.top, *(found["unnamed"] for found in stores.values())])
    created = leases.cluster.env.new_uuid()
    named = _decide(leases, created, adopted, progress)
    if named and named.cluster_uuid == created:
        older = f"; its snapshots up to generation {adopted}, which have none, count as its own" if adopted else ""
        progress.report(f"note: this cluster has the UUID {created} from now on{older}")
    return named


def _decide(leases: Leases, cluster_uuid: str, adopted: int, progress: Progress) -> Lease | None:
    """Write the UUID to the file of the first host that answers, unless another run was first; return that file."""
    first = min(name for name, view in leases.views.items() if view.lease)
    failed: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        if _copy(leases, first, cluster_uuid, adopted, failed):
            # A scheduled run prints nothing.
            with suppress(SmsError):
                note(leases.cluster, leases.hosts[leases.me], "identity", "written", uuid=cluster_uuid, adopted=adopted)
            return leases.views[first].lease
        leases.views[first] = leases.query_host(first)
        if found := find_identity({first: leases.views[first]}):
            return found
    _report_unnamed(leases, failed, progress)
    return None


def _query_store(leases: Leases, name: str) -> Mapping[str, Any]:
    """Return what a host's snapshots show: see ``brief`` of the agent."""
    places = leases.cluster.places
    request = {"store": str(places.snapshots), "lease": str(places.lease), "host": name}
    found: Mapping[str, Any] = leases.cluster.env.agents.query(leases.hosts[name], "brief", request, timeout=STORE_S)
    return found
