"""``sms migrate``: moves the running services container to another admin host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from appliance.errors import ConfigError, Refused, RolledBack, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations import history
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_bridges, check_programs
from appliance.operations.image.copy import copy_image
from appliance.operations.image.deliver import Image, trust
from appliance.operations.migration.lease import query_all_leases, query_lease
from appliance.operations.migration.steps import Migration, MigrationResult, isolated_conflists
from appliance.operations.migration.unfinished import recover_migration
from appliance.operations.overlay.overlay import archive_for, overlay_mark, running_mark
from appliance.operations.services.boot import install_unit
from appliance.operations.services.guarded import start_guard, stop_guard
from appliance.operations.services.start import read_note, record_start
from appliance.operations.upgrade.note import read_last
from appliance.plan.machine import instance_name
from appliance.plan.migration.lease import Lease, View, find_holder
from appliance.plan.migration.move import (
    MUNGE_LIMIT_S,
    SKEW_LIMIT_S,
    SKEW_WARN_S,
    ServiceOutage,
    predict_outages,
    predict_parts,
)
from appliance.plan.services.network import conflists
from appliance.plan.services.note import StartNote
from appliance.progress import Progress
from appliance.tools import apptainer, bridge
from appliance.tools.apptainer import Instance
from appliance.tools.programs import find_missing
from appliance.tools.space import query_space

PROGRAMS = ("conntrack", "nsenter", "ip", "python3", "tail")
USED = 'stat -c "%b %B" -- "$1" | { read -r a b; echo $((a * b)); }'
RESERVE = 16 << 20
"""Free bytes required in addition to the copy (agent/migration_target.py)."""
RECENT = 5
"""Number of previous migrations that a prediction uses."""


@dataclass(frozen=True)
class Plan:
    """What a migration would do. Sizes in bytes; ``skew_s``: seconds by which the target's clock is ahead."""

    source: str
    target: str
    image: str
    sha256: str
    generation: int
    shared: bool
    used_bytes: int
    free_bytes: int
    skew_s: float
    parts: dict[str, float]
    measured: int
    away: list[ServiceOutage]
    warnings: list[str] = field(default_factory=list)

    @property
    def over(self) -> list[ServiceOutage]:
        """Services whose predicted outage exceeds their budget."""
        return [one for one in self.away if one.over]


@dataclass(frozen=True)
class Inspected:
    """Both hosts after all checks, and the plan."""

    source: Host
    target: Host
    pid: int
    lease: Lease
    plan: Plan


def migrate(cluster: Cluster, name: str, progress: Progress, *, force: bool = False) -> MigrationResult:
    """Move the running services container to the admin host ``name``.

    Args:
        force: ignore exceeded outage budgets and differing versions.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed; the services container serves on the source as before.
        SmsError: a step failed; the message says which host serves now.
    """
    try:
        inspected = inspect_hosts(cluster, name, progress, recover=True, force=force)
    except AlreadyMigrated as finished:
        return finished.result
    except Unreachable as error:
        raise Refused(error.message, hint=error.hint) from error
    refuse_over_budget(inspected.plan, force=force)
    result, failures = execute(cluster, inspected, progress)
    if failures:
        migrate_back(cluster, result, failures, progress)
    return result


def execute(cluster: Cluster, inspected: Inspected, progress: Progress) -> tuple[MigrationResult, str]:
    """Execute the plan; return the result, and the messages about services that do not answer on the target.

    Raises:
        SmsError: as ``migrate``.
    """
    image = prepare(cluster, inspected, progress)
    facts: dict[str, Any] = {
        "from": inspected.source.name,
        "to": inspected.target.name,
        "generation": inspected.lease.generation,
    }
    for host in (inspected.source, inspected.target):
        history.note(cluster, host, "migrate", "begun", **facts, image=image.key)
    migration = Migration(
        cluster,
        inspected.source,
        inspected.target,
        image,
        progress,
        pid=inspected.pid,
        generation=inspected.lease.generation,
        shared=inspected.plan.shared,
    )
    try:
        result = migration.run()
    except BaseException as error:
        _note_all(cluster, (inspected.source, inspected.target), "failed", why=str(error) or type(error).__name__)
        raise
    result.notes += finish(cluster, inspected, image, result, progress)
    return result, migration.failed_probes


def migrate_back(cluster: Cluster, result: MigrationResult, failures: str, progress: Progress) -> NoReturn:
    """Migrate back after a partial success, so that nothing is lost that the target has received meanwhile.

    Raises:
        RolledBack: the services container serves on the source as before.
        SmsError: it does not; the message says what is known.
    """
    for message in (*result.notes, failures):
        progress.report(f"note: {message}")
    hosts = [cluster.host(name) for name in (result.source, result.target)]
    _note_all(cluster, hosts, "failed", why=failures)
    try:
        inspected = inspect_hosts(cluster, result.source, progress, recover=False, force=True, back=True)
        _, still_failing = execute(cluster, inspected, progress)
    except SmsError as error:
        raise SmsError(
            f"{failures}\n  it could not be migrated back to {result.source}: {error.message}",
            hint=error.hint or f"sms status --host {result.target}",
        ) from error
    if still_failing:
        raise SmsError(f"{failures}\n  after the rollback: {still_failing}", hint=f"sms status --host {result.source}")
    raise RolledBack(f"{failures}\n  the services container serves on {result.source} as before")


def rehearse_migrate(cluster: Cluster, name: str, progress: Progress) -> Plan:
    """Run the checks of a migration and return its plan; changes nothing. Only a migration verifies the image.

    Raises:
        Refused: as for a migration.
    """
    try:
        return inspect_hosts(cluster, name, progress, recover=False, force=True).plan
    except Unreachable as error:
        raise Refused(error.message, hint=error.hint) from error


def refuse_over_budget(plan: Plan, *, force: bool) -> None:
    """Refuse a plan whose predicted outages exceed their budgets.

    Raises:
        Refused: with all such services.
    """
    if plan.over and not force:
        outages = "; ".join(f"{one.name} {one.predicted_s:g} s, tolerated {one.budget_s:g} s" for one in plan.over)
        raise Refused(f"predicted outages exceed their budgets: {outages}", hint="`sms migrate --force` ignores them")


def inspect_hosts(
    cluster: Cluster, name: str, progress: Progress, *, recover: bool, force: bool, back: bool = False
) -> Inspected:
    """Find the source, and check that both hosts are ready for a migration.

    Args:
        recover: first complete or roll back a migration that was killed.
        back: migrate back from a host whose network may not work.
    """
    known = [host.name for host in cluster.site.admin_hosts]
    if name not in known:
        raise ConfigError(f"no admin host named {name}", hint=f"the site has: {', '.join(known)}")
    target = cluster.host(name)
    with progress.step("check both hosts") as step:
        try:
            check_programs(target)
        except Unreachable as error:
            raise Refused(error.message, hint=error.hint) from error
        source, lease = find_source(cluster, target, recover=recover, progress=progress)
        step.detail(f"{source.name} to {target.name}")
        running = apptainer.find_instance(source, instance_name(cluster.site))
        if not running:
            raise Refused(
                f"{source.name} holds the lease, but the services container does not run there",
                hint=f"sms start --host {source.name}",
            )
        if source.name == target.name:
            if recover and record_if_missing(cluster, target, running, lease, progress):
                raise AlreadyMigrated(MigrationResult(source.name, name, running.image, lease.generation))
            raise Refused(f"the services container runs on {name} already", hint="`sms status` probes every service")
        if left := apptainer.find_instance(target, instance_name(cluster.site)):
            raise Refused(f"an instance runs on {name}, too (process {left.pid})", hint=f"sms stop --host {name}")
        upgrade = read_last(cluster, source)
        if upgrade and not upgrade.ended:
            raise Refused(f"an upgrade was interrupted on {source.name}", hint="`sms upgrade` resumes it")
        note = read_note(cluster, source)
        if not note or note.image != running.image or not note.sha256:
            raise Refused(
                f"the instance on {source.name} was not started by sms, or its record is missing",
                hint=f"sms stop --host {source.name}, then sms start --host {source.name}",
            )
        plan = _plan(cluster, source, target, note, lease, force=force, back=back)
    for warning in plan.warnings:
        progress.report(f"WARNING: {warning}")
    return Inspected(source, target, running.pid, lease, plan)


class AlreadyMigrated(Exception):
    """An earlier run completed the migration and was killed before it recorded that; it is recorded now."""

    def __init__(self, result: MigrationResult) -> None:
        super().__init__()
        result.notes.append(f"an earlier run completed the migration to {result.target}; it has now been recorded")
        self.result = result


def record_if_missing(cluster: Cluster, host: Host, running: Instance, lease: Lease, progress: Progress) -> bool:
    """Record the running instance on its host, as a start does; return False if that was done already.

    Raises:
        Refused: the image cannot be trusted.
    """
    note = read_note(cluster, host)
    if note and note.image == running.image and note.generation == lease.generation:
        return False
    record_start(cluster, host, trust(cluster, host, running.image), lease)
    query_all_leases(host, cluster).publish(lease)
    install_unit(cluster, host, progress)
    start_guard(cluster, host, progress)
    return True


def find_source(cluster: Cluster, target: Host, *, recover: bool, progress: Progress) -> tuple[Host, Lease]:
    """Return the host that holds the lease, and the lease.

    Raises:
        Refused: no host holds it, or the holder cannot be reached.
    """
    hosts = [target if host.name == target.name else cluster.host(host.name) for host in cluster.site.admin_hosts]
    unreachable: list[str] = []

    def query(host: Host) -> Lease | None:
        try:
            if recover:
                recover_migration(cluster, host, progress)
            return query_lease(host, cluster)
        except Unreachable:
            unreachable.append(host.name)
            return None

    with ThreadPoolExecutor(len(hosts)) as pool:
        leases = dict(zip((host.name for host in hosts), pool.map(query, hosts), strict=True))
    newest = find_holder({name: View(lease) for name, lease in leases.items()})
    if newest is None and unreachable:
        raise Refused(
            f"the services container is not running on any reachable host; {', '.join(unreachable)} cannot be reached",
            hint=f"if {unreachable[0]} has failed: sms failover {target.name}",
        )
    if newest is None:
        raise Refused("the services container is not running on any host", hint=f"sms start --host {target.name}")
    if newest.holder not in leases:
        raise Refused(
            f"{newest.holder} holds the lease, but is not in the site file",
            hint=f"add it to admin_hosts, or if it no longer exists: sms failover {target.name}",
        )
    if newest.holder in unreachable:
        raise Refused(
            f"{newest.holder} holds the lease and cannot be reached",
            hint=f"if it has failed: sms failover {target.name}",
        )
    top = max(lease.generation for lease in leases.values() if lease)
    return next(host for host in hosts if host.name == newest.holder), replace(newest, generation=top)


def _plan(
    cluster: Cluster,
    source: Host,
    target: Host,
    note: StartNote,
    lease: Lease,
    *,
    force: bool,
    back: bool,
) -> Plan:
    """Run all checks that are possible in advance, and return the plan.

    Raises:
        Refused: with all problems.
    """
    hosts = (source, target)
    with ThreadPoolExecutor(12) as pool:
        missing = [pool.submit(_find_missing, cluster, host) for host in hosts]
        offsets = [pool.submit(clock_offset, host) for host in hosts]
        versions = [pool.submit(apptainer.version, host) for host in hosts]
        histories = [pool.submit(history.read_history, cluster, host) for host in hosts]
        sharing = pool.submit(shares_overlay, cluster, source, target)
        used = pool.submit(_number, source, USED, str(cluster.places.overlay))
        free = pool.submit(query_space, target, str(cluster.places.overlay.parent))
        linked = {host.name: pool.submit(host.works, "test", "-L", str(cluster.places.overlay)) for host in hosts}
        mark = pool.submit(running_mark, cluster, source)
    problems = [problem for one in missing for problem in one.result()]
    skew = offsets[1].result() - offsets[0].result()
    warnings = []
    if abs(skew) > SKEW_LIMIT_S:
        problems.append(
            f"the clock of {target.name} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} that of "
            f"{source.name}: munge rejects messages at {MUNGE_LIMIT_S} s (munge(7)), and nodes may be off as well"
        )
    elif abs(skew) > SKEW_WARN_S:
        warnings.append(f"the clocks of {source.name} and {target.name} are {abs(skew):.1f} s apart")
    here, there = (one.result() for one in versions)
    if here != there:
        message = f"{source.name} has Apptainer {'.'.join(map(str, here))}, {target.name} {'.'.join(map(str, there))}"
        (warnings if force or here < there else problems).append(message)
    if not problems and not back:
        problems += _check_addresses(cluster, target)
    if not sharing.result() and free.result().free < used.result() + RESERVE:
        problems.append(
            f"the file system of {cluster.places.overlay.parent} on {target.name} has "
            f"{free.result().free >> 20} MiB free, {used.result() + RESERVE >> 20} are needed"
        )
    for name, one in linked.items():
        if one.result():
            problems.append(f"the overlay of {name} is on a mirror, which cannot be migrated")
    if problems:
        raise Refused(
            f"cannot migrate from {source.name} to {target.name}:\n  " + "\n  ".join(problems),
            hint=f"`sms doctor --host {target.name}` shows how to fix it; `sms host prepare {target.name}` fixes most",
        )
    if mark.result() != overlay_mark(archive_for(cluster), Image(note.image, note.key, note.sha256, note.signer)):
        warnings.append("the site file has changed since the start; a migration does not apply it, a restart does")
    measured = _recent_parts([line for one in histories for line in one.result()], shared=sharing.result())
    parts = predict_parts(measured)
    return Plan(
        source.name,
        target.name,
        note.image,
        note.sha256,
        lease.generation,
        sharing.result(),
        used.result(),
        free.result().free,
        round(skew, 3),
        parts,
        len(measured),
        predict_outages(cluster.services, parts, shared=sharing.result()),
        warnings,
    )


def _find_missing(cluster: Cluster, host: Host) -> list[str]:
    """Return what a host lacks for a migration."""
    problems = []
    try:
        check_bridges(cluster, host)
    except Refused as error:
        problems.append(error.message)
    if missing := find_missing(host, *PROGRAMS):
        problems.append(f"{host.name} lacks {', '.join(missing)}")
    return problems


def _check_addresses(cluster: Cluster, target: Host) -> list[str]:
    """Return a problem for each network where the target does not see the services container at its address."""
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    seen = bridge.taken(target, {network.bridge: str(network.address.ip) for network in networks})
    problems = []
    for network in networks:
        mac = seen.get(str(network.address.ip), "").lower()
        if not mac:
            problems.append(
                f"{target.name} does not see {network.address.ip} on {network.bridge}: "
                "is the bridge's port in the right network?"
            )
        elif mac != network.mac.lower():
            problems.append(f"{network.address.ip} is used by another machine, {mac}, as seen from {target.name}")
    return problems


def clock_offset(host: Host) -> float:
    """Return the seconds that the host's clock is ahead of the local one, to within half the round-trip time."""
    before = time.time()
    there = float(host.run("date", "+%s.%N").text)
    return there - (before + time.time()) / 2


def shares_overlay(cluster: Cluster, source: Host, target: Host) -> bool:
    """Return whether both hosts share the overlay folder: the target sees a file that the source writes."""
    path = f"{cluster.places.overlay.parent}/.sms-shared-{time.time_ns()}"
    try:
        source.run("sh", "-c", 'umask 077; mkdir -p "$(dirname "$1")"; echo "$1" >"$1"', "probe", path)
        return target.works("test", "-e", path)
    finally:
        source.remove(path)


def _number(host: Host, script: str, *values: str) -> int:
    return int(host.run("sh", "-c", script, "number", *values).text.splitlines()[-1])


def _recent_parts(lines: Sequence[dict[str, Any]], *, shared: bool) -> list[dict[str, float]]:
    """Return the parts of the last migrations of this kind from the histories; each is in that of both hosts."""
    kind = {
        float(line["at"]): {name: float(took) for name, took in line["parts"].items() if isinstance(took, int | float)}
        for line in lines
        if line.get("event") == "moved"
        and line.get("host") == line.get("to")
        and line.get("shared") == shared
        and isinstance(line.get("parts"), dict)
        and isinstance(line.get("at"), int | float)
    }
    return [kind[at] for at in sorted(kind)[-RECENT:]]


def prepare(cluster: Cluster, inspected: Inspected, progress: Progress) -> Image:
    """Copy the running image to the target, verify it there, and write the network configuration.

    Raises:
        Refused: the image cannot be trusted there.
    """
    where = cluster.places
    folders = (where.images, where.overlay.parent, where.journal, where.public_keys)
    inspected.target.run("mkdir", "-p", "-m", "0700", *(str(path) for path in folders))
    copy_image(inspected.source, inspected.plan.image, inspected.plan.sha256, inspected.target, progress)
    with progress.step(f"verify the image on {inspected.target.name}") as step:
        image = trust(cluster, inspected.target, inspected.plan.image)
        if image.sha256 != inspected.plan.sha256:
            raise Refused(f"{image.path} on {inspected.target.name} is not the image that is running")
        step.detail(image.signer)
    for path, data in isolated_conflists(cluster).items():
        inspected.target.write(path, data)
    for path, text in conflists(cluster.site).items():
        inspected.target.write(path, text.encode())
    return image


def finish(
    cluster: Cluster, inspected: Inspected, image: Image, result: MigrationResult, progress: Progress
) -> list[str]:
    """Record which host runs the instance after a migration; return notes about what failed."""
    notes = []
    for path in isolated_conflists(cluster):
        inspected.target.remove(path)
    try:
        lease = query_lease(inspected.target, cluster)
        record_start(cluster, inspected.target, image, lease)
        query_all_leases(inspected.target, cluster).publish(lease)
        stop_guard(cluster, inspected.source)
        install_unit(cluster, inspected.target, progress)
        start_guard(cluster, inspected.target, progress)
    except SmsError as error:
        notes.append(f"the migration to {inspected.target.name} could not be recorded: {error.message}")
    facts = {
        "from": result.source,
        "to": result.target,
        "parts": result.parts,
        "outage": result.outage,
        "shared": result.shared,
    }
    counts = {"generation": result.generation, "last_bytes": result.last_bytes, "lost_datagrams": result.lost_datagrams}
    _note_all(cluster, (inspected.source, inspected.target), "moved", **facts, **counts)
    return notes


def _note_all(cluster: Cluster, hosts: Sequence[Host], event: str, **facts: Any) -> None:
    """Record the event on all hosts that can be reached: a failed host must not hide what happened."""
    for host in hosts:
        try:
            history.note(cluster, host, "migrate", event, **facts)
        except SmsError:
            continue
