"""``sms overlay snapshot``: dumped, frozen for a moment, taken, checked; the appliance runs on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from appliance.catalog import Service
from appliance.errors import Refused
from appliance.host.base import CommandError, Host, Result
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import check_programs
from appliance.operations.migration.lease import look_at_lease
from appliance.operations.overlay.overlay import keep_stopped, lies_on_closed_mirror
from appliance.operations.services.start import read_note
from appliance.operations.snapshots.list import Snapshot, state_heads, state_paths, store
from appliance.plan.machine import dump_argv, instance_name
from appliance.plan.migration.lease import Lease
from appliance.plan.services.note import StartNote
from appliance.progress import Progress
from appliance.tools import agent, apptainer, ext3
from appliance.tools.apptainer import Instance

FREEZE_LIMIT_S = 5.0
"""Seconds that writers may wait: Slurm's MessageTimeout is 10."""
SCHEDULED = "scheduled"
"""The reason of those that cron asks for."""
TIMED_OUT = 124
"""Status of timeout(1)."""


@dataclass(frozen=True)
class Wanted:
    """How a snapshot is to be taken.

    ``method`` is auto, reflink, delta or full; empty: what the site file says. ``freeze_limit_s``: seconds that
    writers may wait at most.
    """

    method: str = ""
    freeze_limit_s: float = FREEZE_LIMIT_S
    dump: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Taken:
    """A snapshot that counts, and what was to be dumped before it and was not, each with why."""

    snapshot: Snapshot
    not_dumped: tuple[str, ...] = ()


def snapshot(cluster: Cluster, host: Host, progress: Progress, wanted: Wanted) -> Taken:
    """Take a snapshot of the overlay on ``host``, whether the appliance runs there or is stopped.

    Raises:
        Refused: there is no overlay, another host has the lease, or another run is at work; nothing was changed.
        SmsError: it could not be taken, or is not whole; nothing of it counts.
    """
    check_programs(host)
    running, lease = look(cluster, host)
    with ExitStack() as stack:
        if not running:
            lease = stack.enter_context(keep_stopped(cluster, host))
        failed = dump_all(cluster, host, progress) if running and _dumps(cluster, wanted) else []
        taken = ask_take(cluster, host, progress, lease, wanted, running=running, notes=failed)
    return Taken(taken, tuple(failed))


def rehearse_snapshot(cluster: Cluster, host: Host, wanted: Wanted) -> list[str]:
    """Check all that a snapshot checks; give what it would do. Changes nothing.

    Raises:
        Refused: as a snapshot would.
    """
    check_programs(host)
    running, _ = look(cluster, host)
    dumped = [service.name for service in cluster.services if service.dump] if _dumps(cluster, wanted) else []
    wait = f"writers wait {wanted.freeze_limit_s:g} s at most" if running else "the appliance is stopped"
    method = wanted.method or cluster.site.snapshots.method
    return [
        *(f"dump {name}, inside the container" for name in dumped if running),
        f"take {cluster.places.overlay} into {store(cluster)}: method {method}, {wait}",
        "check it with e2fsck, and that state files can be read, before it counts",
    ]


def _dumps(cluster: Cluster, wanted: Wanted) -> bool:
    return wanted.dump and cluster.site.snapshots.dump


def look(cluster: Cluster, host: Host) -> tuple[Instance | None, Lease]:
    """The appliance, if it runs on the host, and the lease.

    Raises:
        Refused: no snapshot can be taken there.
    """
    lease = look_at_lease(host, cluster)
    if lease.holder not in (None, host.name):
        raise Refused(f"the appliance runs on {lease.holder}", hint=f"sms overlay snapshot --host {lease.holder}")
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path) and not lies_on_closed_mirror(cluster, host):
        raise Refused(
            f"there is no overlay {path} on {host.name}", hint="`sms overlay create` or `sms start` makes one"
        )
    running = apptainer.find_instance(host, instance_name(cluster.site))
    users = ext3.users_of(host, path)
    if running and len(users) != 1:
        who = "no loop device has" if not users else f"{', '.join(users)} all have"
        raise Refused(
            f"the appliance runs on {host.name}, but {who} {path} open",
            hint="what it writes lies elsewhere; `losetup -l` and `sms status` show more",
        )
    if not running and users:
        raise Refused(
            f"{path} is in use on {host.name} ({', '.join(users)}), but the appliance does not run",
            hint="is an instance or a mount of it left? `losetup -l` shows who has it",
        )
    return running, lease


def dump_all(cluster: Cluster, host: Host, progress: Progress) -> list[str]:
    """Dump every service that has a way to; give those that failed, each with why.

    A snapshot is worth having without them: pages of a database survive it as they survive a power cut.
    """
    return [why for service in cluster.services if service.dump and (why := _dump(cluster, host, progress, service))]


def _dump(cluster: Cluster, host: Host, progress: Progress, service: Service) -> str:
    with progress.step(f"dump {service.name}") as step:
        try:
            host.run(*dump_argv(cluster.site, service), timeout=service.dump_wait_s + 30)
        except CommandError as error:
            why = _why(error.result, service.dump_wait_s)
            step.detail(f"failed: {why}")
            return f"{service.name} was not dumped: {why}"
    return ""


def _why(result: Result, limit_s: int) -> str:
    if result.status == TIMED_OUT:
        return f"it took longer than {limit_s} s"
    lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"it ended with status {result.status}"


def ask_take(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    lease: Lease,
    wanted: Wanted,
    *,
    running: Instance | None,
    notes: Sequence[str] = (),
) -> Snapshot:
    """Have the agent take one.

    Args:
        running: the instance whose overlay it is; without one the caller holds the lock of the host.

    Raises:
        Refused, SmsError: as ``snapshot``.
    """
    note = read_note(cluster, host)
    if running and note and note.image != running.image:
        note = None  # it tells of another start
    request = {
        "store": store(cluster),
        "overlay": str(cluster.places.overlay),
        # Nobody may stop the appliance while its writers are held.
        "lock": str(cluster.places.lock) if running else "",
        "method": wanted.method or cluster.site.snapshots.method,
        "freeze_limit_s": wanted.freeze_limit_s,
        "facts": {
            "cluster": cluster.site.cluster,
            "host": host.name,
            "generation": _generation(lease, host.name, note, running is not None),
            "image": {"key": note.key if note else "", "sha256": note.sha256 if note else ""},
            "slurm_cluster": cluster.site.cluster,
        },
        "state": state_paths(cluster),
        "heads": state_heads(cluster),
        "reason": wanted.reason,
        "notes": list(notes),
    }
    taken: Snapshot = agent.ask(host, "take", request, progress)["snapshot"]
    return taken


def _generation(lease: Lease, me: str, note: StartNote | None, running: bool) -> int:
    """Under which generation of the lease the overlay was written.

    Where hosts do not share it, one that is stopped has nothing of what another host has done since.
    """
    if running or lease.file != me or not note:
        return lease.generation
    return min(lease.generation, note.generation)
