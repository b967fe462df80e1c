"""``sms status``: probes every service in its own protocol, and whether nodes reach them; collects all else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.hosts.guarded import is_guarded, is_outdated
from appliance.operations.hosts.installed import SITE_FILE
from appliance.operations.image.deliver import find_refusal
from appliance.operations.lease import query_lease
from appliance.operations.overlay.frozen import end_lost_freeze
from appliance.operations.overlay.mirrored import MirrorState, query_mirror
from appliance.operations.preflight import UNCONFINED, find_instance, is_confined, query_age, running_gateway
from appliance.operations.services.holding import describe_lost
from appliance.operations.services.reach import inspect_inside, inspect_links, inspect_reach
from appliance.operations.services.unfinished import moved_path, read_last_upgrade
from appliance.operations.snapshots.status import SnapshotStatus, snapshot_status, vm_snapshot_status
from appliance.operations.start_note import read_note
from appliance.operations.under_way import query_move
from appliance.operations.vm.certificates import container_problems
from appliance.operations.vm.deferred import Deferred, probe_vm
from appliance.plan.migration.state import describe_interrupted, read_state_move
from appliance.plan.migration.under_way import Move
from appliance.plan.services.discarded import Discarded
from appliance.plan.services.inside import Inside, Process
from appliance.plan.services.links import NetworkState
from appliance.plan.services.network import container_addresses
from appliance.plan.services.nodes import NetworkProbe, NodesView
from appliance.shared.lease import Lease

UNSYNCHRONISED = "stratum 10,"
"""Start of chrony's answer while it reaches no time server (`local stratum` of its configuration)."""
SETTLE_S = 60
"""Seconds that chrony may take to choose a server."""
FULL_PERCENT = 70
"""Use of the overlay from which status warns."""


@dataclass(frozen=True)
class Answer:
    """The result of probing one service; ``ms``: milliseconds."""

    name: str
    ok: bool
    detail: str
    ms: float


@dataclass(frozen=True)
class Status:
    """The services container on one host. Sizes in bytes, times in seconds. ``provisioning``: the VM, or None.

    ``lease_problem``: why the lease could not be read. ``networks``, ``nodes``, ``probes``, ``stopped``, ``held``,
    ``strangers``, ``discarded``: those of ``Reach``. ``guarded``: whether a guard runs, None on the only admin host.
    ``move``: what is under way on the host, or was killed there.
    """

    cluster: str
    host: str
    running: bool
    healthy: bool
    lease: Lease
    services: list[Answer] = field(default_factory=list)
    image: dict[str, str] = field(default_factory=dict)
    overlay: dict[str, int] = field(default_factory=dict)
    mirror: MirrorState | None = None
    uptime_s: int = 0
    warnings: list[str] = field(default_factory=list)
    snapshots: SnapshotStatus = field(default_factory=SnapshotStatus)
    vm_snapshots: SnapshotStatus | None = None
    provisioning: Deferred | None = None
    networks: Sequence[NetworkState] = ()
    nodes: NodesView | None = None
    probes: Sequence[NetworkProbe] = ()
    stopped: Sequence[Process] = ()
    held: Sequence[str] = ()
    strangers: Sequence[int] = ()
    discarded: Sequence[Discarded] = ()
    guarded: bool | None = None
    lease_problem: str = ""
    move: Move | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the value printed by --json."""
        shown = {**asdict(self), "snapshots": self.snapshots.as_dict()}
        shown["vm_snapshots"] = self.vm_snapshots and self.vm_snapshots.as_dict()
        if problem := shown.pop("lease_problem"):
            shown["lease"]["problem"] = problem
        return shown


def status(cluster: Cluster, host: Host) -> Status:
    """Collect the status; changes nothing but the log line that the syslog probe sends, and a freeze left over."""
    lease, problem = _lease(cluster, host)
    end_lost_freeze(cluster, host)
    with cluster.env.pool(3) as pool:  # while services are probed
        snapshots = pool.submit(snapshot_status, cluster, host, lease)
        of_vm = pool.submit(vm_snapshot_status, cluster.of_vm(), host) if cluster.site.provisioning else None
        upgrade = pool.submit(_interrupted_upgrade, cluster, host)
        found = _container_status(cluster, host, lease, problem, move=query_move(cluster, host))
        trouble = [*filter(None, [problem]), *upgrade.result()]
        return _with_snapshots(replace(found, warnings=[*trouble, *found.warnings]), snapshots, of_vm)


def gateway_status(cluster: Cluster, host: Host) -> Status | None:
    """Return the status of what stays on a host while an engine has the other services.

    None if it neither runs there nor should: the host does not have its lease, or no engine has that of the others.
    """
    running, part = running_gateway(cluster, host), cluster.of_gateway()
    lease, problem = _lease(part, host)
    wanted = (problem or lease.holder == host.name) and _lease(cluster, host)[0].engine
    if not running and not wanted:
        return None
    found = _container_status(running or part, host, lease, problem)
    return replace(found, warnings=[*filter(None, [problem]), *found.warnings])


def _lease(cluster: Cluster, host: Host) -> tuple[Lease, str]:
    """Return the lease, and why it could not be read: the services must be shown nevertheless."""
    try:
        return query_lease(host, cluster), ""
    except Unreachable:
        raise
    except SmsError as error:
        return Lease(cluster.site.cluster), error.message


def _with_snapshots(status: Status, query: Future[SnapshotStatus], vm_query: Future[SnapshotStatus] | None) -> Status:
    found, of_vm = query.result(), vm_query.result() if vm_query else None
    judgements = [one.judgement for one in (found, of_vm) if one]
    return replace(
        status,
        healthy=status.healthy and all(one.healthy for one in judgements),
        warnings=[*status.warnings, *(warning for one in judgements for warning in one.warnings)],
        snapshots=found,
        vm_snapshots=of_vm,
    )


def _container_status(cluster: Cluster, host: Host, lease: Lease, problem: str, *, move: Move | None = None) -> Status:
    """Return the status without snapshots, and without the warning about the lease's ``problem``."""
    with cluster.env.pool(1) as pool:
        mirror_query = pool.submit(_mirror, cluster, host)
        running = find_instance(cluster, host)
        confined = running is not None and is_confined(host, running)
        mirror, problems = mirror_query.result()
    warnings = [*([f"{move.text}; {move.hint}"] if move else []), *problems]
    found = Status(cluster.site.cluster, host.name, False, False, lease, mirror=mirror, warnings=warnings)
    found = replace(found, lease_problem=problem, move=move)
    current = str(cluster.places.current)
    if not running:
        warnings += filter(None, [find_refusal(host, current), _interrupted_move(cluster, host, lease)])
        if lease.holder == host.name:
            warnings.append(f"{host.name} holds the lease, but runs nothing")
        elif lease.engine:
            warnings.append(f"{lease.engine} has the services: `sms migrate --to container` moves them back")
        elif lease.holder:
            warnings.append(f"{lease.holder} holds the lease: `sms status --host {lease.holder}`")
        return found
    # A VM that is off is detected only by a timeout. With what else is queried meanwhile: at most 10 sessions of SSH.
    with cluster.env.pool(6) as pool:
        inside = pool.submit(inspect_inside, cluster, host, confined=confined)
        links = pool.submit(inspect_links, host, running.pid, container_addresses(cluster.site))
        certificate = pool.submit(container_problems, cluster, host)
        vm = pool.submit(probe_vm, cluster, host)
        refusal = pool.submit(find_refusal, host, current)
        older = pool.submit(query_age, cluster, host, running)
        note_query = pool.submit(read_note, cluster, host)
        guard = pool.submit(is_guarded, cluster, host) if len(cluster.site.admin_hosts) > 1 else None
        reach = inspect_reach(cluster, host, running.pid, links.result(), inside.result())
        note, guarded = note_query.result(), guard.result() if guard else None
    answers = list_answers(cluster, inside.result())
    space, uptime = inside.result().space, inside.result().uptime_s()
    faults = _faults(cluster, host, lease, space, guarded, move=move) + reach.problems + certificate.result()
    faults += filter(None, [describe_lost(cluster, host, inside.result().nodes)])
    # The refusal says all that is to be done about an instance that is not confined, too.
    faults += filter(None, [refusal.result() or (older.result() if confined else UNCONFINED)])
    image = {"path": running.image}
    if note and note.image == running.image:
        image |= {"key": note.key, "sha256": note.sha256, "signer": note.signer}
    else:
        warnings.append("the running image is not the one that was recorded at its start")
    warnings += [*faults, *reach.notices, *_unsynchronised(cluster, answers, uptime)]
    found = replace(found, networks=reach.networks, nodes=reach.nodes, probes=reach.probes, stopped=reach.stopped)
    found = replace(found, held=reach.held, strangers=reach.strangers, discarded=reach.discarded)
    return replace(
        found,
        running=True,
        healthy=all(answer.ok for answer in answers) and not faults and not problems,
        services=answers,
        image=image,
        overlay=space,
        uptime_s=uptime,
        provisioning=vm.result(),
        guarded=guarded,
    )


def _faults(
    cluster: Cluster, host: Host, lease: Lease, space: dict[str, int], guarded: bool | None, *, move: Move | None
) -> list[str]:
    """Return what makes a running container unhealthy although its services answer."""
    faults, moves = [], move is not None and move.under_way
    if lease.holder != host.name:
        holder = lease.holder or "no host"
        isolated = ", as the target of a move that is under way: it is not on the network until its addresses switch"
        faults.append(f"it runs on {host.name}, but {holder} holds the lease{isolated * moves}")
    if space and space["used"] * 100 >= FULL_PERCENT * space["size"]:
        percent = space["used"] * 100 // space["size"]
        faults.append(f"the overlay is {percent}% full; `sms overlay grow +1G` makes it larger")
    if guarded is False and not moves:  # its end starts one
        why = "nothing stops it here if another host takes over"
        faults.append(f"no guard runs on {host.name}: {why}; `sms start --host {host.name}` starts one")
    elif guarded and is_outdated(cluster, host):  # it may not be able to read the leases that this version writes
        faults.append(
            f"the guard on {host.name}"
            " is of another version of sms, or does not know the admin hosts of the site file; "
            f"`sms start` replaces it, where {SITE_FILE} lists the same"
        )
    return faults


def _unsynchronised(cluster: Cluster, answers: Sequence[Answer], uptime_s: int) -> list[str]:
    """Return the warning about a clock that has not chosen a time server in time."""
    clock = cluster.find_role("clock")
    if not clock or not cluster.site.ntp or uptime_s <= SETTLE_S:
        return []
    if not any(answer.name == clock.name and answer.detail.startswith(UNSYNCHRONISED) for answer in answers):
        return []
    return [f"{clock.name} is not synchronised to any time server of the site"]


def _interrupted_upgrade(cluster: Cluster, host: Host) -> list[str]:
    """Return the warning about an unfinished upgrade, if there is one."""
    try:
        last = read_last_upgrade(cluster, host)
    except Unreachable:
        raise
    except SmsError as error:
        return [error.message]
    if last is None or last.ended:
        return []
    return [
        f"an upgrade to {last.after.key[:12]} is under way or was interrupted ({last.phase}); `sms upgrade` resumes it"
    ]


def _interrupted_move(cluster: Cluster, host: Host, lease: Lease) -> str:
    """Return the warning about an unfinished move to or from an engine; empty if there is none."""
    try:
        return describe_interrupted(
            read_state_move(host.read(moved_path(cluster)), cluster.site.cluster), lease, host.name
        )
    except Unreachable:
        raise
    except SmsError as error:
        return error.message


def _mirror(cluster: Cluster, host: Host) -> tuple[MirrorState | None, list[str]]:
    """Return the state of the overlay's mirror, None without one, and its problems."""
    try:
        state = query_mirror(cluster, host)
    except Unreachable:
        raise
    except SmsError as error:
        return None, [error.message]
    return state, list(state.problems) if state else []


def list_answers(cluster: Cluster, inside: Inside) -> list[Answer]:
    """Return one answer per service, in starting order.

    Raises:
        SmsError: none has answered.
    """
    if not inside.answers:
        raise SmsError(f"the services container does not answer: {inside.silence}")
    found = {one.name: Answer(one.name, one.ok, one.detail, one.ms) for one in inside.answers}
    names = (service.name for service in cluster.services)
    return [found.get(name) or Answer(name, False, "the image does not have it", 0) for name in names]
