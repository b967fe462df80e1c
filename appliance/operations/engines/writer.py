"""Who may write the state: the lease of the admin hosts while an engine has the services."""

from __future__ import annotations

from appliance.engines.deploy import Bundle
from appliance.engines.nomad import read_options
from appliance.errors import Refused
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.deployed import Deployed
from appliance.operations.lease import Leases, give_lease, query_lease
from appliance.operations.services.unfinished import moved_path
from appliance.plan.migration.lease import find_holder, find_newest
from appliance.plan.migration.state import StateMove, describe_interrupted, read_state_move
from appliance.plan.services.controllers import NOMAD
from appliance.progress import Progress
from appliance.shared.lease import ENGINE
from appliance.shared.state_lease import LEASE_FILE, parse_state_lease


def refuse_other_writer(cluster: Cluster, host: Host, bundle: Bundle, record: Deployed | None) -> Leases:
    """Check that no admin host and no other engine has the services, whether they run or not; return the leases.

    Raises:
        Refused: one has, or the host that has the lease cannot be queried.
    """
    engine = bundle.engine
    if record and record.has_services and record.engine != engine:
        raise Refused(
            f"{record.engine} has the services of {cluster.site.cluster}",
            hint=f"`sms deploy stop` stops them there; `sms migrate --to {engine}` moves them with their state",
        )
    leases = Leases(host, cluster, tolerant=True)
    views = leases.query()
    moves = f"`sms migrate --to {engine}` moves them with their state"
    for name, view in views.items():
        if view.runs:
            raise Refused(
                f"the services container runs on {name}", hint=f"{moves}; `sms stop --host {name}` stops them"
            )
        if view.stuck:
            raise Refused(f"{name} does not answer in time, and may run the services container", hint="check that host")
    holder = find_holder(views)
    if holder is None or holder.engine == engine:
        return leases
    if holder.engine:
        raise Refused(f"{holder.engine} has the services and their state", hint=moves)
    if holder.holder in leases.unreachable:
        raise Refused(
            f"{holder.holder} cannot be queried and has the lease: its services container may run the services",
            hint="switch it on; if it has failed: `sms failover` to another host",
        )
    raise Refused(
        f"{holder.holder} has the lease: its services container starts again with the host",
        hint=f"{moves}; `sms stop --host {holder.holder}` gives them up",
    )


def refuse_interrupted(cluster: Cluster, host: Host) -> None:
    """Check that no move was interrupted: the state on an engine may be locked, and its tasks would end at once.

    The admin host that ran a move has its record. Of those that answer the newest one counts, and the newest lease.

    Raises:
        Refused: one was.
    """
    leases = Leases(host, cluster, tolerant=True)
    found = [one.lease for one in leases.query().values() if one.lease]
    lease = max(found, key=lambda one: (one.generation, bool(one.holder)))
    records = {name: _read_move(cluster, leases.hosts[name]) for name in leases.hosts if name not in leases.unreachable}
    name, last = max(records.items(), key=lambda one: one[1].began if one[1] else 0.0)
    if why := describe_interrupted(last, lease, name):
        what, _, hint = why.partition("; ")
        raise Refused(what, hint=hint if name == host.name else f"on {name}: {hint}")


def _read_move(cluster: Cluster, host: Host) -> StateMove | None:
    return read_state_move(host.read(moved_path(cluster)), cluster.site.cluster)


def refuse_moved(cluster: Cluster, bundle: Bundle) -> None:
    """Check that the state on Nomad's client was not moved elsewhere: its tasks would end, and it is an older one.

    Raises:
        Refused: it was.
    """
    given = cluster.site.engines.nomad
    name = given.host or cluster.site.admin_hosts[0].name
    hosts = {one.name for one in cluster.site.admin_hosts}
    if bundle.engine != NOMAD or given.address is None or name not in hosts:
        return
    folder = read_options(cluster.site, ()).state
    for item in bundle.items:
        path = f"{folder}{item.lease}/{LEASE_FILE}"
        try:
            data = cluster.host(name).read(path) if item.lease else None
            moved = parse_state_lease(data).moved if data else ""
        except Unreachable:
            return  # the check of the client reports it
        except (ValueError, TypeError):
            continue  # the task itself names a damaged file
        if moved:
            raise Refused(
                f"the state of {item.name} on {NOMAD} was moved to the {moved} since, and is older than that",
                hint=f"`sms migrate --to {NOMAD}` moves the newer; to begin without one, empty {folder} on {name}",
            )


def take_for_engine(leases: Leases, engine: str, progress: Progress) -> None:
    """Give the lease of the admin hosts to an engine, unless it has that already.

    Args:
        leases: as queried; nobody else had it then.

    Raises:
        Refused: another run has changed it since.
    """
    holder, current = f"{ENGINE}{engine}", find_holder(leases.views)
    if current and current.holder == holder:
        leases.adopt(current)
        return
    floors = (view.lease.floor for view in leases.views.values() if view.lease)
    with progress.step("take the lease") as step:
        newest = find_newest(leases.views) or holder
        lease = give_lease(leases, holder, 1 + max(leases.top, *floors), newest)
        step.detail(f"generation {lease.generation}")
    for line in leases.notes:
        progress.report(line)


def release_from_engine(cluster: Cluster, host: Host, engine: str) -> bool:
    """Release the lease that a deployment gave to an engine; return whether the engine has it no more.

    One that a move gave to it stays: no admin host has that state.

    Raises:
        Refused: another run changes it.
    """
    leases = Leases(host, cluster, tolerant=True)
    current = find_holder(leases.query())
    if current is None or current.engine != engine:
        return True
    if not current.last:
        return False
    leases.adopt(current)
    with cluster.env.progress.step("release the lease"):
        last = "" if current.last.startswith(ENGINE) else current.last
        give_lease(leases, None, 1 + leases.top, last)
    for line in leases.notes:
        cluster.env.progress.report(line)
    return True


def release_unused(cluster: Cluster, host: Host) -> None:
    """Release the lease of a deployment that was killed before it could record anything."""
    lease = query_lease(host, cluster)
    if lease.engine:
        release_from_engine(cluster, host, lease.engine)
