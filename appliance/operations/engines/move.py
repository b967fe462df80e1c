"""``sms migrate --to``: moves the services with their state between the services container and an engine.

The steps are the same in each direction. The lease is changed once; before that the source is started again where a
step fails, after that the next run starts the target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from appliance.errors import ConfigError, Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.engines.container_owner import ContainerOwner
from appliance.operations.engines.deploy import render_bundle
from appliance.operations.engines.kubernetes_owner import KubernetesOwner
from appliance.operations.engines.nomad_owner import NomadOwner
from appliance.operations.engines.owners import Owner
from appliance.operations.engines.transfer import transfer
from appliance.operations.history import note, read_history
from appliance.operations.lease import Leases, hand_over, query_lease
from appliance.operations.overlay.generation import refuse_older
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.preflight import lock_host, only_one
from appliance.operations.services.unfinished import moved_path
from appliance.plan.migration.state import (
    COMMITTING,
    COPYING,
    DONE,
    RETURNED,
    STARTING,
    STOPPING,
    MovePlan,
    MoveResult,
    StateMove,
    Tree,
    check_identity,
    compare_trees,
    left_behind,
    moved_paths,
    read_state_move,
    refuse_newer,
)
from appliance.plan.services.controllers import CONTAINER, KUBERNETES, find_controllers
from appliance.progress import Progress
from appliance.shared.lease import ENGINE, Lease
from appliance.shared.records import to_json

VERB = "move"
"""In the history."""
OUTAGE_S = 90.0
"""Predicted outage while no move was measured."""
DATABASES = (
    ("sacctmgr", "-nP", "list", "cluster", "format=cluster,id"),
    ("sacctmgr", "-nP", "list", "cluster", "format=cluster"),
)
"""List the clusters in the database; from Slurm 23.11 on with their ids."""


@dataclass
class Move:
    """A move under way.

    Attributes:
        record: as it was written last.
        resumes: the target has the state already.
        interrupted: an earlier run of this move was killed, before which the source may have run.
        ran: the source ran when this run began.
        stopped: this run has stopped the source, or a part of it.
    """

    cluster: Cluster
    host: Host
    source: Owner
    target: Owner
    leases: Leases
    progress: Progress
    record: StateMove
    resumes: bool = False
    interrupted: bool = False
    ran: bool = False
    stopped: bool = False
    generation: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether the source had the services: where a step fails, it is started again."""
        return self.ran or self.interrupted

    def enter(self, phase: str, **changes: Any) -> None:
        """Write the record durably, and the phase to the history; then the step may begin."""
        self.record = self.record.at(phase, **changes)
        self.host.write(record_path(self.cluster), to_json(self.record), mode=0o600)
        note(self.cluster, self.host, VERB, phase, source=self.source.name, target=self.target.name, **changes)

    @contextmanager
    def timed(self, part: str, text: str) -> Iterator[Any]:
        """Measure and show a part."""
        began = time.monotonic()
        with self.progress.step(text) as step:
            yield step
        self.parts[part] = round(time.monotonic() - began, 3)


def record_path(cluster: Cluster) -> str:
    """Return the path of the record of the last move, on the host that ran it."""
    return moved_path(cluster)


def move(cluster: Cluster, host: Host, target: str, progress: Progress, *, force: bool = False) -> MoveResult:
    """Move the services to ``target``; ``host`` is the admin host whose services container is source or target.

    A move that was interrupted before the lease was changed begins again with a new copy; after that, the target is
    started.

    Args:
        force: although services stop that only the services container runs.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed; the source has the services as before.
        Unverified: the target has the services, and one of them is not ready.
        SmsError: a step failed, and the source could not be started again.
    """
    began = time.monotonic()
    with inspected(cluster, host, target, progress) as (plan, current):
        refuse_left(plan, force=force)
        result = MoveResult(plan.source, plan.target, current.leases.top, plan.files, plan.bytes, resumed=plan.resumes)
        if plan.resumes:
            result.same = current.record.ended and current.target.runs()
        else:
            _copy_and_commit(current)
            result.notes += current.leases.notes
            result.generation, result.files, result.bytes = (
                current.generation,
                current.record.files,
                current.record.bytes,
            )
        _start(current, result)
        result.parts, result.seconds = current.parts, round(time.monotonic() - began, 3)
        if not plan.resumes:
            result.outage_s = round(sum(current.parts.values()), 3)
        if not result.same:
            facts = {"outage_s": result.outage_s, "generation": result.generation}
            current.enter(DONE, parts=result.parts)
            note(cluster, host, VERB, "figures", source=plan.source, target=plan.target, **facts)
    return result


def refuse_left(plan: MovePlan, *, force: bool) -> None:
    """Check that no service stops that only the services container runs.

    Raises:
        Refused: one does.
    """
    if plan.target != CONTAINER and plan.left and not plan.resumes and not force:
        raise Refused(
            f"{', '.join(plan.left)} would stop: only the services container runs them, and it does not run while "
            f"{plan.target} has the other services",
            hint="give nodes another router and time server first; then `--force`",
        )


def rehearse_move(cluster: Cluster, host: Host, target: str, progress: Progress) -> MovePlan:
    """Run all checks of a move and return its plan. Sends the image; changes nothing else.

    Raises:
        Refused: as ``move``.
    """
    with inspected(cluster, host, target, progress) as (plan, _):
        return plan


# Checks


@contextmanager
def inspected(cluster: Cluster, host: Host, target: str, progress: Progress) -> Iterator[tuple[MovePlan, Move]]:
    """Check source and target; yield the plan, and the move that may begin. No other one may within the context.

    Raises:
        Refused: a check failed.
    """
    check_reports(cluster, target)
    with lock_moves(cluster, host):
        current = _begin(cluster, host, target, progress)
        try:
            yield _inspect(current), current
        finally:
            for one in (current.source, current.target):
                with suppress(SmsError):
                    one.close()


@contextmanager
def lock_moves(cluster: Cluster, host: Host) -> Iterator[None]:
    """Hold the lock of moves on every admin host: another run would undo what this one does.

    Raises:
        Busy: another run moves the services.
        Refused: a host cannot be reached.
    """
    path = f"{cluster.places.lock}.move"
    with ExitStack() as stack:
        for name in sorted({one.name for one in cluster.site.admin_hosts} | {host.name}):  # in the same order always
            one = host if name == host.name else cluster.host(name)
            try:
                stack.enter_context(only_one(one, path, f"another `sms migrate --to` is at work; {name} has its lock"))
            except Unreachable as error:
                raise _unreachable([name]) from error
        yield


def _unreachable(names: Sequence[str]) -> Refused:
    return Refused(
        f"{', '.join(names)} cannot be reached, and would not know who has the services",
        hint="make every admin host reachable, or remove it from `admin_hosts`",
    )


def _begin(cluster: Cluster, host: Host, target: str, progress: Progress) -> Move:
    """Find out who has the services."""
    with progress.step("query all admin hosts") as step:
        leases = Leases(host, cluster)
        lease = _query(leases)
        step.detail(f"{lease.holder or 'no host'} holds the lease")
    before = read_state_move(host.read(record_path(cluster)), cluster.site.cluster)
    owner = lease.engine or CONTAINER
    resumes = owner == target
    if resumes and owner == CONTAINER:
        came_from = _refuse_elsewhere(lease, host.name, before)
    elif resumes:
        came_from = before.source if before and before.target == target else CONTAINER
    else:
        came_from = owner
    names = _moving(cluster, (came_from, target))
    paths = moved_paths([one for one in cluster.services if one.name in names])
    source, to = (find_owner(cluster, host, name, paths, progress) for name in (came_from, target))
    record = StateMove(cluster.site.cluster, STARTING if resumes else STOPPING, came_from, target, time.time())
    if resumes and before and before.target == target:
        record = before
    interrupted = before is not None and not before.ended and before.source == came_from
    return Move(cluster, host, source, to, leases, progress, record, resumes, interrupted)


def _refuse_elsewhere(lease: Lease, name: str, before: StateMove | None) -> str:
    """Check that a move to the services container of a host has put the state there; return where it came from.

    Args:
        before: the last move that the host has run.

    Raises:
        Refused: it has not, or another host has the state by now.
    """
    if lease.taker not in ("", name):
        raise Refused(
            f"the services container on {lease.taker} has the services",
            hint=f"`sms migrate {name}` moves it here, and `sms start` starts it there",
        )
    moved = before is not None and before.target == CONTAINER and before.phase in (COMMITTING, STARTING, DONE)
    if before is None or not moved or lease.generation < before.generation:
        raise Refused("the services container has the services already", hint="`sms start` starts it")
    return before.source


def _inspect(current: Move) -> MovePlan:
    """Run the checks; of a move that is resumed, the start runs them."""
    cluster, source, to, progress = current.cluster, current.source, current.target, current.progress
    if current.resumes:
        return _plan(current, Tree())
    for one in (source, to):
        with progress.step(f"check {one.where}"):
            one.check()
    if source.name == CONTAINER:
        _check_container(current)
    current.ran = source.runs()
    if to.runs():
        raise Refused(f"{to.where} runs services already", hint=_stop_hint(to.name))
    with progress.step("check the state") as step:
        tree = source.survey()
        step.detail(f"{tree.files} files, {tree.bytes >> 20} MiB")
    image = to.versions()
    refuse_newer(tree, image, to.where)
    check_identity(tree, cluster.site.cluster, _databases(current))
    free = to.free_bytes()
    if 0 <= free < tree.bytes:
        raise Refused(
            f"{to.where} has {free >> 20} MiB free; the state has {tree.bytes >> 20} MiB", hint="free space there"
        )
    return replace(_plan(current, tree), free_bytes=free, slurm=image.slurm, mariadb=image.mariadb)


def _query(leases: Leases) -> Lease:
    """Query all hosts, which all have to answer: one that does not would not know who has the state."""
    leases.query()
    if leases.unreachable:
        raise _unreachable(leases.unreachable)
    lease = leases.views[leases.me].lease
    assert lease
    top = max((view.lease for view in leases.views.values() if view.lease), key=lambda one: one.generation)
    if top.generation <= lease.generation:
        return lease
    if top.engine:
        leases.adopt(top)
    return top


def _check_container(current: Move) -> None:
    """Check that the state of the services container is that of ``host``.

    Raises:
        Refused: another host has it.
    """
    leases, host = current.leases, current.host
    leases.check()
    if not current.source.runs():
        refuse_older(current.cluster, host, leases, set_aside=False)


def _databases(current: Move) -> list[str] | None:
    """Return the clusters in the database; None if there is none, or the source cannot tell, which is reported."""
    if current.cluster.find_role("accounting") is None:
        return None
    why = "" if current.ran else "its services do not run"
    for argv in DATABASES if current.ran else ():
        try:
            result = current.source.control(*argv)
        except SmsError as error:
            why = error.message
            continue
        if not result.status:
            return result.text.split()
        why = result.stderr.decode(errors="replace").strip()[-200:]
    where = current.source.where
    current.progress.report(f"note: not checked: whether the database of {where} is this cluster's: {why}")
    return None


def _plan(current: Move, tree: Tree) -> MovePlan:
    services = current.cluster.services
    moving = _moving(current.cluster, (current.source.name, current.target.name))
    seconds = list(_measured(current))
    return MovePlan(
        current.source.name,
        current.target.name,
        current.target.paths,
        tree.files,
        tree.bytes,
        -1,
        "",
        "",
        {} if current.target.name == CONTAINER else dict(left_behind(services, moving)),
        round(median(seconds), 1) if seconds else OUTAGE_S,
        len(seconds),
        current.resumes,
    )


def _measured(current: Move) -> Iterator[float]:
    """Yield the outages of earlier moves in the same direction, in seconds."""
    same = {"verb": VERB, "event": "figures", "source": current.source.name, "target": current.target.name}
    for line in read_history(current.cluster, current.host):
        if same.items() <= line.items():
            outage = line.get("outage_s")
            if isinstance(outage, int | float) and outage:
                yield float(outage)


def _moving(cluster: Cluster, owners: Sequence[str]) -> set[str]:
    """Return the services that move between these: those that the engines among them run."""
    found = {one.name for one in cluster.services}
    for name in owners:
        if name != CONTAINER:
            items = render_bundle(cluster, name).items
            found &= {unit for item in items if item.kind == "service" for unit in item.units}
    return found


def check_reports(cluster: Cluster, name: str) -> None:
    """Check that running jobs can report to the controller there: the site file has its address.

    Raises:
        ConfigError: it does not, or nodes reach it at another port.
    """
    if name not in find_controllers(cluster.site, cluster.services):
        port = name == KUBERNETES and cluster.site.engines.kubernetes.address
        if not port:
            raise ConfigError(
                f"`engines.{name}.address` is missing: the address at which nodes and running jobs reach the services",
                hint="add the section to the site file, and `sms apply`: docs/engines.md",
            )
        raise ConfigError(
            f"running jobs could not report to {name}: a NodePort is another port than the services container's",
            hint="set `network: host`, or `service: LoadBalancer`",
        )


def find_owner(cluster: Cluster, host: Host, name: str, paths: Sequence[str], progress: Progress) -> Owner:
    """Return who has the services under this name.

    Args:
        paths: of the state that moves.
    """
    if name == CONTAINER:
        return ContainerOwner(cluster, host, paths, progress)
    kind = KubernetesOwner if name == KUBERNETES else NomadOwner
    return kind(cluster, host, paths, progress)


def _stop_hint(target: str) -> str:
    return "`sms stop` stops them" if target == CONTAINER else "`sms deploy stop` stops them"


# Steps


def _copy_and_commit(current: Move) -> None:
    """Stop the source, copy the state, change the lease.

    Raises:
        Refused: nothing was stopped.
        RolledBack: the source was started again.
        SmsError: it could not be.
    """
    source = current.source
    try:
        with ExitStack() as stack:
            if source.name != CONTAINER:
                stack.enter_context(_keep_others_out(current))  # while a refusal costs nothing
            _stop(current)
            if source.name == CONTAINER:
                stack.enter_context(_keep_others_out(current))
            _refuse_changed(current)
            source.lock(current.target.name)
            tree = _copy(current)
            _commit(current, tree)
        source.close()
    except BaseException as error:
        if current.stopped and (current.record.phase in (STOPPING, COPYING) or not _is_committed(current)):
            _undo(current, error)
        raise


def _keep_others_out(current: Move) -> AbstractContextManager[object]:
    """Keep others from starting the services container, and from its overlay if that is one end of the move."""
    if CONTAINER in (current.source.name, current.target.name):
        return keep_stopped(current.cluster, current.host, current.progress)
    return lock_host(current.cluster, current.host)


def _stop(current: Move) -> None:
    """Stop the source.

    Raises:
        Refused: nothing was stopped.
    """
    current.enter(STOPPING)
    current.stopped = True
    try:
        with current.timed("stop", f"stop {current.source.where}"):
            current.source.stop()
    except Refused as error:
        current.stopped = False
        if not current.interrupted:
            current.enter(RETURNED, why=error.message)
        raise


def _refuse_changed(current: Move) -> None:
    """Check that nobody has taken the lease since it was queried."""
    now, then = query_lease(current.host, current.cluster), current.leases.views[current.host.name].lease
    assert then
    if (now.holder, now.generation) != (then.holder, then.generation):
        raise Refused("another run has taken the lease meanwhile", hint="see `sms status`")


def _copy(current: Move) -> Tree:
    """Copy all of the state, compare both ends, return what it is."""
    source, target = current.source, current.target
    floors = (view.lease.floor for view in current.leases.views.values() if view.lease)
    current.generation = 1 + max(current.leases.top, source.generation(), *floors)
    current.enter(COPYING, generation=current.generation)
    with current.timed("copy", f"copy the state to {target.where}") as step:
        target.prepare()
        tree = source.list()
        reader = source.inside(source.tree_argv("read"))
        writer = target.inside(target.tree_argv("write", copy=True), copy=True)
        transfer(reader, writer, lambda done: step.moved(done, max(done, tree.bytes)))
    with current.timed("compare", "compare digests on both ends") as step:
        compare_trees(tree, target.list(copy=True))
        step.detail(f"{tree.files} files, sha256:{tree.digest[:16]}")
    current.record = replace(current.record, files=tree.files, bytes=tree.bytes, digest=tree.digest)
    return tree


def _commit(current: Move, tree: Tree) -> None:
    """Change the lease: from here on the target has the state.

    Raises:
        SmsError: the copy is not in place, or the source's state is not locked any more.
    """
    target = current.target
    with current.timed("commit", "change the lease") as step:
        current.enter(COMMITTING)
        target.accept(current.generation, tree)
        placed = target.brief()
        if (placed.files, placed.bytes) != (tree.files, tree.bytes):
            has = f"{placed.files} files ({placed.bytes} bytes)"
            raise SmsError(f"{target.where} has {has} in place; the copy has {tree.files} ({tree.bytes} bytes)")
        current.source.check_locked()
        holder = None if target.name == CONTAINER else f"{ENGINE}{target.name}"
        host, cluster = current.host, current.cluster
        lease = hand_over(
            host, cluster, current.leases, holder=holder, generation=current.generation, locked=_has_lock(current)
        )
        step.detail(f"generation {lease.generation}")


def _has_lock(current: Move) -> bool:
    """Return whether this run has the lock of the lease file (``keep_stopped``)."""
    return CONTAINER in (current.source.name, current.target.name)


def _is_committed(current: Move) -> bool:
    """Return whether the lease is the target's; a write whose reply was lost counts."""
    try:
        lease = query_lease(current.host, current.cluster)
    except (SmsError, Unreachable):
        return True  # then nobody starts the source, whose state may be the older one
    return lease.generation >= current.generation and (lease.engine or CONTAINER) == current.target.name


def _undo(current: Move, error: BaseException) -> None:
    """Start the source again. The target may be what has failed: it is asked last, and only to remove the copy.

    Raises:
        RolledBack: it has the services as before; an interruption is raised unchanged.
        SmsError: it could not be started.
    """
    source, target, why = current.source, current.target, str(error) or type(error).__name__
    try:
        source.release(source.generation())
        source.close()
        if current.served:
            source.start()
        current.enter(RETURNED, why=why)
    except SmsError as failed:
        raise SmsError(
            f"{why}\n  and {source.where} could not be started again: {failed.message}",
            hint="it has the only state: run this again, or " + _start_hint(source.name),
        ) from error
    try:
        target.discard()
    except SmsError as left:
        current.progress.report(f"note: {target.where} keeps an incomplete copy until the next move: {left.message}")
    if isinstance(error, SmsError):
        has = "has the services as before" if current.served else "has the state as before, and is stopped as before"
        raise RolledBack(f"{error.message}\n  {source.where} {has}", hint=error.hint) from error


def _start_hint(name: str) -> str:
    """Return how to start the source: its state on an engine may still be locked, and a deployment leaves it so."""
    return "`sms start`" if name == CONTAINER else f"`sms migrate --to {name}`"


def _start(current: Move, result: MoveResult) -> None:
    """Start the target, which has the state.

    Raises:
        Unverified: a service is not ready.
    """
    target = current.target
    if not result.same:
        current.enter(STARTING)
    try:
        with current.timed("start", f"start {target.where}"):
            if not result.same:
                target.release(result.generation)
                target.close()
            target.start()
            if why := target.reload():
                result.notes.append(f"nodes keep the addresses of before as their first ones: {why}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{target.where} has the state (generation {result.generation}); `sms migrate --to {target.name}` goes on"
        ) from None
    except SmsError as error:
        back = "" if target.name == CONTAINER else f", `sms migrate --to {current.source.name}` moves it back"
        raise Unverified(
            f"{target.where} has the state (generation {result.generation}), and does not serve: {error.message}",
            hint=f"run this again to start it{back}" + (f"; {error.hint}" if error.hint else ""),
        ) from error
