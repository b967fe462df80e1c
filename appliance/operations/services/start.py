"""``sms start``: verifies, takes the lease, seeds the overlay, starts and probes; undoes everything on failure."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.catalog import Service
from appliance.config.slurm_files import FOLDER
from appliance.errors import Busy, Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster, runtime_files
from appliance.operations.deployed import refuse_deployed
from appliance.operations.history import note
from appliance.operations.hosts.guarded import start_guard
from appliance.operations.identity import ensure_identity
from appliance.operations.image.deliver import Image, deliver, trust
from appliance.operations.lease import (
    Leases,
    hold_taken_lease,
    query_lease,
    restore_lease,
    take_lease,
)
from appliance.operations.networks import write_networks
from appliance.operations.overlay.generation import mark_overlay, refuse_older, retire_overlay, set_aside_older
from appliance.operations.overlay.mirrored import DISK_WAIT_S, open_mirror
from appliance.operations.overlay.overlay import (
    archive_for,
    check_overlay,
    fitting,
    overlay_commands,
    overlay_mark,
    ready_overlay,
    running_mark,
    seeded_with,
)
from appliance.operations.preflight import (
    UNCONFINED,
    check_confinement,
    check_instance,
    check_networks,
    check_programs,
    find_instance,
    is_confined,
    lock_host,
    query_age,
    refuse_renamed,
    refuse_taken,
    try_confinement,
)
from appliance.operations.services.boot import install_unit
from appliance.operations.services.effect import (
    Answer,
    compare_stopped,
    find_answer,
    find_stopped,
    may_seed,
)
from appliance.operations.services.generation import Known, find_known
from appliance.operations.services.holding import release
from appliance.operations.services.restart import tell_nodes
from appliance.operations.services.stop import stop_gateway, take_down
from appliance.operations.services.stopwatch import Stopwatch
from appliance.operations.services.unfinished import (
    FailoverLoss,
    end_failover,
    find_restored,
    image_of_unfinished,
    recover_migration,
    refuse_interrupted,
)
from appliance.operations.start_note import read_note, record_start
from appliance.plan.image.definition import runtime_digest
from appliance.plan.machine import inside_argv, probe_argv, start_argv
from appliance.plan.migration.lease import (
    engine_error,
    find_newer,
    find_released,
    refuse_other_cluster,
    refuse_unknown_taker,
)
from appliance.plan.services.confinement import Confinement
from appliance.plan.services.effect import Present
from appliance.plan.services.network import attached_bridges
from appliance.plan.services.probes import read_probe
from appliance.plan.services.runs import shown
from appliance.progress import Progress
from appliance.shared.lease import Lease
from appliance.tools import apptainer, files, ports

TOLERABLE_S = 3600
"""A service whose outage compute nodes tolerate so long, by the catalogue, does not decide over a start."""
SETTLE_S = 10
"""Seconds that the services of a running instance may take to answer."""
BOOT_PATIENCE_S = 30
"""Seconds that a start at boot waits for the other admin hosts to answer."""
MAX_AGE_S = 5
"""Age in seconds from which a query of the other hosts' leases is repeated."""


@dataclass
class Started:
    """What a start did, and the seconds that each part took.

    ``stale``: it was running already, and the site file or the image has changed since. ``failover``: it serves the
    snapshot that an interrupted failover has restored. ``unusable``, ``failed``: nodes and jobs that new files cost.
    """

    host: str
    image: str
    key: str
    signer: str
    generation: int
    already: bool = False
    stale: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    services: dict[str, float] = field(default_factory=dict)
    failover: FailoverLoss | None = None
    unusable: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def missing(self, services: Sequence[Service]) -> list[str]:
        """Return the names of those services that did not answer."""
        return [service.name for service in services if service.name not in self.services]


@dataclass(frozen=True)
class StartOptions:
    """Options of a start.

    Attributes:
        image: use this image instead of the current one.
        wait_s: seconds that the services may take to answer.
        keep: leave it running even if a service does not answer.
        boot: start only if it ran here at shutdown.
        unit: install the systemd unit and start the guard.
        fenced: admin hosts that are known to be off: the lease is taken even if they hold it.
        generation_bump: added to the generation of the lease.
        chosen: in a failover, the generation as which the overlay counts until the lease is taken.
        without_remote: start although every lease was lost and a remote copy of the state does not answer.
        force: start although it loses jobs or reservations, which is reported; or a new cluster where another stopped.
        judged: the caller has judged that.
    """

    image: Path | None = None
    wait_s: float = 60
    keep: bool = False
    boot: bool = False
    unit: bool = True
    fenced: tuple[str, ...] = ()
    generation_bump: int = 1
    chosen: int = 0
    without_remote: bool = False
    force: bool = False
    judged: bool = False

    def find_answer(self, *, rehearsed: bool = False) -> Answer:
        """Return the answer to what it costs."""
        return Answer.KEEP if self.boot or self.fenced else find_answer(force=self.force, rehearsed=rehearsed)


def start(cluster: Cluster, host: Host, options: StartOptions) -> Started | None:
    """Start the services container on ``host`` and wait until every service answers.

    Returns:
        None at boot if it did not run here at shutdown, or another host has taken over.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed, and all earlier steps were undone.
        SmsError: a step failed, and the instance could not be stopped; the lease is kept.
    """
    check_programs(host)
    recover_migration(cluster, host)
    if options.boot and not _is_still_held(cluster, host):
        return None
    lease = query_lease(host, cluster)
    if lease.engine and lease.holder not in options.fenced:  # before an image is sent
        raise engine_error(lease)
    options = replace(options, image=options.image or image_of_unfinished(cluster, host))
    with lock_host(cluster, host):
        refuse_interrupted(cluster, host)
        running = find_instance(cluster, host)
        if running:
            _refuse_other_image(cluster, host, running, options.image)
            started, changed, stopped = _check_running(cluster, host, running, options.wait_s), False, None
        else:
            started, changed, stopped = _start(cluster, host, options)
        if options.unit:
            start_guard(cluster, host)  # before a stop can begin, which ends it
    # After releasing the lock: starting the unit runs `sms start --boot`, which takes it.
    if options.unit:
        install_unit(cluster, host)
    if changed:
        tell_nodes(cluster, host)
    if stopped:
        cost = compare_stopped(cluster, host, stopped)
        started.unusable, started.failed = cost.nodes, cost.jobs
    controller = cluster.find_role("controller")
    if controller and controller.name in started.services:
        with suppress(Busy):  # another run is at work
            release(cluster, host, written=not started.already, any_node=True)
    return started


def _is_still_held(cluster: Cluster, host: Host) -> bool:
    """Return whether the services container ran here at shutdown and no other host has taken over since."""
    lease = query_lease(host, cluster)
    if lease.holder != host.name:
        _set_aside_older(cluster, host, lease)
        return False
    leases = Leases(host, cluster, tolerant=True)
    views = leases.query(patience_s=BOOT_PATIENCE_S)
    newer = find_newer(host.name, views) or find_released(host.name, views)
    if not newer:
        return True
    try:
        leases.adopt(newer)
    except Refused:  # the other host may have updated the file just now
        if query_lease(host, cluster).holder == host.name:
            raise
    where = f"nothing is started on {host.name}"
    if not newer.holder:
        cluster.env.progress.report(
            f"{newer.last} had taken over (generation {newer.generation}) and was stopped: {where}"
        )
        _set_aside_older(cluster, host, query_lease(host, cluster))
        return False
    kept = retire_overlay(cluster, host, newer.generation)
    note(cluster, host, "start", "gave way", holder=newer.holder, generation=newer.generation, kept=kept)
    cluster.env.progress.report(f"{newer.holder} has taken over (generation {newer.generation}): {where}")
    return False


def _set_aside_older(cluster: Cluster, host: Host, lease: Lease) -> None:
    """Set the overlay aside if another host has taken over since, whose guard has written the lease file here."""
    try:
        with lock_host(cluster, host):  # a migration to this host puts its copy in place before it has the lease
            kept = set_aside_older(cluster, host)
    except Busy:
        return  # the run that has the lock is responsible; the next start compares again
    if kept:
        note(cluster, host, "start", "gave way", holder=lease.taker, generation=lease.generation, kept=kept)
        cluster.env.progress.report(f"note: the overlay of {host.name} was out of date, and was renamed to {kept}")


def rehearse_start(cluster: Cluster, host: Host, options: StartOptions) -> list[str]:
    """Run all checks of a start and return the commands that it would run. Sends the image and the seccomp profile.

    Raises:
        Refused: as for a start.
    """
    check_programs(host)
    if find_instance(cluster, host):
        raise Refused(f"the services container runs on {host.name} already", hint="`sms status` probes every service")
    with cluster.env.progress.step("check the host"):
        refuse_deployed(cluster, host)
        check_networks(cluster, host)
        _refuse_taken(cluster, host)
        if not (options.force or options.judged):
            refuse_renamed(cluster, host)
    trusted = trust(cluster, host, *deliver(cluster, host, options.image))
    confinement = try_confinement(cluster, host, trusted.path)
    leases = Leases(host, cluster, tolerant=True)
    leases.query()
    known = find_known(cluster, leases, without_remote=options.without_remote)
    leases.check()
    if not options.without_remote:
        refuse_unknown_taker(leases.views)
    refuse_other_cluster(leases.views)
    with _reporting_unread(leases, cluster.env.progress):
        if not cluster.is_gateway:
            refuse_older(cluster, host, leases, set_aside=False)
    for line in known.notes:
        cluster.env.progress.report(line)
    exists = check_overlay(cluster, host)
    mark = overlay_mark(archive_for(fitting(cluster, host) if exists else cluster), trusted)
    if exists and not (options.judged or cluster.is_gateway):
        stays = seeded_with(host, str(cluster.places.overlay)) == mark
        may_seed(cluster, host, options.find_answer(rehearsed=True), image=trusted.path, stays=stays)
    argv = start_argv(cluster.site, confinement, trusted.path)
    return [*overlay_commands(cluster, host, trusted, mark, exists), shlex.join(shown(argv))]


def _refuse_other_image(cluster: Cluster, host: Host, running: apptainer.Instance, wanted: Path | None) -> None:
    """Refuse if another image than the wanted one runs: a start does not replace it."""
    if wanted is None or wanted.name == Path(running.image).name:
        return
    recorded = read_note(cluster, host)
    with suppress(OSError), wanted.open("rb") as stream:
        if recorded and hashlib.file_digest(stream, "sha256").hexdigest() == recorded.sha256:
            return
    raise Refused(
        f"the services container runs on {host.name} with another image, {running.image}",
        hint=f"`sms upgrade --image {wanted}` changes it while jobs run",
    )


def _check_running(cluster: Cluster, host: Host, running: apptainer.Instance, wait_s: float) -> Started:
    """Wait until the running instance serves; check the lease, and whether image and site file still match."""
    lease = query_lease(host, cluster)
    if lease.holder != host.name:
        raise Refused(
            f"the services container runs on {host.name}, but {lease.holder or 'no host'} holds the lease",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )
    leases = Leases(host, cluster, tolerant=True)
    newer = find_newer(host.name, leases.query())
    if newer:
        raise Refused(
            f"the services container runs on {host.name}, "
            f"but {newer.holder} has taken over (generation {newer.generation})",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )
    try:
        if not cluster.is_gateway:
            ensure_identity(leases, cluster.env.progress)
    except Refused as error:  # it runs, and needs a guard and its unit
        cluster.env.progress.report(f"warning: {error.message}; {error.hint}")
    ports.attach_started(host, attached_bridges(cluster.site))  # a start that was killed had not
    recorded = read_note(cluster, host)
    confined, path = is_confined(host, running), running.image
    if older := query_age(cluster, host, running) if confined else UNCONFINED:
        cluster.env.progress.report(f"warning: {older}")
    services = _wait_for_services(cluster, host, min(wait_s, SETTLE_S), True, confined=confined)
    if recorded and recorded.image == path:
        image = Image(path, recorded.key, recorded.sha256, recorded.signer)
    else:
        # The start was killed before it could record the image.
        image = trust(cluster, host, path)
        record_start(cluster, host, image, lease)
    stale = running_mark(cluster, host) != overlay_mark(archive_for(fitting(cluster, host)), image)
    if stale:
        verb = "sms deploy" if cluster.is_gateway else "sms apply"
        cluster.env.progress.report(f"note: the site file has changed since it was started; `{verb}` applies it")
    started = Started(host.name, path, image.key, image.signer, lease.generation, already=True, stale=stale)
    started.services = services
    if restored := find_restored(cluster, host, top=leases.top, holds_lease=True):
        started.failover = end_failover(cluster, host, restored)
    return started


def _start(cluster: Cluster, host: Host, options: StartOptions) -> tuple[Started, bool, Present | None]:
    """Start it; return what was done, whether the controller has other files than nodes may have, and what it had."""
    parts: dict[str, float] = {}
    stopwatch = Stopwatch(parts, cluster.env.clock)
    leases = Leases(host, cluster, without=options.fenced, tolerant=True)

    def query_known() -> Known:
        leases.prepare()
        return find_known(cluster, leases, without_remote=options.without_remote)

    with cluster.env.pool(1) as pool:
        query = pool.submit(query_known)  # while the image is verified
        with cluster.env.progress.step("check the host"):
            refuse_deployed(cluster, host)
            check_networks(cluster, host)
            if not (check_overlay(cluster, host) or options.force or options.judged):
                refuse_renamed(cluster, host)
        stopwatch.lap("preflight")
        image = _verify_image(cluster, host, options.image, stopwatch)
        confinement = check_confinement(cluster, host, image.path)
        stopwatch.lap("confine")
        known = query.result()
    for line in known.notes:
        cluster.env.progress.report(line)
    leases.floor = known.generation
    own, top = leases.views[host.name].lease, leases.top
    with ExitStack() as undo:
        lease = _take_lease(host, leases, cluster.env.progress, undo, options)
        open_mirror(cluster, host, patience_s=DISK_WAIT_S if options.boot else 0)
        restored = None  # by an interrupted failover; one that starts this reports what is lost
        if not options.fenced:
            mine = own is not None and own.taker == host.name  # it, or a start that was rolled back, took it
            restored = find_restored(cluster, host, top=top, holds_lease=mine)
        unjudged, answer = options.judged or cluster.is_gateway, options.find_answer()
        changed = ready_overlay(
            cluster,
            host,
            image,
            may_seed=lambda stays: unjudged or may_seed(cluster, host, answer, image=image.path, stays=stays),
        )
        differs = any(path.startswith(f"{FOLDER}/") for path in changed)
        stopped = find_stopped(cluster, host) if differs and not options.boot else None
        mark_overlay(cluster, host, lease.generation)
        stop_gateway(cluster, host)  # as late as possible: it has the addresses
        stopwatch.lap("overlay")
        with hold_taken_lease(host, cluster, lease):
            _start_instance(cluster, host, image, confinement)
        stopwatch.lap("instance")
        # At boot nobody is there: what answers serves, whatever does not.
        services = _wait_for_services(cluster, host, options.wait_s, options.keep or options.boot)
        stopwatch.lap("probes")
        record_start(cluster, host, image, lease)
        # Before the line after which no failover is open: if this is killed, the next start reports it.
        lost = end_failover(cluster, host, restored) if restored else None
        host.remove(str(cluster.places.jobs))  # a crash from now on leaves no list, not an old one
        note(cluster, host, "start", "started", generation=lease.generation, image=image.key)
        stopwatch.lap("record")
        undo.pop_all()
    facts = (host.name, image.path, image.key, image.signer, lease.generation)
    return Started(*facts, parts=parts, services=services, failover=lost), differs, stopped


def _verify_image(cluster: Cluster, host: Host, chosen: Path | None, stopwatch: Stopwatch) -> Image:
    """Send the image and verify its signature; check in parallel that the addresses are free."""
    where = cluster.places
    folders = (where.images, where.overlay.parent, where.journal, where.public_keys)
    # Existing folders keep their mode: a shared one may have been set up differently.
    files.make_folders(host, *map(str, folders))
    with cluster.env.pool(1) as pool:
        # The query for an unused address takes a second.
        addresses = pool.submit(_refuse_taken, cluster, host)
        delivered = deliver(cluster, host, chosen, before_sending=addresses.result)
        stopwatch.lap("deliver")
        with cluster.env.progress.step("verify the signature; check the addresses") as step:
            image = trust(cluster, host, *delivered)
            addresses.result()
            step.detail(image.signer)
    if image.runtime != runtime_digest(runtime_files()):
        cluster.env.progress.report(
            "note: the image was built by another version of sms; `sms build` builds a matching one"
        )
    stopwatch.lap("verify")
    return image


def _refuse_taken(cluster: Cluster, host: Host) -> None:
    """Check as ``refuse_taken``, unless what stays while an engine has the other services runs here, and will end."""
    if not find_instance(cluster.of_gateway(), host):
        refuse_taken(cluster, host)


def _take_lease(host: Host, leases: Leases, progress: Progress, undo: ExitStack, options: StartOptions) -> Lease:
    """Take the lease; ``undo`` gets what rolls back the start.

    Raises:
        Refused: another host holds it, took it first, or has a newer overlay; at most the older one was renamed.
    """
    before = query_lease(host, leases.cluster)
    with progress.step("take the lease") as step:
        if leases.cluster.env.clock.monotonic() - leases.queried_at > MAX_AGE_S:
            leases.query()
        # What stays while an engine has the other services has no snapshots, and no state that must not get lost.
        rest = leases.cluster.is_gateway
        one_cluster = not rest and _is_one_cluster(leases, progress, boot=options.boot)
        with _reporting_unread(leases, progress):
            leases.check()  # before anything is changed
            if not options.without_remote:
                refuse_unknown_taker(leases.views, without=options.fenced)
            if one_cluster:
                ensure_identity(leases, progress)
            known = 0 if rest else refuse_older(leases.cluster, host, leases, chosen=options.chosen)
        generation_bump = options.generation_bump + max(0, known - leases.top)
        # Before the swap, whose reply may be lost.
        undo.push(lambda _, error, __: _roll_back(leases.cluster, host, before, error))
        try:
            lease = take_lease(host, leases.cluster, leases=leases, generation_bump=generation_bump)
        except Refused:
            undo.pop_all()  # another run took it first
            raise
        unreachable = ", ".join(leases.unreachable)
        step.detail(f"generation {lease.generation}" + (f"; {unreachable} cannot be reached" if unreachable else ""))
    for name, error in leases.unwritten.items():
        why = f"{error.message}; {error.hint}" if error.hint else error.message
        progress.report(f"note: the lease file of {name} could not be written: {why}")
    return lease


def _is_one_cluster(leases: Leases, progress: Progress, *, boot: bool) -> bool:
    """Return whether no lease is of another cluster.

    At boot, the holder by its own lease starts nevertheless if that has the highest generation.

    Raises:
        Refused: there is one, and this is not such a start.
    """
    try:
        refuse_other_cluster(leases.views)
    except Refused as error:
        own = leases.views[leases.me].lease
        if not (boot and own and own.cluster_uuid and own.holder == leases.me):
            raise
        others = [view.lease for view in leases.views.values() if view.lease]
        if any(one.generation >= own.generation for one in others if one.cluster_uuid != own.cluster_uuid):
            raise
        progress.report(f"warning: {error.message}; {error.hint}")
        return False
    return True


@contextmanager
def _reporting_unread(leases: Leases, progress: Progress) -> Iterator[None]:
    """Report at the end, also of a refusal, which hosts count as unreachable because of an invalid file."""
    try:
        yield
    finally:
        for name, why in leases.unread.items():
            progress.report(f"note: {name} counts as unreachable: {why}")


def _roll_back(cluster: Cluster, host: Host, before: Lease, cause: BaseException | None) -> None:
    """Stop the instance and restore the lease, which is kept while the overlay is in use.

    Raises:
        RolledBack: a step failed, which is the cause; a refusal and an interruption are raised unchanged.
        SmsError: the instance could not be stopped.
    """
    try:
        take_down(cluster, host)
        restore_lease(host, cluster, before)
    except SmsError as error:
        raise SmsError(
            f"{cause}\n  and the instance could not be stopped: {error.message}",
            hint=f"{host.name} keeps the lease; run `sms stop --host {host.name}`",
        ) from cause
    if isinstance(cause, SmsError) and not isinstance(cause, Refused):
        raise RolledBack(f"{cause.message}\n  everything that was started is stopped again", hint=cause.hint) from cause


def _start_instance(cluster: Cluster, host: Host, image: Image, confinement: Confinement) -> None:
    write_networks(cluster, host)
    with cluster.env.progress.step("start the instance"):
        apptainer.run_container(host, *start_argv(cluster.site, confinement, image.path), timeout=60)
        ports.attach_started(host, attached_bridges(cluster.site))
        # Apptainer only warns about a read-only overlay; the services would fail one by one.
        inside = inside_argv(cluster.site, cluster.services)
        apptainer.prove_writable(host, inside)
        if running := find_instance(cluster, host):  # else its end is reported by what waits for the services
            check_instance(cluster, host, running.pid, inside, confinement)


def _wait_for_services(
    cluster: Cluster, host: Host, wait_s: float, keep: bool, *, confined: bool = True
) -> dict[str, float]:
    """Wait until every service answers; return the seconds that each took.

    Args:
        confined: whether the instance is.

    Raises:
        SmsError: a service whose outage is not tolerated for an hour did not answer; the message has the ends of logs.
    """
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    names = [service.name for service in cluster.services]
    with cluster.env.progress.step("wait for the services") as step:

        def on_line(line: str) -> None:
            answer = read_probe(line)
            if answer and answer.ok:
                took[answer.name] = answer.after_s
            elif answer:
                failed[answer.name] = answer.detail
            missing = [name for name in names if name not in took]
            waiting = f"; waiting for {', '.join(missing)}" if missing else ""
            step.detail(f"{len(took)} of {len(names)} answer{waiting}")

        argv = probe_argv(cluster.site, cluster.services, "--wait", f"{wait_s:g}", *names, confined=confined)
        host.run(*argv, ok=(0, 4), timeout=wait_s + 30, on_line=on_line)
        failed.update({name: "it was not probed" for name in names if name not in {*took, *failed}})
        if not keep and any(one.name in failed and one.outage.seconds < TOLERABLE_S for one in cluster.services):
            raise SmsError(
                _failure_text(cluster, host, failed), hint="`sms start --keep` leaves it running for inspection"
            )
    if failed:
        cluster.env.progress.report(_failure_text(cluster, host, failed))
        for one in cluster.services:
            if one.name in failed and one.state:
                paths = " ".join(f"--path {path}" for path in one.state)
                cluster.env.progress.report(
                    f"hint: the state of {one.name} as it was in a snapshot (`sms overlay list`): `sms stop`, "
                    f"`sms overlay restore NUMBER {paths}`, `sms start`"
                )
    return took


def _failure_text(cluster: Cluster, host: Host, failed: dict[str, str]) -> str:
    """Return why services do not answer, each with the end of its log."""
    lines = []
    for name, detail in failed.items():
        lines.append(f"{name} does not answer: {detail}")
        log = host.run(
            *inside_argv(cluster.site, cluster.services, "tail", "-n", "8", f"/var/log/sms/{name}.log"), ok=None
        ).text
        lines += [f"    {line}" for line in log.splitlines()]
    return "\n".join(lines)
