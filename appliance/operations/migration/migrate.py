"""``sms migrate``: the running appliance goes to another admin host, and nobody notices."""

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
from appliance.operations.image.copy import bring
from appliance.operations.image.deliver import Image, trust
from appliance.operations.migration.lease import look_around, look_at_lease
from appliance.operations.migration.moving import Move, Moved, held_conflists
from appliance.operations.migration.unfinished import take_up
from appliance.operations.overlay.overlay import archive_for, overlay_mark, running_mark
from appliance.operations.services.boot import install_unit
from appliance.operations.services.guarded import start_guard, stop_guard
from appliance.operations.services.start import read_note, record_start
from appliance.operations.upgrade.note import read_last
from appliance.plan.machine import instance_name
from appliance.plan.migration.lease import Lease, View, find_holder
from appliance.plan.migration.move import MUNGE_LIMIT_S, SKEW_LIMIT_S, SKEW_WARN_S, Away, predict, predict_parts
from appliance.plan.services.network import conflists
from appliance.plan.services.note import StartNote
from appliance.progress import Progress
from appliance.tools import apptainer, bridge
from appliance.tools.apptainer import Instance
from appliance.tools.programs import find_missing
from appliance.tools.space import query_space

PROGRAMS = ("conntrack", "nsenter", "ip", "python3", "tail")
USED = 'stat -c "%b %B" -- "$1" | { read -r a b; echo $((a * b)); }'
ROOM = 16 << 20
"""Bytes to be left besides the copy: see agent/arrive.py."""
LATELY = 5
"""Moves of before that a prediction goes by."""


@dataclass(frozen=True)
class Plan:
    """What a move would do. Sizes in bytes; ``skew_s``: the target's clock against the source's."""

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
    away: list[Away]
    warnings: list[str] = field(default_factory=list)

    @property
    def over(self) -> list[Away]:
        """Services that would be away for too long."""
        return [one for one in self.away if one.over]


@dataclass(frozen=True)
class Ready:
    """Both hosts, looked at."""

    source: Host
    target: Host
    pid: int
    lease: Lease
    plan: Plan


def migrate(cluster: Cluster, name: str, progress: Progress, *, force: bool = False) -> Moved:
    """Move the running appliance to the admin host ``name``.

    Args:
        force: although a service would be away for longer than it may, or versions differ.

    Raises:
        Refused: something is missing or in the way; nothing was changed.
        RolledBack: a step failed; the appliance serves on the source as before.
        SmsError: a step failed, and the message says who serves now.
    """
    try:
        ready = look(cluster, name, progress, recover=True, force=force)
    except Finished as finished:
        return finished.moved
    except Unreachable as error:
        raise Refused(error.message, hint=error.hint) from error
    refuse_over(ready.plan, force=force)
    moved, silent = carry(cluster, ready, progress)
    if silent:
        take_back(cluster, moved, silent, progress)
    return moved


def carry(cluster: Cluster, ready: Ready, progress: Progress) -> tuple[Moved, str]:
    """Do what is planned; give what it did, and what is said of services that do not answer there.

    Raises:
        SmsError: as ``migrate``.
    """
    image = prepare(cluster, ready, progress)
    facts: dict[str, Any] = {"from": ready.source.name, "to": ready.target.name, "generation": ready.lease.generation}
    for host in (ready.source, ready.target):
        history.note(cluster, host, "migrate", "begun", **facts, image=image.key)
    move = Move(
        cluster,
        ready.source,
        ready.target,
        image,
        progress,
        pid=ready.pid,
        generation=ready.lease.generation,
        shared=ready.plan.shared,
    )
    try:
        moved = move.run()
    except BaseException as error:
        _note_all(cluster, (ready.source, ready.target), "failed", why=str(error) or type(error).__name__)
        raise
    moved.notes += finish(cluster, ready, image, moved, progress)
    return moved, move.silent


def take_back(cluster: Cluster, moved: Moved, silent: str, progress: Progress) -> NoReturn:
    """It serves, and not in full: it goes back by another move, so that nothing is lost of what has come in there.

    Raises:
        RolledBack: it serves on the source as before.
        SmsError: it does not; the message says what is known.
    """
    for words in (*moved.notes, silent):
        progress.say(f"note: {words}")
    hosts = [cluster.host(name) for name in (moved.source, moved.target)]
    _note_all(cluster, hosts, "failed", why=silent)
    try:
        ready = look(cluster, moved.source, progress, recover=False, force=True, back=True)
        _, still = carry(cluster, ready, progress)
    except SmsError as error:
        raise SmsError(
            f"{silent}\n  it was to go back to {moved.source}: {error.message}",
            hint=error.hint or f"sms status --host {moved.target}",
        ) from error
    if still:
        raise SmsError(f"{silent}\n  it is back, and {still}", hint=f"sms status --host {moved.source}")
    raise RolledBack(f"{silent}\n  the appliance serves on {moved.source} as before")


def rehearse_migrate(cluster: Cluster, name: str, progress: Progress) -> Plan:
    """Check both hosts as a move does, and give its plan; changes nothing. The image is verified by the move itself.

    Raises:
        Refused: as a move would.
    """
    try:
        return look(cluster, name, progress, recover=False, force=True).plan
    except Unreachable as error:
        raise Refused(error.message, hint=error.hint) from error


def refuse_over(plan: Plan, *, force: bool) -> None:
    """Refuse a plan that takes a service away for longer than it may be.

    Raises:
        Refused: with all of them.
    """
    if plan.over and not force:
        told = "; ".join(f"{one.name} for {one.predicted_s:g} s, and may be for {one.budget_s:g}" for one in plan.over)
        raise Refused(f"services would be away for too long: {told}", hint="`sms migrate --force` does it all the same")


def look(cluster: Cluster, name: str, progress: Progress, *, recover: bool, force: bool, back: bool = False) -> Ready:
    """Find out where it runs, and whether both hosts can do their part.

    Args:
        recover: take up what a killed run has left on either host, first.
        back: it is the way back from a host that may have nobody who hears it.
    """
    known = [host.name for host in cluster.site.admin_hosts]
    if name not in known:
        raise ConfigError(f"no admin host named {name}", hint=f"the site has: {', '.join(known)}")
    target = cluster.host(name)
    with progress.step("look at both hosts") as step:
        try:
            check_programs(target)
        except Unreachable as error:
            raise Refused(error.message, hint=error.hint) from error
        source, lease = find_source(cluster, target, recover=recover, progress=progress)
        step.detail(f"{source.name} to {target.name}")
        running = apptainer.find_instance(source, instance_name(cluster.site))
        if not running:
            raise Refused(
                f"{source.name} holds the lease, but the appliance does not run there",
                hint=f"sms start --host {source.name}",
            )
        if source.name == target.name:
            if recover and write_down(cluster, target, running, lease, progress):
                raise Finished(Moved(source.name, name, running.image, lease.generation))
            raise Refused(f"the appliance runs on {name} already", hint="`sms status` asks every service")
        if left := apptainer.find_instance(target, instance_name(cluster.site)):
            raise Refused(f"an instance runs on {name}, too, as process {left.pid}", hint=f"sms stop --host {name}")
        upgrade = read_last(cluster, source)
        if upgrade and not upgrade.ended:
            raise Refused(f"an upgrade was cut off on {source.name}", hint="`sms upgrade` goes on with it")
        note = read_note(cluster, source)
        if not note or note.image != running.image or not note.sha256:
            raise Refused(
                f"what runs on {source.name} was not started by sms, or its note is gone",
                hint=f"sms stop --host {source.name}, then sms start --host {source.name}",
            )
        plan = _plan(cluster, source, target, note, lease, force=force, back=back)
    for warning in plan.warnings:
        progress.say(f"WARNING: {warning}")
    return Ready(source, target, running.pid, lease, plan)


class Finished(Exception):
    """An earlier run had moved it there and was killed before it could write that down; now it has been."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()
        moved.notes.append(f"an earlier run had moved it to {moved.target}, and could not write that down; now it is")
        self.moved = moved


def write_down(cluster: Cluster, host: Host, running: Instance, lease: Lease, progress: Progress) -> bool:
    """Have what runs on a host known there, as it is after a start; say whether it was not.

    Raises:
        Refused: the image is not to be trusted.
    """
    note = read_note(cluster, host)
    if note and note.image == running.image and note.generation == lease.generation:
        return False
    record_start(cluster, host, trust(cluster, host, running.image), lease)
    look_around(host, cluster).tell(lease)
    install_unit(cluster, host, progress)
    start_guard(cluster, host, progress)
    return True


def find_source(cluster: Cluster, target: Host, *, recover: bool, progress: Progress) -> tuple[Host, Lease]:
    """The host that holds the lease, and the lease.

    Raises:
        Refused: nobody does, or who does cannot be reached.
    """
    hosts = [target if host.name == target.name else cluster.host(host.name) for host in cluster.site.admin_hosts]
    silent: list[str] = []

    def ask(host: Host) -> Lease | None:
        try:
            if recover:
                take_up(cluster, host, progress)
            return look_at_lease(host, cluster)
        except Unreachable:
            silent.append(host.name)
            return None

    with ThreadPoolExecutor(len(hosts)) as pool:
        leases = dict(zip((host.name for host in hosts), pool.map(ask, hosts), strict=True))
    newest = find_holder({name: View(lease) for name, lease in leases.items()})
    if newest is None and silent:
        raise Refused(
            f"the appliance runs on no host that answers; {', '.join(silent)} cannot be asked",
            hint=f"where {silent[0]} is dead: sms failover {target.name}",
        )
    if newest is None:
        raise Refused("the appliance runs nowhere", hint=f"sms start --host {target.name}")
    if newest.holder not in leases:
        raise Refused(
            f"{newest.holder} holds the lease, and the site file does not have it",
            hint=f"name it under admin_hosts, or where it is gone for good: sms failover {target.name}",
        )
    if newest.holder in silent:
        raise Refused(
            f"{newest.holder} holds the lease and cannot be reached",
            hint=f"where it is dead: sms failover {target.name}",
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
    """Ask all that can be asked beforehand.

    Raises:
        Refused: with all that is in the way.
    """
    hosts = (source, target)
    with ThreadPoolExecutor(12) as pool:
        lacks = [pool.submit(_lacks, cluster, host) for host in hosts]
        offsets = [pool.submit(clock_offset, host) for host in hosts]
        versions = [pool.submit(apptainer.version, host) for host in hosts]
        histories = [pool.submit(history.read_history, cluster, host) for host in hosts]
        sharing = pool.submit(shares_overlay, cluster, source, target)
        used = pool.submit(_number, source, USED, str(cluster.places.overlay))
        free = pool.submit(query_space, target, str(cluster.places.overlay.parent))
        linked = {host.name: pool.submit(host.works, "test", "-L", str(cluster.places.overlay)) for host in hosts}
        mark = pool.submit(running_mark, cluster, source)
    problems = [problem for one in lacks for problem in one.result()]
    skew = offsets[1].result() - offsets[0].result()
    warnings = []
    if abs(skew) > SKEW_LIMIT_S:
        problems.append(
            f"the clock of {target.name} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} that of "
            f"{source.name}: munge refuses messages at {MUNGE_LIMIT_S} s (munge(7)), and nodes may be off as well"
        )
    elif abs(skew) > SKEW_WARN_S:
        warnings.append(f"the clocks of {source.name} and {target.name} are {abs(skew):.1f} s apart")
    here, there = (one.result() for one in versions)
    if here != there:
        said = f"{source.name} has Apptainer {'.'.join(map(str, here))}, {target.name} {'.'.join(map(str, there))}"
        (warnings if force or here < there else problems).append(said)
    if not problems and not back:
        problems += _strangers(cluster, target)
    if not sharing.result() and free.result().free < used.result() + ROOM:
        problems.append(
            f"the file system of {cluster.places.overlay.parent} on {target.name} has "
            f"{free.result().free >> 20} MiB free, {used.result() + ROOM >> 20} are needed"
        )
    for name, one in linked.items():
        if one.result():
            problems.append(f"the overlay of {name} lies on a mirror, which a move cannot bring along")
    if problems:
        raise Refused(
            f"the appliance cannot move from {source.name} to {target.name}:\n  " + "\n  ".join(problems),
            hint=f"`sms doctor --host {target.name}` tells what mends it; `sms host prepare {target.name}` does most",
        )
    if mark.result() != overlay_mark(archive_for(cluster), Image(note.image, note.key, note.sha256, note.signer)):
        warnings.append("the site file has changed since the start; the move changes nothing of that: restart for it")
    measured = _measured([line for one in histories for line in one.result()], shared=sharing.result())
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
        predict(cluster.services, parts, shared=sharing.result()),
        warnings,
    )


def _lacks(cluster: Cluster, host: Host) -> list[str]:
    """What a host lacks to do its part."""
    problems = []
    try:
        check_bridges(cluster, host)
    except Refused as error:
        problems.append(error.message)
    if missing := find_missing(host, *PROGRAMS):
        problems.append(f"{host.name} lacks {', '.join(missing)}")
    return problems


def _strangers(cluster: Cluster, target: Host) -> list[str]:
    """Whether the target sees the appliance on both networks, and nobody else at its addresses."""
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    seen = bridge.taken(target, {network.bridge: str(network.address.ip) for network in networks})
    problems = []
    for network in networks:
        mac = seen.get(str(network.address.ip), "").lower()
        if not mac:
            problems.append(
                f"{target.name} does not see {network.address.ip} by {network.bridge}: "
                "is the bridge's port in the right network?"
            )
        elif mac != network.mac.lower():
            problems.append(f"{network.address.ip} is taken by a stranger, {mac}, as {target.name} sees it")
    return problems


def clock_offset(host: Host) -> float:
    """Seconds that the host's clock is ahead of this one's, within half the time that it takes to ask."""
    before = time.time()
    there = float(host.run("date", "+%s.%N").text)
    return there - (before + time.time()) / 2


def shares_overlay(cluster: Cluster, source: Host, target: Host) -> bool:
    """Whether both hosts see one overlay folder: what one writes there the other reads."""
    path = f"{cluster.places.overlay.parent}/.sms-shared-{time.time_ns()}"
    try:
        source.run("sh", "-c", 'umask 077; mkdir -p "$(dirname "$1")"; echo "$1" >"$1"', "probe", path)
        return target.works("test", "-e", path)
    finally:
        source.remove(path)


def _number(host: Host, script: str, *values: str) -> int:
    return int(host.run("sh", "-c", script, "number", *values).text.splitlines()[-1])


def _measured(lines: Sequence[dict[str, Any]], *, shared: bool) -> list[dict[str, float]]:
    """Parts of the last moves of this kind, as hosts have noted them; both have a line of each."""
    kind = {
        float(line["at"]): {name: float(took) for name, took in line["parts"].items() if isinstance(took, int | float)}
        for line in lines
        if line.get("event") == "moved"
        and line.get("host") == line.get("to")
        and line.get("shared") == shared
        and isinstance(line.get("parts"), dict)
        and isinstance(line.get("at"), int | float)
    }
    return [kind[at] for at in sorted(kind)[-LATELY:]]


def prepare(cluster: Cluster, ready: Ready, progress: Progress) -> Image:
    """Have the running image on the target, verified there, and its networks known.

    Raises:
        Refused: it is not to be trusted there.
    """
    where = cluster.places
    folders = (where.images, where.overlay.parent, where.journal, where.public_keys)
    ready.target.run("mkdir", "-p", "-m", "0700", *(str(path) for path in folders))
    bring(ready.source, ready.plan.image, ready.plan.sha256, ready.target, progress)
    with progress.step(f"verify the image on {ready.target.name}") as step:
        image = trust(cluster, ready.target, ready.plan.image)
        if image.sha256 != ready.plan.sha256:
            raise Refused(f"{image.path} on {ready.target.name} is another image than the one that runs")
        step.detail(image.signer)
    for path, data in held_conflists(cluster).items():
        ready.target.write(path, data)
    for path, text in conflists(cluster.site).items():
        ready.target.write(path, text.encode())
    return image


def finish(cluster: Cluster, ready: Ready, image: Image, moved: Moved, progress: Progress) -> list[str]:
    """Write down what runs where; give what could not be done. The move itself is over."""
    notes = []
    for path in held_conflists(cluster):
        ready.target.remove(path)
    try:
        lease = look_at_lease(ready.target, cluster)
        record_start(cluster, ready.target, image, lease)
        look_around(ready.target, cluster).tell(lease)
        stop_guard(cluster, ready.source)
        install_unit(cluster, ready.target, progress)
        start_guard(cluster, ready.target, progress)
    except SmsError as error:
        notes.append(f"what runs on {ready.target.name} could not be written down: {error.message}")
    facts = {
        "from": moved.source,
        "to": moved.target,
        "parts": moved.parts,
        "outage": moved.outage,
        "shared": moved.shared,
    }
    counts = {"generation": moved.generation, "last_bytes": moved.last_bytes, "lost_datagrams": moved.lost_datagrams}
    _note_all(cluster, (ready.source, ready.target), "moved", **facts, **counts)
    return notes


def _note_all(cluster: Cluster, hosts: Sequence[Host], event: str, **facts: Any) -> None:
    """Write it down wherever that works: a host that is gone must not hide what happened."""
    for host in hosts:
        try:
            history.note(cluster, host, "migrate", event, **facts)
        except SmsError:
            continue
