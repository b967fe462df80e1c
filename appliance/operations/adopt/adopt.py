"""``sms adopt``: takes a live management node over into the services container of an admin host, while jobs run.

Each agent decides alone when the connection is lost: the one on the old node takes the addresses back unless the target
answers for them, the one on the target goes on only once it has them. So the next run finds one of both serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from appliance.errors import Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host
from appliance.operations import history
from appliance.operations.adopt.capture import Captures, Traffic
from appliance.operations.adopt.carry import apply_changes, copy_changes, copy_database, copy_state, neighbours_of
from appliance.operations.adopt.inspection import (
    VERB,
    Inspected,
    inspect,
    lock_on_old,
    mark_on_old,
    query_mark,
    query_nodes,
    resume_old,
)
from appliance.operations.adopt.isolated import find_controller, start_held, wait_for_held
from appliance.operations.adopt.record import find_record, save_record
from appliance.operations.adopt.rehearse import migration_facts, rehearse
from appliance.operations.adopt.undo import give_back, release_unserved
from appliance.operations.context import Cluster
from appliance.operations.identity import ensure_identity
from appliance.operations.image.deliver import Image
from appliance.operations.lease import query_all_leases, query_lease
from appliance.operations.migration.agents import QUICK_S, target_request
from appliance.operations.migration.inspection import record_if_missing, record_serving
from appliance.operations.migration.rollback import end_agents
from appliance.operations.migration.start import check_services, compare_jobs
from appliance.operations.migration.state import Migration, MigrationResult
from appliance.operations.migration.switch import commit, flush, switch_addresses
from appliance.operations.networks import remove_isolated, write_networks
from appliance.operations.preflight import check_confinement, find_instance
from appliance.operations.services.effect import compare_stopped, query_old_jobs
from appliance.operations.services.start import StartOptions, start
from appliance.operations.services.unfinished import recover_migration
from appliance.plan.adopt.adoption import (
    ADOPTED,
    BEGUN,
    FOLDER,
    UNDONE,
    Adoption,
    AdoptPlan,
    find_database,
    free_argv,
    refuse_doubtful,
)
from appliance.plan.machine import inside_argv
from appliance.plan.migration.move import reset_ports, stream_ports
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, read_jobs
from appliance.shared.adopt import AdoptRequest

__all__ = ["AdoptResult", "adopt", "adopt_request", "refuse_doubtful", "rehearse_adopt"]

GONE_S = 10.0
"""Seconds until a silent host counts as gone, as in a migration."""
NODES_S = 60.0
"""Seconds that nodes have to register with the new controller, which asks them when it starts."""
STOP_WAIT_S = 60.0
"""Seconds that a unit of the old node may take to stop."""
GIVEN_S = 5.0
"""Seconds that the old node may take to confirm that it has given all away: its log server reads what it has. Longer
than that both might serve, if it was the network of the target that failed and works again."""


@dataclass
class AdoptResult:
    """What an adoption did. Times in seconds, sizes in bytes.

    ``outage`` by service, measured by this process. ``traffic``: what nodes used before and after; None without a
    capture. ``silent``: nodes that responded before, and do not now. ``unusable``: lines for nodes that took jobs
    before, and do not now. ``failed``: lines for jobs that failed with it. ``resumed``: an earlier run had done all but
    record it.
    """

    old: str
    target: str
    generation: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    outage: dict[str, float] = field(default_factory=dict)
    state_bytes: int = 0
    last_bytes: int = 0
    connections: int = 0
    jobs: int = 0
    stays: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    traffic: Traffic | None = None
    silent: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    resumed: bool = False


def rehearse_adopt(cluster: Cluster, old: Host, named: str, name: str) -> AdoptPlan:
    """Run all checks, rehearse, and return the plan with its doubts. Nothing of it is left but the image on the target.

    Raises:
        Refused: as ``inspect`` and ``rehearse``.
    """
    inspected = inspect(cluster, old, named, name)
    if inspected.plan.refused:
        return inspected.plan
    image = _prepare(cluster, inspected)
    return rehearse(cluster, inspected, image, adopt_request(cluster, inspected.plan).state_inside)


def adopt(cluster: Cluster, old: Host, named: str, name: str, *, capture_s: float = 0) -> AdoptResult:
    """Take the old node's services over into the services container on the admin host ``name``.

    Args:
        named: the old node as [USER@]HOST[:PORT].
        capture_s: capture for this long before it and after it what nodes use; 0: do not.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed; the old node serves as before.
        Unverified: the target serves, and the end was not confirmed.
        SmsError: a step failed; the message says what is known.
    """
    began = cluster.env.clock.monotonic()
    target = cluster.host(name)
    with ExitStack() as stack:
        for host in (old, target):
            stack.enter_context(host.limit_silence(GONE_S))
        if done := _resume(cluster, old, target):
            return done
        inspected = inspect(cluster, old, named, name)
        refuse_doubtful(inspected.plan)
        for doubt in inspected.plan.doubts:
            cluster.env.progress.warn(f"{doubt.what}; {doubt.todo}")
        record = _record(cluster, inspected, named)
        captures = Captures(cluster, old, inspected.plan, inspected.survey, capture_s)
        captures.begin()
        image = _prepare(cluster, inspected)
        plan = rehearse(cluster, inspected, image, record.request.state_inside)
        inspected = replace(inspected, plan=plan)
        _name_cluster(cluster, inspected)
        captures.wait(cluster.env.progress)
        present = query_old_jobs(old, find_controller(cluster).user)
        save_record(cluster, target, record)
        history.note(cluster, target, VERB, "begun", old=old.name, image=image.key)
        try:
            result, failures = _run_steps(cluster, inspected, image, record.request)
        except BaseException as error:
            with suppress(SmsError):
                history.note(cluster, target, VERB, "failed", why=str(error) or type(error).__name__)
                if isinstance(error, Refused | RolledBack):  # else it is not known who serves: undo needs the record
                    save_record(cluster, target, replace(record, phase=UNDONE))
            raise
        unrecorded = _finish(cluster, inspected, image, record, result.parts)
        result.seconds = round(cluster.env.clock.monotonic() - began, 3)
        if failures:
            cluster.env.progress.report(f"note: {failures}")
            give_back(cluster, replace(record, phase=ADOPTED), old, target)
            raise RolledBack(f"{failures}\n  {old.name} serves as before, with all jobs accepted since")
        if unrecorded:
            raise Unverified(
                f"{target.name} has the services since the switch, and that could not be recorded: {unrecorded}",
                hint=f"`sms adopt {named} --to {name}` again records it; if {target.name} has lost its power since, "
                "it starts the services there first",
            )
        result.silent = _wait_for_nodes(cluster, target, plan)
        if present:
            try:
                cost = compare_stopped(cluster, target, present)
                result.unusable, result.failed = cost.nodes, cost.jobs
            except SmsError as error:
                result.notes.append(f"what it has cost is not known: {error.message}")
        result.traffic = captures.finish(target, cluster.env.progress)
    return result


def _wait_for_nodes(cluster: Cluster, target: Host, plan: AdoptPlan) -> tuple[str, ...]:
    """Wait until the nodes that responded to the old node's controller respond to that of the target.

    Returns:
        Those that do not within ``NODES_S``.
    """
    inside, user = inside_argv(cluster.site, cluster.services), find_controller(cluster).user
    with cluster.env.progress.step("wait until nodes respond") as step:
        end = cluster.env.clock.monotonic() + NODES_S
        while True:
            view = query_nodes(target, inside, user)
            silent = [one.name for one in view.silent if not one.acknowledged and one.name not in plan.silent]
            if (view.count and not silent) or cluster.env.clock.monotonic() > end:
                break
            cluster.env.clock.sleep(1)
        step.detail(f"{view.count - len(view.silent)} of {view.count}")
    return tuple(silent)


def adopt_request(cluster: Cluster, plan: AdoptPlan) -> AdoptRequest:
    """Return the request to the agent on the old node."""
    site, loggers = cluster.site, [service for service in cluster.services if service.live and service.tails]
    return AdoptRequest(
        cluster=site.cluster,
        host=plan.old,
        peer=plan.target,
        mark=mark_on_old(cluster),
        away=f"{FOLDER}/{site.cluster}.away",
        lock=lock_on_old(cluster),
        interfaces=plan.interfaces,
        controller=plan.stops[:1],
        accounting=plan.stops[1:],
        stop_wait_s=STOP_WAIT_S,
        state=plan.state,
        state_inside=find_controller(cluster).state[0],
        stream_ports=stream_ports(loggers),
        reset_ports=reset_ports(loggers),
    )


def _record(cluster: Cluster, inspected: Inspected, named: str) -> Adoption:
    plan, slurm = inspected.plan, inspected.survey.slurm
    assert slurm
    return Adoption(
        cluster.site.cluster, plan.old, named, plan.target, BEGUN, cluster.env.clock.time(), plan.stays, slurm.file,
        adopt_request(cluster, plan),
    )  # fmt: skip


def _resume(cluster: Cluster, old: Host, target: Host) -> AdoptResult | None:
    """Let the agents complete or undo what a killed run has left; return the result if the target serves since."""
    recover_migration(cluster, target)
    record, state = find_record(cluster), resume_old(cluster, old)
    if not (record and record.phase == BEGUN and record.host == target.name):
        return None
    if not state and record.old == old.name:
        release_unserved(cluster, record, old)
    if query_lease(target, cluster).holder != target.name:
        return None
    if state == "given" and not find_instance(cluster, target):  # its power has failed since, before it had a unit
        start(cluster, target, StartOptions(judged=True))
    lease, running = query_lease(target, cluster), find_instance(cluster, target)
    if not running:
        return None
    if not state:
        raise Refused(
            f"the services container runs on {target.name}, and {old.name} is not as the adoption left it",
            hint=f"`sms stop --host {target.name}` keeps its overlay; start the units of {old.name}, adopt again",
        )
    record_if_missing(cluster, target, running, lease)
    save_record(cluster, target, replace(record, phase=ADOPTED))
    note = f"an earlier run completed the adoption of {old.name}; it has now been recorded"
    return AdoptResult(old.name, target.name, lease.generation, stays=record.stays, notes=[note], resumed=True)


def _prepare(cluster: Cluster, inspected: Inspected) -> Image:
    """Write what a start needs on the target: confinement and networks. Return the image.

    Raises:
        Refused: the image cannot be trusted there.
    """
    target, image = inspected.target, inspected.owner.image
    check_confinement(cluster, target, image.path)
    for isolated in (True, False):
        write_networks(cluster, target, isolated=isolated)
    return image


def _name_cluster(cluster: Cluster, inspected: Inspected) -> None:
    """Give the cluster its UUID, and prepare an overlay to which state is copied.

    Raises:
        Refused: hosts know another one.
    """
    ensure_identity(query_all_leases(inspected.target, cluster), cluster.env.progress)
    with cluster.env.progress.step(f"prepare the overlay on {inspected.target.name}"):
        inspected.owner.prepare()


def _run_steps(cluster: Cluster, inspected: Inspected, image: Image, request: AdoptRequest) -> tuple[AdoptResult, str]:
    """Run the steps; return the result, and the messages about services that do not answer on the target."""
    with ExitStack() as agents:
        migration = _open_agents(cluster, inspected, image, request, agents)
        result = AdoptResult(inspected.old.name, inspected.target.name, migration.result.generation)
        try:
            failures = _steps(cluster, inspected, migration, request, result)
            _clean_up(migration, result)
        except BaseException as error:
            end_agents(migration, error)
            with suppress(SmsError):
                inspected.owner.discard()
            _raise_outcome(cluster, inspected, migration, error)
    done = migration.result
    result.parts |= done.parts
    result.outage |= {name: took for name, took in done.outage.items() if name not in result.outage}
    result.connections, result.jobs, result.stays = done.connections, done.jobs, inspected.plan.stays
    result.notes += done.notes
    return result, failures


def _open_agents(
    cluster: Cluster, inspected: Inspected, image: Image, request: AdoptRequest, stack: ExitStack
) -> Migration:
    """Start both agents; nothing has begun yet.

    Raises:
        Busy: another run is at work on a host.
        Refused: something has changed since it was planned.
    """
    old, target = inspected.old, inspected.target
    facts = migration_facts(cluster, inspected, image)
    source = stack.enter_context(cluster.env.agents.open_endpoint(old, "adopt_leave", request, cluster.env.progress))
    source.receive("ready", patience_s=QUICK_S)
    wanted = replace(
        target_request(cluster, facts), verb=VERB, prepared=inspected.owner.moving, gives=inspected.plan.interfaces
    )
    arrive = stack.enter_context(cluster.env.agents.open_endpoint(target, "adopt_arrive", wanted, cluster.env.progress))
    arrive.receive("ready", patience_s=QUICK_S)
    result = MigrationResult(old.name, target.name, image.path, inspected.lease.generation + 1)
    return Migration(cluster, facts, image, source, arrive, result)


def _steps(
    cluster: Cluster, inspected: Inspected, migration: Migration, request: AdoptRequest, result: AdoptResult
) -> str:
    """Copy, stop there, start here isolated, switch; return the messages about services that do not answer then.

    Raises:
        SmsError: a step failed. In the last one, the old node may serve again: the target asks before it goes on.
    """
    progress, source, place = migration.cluster.env.progress, migration.source, request.state_inside
    write = partial(apply_changes, inspected, place)
    with progress.step(f"copy the state of {inspected.old.name} while it serves") as step:
        result.state_bytes = copy_state(inspected, source, place, step)
        copy_changes(source, write)
        source.send("prepare_stop")
        source.receive("prepared", patience_s=QUICK_S)
    database, since = find_database(cluster.services) if request.accounting else None, cluster.env.clock.monotonic()
    with progress.step(
        "stop the accounting there; copy its database" if database else "keep units there from starting again"
    ) as step:
        source.send("stop_accounting")
        source.receive("stopped", patience_s=request.stop_wait_s + QUICK_S)
        if database:
            copy_database(inspected, database.setup or "", step)
            result.parts["database"] = round(cluster.env.clock.monotonic() - since, 3)
    with progress.step("send the changes since then"):
        copy_changes(source, write)
    migration.neighbours = neighbours_of(inspected)
    result.parts["isolated"] = round(start_held(cluster, inspected.owner, migration), 3)
    copy_changes(source, partial(write, inside=inside_argv(cluster.site, cluster.services)))
    jobs = read_jobs(inspected.old.run(*JOBS, ok=None, timeout=60, limit=JOBS_BYTES).text)
    _hand_over_controller(cluster, inspected, migration, place, result)
    compare_jobs(migration, jobs)
    switch_addresses(migration)
    with progress.step(f"confirm on {inspected.old.name}"):
        # At once: it takes its addresses back when it hears nothing, and until then the target must not stay alone.
        flush(migration, QUICK_S)  # its disk is done: the answer shows that it has not lost its power since
        source.send("given")
        source.receive("given", patience_s=GIVEN_S)
    if database:
        for service in (cluster.find_role("accounting"), database):
            if service:
                result.outage[service.name] = round(cluster.env.clock.monotonic() - since, 3)
    return check_services(migration)


def _hand_over_controller(
    cluster: Cluster, inspected: Inspected, migration: Migration, place: str, result: AdoptResult
) -> None:
    """Stop the controller on the old node, copy the last changes, start it on the target."""
    source, controller = migration.source, find_controller(cluster)
    inside = inside_argv(cluster.site, cluster.services)
    with migration.cluster.env.progress.step(f"stop {controller.name} there; copy the last changes") as step:
        began = migration.stopped_at = cluster.env.clock.monotonic()
        source.send("stop")
        final, data = source.receive("final", patience_s=STOP_WAIT_S + QUICK_S)
        apply_changes(inspected, place, data, inside=inside, then=free_argv(controller))
        migration.complete = True
        result.last_bytes = len(data)
        migration.result.measured("stop", float(final["stop_s"]))
        migration.result.measured("last changes", cluster.env.clock.monotonic() - began - float(final["stop_s"]))
        step.detail(f"{len(data) >> 10} KiB")
    wait_for_held(cluster, migration)


def _clean_up(migration: Migration, result: AdoptResult) -> None:
    """Complete the switch on both hosts. Errors on the old node are only noted: it stays away."""
    with migration.cluster.env.progress.step(f"clean up on {migration.source.name}"):
        commit(migration)
        try:
            migration.source.send("finish")
            migration.source.receive("finished", patience_s=QUICK_S)
        except SmsError as error:
            result.notes.append(f"{migration.source.name} has not confirmed the end: {error.message}")


def _raise_outcome(cluster: Cluster, inspected: Inspected, migration: Migration, cause: BaseException) -> NoReturn:
    """Raise the outcome of a failed adoption.

    Raises:
        RolledBack: the old node serves as before.
        Unverified: the target serves.
        SmsError: that is not known.
    """
    old, target = inspected.old, inspected.target
    message = cause.message if isinstance(cause, SmsError) else "the adoption was interrupted"
    hint = cause.hint if isinstance(cause, SmsError) else ""
    again = f"`sms adopt {old.name} --to {target.name}` again completes it or undoes it"
    holder = None
    with suppress(SmsError):  # its power may have failed: then the old node has decided what that means
        holder = query_lease(target, cluster).holder
    if holder == target.name and not migration.target.ended:
        raise SmsError(
            f"{message}\n  {target.name} serves nobody until it sees whether {old.name} does: is its network down?",
            hint=again,
        ) from cause
    if holder == target.name:
        raise Unverified(f"{message}\n  {target.name} serves since the switch", hint=again) from cause
    try:
        mark = query_mark(cluster, old)
        active = old.works("systemctl", "is-active", "--quiet", *inspected.plan.stops)
    except SmsError as error:
        raise SmsError(
            f"{message}\n  {old.name} cannot be queried; it takes its addresses back alone once its network works, "
            f"unless {target.name} answers for them: {error.message}",
            hint=again,
        ) from cause
    if mark == "given":
        raise Unverified(
            f"{message}\n  {target.name} has the services since the switch, and cannot be queried", hint=again
        ) from cause
    if mark or not active:
        raise SmsError(f"{message}\n  {old.name} does not serve yet: its agent is at work", hint=again) from cause
    if isinstance(cause, SmsError) or not migration.stopped_at:
        raise RolledBack(f"{message}\n  {old.name} serves as before", hint=hint) from cause
    raise cause


def _finish(
    cluster: Cluster,
    inspected: Inspected,
    image: Image,
    record: Adoption,
    parts: Mapping[str, float],
) -> str:
    """Record which host has the services; return why that failed, or nothing."""
    old, target = inspected.old, inspected.target
    try:
        remove_isolated(cluster, target)
        lease = query_lease(target, cluster)
        record_serving(cluster, target, image, lease)
        save_record(cluster, target, replace(record, phase=ADOPTED))
        history.note(cluster, target, VERB, "adopted", old=old.name, generation=lease.generation, parts=dict(parts))
    except SmsError as error:
        return error.message
    return ""
