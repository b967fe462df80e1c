"""Inspects both hosts of a migration: the source is found, both are queried, and the migration is planned."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations import history
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.hosts.guarded import start_guard
from appliance.operations.image.deliver import Image, trust
from appliance.operations.lease import query_all_leases, query_lease
from appliance.operations.migration.state import Inspected, MigrationResult
from appliance.operations.overlay.frozen import end_lost_freeze
from appliance.operations.overlay.mirrored import is_linked
from appliance.operations.overlay.overlay import archive_for, fitting, overlay_mark, query_room, running_mark
from appliance.operations.overlay.standby import plan_standby
from appliance.operations.preflight import check_networks, check_programs, find_instance, find_taken, query_confinement
from appliance.operations.services.boot import install_unit
from appliance.operations.services.effect import find_dropped
from appliance.operations.services.holding import release
from appliance.operations.services.unfinished import close_idle_mirror, read_last_upgrade, recover_migration
from appliance.operations.start_note import StartNote, read_note, record_start
from appliance.plan.migration.lease import View, engine_error, find_holder, find_last, refuse_other_cluster
from appliance.plan.migration.plan import Facts, HostFacts, plan_migration, recent_parts
from appliance.shared.lease import Lease
from appliance.tools import apptainer
from appliance.tools.apptainer import Instance
from appliance.tools.programs import find_missing
from appliance.tools.space import query_space, query_used

PROGRAMS = ("conntrack", "nsenter", "ip", "python3", "tail")


def inspect_hosts(
    cluster: Cluster, name: str, *, recover: bool, force: bool, back: bool = False
) -> Inspected | MigrationResult:
    """Find the source, check that both hosts are ready for a migration, and plan it.

    Args:
        recover: first complete or roll back a migration that was killed.
        back: migrate back from a host whose network may not work.

    Returns:
        With ``recover``, the result of a migration that an earlier run completed and did not record; it is now.

    Raises:
        ConfigError: no admin host has that name.
        Refused: with all problems.
    """
    target = cluster.host(name)
    with ExitStack() as stack:
        step = stack.enter_context(cluster.env.progress.step("check both hosts"))
        source, lease = find_source(cluster, target, recover=recover)
        stack.enter_context(unreachable_is_refused(source.name))
        check_programs(target)
        step.detail(f"{source.name} to {name}")
        end_lost_freeze(cluster, source)
        running = _find_running(cluster, source)
        if source.name == name:
            if recover and record_if_missing(cluster, target, running, lease):
                completed = f"an earlier run completed the migration to {name}; it has now been recorded"
                return MigrationResult(name, name, running.image, lease.generation, notes=[completed])
            raise Refused(f"the services container runs on {name} already", hint="`sms status` probes every service")
        if recover:
            release(cluster, source)  # else it would count as done by hand
        note = _check_unchanged(cluster, source, target, running)
        facts = gather_facts(cluster, source, target, note, generation=lease.generation, addresses=not back)
        plan = plan_migration(facts, cluster.services, force=force)
    for warning in plan.warnings:
        cluster.env.progress.warn(warning)
    confinements = query_confinement(cluster, source), query_confinement(cluster, target)
    return Inspected(source, target, running.pid, lease, plan, *confinements)


@contextmanager
def unreachable_is_refused(source: str) -> Iterator[None]:
    """Refuse if a host cannot be reached while nothing has been changed yet; ``source`` runs the services container.

    Raises:
        Refused: it cannot.
    """
    try:
        yield
    except Unreachable as error:
        runs = f"nothing was changed: {source} has the services container, by its lease"
        raise Refused(f"{error.message}\n  {runs}", hint=error.hint) from error


def find_source(cluster: Cluster, target: Host, *, recover: bool) -> tuple[Host, Lease]:
    """Return the host that holds the lease, and the lease.

    Raises:
        Refused: no host holds it, or the holder cannot be reached.
    """
    hosts = [cluster.host(host.name) for host in cluster.site.admin_hosts]
    unreachable: dict[str, Unreachable] = {}

    def query(host: Host) -> Lease | None:
        try:
            if recover:
                recover_migration(cluster, host)
                close_idle_mirror(cluster, host)
            return query_lease(host, cluster)
        except Unreachable as error:
            unreachable[host.name] = error
            return None

    with cluster.env.pool(len(hosts)) as pool:
        leases = dict(zip((host.name for host in hosts), pool.map(query, hosts), strict=True))
    views = {name: View(lease) for name, lease in leases.items()}
    refuse_other_cluster(views)
    newest = find_holder(views)
    if newest is None and unreachable:
        raise Refused(
            f"the services container is not running on any reachable host; {', '.join(unreachable)} cannot be reached",
            hint=_failover_hint(next(iter(unreachable)), target, leases, unreachable),
        )
    if newest is None:
        hint = f"sms start --host {find_last(views) or target.name}"
        raise Refused("the services container is not running on any host", hint=hint)
    if newest.engine:
        raise _engine_error(cluster, target, newest)
    if newest.holder not in leases:
        raise Refused(
            f"{newest.holder} holds the lease, but is not in the site file",
            hint=f"add it to admin_hosts, or if it no longer exists: sms failover {target.name}",
        )
    if newest.holder in unreachable:
        raise Refused(
            f"{newest.holder} holds the lease and cannot be reached: {unreachable[newest.holder].message}",
            hint=_failover_hint(newest.holder, target, leases, unreachable),
        )
    top = max(lease.generation for lease in leases.values() if lease)
    return next(host for host in hosts if host.name == newest.holder), replace(newest, generation=top)


def _engine_error(cluster: Cluster, target: Host, newest: Lease) -> Refused:
    """Return the refusal while an engine has the services, with the way in which what stays gets to the target."""
    error, here = engine_error(newest), None
    with suppress(SmsError):
        here = query_lease(target, cluster.of_gateway()).holder
    if here and here != target.name:
        way = f"`sms stop --host {here}`, then `sms start --host {target.name}`"
        error.hint = f"{way}, moves what stays in the services container; {error.hint}"
    return error


def _failover_hint(failed: str, target: Host, hosts: Iterable[str], unreachable: Mapping[str, Unreachable]) -> str:
    """Return what to do if a host has failed: a failover to the target, or to another host that can be reached.

    It may not have failed: its key may be another one.
    """
    reachable = [name for name in (target.name, *hosts) if name not in unreachable]
    way = f"if {failed} has failed: sms failover {reachable[0]}" if reachable else "make one of them reachable"
    return "\n  ".join(filter(None, [unreachable[failed].hint, way]))


def _find_running(cluster: Cluster, source: Host) -> Instance:
    running = find_instance(cluster, source)
    if not running:
        raise Refused(
            f"{source.name} holds the lease, but the services container does not run there",
            hint=f"sms start --host {source.name}",
        )
    return running


def record_if_missing(cluster: Cluster, host: Host, running: Instance, lease: Lease) -> bool:
    """Record the running instance on its host, as a start does; return False if that was done already.

    Raises:
        Refused: the image cannot be trusted.
    """
    note = read_note(cluster, host)
    if note and note.image == running.image and note.generation == lease.generation:
        return False
    record_serving(cluster, host, trust(cluster, host, running.image), lease)
    return True


def record_serving(cluster: Cluster, host: Host, image: Image, lease: Lease) -> None:
    """Record on the host, and in the leases of the others, that it serves since now; start what it needs for that.

    The record comes last: without it, ``record_if_missing`` of the next run does what a killed one has not done.

    Raises:
        SmsError: it could not be recorded.
    """
    install_unit(cluster, host)
    start_guard(cluster, host, renew=True)  # one that runs may have read the site file of before
    query_all_leases(host, cluster).publish(lease)
    record_start(cluster, host, image, lease)


def _check_unchanged(cluster: Cluster, source: Host, target: Host, running: Instance) -> StartNote:
    """Return the note of the start; check that nothing runs on the target, and that no upgrade is under way.

    Raises:
        Refused: they are not as sms leaves them.
    """
    if left := find_instance(cluster, target):
        raise Refused(
            f"an instance runs on {target.name}, too (process {left.pid})", hint=f"sms stop --host {target.name}"
        )
    upgrade = read_last_upgrade(cluster, source)
    if upgrade and not upgrade.ended:
        raise Refused(f"an upgrade was interrupted on {source.name}", hint="`sms upgrade` resumes it")
    note = read_note(cluster, source)
    if not note or note.image != running.image or not note.sha256:
        raise Refused(
            f"the instance on {source.name} was not started by sms, or its record is missing",
            hint=f"sms stop --host {source.name}, then sms start --host {source.name}",
        )
    return note


def gather_facts(
    cluster: Cluster, source: Host, target: Host, note: StartNote, *, generation: int, addresses: bool
) -> Facts:
    """Query both hosts in parallel. ``addresses``: also probe the addresses of the services container."""
    where, hosts = cluster.places, (source, target)
    with cluster.env.pool(13) as pool:
        both = [pool.submit(_gather_host, cluster, host) for host in hosts]
        histories = [pool.submit(history.read_history, cluster, host) for host in hosts]
        sharing = pool.submit(shares_overlay, cluster, source, target)
        used = pool.submit(query_used, source, str(where.overlay))
        free = pool.submit(query_space, target, str(where.overlay.parent))
        mark = pool.submit(running_mark, cluster, source)
        room = pool.submit(query_room, cluster, source)
        mirrored = pool.submit(is_linked, cluster, source)
        by_hand = pool.submit(find_dropped, cluster, source)
    here, there = (one.result() for one in both)
    shared = sharing.result()
    image = Image(note.image, note.key, note.sha256, note.signer)
    mirror, mirror_problems = ((), []) if shared else plan_standby(cluster, source, target)
    return Facts(
        here,
        there,
        note.image,
        note.sha256,
        generation,
        str(where.overlay.parent),
        shared,
        used.result(),
        free.result().free,
        _check_addresses(cluster, target) if addresses and not (here.lacks or there.lacks) else (),
        mark.result() != overlay_mark(archive_for(fitting(cluster, source)), image),
        recent_parts([line for one in histories for line in one.result()], shared=shared),
        mirrored.result(),
        mirror,
        mirror_problems,
        room.result(),
        by_hand.result(),
    )


def _gather_host(cluster: Cluster, host: Host) -> HostFacts:
    with cluster.env.pool(3) as pool:
        missing = pool.submit(find_lacking, cluster, host)
        offset = pool.submit(clock_offset, host, cluster.env.clock)
        version = pool.submit(apptainer.version, host)
    return HostFacts(host.name, missing.result(), offset.result(), version.result())


def find_lacking(cluster: Cluster, host: Host) -> list[str]:
    """Return what a host lacks for a migration."""
    problems = []
    try:
        check_networks(cluster, host)
    except Refused as error:
        problems.append(error.message)
    if missing := find_missing(host, *PROGRAMS):
        problems.append(f"{host.name} lacks {', '.join(missing)}")
    return problems


def _check_addresses(cluster: Cluster, target: Host) -> list[str]:
    """Return a problem for each network where the target does not see the services container at its address."""
    seen, problems = find_taken(cluster, target), []
    for network in (cluster.site.networks.provisioning, cluster.site.networks.public):
        mac = seen.get(str(network.address.ip), "").lower()
        if not mac:
            problems.append(
                f"{target.name} does not see {network.address.ip} on {network.uplink(target.name)}: "
                f"is {'it' if network.attach == 'macvlan' else 'its port'} in the right network?"
            )
        elif mac != network.mac.lower():
            problems.append(f"{network.address.ip} is used by another machine, {mac}, as seen from {target.name}")
    return problems


def clock_offset(host: Host, clock: Clock) -> float:
    """Return the seconds that the host's clock is ahead of the local one, to within half the round-trip time.

    Raises:
        SmsError: its `date` prints something else.
    """
    before = clock.time()
    shown = host.run("date", "+%s.%N").text
    after = clock.time()
    try:
        return float(shown) - (before + after) / 2
    except ValueError:
        raise SmsError(f"{host.name}: `date +%s.%N` does not print the time", hint="is it GNU date?") from None


def shares_overlay(cluster: Cluster, source: Host, target: Host) -> bool:
    """Return whether both hosts share the overlay folder: the target sees a file that the source writes."""
    path = f"{cluster.places.overlay.parent}/.sms-shared-{time.time_ns()}"
    try:
        source.write(path, path.encode(), mode=0o600)
        return target.works("test", "-e", path)
    finally:
        source.remove(path)
