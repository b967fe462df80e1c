"""A scheduled run: take a snapshot, prune, push, renew certificates, record the result.

Failures are reported by syslog and mail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.hosts.guarded import ensure_guard
from appliance.operations.identity import ensure_identity
from appliance.operations.lease import Leases, query_lease
from appliance.operations.overlay.mirror import scrub
from appliance.operations.overlay.mirrored import find_mirror
from appliance.operations.preflight import find_instance
from appliance.operations.snapshots.list import store
from appliance.operations.snapshots.prune import prune
from appliance.operations.snapshots.push import FAILED, PushOptions, push, site_targets
from appliance.operations.snapshots.report import finish, finish_interrupted, read_record, write_record
from appliance.operations.snapshots.schedule import schedule_files
from appliance.operations.snapshots.snapshot import SCHEDULED, SnapshotOptions, snapshot
from appliance.operations.snapshots.vm_state import has_vm, raise_above_copies, take_vm_state, vm_since
from appliance.operations.vm.certificates import renew_due
from appliance.plan.migration.lease import find_foreign
from appliance.plan.overlay.mirror import scrub_is_due
from appliance.plan.snapshots.offsite import BORG
from appliance.plan.snapshots.runs import (
    VM_SNAPSHOTS,
    Expected,
    Run,
    count_postponed,
    find_gap,
    judge_waiting_push,
    one_line,
    record_overlap,
)
from appliance.plan.snapshots.schedule import installed
from appliance.progress import Silent
from appliance.shared.lease import Lease

REREAD_EVERY_S = 86400
Report = Callable[[str], None]


class NotesOnly(Silent):
    """Records the lines that stay as notes of a run."""

    def __init__(self, work: RunState) -> None:
        self.work = work

    def report(self, text: str) -> None:
        self.work.notes += (text,)


@dataclass
class RunState:
    """The results of a run so far."""

    clock: Clock
    number: int | None = None
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stored_bytes: int | None = None
    put_off: int = 0
    missed: str = ""
    generation: int | None = None
    push_waits_since: float | None = None
    foreign: tuple[str, ...] = ()

    def attempt(self, what: str, do: Callable[[], None]) -> str:
        """Run one step and record its failure, so that later steps still run. A lock held by another run is a note.

        Return the reason of such a note, else an empty string.
        """
        try:
            do()
        except Busy as error:
            self.notes += (f"{what}: {one_line(error.message)}",)
            return one_line(error.message)
        except Exception as error:
            self.fail(f"{what}: ", error)
        return ""

    def fail(self, what: str, error: Exception) -> None:
        """Record a failure. The run is unattended, so unexpected exceptions are reported as any other failure."""
        if isinstance(error, SmsError):
            text = error.message + (f"\nhint: {error.hint}" if error.hint else "")
        else:
            text = f"{type(error).__name__}: {error}"
        self.errors += (what + text,)

    def run(self, started: float, *interrupted: str) -> Run:
        """Return the record of the run."""
        errors = interrupted or self.errors
        run = Run(started, self.clock.time(), not errors, self.number, "\n".join(errors), self.notes, self.stored_bytes)
        return replace(
            run,
            put_off=self.put_off,
            missed=self.missed,
            generation=self.generation,
            push_waits_since=self.push_waits_since,
            foreign=self.foreign,
        )


def run_scheduled(
    cluster: Cluster, host: Host, options: SnapshotOptions, *, follow_names: Callable[[Report], None]
) -> Run | None:
    """Take a snapshot, prune and push; return the record of the run.

    Args:
        follow_names: called if the site has no guard, which does it: takes over other addresses of nodes' names.

    None: no snapshot was taken, because the container does not run on this host, or another run is in progress.
    Failures are not raised; they are recorded and reported by syslog and mail.
    """
    started = cluster.env.clock.time()
    work = RunState(cluster.env.clock)
    try:
        try:
            lease = query_lease(host, cluster)
            # An instance whose lease was lost still needs snapshots.
            if lease.holder != host.name and (lease.since or not find_instance(cluster, host)):
                _renew_certificates(cluster, host)
                return None
            work.generation = lease.generation
            # Before this run writes fields into the lease that a guard of an earlier version cannot read.
            work.attempt("guard", partial(ensure_guard, cluster, host))
            work.attempt("UUID of the cluster", partial(name_cluster, cluster, host, work))
            work.missed = detect_gap(cluster, host, lease, started)
            # Before the snapshot is taken: it then stores damaged chunks again.
            work.attempt("read again", partial(reread_when_due, cluster, host))
            taken = snapshot(cluster, host, options)
            work.number = taken.snapshot["number"]
            work.errors += taken.not_dumped
            if len(cluster.site.admin_hosts) < 2:
                try:
                    follow_names(NotesOnly(work).report)
                except SmsError as error:  # the snapshot is taken, and the next run tries again
                    work.notes += (f"names of nodes: {one_line(error.message)}",)
        except Busy as error:
            _record_skipped(cluster, host, error)
            return None
        except Exception as error:
            work.fail("", error)
        after_scheduled(cluster, host, work)
    except KeyboardInterrupt:
        finish_interrupted(cluster, host, work.run(started, "it was interrupted"))
        raise
    return finish(cluster, host, work.run(started))


def name_cluster(cluster: Cluster, host: Host, work: RunState) -> None:
    """Give a cluster its UUID that an earlier version has started, and that has not been started since; record it.

    Each run also writes it to the lease of a host that did not get it: that host would otherwise take the snapshots
    which are pushed to it for those of another cluster, and a failover there would not use them. Leases of another
    cluster stay as they are, and are recorded: this host holds its own, and needs its snapshots.

    Raises:
        Refused: the lease of this host has none, and the other admin hosts know different ones.
    """
    leases = Leases(host, cluster, tolerant=True)
    with suppress(Unreachable, CommandError):
        leases.query()
        foreign = find_foreign(host.name, leases.views)
        for name, other in foreign.items():
            work.foreign += (
                f"the lease of {name} is of another cluster of this name, {other.cluster_uuid}: not touched",
            )
            del leases.views[name]
        ensure_identity(leases, NotesOnly(work))


def run_scheduled_vm(cluster: Cluster, host: Host) -> Run | None:
    """Take a snapshot of the VM's state, prune and push; return the record of the run, as ``run_scheduled`` does.

    None: the VM and its disks are not on this host, or another run is in progress. While the VM is off, nothing is
    taken again that the newest snapshot has.

    Args:
        cluster: ``of_vm``.
    """
    started, work = cluster.env.clock.time(), RunState(cluster.env.clock)
    try:
        try:
            if not has_vm(cluster, host):
                return None
            previous = read_record(cluster, host, VM_SNAPSHOTS)
            work.missed = detect_gap(cluster, host, Lease("", since=vm_since(cluster, host)), started)
            work.attempt("read again", partial(reread_when_due, cluster, host))
            if previous is None or not previous.ok:
                order_after_copies(cluster, host, work)
            taken = take_vm_state(cluster, host, reason=SCHEDULED, if_changed=True)
            if taken:
                work.number = taken["number"]
            else:
                work.number = previous.number if previous else None
                work.notes += ("the VM is off and its state has not changed since the newest snapshot",)
        except Busy as error:
            _record_skipped(cluster, host, error)
            return None
        except Exception as error:
            work.fail("", error)
        prune_and_push(cluster, host, work)
    except KeyboardInterrupt:
        finish_interrupted(cluster, host, work.run(started, "it was interrupted"), VM_SNAPSHOTS)
        raise
    return finish(cluster, host, work.run(started), VM_SNAPSHOTS)


def _record_skipped(cluster: Cluster, host: Host, error: Busy) -> None:
    """Record that a run did nothing because another one is at work."""
    overlap = record_overlap(read_record(cluster, host), now=cluster.env.clock.time(), what=one_line(error.message))
    write_record(cluster, host, overlap)


def order_after_copies(cluster: Cluster, host: Host, work: RunState) -> None:
    """Call ``raise_above_copies``; a target that cannot be queried is a failure, so that the next run does it again."""
    try:
        work.notes += tuple(filter(None, [raise_above_copies(cluster, host)]))
    except SmsError as error:
        work.fail("order of the copies: ", error)


def after_scheduled(cluster: Cluster, host: Host, work: RunState) -> None:
    """Prune, push, scrub, renew certificates. Also after a failed snapshot: pruning frees a full disk."""
    prune_and_push(cluster, host, work)
    work.attempt("scrub", partial(scrub_when_due, cluster, host))
    work.attempt("certificates", partial(renew_due, cluster))


def prune_and_push(cluster: Cluster, host: Host, work: RunState) -> None:
    """Prune this host, then push to the site's targets and prune these."""

    def thin() -> None:
        work.stored_bytes = prune(cluster, host, ()).stored_bytes

    if busy := work.attempt("prune", thin):
        work.put_off, error = count_postponed(read_record(cluster, host), busy)
        work.errors += (error,) if error else ()
    for target in site_targets(cluster, host.name):
        if busy := work.attempt(f"push to {target}", partial(push_to, cluster, host, target)):
            record, now = read_record(cluster, host), cluster.env.clock.time()
            work.push_waits_since, error = judge_waiting_push(record, busy, now=now)
            work.errors += (f"push to {target}: {error}",) if error else ()


def _renew_certificates(cluster: Cluster, host: Host) -> None:
    """Renew certificates on a host that takes no snapshots, which may be the one with the authority's key."""
    work = RunState(cluster.env.clock)
    work.attempt("certificates", partial(renew_due, cluster))
    for error in work.errors:
        host.run("logger", "-t", "sms", "-p", "cron.err", "--", one_line(error)[:900], ok=None)


def reread_when_due(cluster: Cluster, host: Host) -> None:
    """Verify the newest verified snapshot again once a day: disks rot, and later snapshots share its chunks.

    Raises:
        SmsError: it is damaged.
    """
    reply = cluster.env.agents.call(
        host, "reread", {"store": store(cluster), "every_s": REREAD_EVERY_S}, cluster.env.progress
    )
    if reply["damage"]:
        raise SmsError(f"snapshot {reply['number']} is damaged: {reply['damage'][0]}", hint="sms overlay verify --all")


def detect_gap(cluster: Cluster, host: Host, lease: Lease, now: float) -> str:
    """Return a warning about missed runs; empty where there are none, or where this cannot be determined."""
    try:
        found = {path: data for path in schedule_files(cluster) if (data := host.read(path))}
        every = installed({path: data.decode(errors="replace") for path, data in found.items()}, cluster.label)
        if not every:
            return ""
        written = [float(stamp) for stamp in host.run("stat", "-c", "%Y", *found).text.split()]
        booted = float(host.run("sed", "-n", "s/^btime //p", "/proc/stat").text)
    except (SmsError, ValueError):
        return ""
    expected = Expected(every[1], max(written), lease.since, lease.generation, booted)
    return find_gap(read_record(cluster, host), expected, now=now)


def scrub_when_due(cluster: Cluster, host: Host) -> None:
    """Scrub the mirror once a week, where there is one: nothing else finds corruption in blocks that are never read."""
    mirror = find_mirror(cluster, host)
    if mirror and scrub_is_due(mirror, now=cluster.env.clock.time()):
        scrub(cluster, host)


def push_to(cluster: Cluster, host: Host, target: str) -> None:
    """Push the snapshots missing at one target, and prune it: a standby's own schedule does not while it is standby.

    Raises:
        Busy: an earlier run is still pushing there, or another one, such as a drill, uses the repository.
        SmsError: a push failed.
    """
    lock = f"/run/sms/{cluster.label}.push-{target}.lock"
    with cluster.env.locks.hold(host, lock, f"another run pushes to {target}"):
        repository = cluster.site.snapshots.borg
        prunes = target == BORG and repository is not None and not repository.append_only
        done = push(cluster, host, PushOptions(all_missing=True, prune=prunes), [target])
        failed = [one for one in done if one.state == FAILED]
        if failed:
            errors = [f"snapshot {one.snapshot}: {one.error}" if one.snapshot else one.error for one in failed]
            kind = Busy if all(one.busy for one in failed) else SmsError
            raise kind("\n".join(errors), hint=failed[0].hint)
        if target != BORG:
            prune(cluster, cluster.host(target), ())
