"""``sms overlay drill``: restore the newest snapshot elsewhere beside production, start it in isolation, compare jobs.

It is a rehearsal without compute nodes, with a snapshot from the Borg repository or a standby host: in namespaces of
its own without a way out, with a lease, locks, and state of its own. Of production only the jobs are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from appliance.errors import Busy, SmsError
from appliance.host.base import Host
from appliance.lab.up import check_machine
from appliance.operations.context import Cluster, need_root
from appliance.operations.env import Clock
from appliance.operations.hosts.host import list_hosts
from appliance.operations.image.deliver import Image, trust
from appliance.operations.preflight import check_programs
from appliance.operations.snapshots.list import Snapshot, list_snapshots
from appliance.operations.snapshots.pull import find_remote, list_remote
from appliance.operations.snapshots.push import choose_targets
from appliance.operations.snapshots.report import finish, finish_interrupted
from appliance.operations.snapshots.repository import check_repository, warn_about_key
from appliance.operations.snapshots.transfer import Offsite
from appliance.operations.upgrade import rehearse_checks as checks
from appliance.operations.upgrade.rehearse import (
    Fetch,
    Ready,
    RehearsalOptions,
    check_room,
    fetch_from,
    find_image,
    find_source,
    run_rehearsal,
)
from appliance.operations.upgrade.rehearse_checks import Check, Checks
from appliance.operations.upgrade.rehearse_folders import remove_leftovers
from appliance.plan.snapshots.offsite import BORG, LATEST, archive_name
from appliance.plan.snapshots.runs import DRILLS, VM_DRILLS, Run, one_line
from appliance.shared.order import order

BUSY_S, RETRY_S = 900, 10
"""Seconds that a drill waits for a push that uses the repository, and between two attempts."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class DrillOptions:
    """Options of a drill.

    Attributes:
        source: ``borg`` or an admin host; empty: the newest snapshot of all targets of the site file.
        snapshot: a number there, an archive name, or ``latest``.
        wait_s: timeout of the services, in seconds.
    """

    source: str = ""
    snapshot: str = LATEST
    wait_s: float = 60


@dataclass
class DrillResult:
    """Report of a drill on ``host``.

    Attributes:
        source: where the snapshot came from: ``borg`` or an admin host; empty if there was none.
        snapshot: its number there; ``name``: that of its archive; ``taken``: Unix time; ``age_s``: at the drill.
        image: digest of the inputs of the image that was started on it.
        production: the host whose jobs were compared; empty if they were not.
        notes: what should be changed, but is not a failure.
    """

    host: str
    source: str = ""
    snapshot: int | None = None
    name: str = ""
    taken: float | None = None
    age_s: float | None = None
    image: str = ""
    production: str = ""
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The failed checks."""
        return [check for check in self.checks if not check.ok]

    @property
    def ok(self) -> bool:
        """Whether there was a snapshot and every check succeeded."""
        return self.snapshot is not None and not self.failed

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class Found:
    """A snapshot elsewhere."""

    source: str
    snapshot: Snapshot


def drill(cluster: Cluster, options: DrillOptions) -> DrillResult:
    """Restore a snapshot from elsewhere and start it in isolation. Failed checks are part of the result.

    Raises:
        ConfigError, Refused: it cannot be started; nothing was created.
    """
    need_root()
    remove_leftovers(cluster)
    here = cluster.env.hosts.this
    done = DrillResult(here.name)
    tried = Checks(cluster.env.progress, cluster.env.clock, done.checks)
    targets = choose_targets(cluster, here.name, [options.source] if options.source else [], option="--from")
    image = _prepare(cluster, here)
    if BORG in targets:
        check_borg(cluster, here, tried, done)
    found = find_newest(cluster, here, targets, options.snapshot, tried)
    if not found:
        return done
    _describe(done, found, image, cluster.env.clock.time())
    ready = Ready(
        image,
        found.source,
        found.snapshot,
        ("", ""),
        check_room(cluster, found.snapshot, image, copies=2),
        make_fetch(cluster, here, found),
        _production(cluster, found.snapshot["taken"], done),
    )
    began = cluster.env.clock.monotonic()
    try:
        done.checks += run_rehearsal(cluster, RehearsalOptions(nodes=0, wait_s=options.wait_s), ready).checks
    except SmsError as error:  # such as damage in what was fetched: this is what a drill looks for
        done.checks.append(
            Check("it is fetched and restored", False, error.message, round(cluster.env.clock.monotonic() - began, 2))
        )
    return done


def plan_drill(cluster: Cluster, options: DrillOptions) -> list[str]:
    """Run all checks before a drill; return its steps.

    Raises:
        ConfigError, Refused: as ``drill``.
        SmsError: no snapshot elsewhere can be found.
    """
    need_root()
    here = cluster.env.hosts.this
    targets = choose_targets(cluster, here.name, [options.source] if options.source else [], option="--from")
    image = _prepare(cluster, here, dry_run=True)
    tried = Checks(cluster.env.progress, cluster.env.clock)
    found = find_newest(cluster, here, targets, options.snapshot, tried)
    if not found:
        raise SmsError("; ".join(check.seen for check in tried.done))
    room = check_room(cluster, found.snapshot, image, copies=2)
    return [
        *([f"borg check of {cluster.site.snapshots.borg.repository}"] if cluster.site.snapshots.borg else []),
        f"fetch snapshot {found.snapshot['number']} from {found.source}: {found.snapshot['used_bytes'] >> 20} MiB, "
        f"{room} MiB of free space are needed",
        f"start {image.path} ({image.signer}) on it in networks of its own, probe every service, compare jobs",
        "remove everything",
    ]


def _prepare(cluster: Cluster, here: Host, *, dry_run: bool = False) -> Image:
    """Return the verified current image; without ``dry_run`` that of production is fetched, if this machine has none.

    Raises:
        Refused: a program is missing, or there is no image.
    """
    check_machine()
    check_programs(here)
    source = here if Path(cluster.places.current).is_file() else find_source(cluster, "")
    path = find_image(cluster, source, "", dry_run=dry_run)
    with cluster.env.progress.step("verify the image") as step:
        image = trust(cluster, here, path)
        step.detail(image.signer)
    return image


def check_borg(cluster: Cluster, here: Host, tried: Checks, done: DrillResult) -> None:
    """Check the repository, and note whether a copy of its key is known."""
    clock = cluster.env.clock
    tried.try_out("borg check of the repository", lambda: retry(lambda: check_repository(cluster, here), clock))
    try:
        warning = warn_about_key(cluster, here)
    except SmsError as error:
        warning = f"the repository's key cannot be compared: {one_line(error.message)}"
    done.notes += [warning] if warning else []


def find_newest(cluster: Cluster, here: Host, targets: Sequence[str], selector: str, tried: Checks) -> Found | None:
    """Return the newest of the selected snapshots of all targets; a target that fails is a failed check."""
    found: list[Found] = []
    identity = list_snapshots(cluster, here).identity

    def query(target: str) -> str:
        remote = list_remote(cluster, here, target, identity)
        one, there = find_remote(remote, target, selector), remote.snapshots
        found.append(Found(target, one))
        return f"{len(there)} snapshots, the newest is {there[-1]['number']} of {there[-1]['host']}"

    for target in targets:
        tried.try_out(f"snapshots at {target}", lambda target=target: query(target))  # type: ignore[misc]
    return max(found, key=lambda one: order(one.snapshot), default=None)


def _describe(done: DrillResult, found: Found, image: Image, now: float) -> None:
    taken = found.snapshot["taken"]
    done.source, done.snapshot, done.name = found.source, found.snapshot["number"], archive_name(found.snapshot)
    done.taken, done.age_s, done.image = taken, round(now - taken, 1), image.key


def make_fetch(cluster: Cluster, here: Host, found: Found) -> Fetch:
    """Return what fetches the snapshot into the folder of the drill."""
    if found.source != BORG:
        return fetch_from(cluster, cluster.host(found.source), found.snapshot)

    def fetch(folder: Path) -> tuple[str, int]:
        offsite, into = Offsite(cluster, here), str(folder / "snapshots")
        with ExitStack() as stack:
            offsite.lock_repository(stack)
            return into, int(offsite.pull(found.snapshot, cluster.env.progress, into=into).name)

    return lambda folder: retry(lambda: fetch(folder), cluster.env.clock)


def retry(work: Callable[[], Value], clock: Clock) -> Value:
    """Do what needs the repository for itself; wait while a push uses it.

    Raises:
        Busy: it was in use for too long.
    """
    until = clock.monotonic() + BUSY_S
    while True:
        try:
            return work()
        except Busy:
            if clock.monotonic() > until:
                raise
        clock.sleep(RETRY_S)


def _production(cluster: Cluster, taken: float, done: DrillResult) -> frozenset[int] | None:
    """Return the ids of production's jobs that the snapshot must have; None, with a note, where they are not known."""
    if not cluster.find_role("controller"):
        return None
    running = [line.name for line in list_hosts(cluster) if line.running]
    try:
        for name in running:
            jobs = checks.query_production(cluster, cluster.host(name), taken)
            done.production = name
            return jobs
    except SmsError as error:
        done.notes.append(f"jobs were not compared with production: {one_line(error.message)}")
        return None
    done.notes.append("jobs were not compared with production: it is not running on any host")
    return None


def run_scheduled_drill(cluster: Cluster, work: Callable[[], DrillResult]) -> Run:
    """Run a drill; record the result, and report failures by syslog and mail instead of raising them.

    Args:
        work: the drill.
    """
    here, started, subject = cluster.env.hosts.this, cluster.env.clock.time(), VM_DRILLS if cluster.vm else DRILLS

    def record(number: int | None, error: str, notes: Sequence[str] = ()) -> Run:
        return Run(started, cluster.env.clock.time(), not error, number, error, tuple(notes))

    try:
        try:
            done = work()
            run = record(done.snapshot, describe_failure(done), done.notes)
        except SmsError as error:
            run = record(None, error.message + (f"\nhint: {error.hint}" if error.hint else ""))
        except Exception as error:  # an unattended run reports whatever happens
            run = record(None, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        finish_interrupted(cluster, here, record(None, "it was interrupted"), subject)
        raise
    return finish(cluster, here, run, subject)


def describe_failure(done: DrillResult) -> str:
    """Return what failed, a line for each check; empty if the drill succeeded."""
    if done.ok:
        return ""
    return "\n".join(f"{check.what}: {one_line(check.seen)}" for check in done.failed) or "no copy was started"


def clean_up(cluster: Cluster) -> list[str]:
    """Remove drills and rehearsals that were killed, without kept rehearsals; return their names."""
    need_root()
    return remove_leftovers(cluster)
