"""``sms failover``: the host that ran the appliance is dead; another one takes its place, once the dead one is off."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.config.model import AdminHost
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.operations.hosts.preflight import check_bridges, check_programs
from appliance.operations.image.deliver import deliver, trust
from appliance.operations.migration.fence import check_fence, fence, fence_way
from appliance.operations.migration.lease import Leases, look_around
from appliance.operations.services.start import Started, start
from appliance.operations.services.status import uptime_text
from appliance.operations.snapshots.list import LATEST, find_snapshot, list_snapshots
from appliance.operations.snapshots.restore import restore
from appliance.plan.machine import inside_argv
from appliance.plan.migration.failover import Begun, choose_snapshot, find_begun
from appliance.plan.migration.lease import LEAP, Lease, find_holder, is_apart
from appliance.progress import Progress

VERB = "failover"


@dataclass(frozen=True)
class Wanted:
    """How to take over.

    ``fenced``: somebody has made sure that the dead host is off. ``shared``: its overlay is the one that lies here.
    ``snapshot``: this one, whatever lies here; a number or ``latest``.
    """

    fenced: bool = False
    shared: bool = False
    snapshot: str = ""
    image: Path | None = None
    wait_s: float = 60


@dataclass(frozen=True)
class Plan:
    """What a failover will do. ``snapshot`` is None where the overlay that lies here is started as it is."""

    host: str
    old: tuple[str, ...]
    generation: int
    shared: bool
    snapshot: dict[str, Any] | None
    steps: tuple[str, ...]
    restored: bool = False
    """An earlier run has restored a snapshot, and was interrupted after that."""
    taken: bool = False
    """An earlier run has taken the lease as well."""
    snapshot_taken: float = 0.0
    """When the snapshot of an earlier run was taken."""


@dataclass
class FailedOver:
    """What a failover did. Times in Unix seconds; ``lost_s`` is the age of what it started from, None: nothing lost."""

    host: str
    old: list[str]
    generation: int
    shared: bool
    snapshot: int | None = None
    taken_on: str = ""
    taken: float = 0.0
    lost_s: float | None = None
    kept: str = ""
    jobs: dict[str, int] | None = None
    services: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def failover(cluster: Cluster, host: Host, wanted: Wanted, progress: Progress) -> FailedOver:
    """Fence the host that holds the lease, and start on ``host`` from a shared overlay or the newest verified snapshot.

    Interrupted, it goes on when it is run again.

    Raises:
        Refused: the holder is alive, or is not known to be off, or there is nothing to start from; nothing was changed.
        SmsError: a later step failed; run it again.
    """
    began = time.monotonic()
    plan = plan_failover(cluster, host, wanted, progress)
    if not wanted.fenced and not plan.taken:
        _fence(cluster, plan, progress)
    snapshot = plan.snapshot and plan.snapshot["number"]
    event = "resumed" if plan.restored else "begun"
    facts = {"old": plan.old, "shared": plan.shared, "snapshot": snapshot, "by_hand": wanted.fenced}
    age = plan.snapshot["taken"] if plan.snapshot else plan.snapshot_taken
    note(cluster, host, VERB, event, **facts, generation=plan.generation - LEAP, taken=age)
    done = FailedOver(host.name, list(plan.old), 0, plan.shared)
    if plan.restored and plan.snapshot_taken:
        done.taken, done.lost_s = plan.snapshot_taken, round(time.time() - plan.snapshot_taken, 1)
    try:
        _restore(cluster, host, plan, done, progress)
        started = _start(cluster, host, plan, wanted, progress)
    except Refused as error:  # of a step; what came before it was done
        hint = f"{error.hint + '; then r' if error.hint else 'R'}un this again: it goes on from here"
        raise SmsError(error.message, hint=hint) from error
    done.generation, done.services = started.generation, started.services
    done.jobs = _jobs(cluster, host)
    done.seconds = round(time.monotonic() - began, 1)
    note(cluster, host, VERB, "done", generation=done.generation, lost_s=done.lost_s, seconds=done.seconds)
    return done


def plan_failover(cluster: Cluster, host: Host, wanted: Wanted, progress: Progress) -> Plan:
    """Check all that a failover checks before it changes anything; give what it would do. Sends the image.

    Raises:
        Refused: as ``failover``.
    """
    check_programs(host)
    with progress.step("ask all admin hosts") as step:
        leases = look_around(host, cluster)
        top = max(view.lease.generation for view in leases.views.values() if view.lease)
        own = leases.views[host.name].lease
        held = own is not None and own.holder == host.name
        begun = find_begun(read_history(cluster, host), top=top, mine=held)
        if begun and begun.taken and not held:
            newest = choose_snapshot(list_snapshots(cluster, host).snapshots)
            if newest and newest["taken"] > begun.taken:
                begun = None  # it has run on since, and this is what is known of that
        old = _old(leases, begun)
        step.detail(f"{', '.join(old)} held the lease")
    if not wanted.fenced:
        for name in old:
            check_fence(_admin(cluster, name))
    elif answering := [name for name in old if name in leases.views and leases.views[name].lease]:
        raise Refused(
            f"{', '.join(answering)} answers: it is not off",
            hint=f"`sms stop --host {answering[0]}` lets the lease go; then `sms start --host {host.name}`",
        )
    with progress.step(f"check {host.name}"):
        check_bridges(cluster, host)
        trust(cluster, host, deliver(cluster, host, wanted.image, progress, before_sending=lambda: None))
    mine = leases.views[host.name].lease
    assert mine
    shared, snapshot = _origin(cluster, host, wanted, mine, begun)
    restored = not shared and snapshot is None
    plan = Plan(host.name, old, top + LEAP, shared, snapshot, (), restored, held, begun.taken if begun else 0.0)
    return replace(plan, steps=_steps(cluster, plan, wanted))


def _old(leases: Leases, begun: Begun | None) -> tuple[str, ...]:
    """The hosts to make sure of: who holds the lease; where nobody is known to hold it, all that do not answer.

    Raises:
        Refused: the holder runs the appliance, or there is nobody to take over from.
    """
    me, holder = leases.me, find_holder(leases.views)
    running = [name for name, view in leases.views.items() if view.runs and name != me]
    if running:
        raise Refused(
            f"{running[0]} is alive and runs the appliance", hint=f"`sms migrate {me}` moves it without losing anything"
        )
    if holder and holder.holder != me:
        return (str(holder.holder),)
    if begun:
        return begun.old
    if holder:
        raise Refused(f"{me} holds the lease itself", hint=f"there is nobody to take over from: sms start --host {me}")
    if not leases.silent:
        raise Refused("nobody holds the lease, and all hosts answer", hint=f"sms start --host {me}")
    return tuple(leases.silent)


def _admin(cluster: Cluster, name: str) -> AdminHost:
    for admin in cluster.site.admin_hosts:
        if admin.name == name:
            return admin
    raise Refused(
        f"{name} holds the lease, and the site file does not have it",
        hint="switch it off yourself, look that it is, and say so: --i-have-fenced",
    )


def _origin(
    cluster: Cluster, host: Host, wanted: Wanted, mine: Lease, begun: Begun | None
) -> tuple[bool, dict[str, Any] | None]:
    """Whether the overlay that lies here is the dead host's, and the snapshot to restore, if it is not.

    Raises:
        Refused: it cannot be known, or there is nothing to start from.
    """
    exists = host.works("test", "-e", str(cluster.places.overlay))
    if not wanted.snapshot:
        if begun and begun.restored:
            return False, None
        if wanted.shared or (begun and begun.shared) or is_shared(mine, host.name):
            if not exists:
                raise Refused(
                    f"there is no overlay {cluster.places.overlay} on {host.name}",
                    hint="is the shared folder mounted there? `--snapshot latest` does without it",
                )
            return True, None
        if exists and not is_apart(mine, host.name) and not begun:
            raise Refused(
                f"nobody knows whether the overlay on {host.name} is the one that was in use",
                hint="if its folder is shared: --shared; if it is not: --snapshot latest",
            )
    listing = list_snapshots(cluster, host)
    if begun and begun.snapshot and not wanted.snapshot:
        return False, find_snapshot(listing, str(begun.snapshot))
    if wanted.snapshot not in ("", LATEST):
        return False, find_snapshot(listing, wanted.snapshot)
    chosen = choose_snapshot(listing.snapshots)
    if not chosen:
        raise Refused(
            f"there is no verified snapshot on {host.name} to start from",
            hint=f"`sms overlay pull latest --host {host.name}` takes one out of a Borg repository; "
            f"`sms overlay list --host {host.name}` shows all",
        )
    return False, dict(chosen)


def is_shared(mine: Lease, me: str) -> bool:
    """Whether another host wrote the lease into a folder that it shares with ``me``."""
    return bool(mine.file) and mine.file != me


def _steps(cluster: Cluster, plan: Plan, wanted: Wanted) -> tuple[str, ...]:
    """For people."""
    steps = []
    for name in plan.old if not plan.taken else ():
        way = "it is off: you say so" if wanted.fenced else fence_way(_admin(cluster, name))
        steps.append(f"{name}: {way}")
    if plan.snapshot:
        age = uptime_text(int(time.time() - plan.snapshot["taken"]))
        steps.append(f"restore snapshot {plan.snapshot['number']} of {plan.snapshot['host']}, {age} old")
    elif plan.shared:
        steps.append(f"start from the shared overlay {cluster.places.overlay}")
    else:
        steps.append("the overlay is restored already, by an earlier run")
    return (*steps, f"take the lease (generation {plan.generation}) and start on {plan.host}")


def _fence(cluster: Cluster, plan: Plan, progress: Progress) -> None:
    for name in plan.old:
        admin = _admin(cluster, name)
        with progress.step(f"make sure that {name} is off"):
            fence(admin)


def _start(cluster: Cluster, host: Host, plan: Plan, wanted: Wanted, progress: Progress) -> Started:
    started = start(
        cluster,
        host,
        progress,
        image=wanted.image,
        wait_s=wanted.wait_s,
        keep=True,  # there is no host to go back to: what works is better than nothing
        fenced=plan.old,
        leap=1 if plan.taken else LEAP,
    )
    assert started  # None is for a start at boot
    return started


def _restore(cluster: Cluster, host: Host, plan: Plan, done: FailedOver, progress: Progress) -> None:
    """Put the snapshot in the overlay's place, if there is one to; what lay there is kept as a snapshot."""
    chosen = plan.snapshot
    if not chosen:
        return
    done.snapshot, done.taken_on, done.taken = chosen["number"], chosen["host"], chosen["taken"]
    done.lost_s = round(time.time() - chosen["taken"], 1)
    with progress.step(f"restore snapshot {chosen['number']}") as step:
        restored = restore(cluster, host, str(chosen["number"]), progress, fenced=plan.old)
        step.detail(f"of {chosen['host']}, {uptime_text(int(done.lost_s))} old")
    if restored.kept and not restored.kept.same:
        done.kept = restored.kept.path or f"snapshot {restored.kept.snapshot}"
    note(cluster, host, VERB, "restored", snapshot=chosen["number"], uuid=chosen["uuid"], kept=done.kept)


def _jobs(cluster: Cluster, host: Host) -> dict[str, int] | None:
    """How many jobs the controller knows now, by their state; None where there is no controller that answers."""
    if not cluster.find_role("controller"):
        return None
    try:
        said = host.run(*inside_argv(cluster.site, "squeue", "--noheader", "--format=%T"), timeout=30).text
    except SmsError:
        return None
    states = said.split()
    return {state: states.count(state) for state in sorted(set(states))}
