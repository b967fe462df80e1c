"""``sms failover``: fences the failed host and starts the services container on another one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.config.model import AdminHost
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import STOPPED, read_deployed
from appliance.operations.engines.abandon import abandon_engine, refuse_running
from appliance.operations.engines.deployed import set_phase
from appliance.operations.history import note, read_history
from appliance.operations.image.deliver import deliver, trust
from appliance.operations.lease import Leases, query_lease
from appliance.operations.migration.fence import check_fence, describe_fence, fence
from appliance.operations.preflight import check_networks, check_programs, try_confinement
from appliance.operations.services.generation import find_known
from appliance.operations.services.start import Started, StartOptions, start
from appliance.operations.services.stop import stop_gateway
from appliance.operations.services.unfinished import last_sign, overlay_inode
from appliance.operations.snapshots.list import find_snapshot, foreign_error, list_snapshots
from appliance.operations.snapshots.restore import restore
from appliance.plan.machine import inside_argv
from appliance.plan.migration.failover import (
    OpenFailover,
    choose_snapshot,
    find_open_failover,
    has_newer,
    measure_loss,
)
from appliance.plan.migration.lease import (
    GENERATION_BUMP,
    Views,
    find_holder,
    find_identity,
    find_last,
    has_own_overlay,
    refuse_other_cluster,
)
from appliance.plan.snapshots.offsite import LATEST
from appliance.shared.identity import Identity
from appliance.shared.lease import ENGINE, Lease
from appliance.units import format_uptime

VERB = "failover"


@dataclass(frozen=True)
class FailoverOptions:
    """Options of a failover.

    ``fenced``: the user has verified that the failed host is off. ``shared``: the overlay on this host is that of the
    failed host. ``snapshot``: start from this snapshot, a number or ``latest``, instead of an overlay on this host.
    ``without_remote``: as for a start.
    """

    fenced: bool = False
    shared: bool = False
    snapshot: str = ""
    image: Path | None = None
    wait_s: float = 60
    without_remote: bool = False


@dataclass(frozen=True)
class Plan:
    """What a failover will do. ``snapshot`` is None when the overlay on this host is started unchanged."""

    host: str
    old: tuple[str, ...]
    generation: int
    shared: bool
    snapshot: dict[str, Any] | None
    steps: tuple[str, ...]
    restored: bool = False
    """An earlier run was interrupted after it had restored a snapshot."""
    taken: bool = False
    """An earlier run has taken the lease, too."""
    snapshot_taken: float = 0.0
    """Unix time in seconds of the snapshot of an earlier run."""
    alive: float = 0.0
    """Unix time in seconds when the failed host was last heard from; 0 if that is not known."""
    overlay: int | None = None
    """Inode of the overlay that the snapshot replaces; as in ``OpenFailover``."""
    refused: str = ""
    """Why it would be refused; only of a plan that is shown. ``hint``: what to do about it."""
    hint: str = ""


@dataclass
class FailoverResult:
    """What a failover did. Times in Unix seconds.

    ``alive``: when the failed host was last heard from; 0 if that is not known. ``lost_s`` (None without a snapshot)
    and ``dead_s`` as in ``Loss``.
    """

    host: str
    old: list[str]
    generation: int
    shared: bool
    snapshot: int | None = None
    taken_on: str = ""
    taken: float = 0.0
    alive: float = 0.0
    lost_s: float | None = None
    dead_s: float | None = None
    kept: str = ""
    jobs: dict[str, int] | None = None
    services: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def failover(cluster: Cluster, host: Host, options: FailoverOptions) -> FailoverResult:
    """Fence the holder of the lease, and start on ``host`` from a shared overlay or the newest verified snapshot.

    An interrupted failover resumes when it is run again.

    Raises:
        Refused: the holder is alive or not known to be off, or there is nothing to start from; nothing was changed.
        SmsError: a later step failed; run it again.
    """
    began, began_at = cluster.env.clock.monotonic(), cluster.env.clock.time()
    _learn_identity(cluster, host)
    plan = plan_failover(cluster, host, options)
    if not options.fenced and not plan.taken:
        _fence(cluster, plan)
        plan = _choose_again(cluster, host, plan, options)
    for name in plan.old if not plan.taken else ():
        if name.startswith(ENGINE):
            abandon_engine(cluster, host, name.removeprefix(ENGINE))
    snapshot = plan.snapshot and plan.snapshot["number"]
    event = "resumed" if plan.restored else "begun"
    facts = {"old": plan.old, "shared": plan.shared, "snapshot": snapshot, "by_hand": options.fenced}
    age = plan.snapshot["taken"] if plan.snapshot else plan.snapshot_taken
    known = plan.generation - GENERATION_BUMP
    note(cluster, host, VERB, event, **facts, generation=known, taken=age, overlay=plan.overlay)
    result = FailoverResult(host.name, list(plan.old), 0, plan.shared, alive=plan.alive)
    if plan.restored:
        result.taken = plan.snapshot_taken
    if plan.snapshot:
        cluster.env.progress.report(f"note: it starts from {_describe_snapshot(cluster, plan.snapshot)}")
    try:
        _restore(cluster, host, plan, result)
        _forget_engine(cluster, host, plan)
        started = _start(cluster, host, plan, options)
        served = cluster.env.clock.time()
    except Refused as error:  # not a refusal of the whole: earlier steps were done
        hint = f"{error.hint + '; then r' if error.hint else 'R'}un this again: it resumes from here"
        raise SmsError(error.message, hint=hint) from error
    result.generation, result.services = started.generation, started.services
    result.jobs = _count_jobs(cluster, host)
    result.seconds = round(cluster.env.clock.monotonic() - began, 1)
    loss = measure_loss(taken=result.taken or plan.alive, alive=plan.alive, began=began_at, served=served)
    result.lost_s, result.dead_s = loss.lost_s if result.taken else None, loss.dead_s
    facts = {"lost_s": result.lost_s, "dead_s": result.dead_s, "alive": plan.alive, "seconds": result.seconds}
    note(cluster, host, VERB, "done", generation=result.generation, **facts)
    return result


def plan_failover(cluster: Cluster, host: Host, options: FailoverOptions, *, shown: bool = False) -> Plan:
    """Run all checks of a failover and return what it would do. Sends the image and the seccomp profile.

    Args:
        shown: it is only shown, also if the failed host cannot be fenced: what would be lost is of interest then, too.

    Raises:
        Refused: as ``failover``.
    """
    check_programs(host)
    with cluster.env.progress.step("query all admin hosts") as step:
        leases = Leases(host, cluster, tolerant=True)
        leases.query()
        _refuse_unread(leases)
        refuse_other_cluster(leases.views)
        top = leases.top
        own = leases.views[host.name].lease
        held = own is not None and own.holder == host.name
        interrupted = find_open_failover(read_history(cluster, host), top=top, holds_lease=held)
        again = interrupted.snapshot if interrupted and not held else None
        if again and has_newer(list_snapshots(cluster, host).snapshots, again):
            interrupted = None
        old = _failed_hosts(leases, interrupted)
        deployed = read_deployed(cluster, host)
        if deployed and deployed.has_services and f"{ENGINE}{deployed.engine}" not in old:
            old = (*old, f"{ENGINE}{deployed.engine}")
        step.detail(f"{', '.join(old)} held the lease")
        known = find_known(cluster, leases, without=old, without_remote=options.without_remote)
    refused: Refused | None = None
    try:
        _check_off(cluster, host, options, leases, old)
    except Refused as error:
        if not shown:
            raise
        refused = error
    with cluster.env.progress.step(f"check {host.name}"):
        check_networks(cluster, host)
        image = trust(cluster, host, *deliver(cluster, host, options.image))
        try_confinement(cluster, host, image.path)  # before anything is fenced or restored
    mine = leases.views[host.name].lease
    assert mine
    mine = _identify(mine, leases.views)
    shared, snapshot = _choose_origin(cluster, host, options, mine, interrupted)
    restored = not shared and snapshot is None
    plan = Plan(
        host.name,
        old,
        max(top, known.generation) + GENERATION_BUMP,
        shared,
        snapshot,
        (),
        restored,
        held,
        interrupted.taken if interrupted else 0.0,
        last_sign(cluster, host, old),
        interrupted.overlay if interrupted else overlay_inode(cluster, host),
    )
    if refused:
        plan = replace(plan, refused=refused.message, hint=refused.hint)
    return replace(plan, steps=_steps(cluster, plan, options))


def _check_off(cluster: Cluster, host: Host, options: FailoverOptions, leases: Leases, old: Collection[str]) -> None:
    """Check that the failed hosts are off, or can be fenced.

    Raises:
        Refused: one is alive, or cannot be.
    """
    if not options.fenced:
        for name in old:
            check_fence(find_admin(cluster, name))
        return
    refuse_alive(leases, old)
    for name in old:
        if name.startswith(ENGINE):
            refuse_running(cluster, host, name.removeprefix(ENGINE))


def _learn_identity(cluster: Cluster, host: Host) -> None:
    """Write the UUID of the cluster to the lease of ``host`` if it has none and another host that answers knows it.

    Without it, the snapshots on ``host`` that have the UUID would be another cluster's, and an older one be restored.

    Raises:
        Refused: the hosts know different UUIDs, or another run changes the lease.
        SmsError: it cannot be written.
    """
    if query_lease(host, cluster).cluster_uuid:
        return
    leases = Leases(host, cluster, tolerant=True)
    refuse_other_cluster(leases.query())
    mine = leases.views[host.name].lease
    assert mine
    named = _identify(mine, leases.views)
    if named != mine and not leases.name_cluster(host.name, named.cluster_uuid, named.adopted):
        raise Refused(f"the lease of {host.name} was not written: another run changes it", hint="run it again")


def _identify(mine: Lease, views: Views) -> Lease:
    """Return the lease of this host; without a UUID, with that of the other hosts, as a start writes it."""
    named = find_identity(views)
    if mine.cluster_uuid or not named:
        return mine
    adopted = max(named.adopted, mine.generation if mine.since else 0)
    return replace(mine, cluster_uuid=named.cluster_uuid, adopted=adopted)


def _refuse_unread(leases: Leases) -> None:
    """Refuse if the lease file of another host is damaged: it may be the newest one, of a host that has taken over."""
    for name, why in leases.unread.items():
        path = leases.cluster.places.lease
        raise Refused(
            f"{why}; {name} answers, and may have the newest overlay",
            hint=f"is another version of sms there? If not, and nothing runs on {name}, move the file away there: "
            f"`mv {path} {path}.damaged`; then run this again",
        )


def refuse_alive(leases: Leases, old: Collection[str]) -> None:
    """Refuse if one of the hosts that the user has powered off is not off.

    One that did not answer the query is asked for a new connection: the old one may have ended when it was powered off.
    """
    queried = [name for name in old if name in leases.views]
    if answering := [name for name in queried if leases.views[name].lease]:
        raise Refused(
            f"{', '.join(answering)} answers, so it is not off",
            hint=f"`sms stop --host {answering[0]}` releases the lease; then `sms start --host {leases.me}`",
        )
    if alive := [name for name in queried if leases.hosts[name].accepts_connections()]:
        raise Refused(
            f"{', '.join(alive)} accepts connections, so it is not off, though it did not answer the query",
            hint="power it off and verify that it is off; if another machine has its address now, disconnect that one",
        )


def _forget_engine(cluster: Cluster, host: Host, plan: Plan) -> None:
    """Record that an engine whose state is lost has the services no more; stop what stayed on hosts that answer."""
    if any(name.startswith(ENGINE) for name in plan.old):
        for name in [one.name for one in cluster.site.admin_hosts if one.name not in (*plan.old, host.name)]:
            try:
                stop_gateway(cluster, cluster.host(name))
            except SmsError as error:
                cluster.env.progress.report(f"note: what stayed on {name} may still run: {error.message}")
    record = read_deployed(cluster, host)
    if record and record.has_services and f"{ENGINE}{record.engine}" in plan.old:
        set_phase(cluster, host, record, STOPPED)


def _failed_hosts(leases: Leases, interrupted: OpenFailover | None) -> tuple[str, ...]:
    """Return the hosts to fence: the holder of the lease, or all unreachable hosts if no holder is known.

    Raises:
        Refused: the services container runs on another host, or there is no host to take over from.
    """
    me, holder = leases.me, find_holder(leases.views)
    running = [name for name, view in leases.views.items() if view.runs and name != me]
    if running:
        raise Refused(
            f"the services container runs on {running[0]}", hint=f"`sms migrate {me}` moves it without losing anything"
        )
    if holder and holder.holder != me:
        return (str(holder.holder),)
    if interrupted:
        return interrupted.old
    if holder:
        raise Refused(f"{me} holds the lease itself", hint=f"no failover is needed: sms start --host {me}")
    if not leases.unreachable:
        hint = f"sms start --host {find_last(leases.views) or me}"
        raise Refused("the lease is free, and all hosts answer", hint=hint)
    return tuple(leases.unreachable)


def find_admin(cluster: Cluster, name: str) -> AdminHost:
    if name.startswith(ENGINE):
        raise Refused(
            f"{name.removeprefix(ENGINE)} has the services and their state",
            hint="`sms migrate --to container` moves them back, with `--force` if the engine does not answer and an "
            "admin host has the state. If its state is lost: stop it, so that it never starts them again, and pass "
            "--i-have-fenced",
        )
    for admin in cluster.site.admin_hosts:
        if admin.name == name:
            return admin
    raise Refused(
        f"{name} holds the lease, but is not in the site file",
        hint="power it off yourself, verify that it is off, and pass --i-have-fenced",
    )


def _choose_origin(
    cluster: Cluster, host: Host, options: FailoverOptions, mine: Lease, interrupted: OpenFailover | None
) -> tuple[bool, dict[str, Any] | None]:
    """Return whether the overlay on this host is that of the failed host, and if not, the snapshot to restore.

    Args:
        mine: the lease of this host, with the UUID of the cluster if any host that answers knows it.

    Raises:
        Refused: that is not known, or there is nothing to start from.
    """
    exists = host.works("test", "-e", str(cluster.places.overlay))
    if not options.snapshot:
        if interrupted and interrupted.restored and exists:  # else a start has set it aside since
            return False, None
        if options.shared or (interrupted and interrupted.shared) or is_shared(mine, host.name):
            if not exists:
                raise Refused(
                    f"there is no overlay {cluster.places.overlay} on {host.name}",
                    hint="check that the shared folder is mounted there; `--snapshot latest` works without it",
                )
            return True, None
        if exists and not has_own_overlay(mine, host.name) and not interrupted:
            raise Refused(
                f"it is not known whether the overlay on {host.name} is the one that was in use",
                hint="if its folder is shared, pass --shared; otherwise --snapshot latest",
            )
    identity = Identity(mine.cluster_uuid, mine.adopted) if mine.cluster_uuid else None
    listing = list_snapshots(cluster, host, identity=identity)
    if interrupted and interrupted.snapshot and not options.snapshot:
        return False, find_snapshot(listing, str(interrupted.snapshot))
    if options.snapshot not in ("", LATEST):
        return False, find_snapshot(listing, options.snapshot)
    chosen = choose_snapshot(listing.snapshots)
    if listing.foreign and ((listing.unknown and not identity) or not chosen):
        raise foreign_error(listing.foreign, host.name)
    if not chosen:
        raise Refused(
            f"there is no verified snapshot on {host.name} to start from",
            hint=f"`sms overlay pull --from SOURCE --host {host.name}` fetches one, from borg or another admin host; "
            f"`sms overlay list --host {host.name}` shows all",
        )
    return False, dict(chosen)


def _choose_again(cluster: Cluster, host: Host, plan: Plan, options: FailoverOptions) -> Plan:
    """Return the plan with the newest snapshot: the failed host may have pushed one until it was fenced."""
    if not plan.snapshot or options.snapshot not in ("", LATEST):
        return plan
    newest = choose_snapshot(list_snapshots(cluster, host).snapshots)
    return replace(plan, snapshot=dict(newest)) if newest else plan


def is_shared(mine: Lease, me: str) -> bool:
    """Return whether another host wrote the lease into a folder that it shares with ``me``."""
    return bool(mine.file) and mine.file != me


def _steps(cluster: Cluster, plan: Plan, options: FailoverOptions) -> tuple[str, ...]:
    """Return the steps of a plan, as text for the user."""
    steps = []
    for name in plan.old if not plan.taken else ():
        how = "assumed to be off (--i-have-fenced)" if options.fenced else ""
        how = plan.refused or how or describe_fence(find_admin(cluster, name))
        steps.append(f"{name}: {how}")
    if plan.snapshot:
        steps.append(f"restore {_describe_snapshot(cluster, plan.snapshot)}")
    elif plan.shared:
        steps.append(f"start from the shared overlay {cluster.places.overlay}")
    else:
        steps.append("the overlay was already restored by an earlier run")
    return (*steps, f"take the lease (generation {plan.generation}) and start on {plan.host}")


def _describe_snapshot(cluster: Cluster, snapshot: dict[str, Any]) -> str:
    """Return which one it is, and what is lost with it."""
    age = format_uptime(int(cluster.env.clock.time() - snapshot["taken"]))
    which = f"snapshot {snapshot['number']} of {snapshot['host']}, {age} old"
    return f"{which}: jobs submitted, accounting and messages since then are lost"


def _fence(cluster: Cluster, plan: Plan) -> None:
    for name in plan.old:
        admin = find_admin(cluster, name)
        with cluster.env.progress.step(f"fence {name}"):
            fence(admin, cluster.env.hosts.this)


def _start(cluster: Cluster, host: Host, plan: Plan, options: FailoverOptions) -> Started:
    start_options = StartOptions(
        options.image,
        options.wait_s,
        keep=True,  # there is no host to roll back to: a partial start is better than none
        fenced=plan.old,
        generation_bump=1 if plan.taken else GENERATION_BUMP,
        # Not marked before the lease is taken: if this is interrupted, the overlay of the failed host is still newer,
        # and a start here is refused, which would not report what was lost.
        chosen=max(plan.generation - GENERATION_BUMP, plan.snapshot["generation"] if plan.snapshot else 0),
        without_remote=options.without_remote,
    )
    started = start(cluster, host, start_options)
    assert started  # None is for a start at boot
    return started


def _restore(cluster: Cluster, host: Host, plan: Plan, result: FailoverResult) -> None:
    """Replace the overlay with the snapshot, if the plan has one; the old overlay is kept as a snapshot."""
    chosen = plan.snapshot
    if not chosen:
        return
    result.snapshot, result.taken_on, result.taken = chosen["number"], chosen["host"], chosen["taken"]
    with cluster.env.progress.step(f"restore snapshot {chosen['number']}") as step:
        restored = restore(cluster, host, str(chosen["number"]), fenced=plan.old)
        step.detail(f"of {chosen['host']}, {format_uptime(int(cluster.env.clock.time() - chosen['taken']))} old")
    if restored.kept and not restored.kept.same:
        result.kept = restored.kept.path or f"snapshot {restored.kept.snapshot}"
    note(cluster, host, VERB, "restored", snapshot=chosen["number"], uuid=chosen["uuid"], kept=result.kept)


def _count_jobs(cluster: Cluster, host: Host) -> dict[str, int] | None:
    """Return the number of jobs by state; None without a controller that answers."""
    if not cluster.find_role("controller"):
        return None
    try:
        output = host.run(
            *inside_argv(cluster.site, cluster.services, "squeue", "--noheader", "--format=%T"), timeout=30
        ).text
    except SmsError:
        return None
    states = output.split()
    return {state: states.count(state) for state in sorted(set(states))}
