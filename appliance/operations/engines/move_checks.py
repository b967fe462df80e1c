"""What is checked before a move of the services changes anything, and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.engines.bundles import render_bundle
from appliance.operations.engines.container_owner import ContainerOwner
from appliance.operations.engines.kubernetes_owner import KubernetesOwner
from appliance.operations.engines.move_lock import lock_moves, unreachable
from appliance.operations.engines.move_run import VERB, Move, record_path
from appliance.operations.engines.nomad_owner import NomadOwner
from appliance.operations.engines.owners import Owner
from appliance.operations.history import read_history
from appliance.operations.lease import Leases
from appliance.operations.overlay.generation import refuse_older
from appliance.operations.services.effect import find_answer, judge_running, judge_start, may_fail, settle
from appliance.plan.migration.state import (
    COMMITTING,
    DONE,
    STARTING,
    STOPPING,
    MovePlan,
    StateMove,
    Tree,
    Versions,
    check_identity,
    moved_paths,
    read_state_move,
    refuse_newer,
)
from appliance.plan.services.controllers import CONTAINER, KUBERNETES, find_controllers
from appliance.plan.services.gateway import find_staying, find_stopping
from appliance.shared.lease import Lease

OUTAGE_S = 90.0
"""Predicted outage while no move was measured."""
DATABASES = (
    ("sacctmgr", "-nP", "list", "cluster", "format=cluster,id"),
    ("sacctmgr", "-nP", "list", "cluster", "format=cluster"),
)
"""List the clusters in the database; from Slurm 23.11 on with their ids."""


@contextmanager
def inspected(
    cluster: Cluster, host: Host, target: str, *, force: bool, rehearsed: bool = False
) -> Iterator[tuple[MovePlan, Move]]:
    """Check source and target; yield the plan, and the move that may begin. No other one may within the context.

    Args:
        force: from an engine that does not answer, too.
        rehearsed: nothing of it is recorded.

    Raises:
        Refused: a check failed.
    """
    check_reports(cluster, target)
    with lock_moves(cluster, host):
        current = _begin(cluster, host, target)
        try:
            yield _inspect(current, force=force, rehearsed=rehearsed), current
        finally:
            for one in (current.source, current.target):
                with suppress(SmsError):
                    one.close()


def _begin(cluster: Cluster, host: Host, target: str) -> Move:
    """Find out who has the services."""
    with cluster.env.progress.step("query all admin hosts") as step:
        leases = Leases(host, cluster)
        lease = _query(leases)
        step.detail(f"{lease.engine or lease.holder or 'no host'} holds the lease")
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
    source, to = (find_owner(cluster, host, name, paths) for name in (came_from, target))
    phase, now = STARTING if resumes else STOPPING, cluster.env.clock.time()
    record = StateMove(cluster.site.cluster, phase, came_from, target, now)
    if resumes and before and before.target == target:
        record = before
    interrupted = before is not None and not before.ended and before.source == came_from
    return Move(cluster, host, source, to, leases, record, resumes, interrupted)


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


def _inspect(current: Move, *, force: bool, rehearsed: bool) -> MovePlan:
    """Run the checks; of a move that is resumed, the start runs them."""
    cluster, source, to = current.cluster, current.source, current.target
    if current.resumes:
        return _plan(current, Tree())
    with cluster.env.progress.step(f"check {source.where}") as step:
        if not _answers(source, force=force):
            source.check_lost()
            step.detail("it does not answer; the state is there, and no service runs with it")
    with cluster.env.progress.step(f"check {to.where}"):
        to.check()
    if source.name == CONTAINER:
        _check_container(current, force=force, rehearsed=rehearsed)
    current.ran = source.runs()
    if to.runs():
        raise Refused(f"{to.where} runs services already", hint=_stop_hint(to.name))
    with cluster.env.progress.step("check the state") as step:
        tree = source.survey()
        step.detail(f"{tree.files} files, {tree.bytes >> 20} MiB")
    current.unread = tree
    image = Versions()
    if lacking := to.lacks():
        cluster.env.progress.report(f"note: the image of {to.where} is not checked before a move has created {lacking}")
    else:
        image = check_image(current)
    check_identity(tree, cluster.site.cluster, _databases(current))
    free = to.free_bytes()
    if 0 <= free < tree.bytes:
        raise Refused(
            f"{to.where} has {free >> 20} MiB free; the state has {tree.bytes >> 20} MiB", hint="free space there"
        )
    return replace(_plan(current, tree), free_bytes=free, slurm=image.slurm, mariadb=image.mariadb)


def _answers(source: Owner, *, force: bool) -> bool:
    """Check the source; return whether it answers.

    Raises:
        Refused: a check failed, or it does not answer, without ``force``.
    """
    try:
        source.check()
    except Unreachable as error:
        if source.name == CONTAINER:
            raise
        if force:
            return False
        raise Refused(
            f"{source.where} cannot be queried: {error.message}",
            hint="make it answer; if that is not possible: `--force` moves the state without it, if an admin host has "
            "that, as Nomad's client",
        ) from error
    return True


def check_image(current: Move) -> Versions:
    """Check that the image of the target can read the state; return its versions.

    Raises:
        Refused: it cannot.
    """
    image = current.target.versions()
    if current.unread is not None:
        refuse_newer(current.unread, image, current.target.where)
        current.unread = None
    return image


def _query(leases: Leases) -> Lease:
    """Query all hosts, which all have to answer: one that does not would not know who has the state."""
    leases.query()
    if leases.unreachable:
        raise unreachable(leases.unreachable)
    lease = leases.views[leases.me].lease
    assert lease
    top = max((view.lease for view in leases.views.values() if view.lease), key=lambda one: one.generation)
    if top.generation <= lease.generation:
        return lease
    if top.engine:
        leases.adopt(top)
    return top


def _check_container(current: Move, *, force: bool, rehearsed: bool) -> None:
    """Check that the state of the services container is that of ``host``, and what the site file costs that goes along.

    Raises:
        Refused: another host has it, or jobs or reservations would be lost.
    """
    leases, host, runs = current.leases, current.host, current.source.runs()
    leases.check()
    if not runs:
        refuse_older(current.cluster, host, leases, set_aside=False)
    answer = find_answer(force=force, rehearsed=rehearsed)
    with may_fail(current.cluster, "migrate", answer):
        if runs:
            settle(current.cluster, host, judge_running(current.cluster, host), "migrate", answer)
        else:
            judge_start(current.cluster, host, answer)


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
    current.cluster.env.progress.report(f"note: not checked: whether the database of {where} is this cluster's: {why}")
    return None


def _plan(current: Move, tree: Tree) -> MovePlan:
    services, back = current.cluster.services, current.target.name == CONTAINER
    moved = _moving(current.cluster, (current.target.name,))
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
        {} if back else dict(find_stopping(services, moved)),
        round(median(seconds), 1) if seconds else OUTAGE_S,
        len(seconds),
        current.resumes,
        () if back else tuple(one.name for one in find_staying(services, moved)),
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
        port = name == KUBERNETES and cluster.site.engines.kubernetes.used
        if not port:
            raise ConfigError(
                f"`engines.{name}.address` is missing: the address at which nodes and running jobs reach the services",
                hint="add the section to the site file, and `sms apply`: docs/engines.md",
            )
        raise ConfigError(
            f"running jobs could not report to {name}: a NodePort is another port than the services container's",
            hint="set `service: ExternalIPs` or `LoadBalancer`, or another `network` than `service`",
        )


def find_owner(cluster: Cluster, host: Host, name: str, paths: Sequence[str]) -> Owner:
    """Return who has the services under this name.

    Args:
        paths: of the state that moves.
    """
    if name == CONTAINER:
        return ContainerOwner(cluster, host, paths)
    kind = KubernetesOwner if name == KUBERNETES else NomadOwner
    return kind(cluster, host, paths)


def _stop_hint(target: str) -> str:
    return "`sms stop` stops them" if target == CONTAINER else "`sms deploy stop` stops them"
