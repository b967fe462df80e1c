"""``sms overlay identity``: the UUID of this cluster, and other clusters of its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.lease import Leases, query_all_leases
from appliance.operations.preflight import lock_host
from appliance.operations.snapshots.list import Snapshot, list_snapshots
from appliance.operations.snapshots.transfer import Offsite
from appliance.plan.migration.lease import check_plausible, find_holder, find_identity
from appliance.plan.vm.holder import read_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.identity import UUID, uuid_of
from appliance.shared.lease import Lease
from appliance.shared.records import RecordError, to_json

NEW = "new"
"""Selects a UUID that no cluster has."""


@dataclass
class Found:
    """Snapshots of one UUID; empty: of earlier versions. ``where``: hosts, or the repository's URL."""

    snapshots: int = 0
    generation: int = 0
    first_generation: int = 0
    taken: float = 0.0
    hosts: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClusterIdentity:
    """The UUID of the cluster, and what else was found.

    Attributes:
        uuid: in the lease of the highest generation; empty: it has none yet.
        adopted: generation up to which snapshots without a UUID are its own.
        leases: UUID by host that answers; empty: its lease has none.
        found: snapshots by UUID.
        unread: what did not answer, with the reason.
    """

    cluster: str
    uuid: str = ""
    adopted: int = 0
    leases: dict[str, str] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def show_identity(cluster: Cluster, host: Host) -> ClusterIdentity:
    """Query the leases and snapshots of all admin hosts, and the Borg repository.

    Raises:
        Unreachable, SmsError: the lease of ``host`` cannot be read.
    """
    return _inspect(cluster, query_all_leases(host, cluster))


def _inspect(cluster: Cluster, leases: Leases) -> ClusterIdentity:
    named = find_identity(leases.views)
    uuids = {name: view.lease.cluster_uuid for name, view in leases.views.items() if view.lease}
    shown = ClusterIdentity(cluster.site.cluster, leases=uuids)
    shown = replace(shown, uuid=named.cluster_uuid, adopted=named.adopted) if named else shown
    for name, host in leases.hosts.items():
        try:
            listing = list_snapshots(cluster, host)
            _count(shown, [*listing.snapshots, *listing.foreign], name)
        except SmsError as error:
            shown.unread[name] = error.message
    if borg := cluster.site.snapshots.borg:
        try:
            _count(shown, [one for one, _ in Offsite(cluster, leases.hosts[leases.me]).open()], borg.repository)
        except SmsError as error:
            shown.unread[borg.repository] = error.message
    return shown


def _count(shown: ClusterIdentity, snapshots: Sequence[Snapshot], where: str) -> None:
    for one in snapshots:
        found = shown.found.setdefault(uuid_of(one), Found(first_generation=one["generation"]))
        found.snapshots += 1
        found.generation = max(found.generation, one["generation"])
        found.first_generation = min(found.first_generation, one["generation"])
        found.taken = max(found.taken, one["taken"])
        found.hosts = sorted({*found.hosts, one["host"]})
        found.where = [*found.where, *({where} - set(found.where))]


def set_identity(cluster: Cluster, host: Host, selector: str, *, without_remote: bool = False) -> ClusterIdentity:
    """Give the stopped cluster another UUID, on all admin hosts: a new one, or that of a cluster that it continues.

    Args:
        selector: ``new``, or the beginning of a UUID that a lease or a snapshot has.
        without_remote: go on although an admin host does not answer, which keeps its present UUID.

    Raises:
        Refused: it runs or may run, a host does not answer, or the UUID is not known; nothing was changed.
        SmsError: a host's file could not be written; run it again.
    """
    with lock_host(cluster, host):
        leases = query_all_leases(host, cluster)
        silent = leases.unreachable
        if silent and not without_remote:
            raise Refused(
                f"{', '.join(silent)} cannot be reached, and would keep the present UUID",
                hint="make it reachable; remove it from admin_hosts if it no longer exists; or `--without-remote` goes "
                "on without it",
            )
        holders = {view.lease.holder for view in leases.views.values() if view.lease and view.lease.holder}
        # A host that was removed from admin_hosts, because it no longer exists, is still named by the copies.
        holder = find_holder(leases.views, without=holders - leases.hosts.keys())
        stuck = [name for name, view in leases.views.items() if view.stuck]
        if stuck or (holder and holder.holder in silent):
            where = stuck[0] if stuck else holder and holder.holder
            raise Refused(
                f"{where} does not answer, and the services container may run there",
                hint="if it has failed, `sms failover` to another host takes over; then `sms stop`",
            )
        if holder or any(view.runs for view in leases.views.values()):
            where = holder.holder if holder else next(name for name, view in leases.views.items() if view.runs)
            raise Refused(f"the services container runs on {where}", hint=f"sms stop --host {where}")
        shown = _inspect(cluster, leases)
        chosen = cluster.env.new_uuid() if selector == NEW else _choose(shown, selector)
        found = shown.found.get(chosen, Found())
        check_plausible(found.generation, Lease("", leases.top))
        same = [
            view.lease.adopted for view in leases.views.values() if view.lease and view.lease.cluster_uuid == chosen
        ]
        adopted = max(same, default=found.first_generation)
        with cluster.env.progress.step(f"write {chosen} to the leases"):
            for name in (name for name in leases.hosts if name not in silent):
                _write(leases, name, chosen, adopted, found.generation)
                _name_vm(cluster, leases.hosts[name], chosen)
        for name in silent:
            cluster.env.progress.report(
                f"note: {name} keeps its UUID: run `sms overlay identity {chosen}` again once it answers"
            )
        leases.query()
        return _inspect(cluster, leases)


def _choose(shown: ClusterIdentity, selector: str) -> str:
    known = {one for one in (*shown.leases.values(), *shown.found) if one}
    chosen = sorted(one for one in known if one.startswith(selector))
    if len(chosen) == 1:
        return chosen[0]
    why = f"{len(chosen)} UUIDs begin" if chosen else "no lease and no snapshot has a UUID that begins"
    raise Refused(f"{why} with {selector}", hint="`sms overlay identity` shows all; `new` creates one")


def _write(leases: Leases, name: str, chosen: str, adopted: int, generation: int) -> None:
    """Write the UUID to a host's file, with a generation above that of the snapshots which are the cluster's now.

    Raises:
        SmsError: it was not written.
    """
    leases.views[name] = leases.query_host(name)  # hosts may share a file that was written just now
    current = leases.views[name].lease
    if current and (current.cluster_uuid, current.adopted) == (chosen, adopted) and current.generation > generation:
        return
    if not leases.name_cluster(name, chosen, adopted, above=generation):
        raise SmsError(f"the lease of {name} was not written: another run changes it", hint="run it again")


def _name_vm(cluster: Cluster, host: Host, chosen: str) -> None:
    """Write the UUID to a host's record of who has the VM's disks, if it has one."""
    if not cluster.site.provisioning:
        return
    where = VmPlaces(cluster.site)
    with cluster.env.locks.hold(host, str(where.lock), f"another sms is at work on the VM on {host.name}"):
        try:
            holder = read_holder(host.read(str(where.holder)))
        except RecordError as error:
            raise SmsError(f"{host.name}: {where.holder}: {error}", hint="sms vm status") from error
        if holder and holder.cluster_uuid != chosen:
            host.write(str(where.holder), to_json(replace(holder, cluster_uuid=chosen)), mode=0o600)


def is_valid(selector: str) -> bool:
    """Return whether an argument is ``new`` or the beginning of a UUID."""
    return selector == NEW or is_uuid(selector)


def is_uuid(selector: str) -> bool:
    """Return whether an argument is the beginning of a UUID."""
    filled = selector + "00000000-0000-0000-0000-000000000000"[len(selector) :]
    return len(selector) >= 4 and UUID.fullmatch(filled) is not None
