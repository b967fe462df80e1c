"""``sms overlay snapshot``: dump databases, take a snapshot of the overlay and check it, while it is in use or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from appliance.catalog import Service
from appliance.errors import Refused
from appliance.host.base import CommandError, Host, Result
from appliance.operations.context import Cluster
from appliance.operations.lease import query_lease
from appliance.operations.overlay.frozen import end_lost_freeze
from appliance.operations.overlay.overlay import is_on_closed_mirror, keep_stopped
from appliance.operations.preflight import check_programs, find_instance
from appliance.operations.snapshots.list import Snapshot, check_request, store
from appliance.operations.start_note import StartNote, read_note
from appliance.plan.machine import dump_argv, inside_argv
from appliance.plan.services.apply import SERVICES
from appliance.shared.lease import Lease
from appliance.tools import ext3
from appliance.tools.apptainer import Instance

FREEZE_LIMIT_S = 5.0
"""Default limit of the freeze in seconds: Slurm's MessageTimeout is 10."""
SCHEDULED = "scheduled"
"""The reason recorded with scheduled snapshots."""
TIMED_OUT = 124
"""Status of timeout(1)."""


@dataclass(frozen=True)
class SnapshotOptions:
    """How to take a snapshot.

    ``method`` is auto, reflink, delta or full; empty: the site file's. ``freeze_limit_s``: longest freeze of the
    file system, in seconds.
    """

    method: str = ""
    freeze_limit_s: float = FREEZE_LIMIT_S
    dump: bool = True
    reason: str = ""


@dataclass(frozen=True)
class OverlayUse:
    """The lease, and the instance that uses the overlay; when None the caller holds the host's lock."""

    lease: Lease
    running: Instance | None = None


@dataclass(frozen=True)
class Taken:
    """A committed snapshot, and the services whose dump failed, each with the reason."""

    snapshot: Snapshot
    not_dumped: tuple[str, ...] = ()


def snapshot(cluster: Cluster, host: Host, options: SnapshotOptions) -> Taken:
    """Take a snapshot of the overlay on ``host``, whether the services container runs there or is stopped.

    Raises:
        Refused: there is no overlay, another host has the lease, or another run is in progress; nothing was changed.
        SmsError: it could not be taken, or failed its checks; it was not committed.
    """
    check_programs(host)
    end_lost_freeze(cluster, host)  # a dump would wait for its end
    use = inspect_overlay(cluster, host)
    with ExitStack() as stack:
        if not use.running:
            use = OverlayUse(stack.enter_context(keep_stopped(cluster, host)))
        failed = dump_all(cluster, host) if use.running and _dump_enabled(cluster, options) else []
        taken = take_snapshot(cluster, host, use, options, notes=failed)
    return Taken(taken, tuple(failed))


def rehearse_snapshot(cluster: Cluster, host: Host, options: SnapshotOptions) -> list[str]:
    """Check all that a snapshot checks and return its steps. Changes nothing.

    Raises:
        Refused: as a snapshot would.
    """
    check_programs(host)
    running = inspect_overlay(cluster, host).running
    dumped = [service.name for service in cluster.services if service.dump] if _dump_enabled(cluster, options) else []
    wait = f"writers wait {options.freeze_limit_s:g} s at most" if running else "the services container is stopped"
    method = options.method or cluster.site.snapshots.method
    return [
        *(f"dump {name}, inside the container" for name in dumped if running),
        f"take {cluster.places.overlay} into {store(cluster)}: method {method}, {wait}",
        "check it with e2fsck, and that state files can be read, then commit it",
    ]


def _dump_enabled(cluster: Cluster, options: SnapshotOptions) -> bool:
    return options.dump and cluster.site.snapshots.dump


def inspect_overlay(cluster: Cluster, host: Host) -> OverlayUse:
    """Return the lease, and the instance if it runs on the host.

    Raises:
        Refused: no snapshot of the overlay can be taken there.
    """
    lease = query_lease(host, cluster)
    if lease.engine:
        raise Refused(
            f"{lease.engine} has the services and their state: the overlay on {host.name} has an older one",
            hint="the storage of the engine has the state; what stays in the services container has none of Slurm, and "
            "no snapshots; `sms migrate --to container` moves all of it back",
        )
    if lease.holder not in (None, host.name):
        raise Refused(
            f"the services container runs on {lease.holder}", hint=f"sms overlay snapshot --host {lease.holder}"
        )
    path = str(cluster.places.overlay)
    if not host.works("test", "-f", path) and not is_on_closed_mirror(cluster, host):
        raise Refused(
            f"there is no overlay {path} on {host.name}", hint="`sms overlay create` or `sms start` creates it"
        )
    running = find_instance(cluster, host)
    users = ext3.users_of(host, path)
    if running and len(users) != 1:
        who = "no loop device has" if not users else f"{', '.join(users)} all have"
        raise Refused(
            f"the services container runs on {host.name}, but {who} {path} open",
            hint="it does not write to this file alone; `losetup -l` and `sms status` show more",
        )
    if not running and users:
        raise Refused(
            f"{path} is in use on {host.name} ({', '.join(users)}), but the services container does not run",
            hint="is an instance or a mount of it left? `losetup -l` shows its users",
        )
    return OverlayUse(lease, running)


def dump_all(cluster: Cluster, host: Host) -> list[str]:
    """Dump every service that defines a dump; return those that failed, each with the reason.

    A failure does not prevent the snapshot: a database recovers from it as after a power failure. A service that the
    site file has and the running container does not, before it is upgraded, has nothing to dump.
    """
    return [
        why
        for service in cluster.services
        if service.dump and _is_started(cluster, host, service) and (why := _dump(cluster, host, service))
    ]


def _is_started(cluster: Cluster, host: Host, service: Service) -> bool:
    """Return whether the running container has the service; if that is not known, its dump shows it."""
    argv = inside_argv(cluster.site, cluster.services, "grep", "-q", f'^  "{service.name}": ', SERVICES)
    return host.run(*argv, ok=None, timeout=30).status != 1


def _dump(cluster: Cluster, host: Host, service: Service) -> str:
    with cluster.env.progress.step(f"dump {service.name}") as step:
        try:
            host.run(*dump_argv(cluster.site, cluster.services, service), timeout=service.dump_wait_s + 30)
        except CommandError as error:
            why = _failure_reason(error.result, service.dump_wait_s)
            step.detail(f"failed: {why}")
            return f"{service.name} was not dumped: {why}"
    return ""


def _failure_reason(result: Result, limit_s: int) -> str:
    if result.status == TIMED_OUT:
        return f"it took longer than {limit_s} s"
    lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"it ended with status {result.status}"


def take_snapshot(
    cluster: Cluster,
    host: Host,
    use: OverlayUse,
    options: SnapshotOptions,
    *,
    notes: Sequence[str] = (),
) -> Snapshot:
    """Request a snapshot from the agent and return its manifest.

    Raises:
        Refused, SmsError: as ``snapshot``.
    """
    running, note = use.running, read_note(cluster, host)
    if running and note and note.image != running.image:
        note = None  # the note of another start
    request = {
        "store": store(cluster),
        "overlay": str(cluster.places.overlay),
        # The services container must not be stopped during the freeze.
        "lock": str(cluster.places.lock) if running else "",
        "lease": str(cluster.places.lease),
        "method": options.method or cluster.site.snapshots.method,
        "freeze_limit_s": options.freeze_limit_s,
        "facts": {
            "cluster": cluster.site.cluster,
            "cluster_uuid": use.lease.cluster_uuid,
            "host": host.name,
            "generation": _generation(use.lease, host.name, note, running is not None),
            "image": {"key": note.key if note else "", "sha256": note.sha256 if note else ""},
            "slurm_cluster": cluster.site.cluster,
        },
        **check_request(cluster),
        "reason": options.reason,
        "notes": list(notes),
    }
    taken: Snapshot = cluster.env.agents.call(host, "take", request, cluster.env.progress)["snapshot"]
    return taken


def _generation(lease: Lease, host: str, note: StartNote | None, running: bool) -> int:
    """Return the generation of the lease under which the overlay was last written.

    Where hosts do not share the overlay, a stopped one has nothing of what another host wrote since. Where the lease
    was lost, the note of the last start has it.
    """
    noted = note.generation if note else 0
    if running:
        return max(lease.generation, noted)
    if not lease.since:
        return noted
    return min(lease.generation, noted) if note and lease.file == host else lease.generation
