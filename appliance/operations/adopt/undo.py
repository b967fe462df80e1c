"""``sms adopt --undo``: gives the services back to the old node, with the jobs accepted since; and ``--finish``."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

from appliance.errors import Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host
from appliance.operations import history
from appliance.operations.adopt.carry import CHANGE_S, copy_changes, copy_round
from appliance.operations.adopt.inspection import VERB, lock_on_old, resume_old
from appliance.operations.adopt.record import find_record, save_record
from appliance.operations.adopt.survey import open_host
from appliance.operations.context import Cluster
from appliance.operations.engines.owners import Command, script_argv
from appliance.operations.engines.transfer import transfer
from appliance.operations.env import Clock
from appliance.operations.hosts.guarded import stop_guard
from appliance.operations.image.deliver import trust
from appliance.operations.lease import Leases, query_all_leases, query_lease
from appliance.operations.migration.agents import LONG_S, QUICK_S, source_request
from appliance.operations.migration.rollback import SOURCE_REPLIES
from appliance.operations.migration.state import Inspected as MigrationFacts
from appliance.operations.preflight import find_instance, query_confinement
from appliance.operations.services.stop import stop
from appliance.operations.services.unfinished import recover_migration
from appliance.plan.adopt.accounting import accounting_conf
from appliance.plan.adopt.adoption import ADOPTED, BEGUN, FINISHED, ROLES, UNDONE, Adoption, find_database
from appliance.plan.adopt.dump import DumpFilter
from appliance.plan.machine import inside_argv
from appliance.plan.migration.lease import find_holder
from appliance.plan.migration.move import missing_jobs
from appliance.plan.migration.plan import Plan
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, read_jobs
from appliance.shared.adopt import ReturnRequest
from appliance.tools.move import Endpoint, receive_after
from appliance.tools.scripts import read_script
from appliance.tools.scripts import script_argv as shell_argv
from appliance.units import format_time

STOP_WAIT_S, START_WAIT_S, SWITCH_S = 60.0, 60.0, 5.0
GONE_S = 10.0
PING_S = 0.1
CONFIGURATION = (
    *("/etc/network/interfaces", "/etc/network/interfaces.d", "/etc/netplan", "/etc/systemd/network"),
    *("/etc/NetworkManager/system-connections", "/etc/sysconfig/network-scripts", "/etc/sysconfig/network"),
)
"""Where distributions have the addresses of interfaces."""
OLD_REPLIES = ("ready", "armed", "up", "serves", "committed")
DUMP = (
    *("mariadb-dump", "--no-defaults", "--socket=/run/mysqld/mysqld.sock", "--single-transaction", "--quick"),
    *("--skip-dump-date", "--skip-triggers", "--default-character-set=utf8mb4", "slurm_acct_db"),
)


@dataclass
class UndoResult:
    """What an undo did. Times in seconds; ``outage`` by service, measured by this process."""

    old: str
    source: str
    seconds: float = 0.0
    outage: dict[str, float] = field(default_factory=dict)
    connections: int = 0
    jobs: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class _Undo:
    """An undo under way; ``ordered``: the old node was ordered to take the addresses."""

    cluster: Cluster
    record: Adoption
    host: Host
    old: Host
    source: Endpoint
    target: Endpoint
    result: UndoResult
    ordered: bool = False


def undo(cluster: Cluster) -> UndoResult:
    """Give the services back to the old node of the last adoption.

    Raises:
        Refused: there is nothing to undo, or the old node is not as the adoption left it; nothing was changed.
        RolledBack: a step failed; the services container serves as before.
        Unverified: the old node serves, and the end was not confirmed.
        SmsError: a step failed; the message says what is known.
    """
    record = find_record(cluster)
    if record is None or record.phase not in (ADOPTED, BEGUN):
        raise _nothing_to(cluster, "undo", record)
    old = open_host(record.target)
    for admin in cluster.site.admin_hosts:
        recover_migration(cluster, cluster.host(admin.name))
    state = resume_old(cluster, old)
    if not state:
        release_unserved(cluster, record, old)
    views = Leases(cluster.host(record.host), cluster).query()
    holder = find_holder(views)
    if holder is None or holder.engine or not holder.holder:
        if not state:
            save_record(cluster, cluster.host(record.host), replace(record, phase=UNDONE))
            raise Refused(f"{record.old} has the services already", hint=f"`sms survey {record.target}` shows them")
        raise Refused(
            "the services container runs on no admin host: what it has accepted could not be given back",
            hint=f"sms start --host {record.host}",
        )
    return give_back(cluster, record, old, cluster.host(holder.holder))


def _nothing_to(cluster: Cluster, what: str, record: Adoption | None) -> Refused:
    """Return the error where there is no adoption to undo or to finish."""
    if record is None or record.phase not in (UNDONE, FINISHED):
        return Refused(f"there is no adoption of {cluster.site.cluster} to {what}", hint="`sms adopt OLD --to HOST`")
    message = f"there is nothing to {what}: the adoption of {record.old} of {format_time(record.at)} was {record.phase}"
    hint = f"`sms adopt {record.old} --to {record.host}` adopts it again"
    return Refused(message, hint=hint if record.phase == UNDONE else "")


def release_unserved(cluster: Cluster, record: Adoption, old: Host) -> None:
    """Release the lease of a host whose power failed right after the switch: the old node has taken everything back.

    Its overlay stays, with the jobs that it accepted in those seconds.

    Raises:
        Refused: both serve, each on its side of a network that was split in the switch.
    """
    host = cluster.host(record.host)
    if query_lease(host, cluster).holder != host.name:
        return
    if not old.works("systemctl", "is-active", "--quiet", *record.request.controller):
        return
    if find_instance(cluster, host):
        raise Refused(
            f"{record.old} and {host.name} both have the services: the network between them was split in the switch",
            hint=f"end one, as by `sms stop --host {host.name}`, which keeps its overlay; then run this again",
        )
    stop(cluster, host)
    cluster.env.progress.report(f"note: {host.name} failed right after the switch; {record.old} has its services again")


def give_back(cluster: Cluster, record: Adoption, old: Host, host: Host) -> UndoResult:
    """Give the services back from the services container on ``host``; as ``undo``."""
    began = cluster.env.clock.monotonic()
    result = UndoResult(record.old, host.name)
    with ExitStack() as stack:
        for one in (old, host):
            stack.enter_context(one.limit_silence(GONE_S))
        source, target = _open_agents(cluster, record, old, host, stack)
        current = _Undo(cluster, record, host, old, source, target, result)
        history.note(cluster, host, VERB, "undo begun", old=record.old)
        try:
            _steps(current)
        except BaseException as error:
            _roll_back(current, error)
        _clean_up(current)
    with suppress(SmsError):
        stop_guard(cluster, host)
    for name in {record.host, host.name}:
        try:
            save_record(cluster, cluster.host(name), replace(record, phase=UNDONE))
        except SmsError as error:
            result.notes.append(f"{name}: the undo could not be recorded: {error.message}")
    result.seconds = round(cluster.env.clock.monotonic() - began, 3)
    history.note(cluster, host, VERB, "undone", old=record.old, outage=result.outage)
    return result


def _open_agents(
    cluster: Cluster, record: Adoption, old: Host, host: Host, stack: ExitStack
) -> tuple[Endpoint, Endpoint]:
    """Start the agents: that which yields on the admin host, and that which takes on the old node.

    Raises:
        Refused: one of them is not as an adoption leaves it.
    """
    running = find_instance(cluster, host)
    if not running:
        raise Refused(f"the services container does not run on {host.name}", hint=f"sms start --host {host.name}")
    image = trust(cluster, host, running.image)
    lease = query_all_leases(host, cluster)
    mine = lease.views[host.name].lease
    assert mine
    how = Plan(host.name, old.name, image.path, image.sha256, lease.top, False, 0, 0, 0.0, {}, 0, [])
    confinement = query_confinement(cluster, host)
    facts = MigrationFacts(host, old, running.pid, replace(mine, generation=lease.top), how, confinement, confinement)
    request = replace(source_request(cluster, facts, image), verb=VERB, gives=record.request.interfaces)
    source = stack.enter_context(cluster.env.agents.open_endpoint(host, "adopt_yield", request, cluster.env.progress))
    source.receive("ready", patience_s=QUICK_S)
    wanted = _return_request(cluster, record, host.name)
    target = stack.enter_context(cluster.env.agents.open_endpoint(old, "adopt_return", wanted, cluster.env.progress))
    target.receive("ready", patience_s=QUICK_S)
    return source, target


def _return_request(cluster: Cluster, record: Adoption, host: str) -> ReturnRequest:
    """Return the request to the old node that gets its services back from an admin host."""
    request = record.request
    return ReturnRequest(request.cluster, request.host, host, request.mark, lock_on_old(cluster))


def _steps(current: _Undo) -> None:
    """Copy the state, stop what keeps it here, copy the rest there, move the addresses, start it there."""
    cluster, record, request = current.cluster, current.record, current.record.request
    source, target, result, progress = current.source, current.target, current.result, current.cluster.env.progress
    controller, accounting = map(cluster.find_role, ROLES)
    assert controller
    since, copied = 0.0, (f"like={request.state}", f"{request.state_inside}={request.state}.sms-new")

    def write(data: bytes) -> None:
        current.old.run(*script_argv("change", *copied), input=data, timeout=CHANGE_S)

    with progress.step(f"copy the state to {record.old} while slurmctld runs") as step:
        source.send("note", folder=request.state_inside)
        noted, _ = source.receive("noted", patience_s=LONG_S)
        argv = script_argv("read", f"{request.state_inside}={request.state_inside}")
        reader = Command(current.host, inside_argv(cluster.site, cluster.services, *argv))
        writer = Command(current.old, script_argv("write", *copied))
        transfer(reader, writer, lambda done: step.moved(done, max(done, int(noted["file_bytes"]))))
        copy_changes(source, write)
    if request.accounting and accounting:
        with progress.step("stop the accounting; copy its database to the old node") as step:
            since = current.cluster.env.clock.monotonic()
            _halt(current, accounting.name)
            conf, number = accounting_conf(record.slurm_conf), str(int(record.at))
            reader = Command(current.host, inside_argv(cluster.site, cluster.services, *DUMP))
            load = shell_argv("accounting-database", "load", conf, number, read_script("load-dump"))
            writer = Command(current.old, load)
            through = DumpFilter(f"the services container on {current.host.name}")
            transfer(reader, writer, lambda done: step.moved(done, done), through)
    jobs = read_jobs(
        current.host.run(
            *inside_argv(cluster.site, cluster.services, *JOBS), ok=None, timeout=60, limit=JOBS_BYTES
        ).text
    )
    with progress.step("stop slurmctld; copy the last changes to the old node") as step:
        copy_changes(source, write)
        stopped = current.cluster.env.clock.monotonic()
        _halt(current, controller.name)
        step.detail(f"{copy_round(source, write) >> 10} KiB")
    with progress.step("switch the addresses") as step:
        source.send("connections")
        _, lines = source.receive("connections", patience_s=QUICK_S)
        target.send("arm", lines)
        target.receive("armed", patience_s=QUICK_S)
        began = current.cluster.env.clock.monotonic()
        source.send("release")
        released, lines = source.receive("released", patience_s=SWITCH_S)
        current.ordered = True
        target.send("up", lines)
        up, _ = target.receive("up", patience_s=SWITCH_S)
        took = current.cluster.env.clock.monotonic() - began
        result.connections = int(released["connections"])
        if up.get("trouble"):
            result.notes.append(f"connections could not be transferred: {up['trouble']}")
        step.detail(f"{took * 1000:.0f} ms; {result.connections} connections kept")
    with progress.step(f"start slurmctld on {record.old}"):
        target.send("serve")
        target.receive("serves", patience_s=START_WAIT_S)
        if not _answers(current.old, current.cluster.env.clock):
            result.notes.append(f"slurmctld does not answer on {record.old} yet: `journalctl -u slurmctld` there")
    now = current.cluster.env.clock.monotonic()
    for service in cluster.services:
        result.outage[service.name] = round(took if service.live else now - stopped, 3)
    if since:
        for one in (accounting, find_database(cluster.services)):
            if one:
                result.outage[one.name] = round(now - since, 3)
    shown = read_jobs(current.old.run(*JOBS, ok=None, timeout=60, limit=JOBS_BYTES).text)
    result.jobs = len(shown)
    if lost := missing_jobs(jobs, shown):
        result.notes.append(f"job {', '.join(lost[:10])} was lost or requeued; see `scontrol show job`")


def _answers(old: Host, clock: Clock) -> bool:
    """Wait until slurmctld answers, which has its unit active before: it reads its state. Return whether it does."""
    deadline = clock.monotonic() + START_WAIT_S
    while "is UP" not in old.run("scontrol", "ping", ok=None, timeout=60).text:
        if clock.monotonic() > deadline:
            return False
        clock.sleep(PING_S)
    return True


def _halt(current: _Undo, name: str) -> None:
    current.source.send("halt", names=[name])
    current.source.receive("halted", patience_s=STOP_WAIT_S + QUICK_S)


def _clean_up(current: _Undo) -> None:
    """Confirm on both hosts.

    Raises:
        Unverified: the old node does not confirm; it goes on serving.
    """
    with current.cluster.env.progress.step("clean up"):
        try:
            current.source.send("given")  # first: if this host crashes now, it must not start the instance at its boot
            receive_after(current.source, "given", *SOURCE_REPLIES, patience_s=QUICK_S)
            current.target.send("commit")
            current.target.receive("committed", patience_s=START_WAIT_S)
            current.source.send("finish")
            receive_after(current.source, "finished", *SOURCE_REPLIES, patience_s=START_WAIT_S)
        except SmsError as error:
            raise Unverified(
                f"{current.record.old} serves, and the end was not confirmed: {error.message}",
                hint="`sms adopt --undo` again does it",
            ) from error


def _roll_back(current: _Undo, cause: BaseException) -> NoReturn:
    """Make the services container serve as before, unless the old node has the addresses by now.

    Raises:
        RolledBack: it does.
        Unverified: the old node serves.
        SmsError: what serves is not known.
    """
    why, sure = str(cause) or type(cause).__name__, False
    message, hint = (cause.message, cause.hint) if isinstance(cause, SmsError) else ("the undo was interrupted", "")
    with current.cluster.env.progress.step(f"roll back to {current.host.name}"):
        try:
            current.target.send("abort", why=why)
            receive_after(current.target, "aborted", *OLD_REPLIES, patience_s=QUICK_S)
            sure = True
        except SmsError:
            sure = False
        current.target.close()
        try:
            current.source.send("abort", why=why, sure=sure)
            receive_after(current.source, "back", "halted", *SOURCE_REPLIES)
        except SmsError:
            current.source.close()
        current.target.wait()
        current.source.wait()
    again = "`sms adopt --undo` again completes or undoes it"
    try:
        recover_migration(current.cluster, current.host)
        running = find_instance(current.cluster, current.host)
        state = resume_old(current.cluster, current.old)
    except SmsError as error:
        raise SmsError(
            f"{message}\n  what serves is not known: {current.host.name} takes the addresses again unless "
            f"{current.record.old} answers for them: {error.message}",
            hint=again,
        ) from cause
    if running and state == "given":
        if not isinstance(cause, SmsError):
            raise cause
        raise RolledBack(
            f"{message}\n  the services container serves on {current.host.name} as before", hint=hint
        ) from cause
    if not state and not running:
        raise Unverified(f"{message}\n  {current.record.old} serves", hint=again) from cause
    raise SmsError(
        f"{message}\n  {current.host.name} and {current.record.old} have not decided yet who serves", hint=again
    ) from cause


def finish(cluster: Cluster) -> Adoption:
    """End an adoption for good: it cannot be undone any more.

    Raises:
        Refused: there is none that could be finished, or the old node's network configuration has what has moved.
    """
    record = find_record(cluster)
    if record is None or record.phase != ADOPTED:
        raise _nothing_to(cluster, "finish", record)
    old = open_host(record.target)
    if resume_old(cluster, old) != "given":
        raise Refused(f"{record.old} is not as the adoption left it", hint="`sms adopt --undo` shows what is left")
    _refuse_configured(old, record)
    request = _return_request(cluster, record, record.host)
    with (
        cluster.env.progress.step(f"finish on {record.old}"),
        cluster.env.agents.open_endpoint(old, "adopt_return", request, cluster.env.progress) as target,
    ):
        target.receive("ready", patience_s=QUICK_S)
        target.send("forget")
        target.receive("forgotten", patience_s=START_WAIT_S)
    done = replace(record, phase=FINISHED)
    save_record(cluster, cluster.host(record.host), done)
    return done


def _refuse_configured(old: Host, record: Adoption) -> None:
    """Check that no network configuration of the old node has an address that has moved: a boot would bring it back.

    Raises:
        Refused: one has.
    """
    moved = [one.partition("/")[0] for each in record.request.interfaces for one in each.moves]
    words = [word for address in moved for word in ("-e", address)]
    found = old.run("grep", "-rlwF", *words, "--", *CONFIGURATION, ok=None, timeout=60).text.split()
    if found:
        raise Refused(
            f"{', '.join(found[:5])} of {record.old} still has {' or '.join(moved)}: a boot would bring that back",
            hint="remove what has moved from its network configuration, then run this again",
        )
