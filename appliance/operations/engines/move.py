"""``sms migrate --to``: moves the services with their state between the services container and an engine.

The steps are the same in each direction. The lease is changed once; before that the source is started again where a
step fails, after that the next run starts the target.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from appliance.errors import Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.engines.move_checks import check_image, inspected
from appliance.operations.engines.move_run import VERB, Move
from appliance.operations.engines.transfer import transfer
from appliance.operations.history import note
from appliance.operations.lease import hand_over, query_lease
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.preflight import lock_host
from appliance.plan.migration.state import (
    COMMITTING,
    COPYING,
    DONE,
    RETURNED,
    STARTING,
    STOPPING,
    MovePlan,
    MoveResult,
    Tree,
    compare_trees,
)
from appliance.plan.services.controllers import CONTAINER
from appliance.shared.lease import ENGINE


def move(cluster: Cluster, host: Host, target: str, *, force: bool = False) -> MoveResult:
    """Move the services to ``target``; ``host`` is the admin host whose services container is source or target.

    A move that was interrupted before the lease was changed begins again with a new copy; after that, the target is
    started.

    Args:
        force: although services stop, and from an engine that does not answer.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed; the source has the services as before.
        Unverified: the target has the services, and one of them is not ready.
        SmsError: a step failed, and the source could not be started again.
    """
    began = cluster.env.clock.monotonic()
    with inspected(cluster, host, target, force=force) as (plan, current):
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
        if not result.same:  # a start of the services container takes the lease, and so the next generation
            result.generation = query_lease(host, cluster).generation
        result.parts, result.seconds = current.parts, round(cluster.env.clock.monotonic() - began, 3)
        if not plan.resumes:
            result.outage_s = round(sum(current.parts.values()), 3)
        if not result.same:
            facts = {"outage_s": result.outage_s, "generation": result.generation}
            current.enter(DONE, parts=result.parts)
            note(cluster, host, VERB, "figures", source=plan.source, target=plan.target, **facts)
    return result


def refuse_left(plan: MovePlan, *, force: bool) -> None:
    """Check that no service stops that neither the target runs nor what stays of the services container.

    Raises:
        Refused: one does.
    """
    if plan.target != CONTAINER and plan.left and not plan.resumes and not force:
        raise Refused(
            f"{', '.join(plan.left)} would stop: neither {plan.target} can run this, nor what stays of the services "
            "container",
            hint="`sms migrate --dry-run` prints why; `--force` moves the other services nevertheless",
        )


def rehearse_move(cluster: Cluster, host: Host, target: str, *, force: bool = False) -> MovePlan:
    """Run all checks of a move and return its plan. Sends the image; changes nothing else.

    Raises:
        Refused: as ``move``.
    """
    with inspected(cluster, host, target, force=force, rehearsed=True) as (plan, _):
        return plan


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
            _open(current)
            _stop(current)
            if source.name == CONTAINER:
                stack.enter_context(_keep_others_out(current))
            _refuse_changed(current)
            source.lock(current.target.name)
            tree = _copy(current)
            _commit(current, tree)
    except BaseException as error:
        if current.stopped and (current.record.phase in (STOPPING, COPYING) or not _is_committed(current)):
            _undo(current, error)
        raise


def _open(current: Move) -> None:
    """Do the checks of the target's image that create something, such as a namespace of Kubernetes.

    Raises:
        Refused: one failed.
    """
    if current.unread is not None:
        with current.cluster.env.progress.step(f"check the image of {current.target.where}"):
            current.target.open()
            check_image(current)


def _keep_others_out(current: Move) -> AbstractContextManager[object]:
    """Keep others from starting the services container, and from its overlay if that is one end of the move."""
    if CONTAINER in (current.source.name, current.target.name):
        return keep_stopped(current.cluster, current.host)
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
        writer = target.inside(target.tree_argv("write", copy=True), copy=True, input=True)
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
        current.cluster.env.progress.report(
            f"note: {target.where} keeps an incomplete copy until the next move: {left.message}"
        )
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
    try:
        if not result.same:
            current.enter(STARTING)
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
