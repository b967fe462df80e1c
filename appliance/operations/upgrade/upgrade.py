"""``sms upgrade``: rehearse, switch, probe; on any failure roll back to the old image and overlay.

Usually a second instance with the new image takes over (``switch.py``). Where that is not possible, the container is
stopped, and the new image started on its overlay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab.up import check_machine
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.history import read_history
from appliance.operations.image.deliver import LacksService, trust
from appliance.operations.lease import query_lease
from appliance.operations.migration.here import record_interrupted, shown_outages
from appliance.operations.preflight import check_networks, check_programs, find_instance
from appliance.operations.services.effect import find_answer, judge_running, may_fail, settle
from appliance.operations.services.inside import need_running
from appliance.operations.services.start import Started, StartOptions, start
from appliance.operations.services.stop import stop
from appliance.operations.services.unfinished import (
    has_switched,
    read_last_upgrade,
    recover_migration,
    restore_overlay,
    write_phase,
)
from appliance.operations.snapshots.restore import restore_own
from appliance.operations.snapshots.snapshot import SnapshotOptions, snapshot
from appliance.operations.start_note import read_note
from appliance.operations.upgrade.image import check_rollback_image, make_current_here, send_image
from appliance.operations.upgrade.jobs import check_jobs, list_before, query_jobs
from appliance.operations.upgrade.rehearse import RehearsalOptions, find_image, rehearse
from appliance.operations.upgrade.state import UpgradeOptions, UpgradeResult
from appliance.operations.upgrade.switch import plan_way, resume_switch, switch_over
from appliance.plan.services.jobs import active_jobs, count_jobs
from appliance.plan.snapshots.retention import UPGRADE
from appliance.plan.upgrade.upgrade import (
    DONE,
    LAYING,
    RESTORED,
    RETURNED,
    RETURNING,
    STARTING,
    STOPPING,
    SWITCHING,
    Side,
    Upgrade,
    predict_outage,
)
from appliance.progress import Silent
from appliance.tools.sha256 import find_digest

NO_REHEARSAL = "or skip it: --no-rehearsal"


def upgrade(cluster: Cluster, host: Host, options: UpgradeOptions) -> UpgradeResult:
    """Switch to another image with the same overlay and the same jobs; first resume an interrupted upgrade.

    Raises:
        Refused: it cannot be started, or the rehearsal failed; production was not changed.
        RolledBack: the new image failed; the old image and overlay serve again.
        Unverified: the new image serves, but a service does not answer, or a job was lost.
        SmsError: neither serves; the next run resumes.
    """
    check_programs(host)
    lock = f"{cluster.places.lock.parent}/{cluster.site.cluster}.upgrade.lock"
    with cluster.env.locks.hold(host, lock, f"another upgrade is under way on {host.name}"):
        recover_migration(cluster, host)
        record_interrupted(cluster, host)
        last = read_last_upgrade(cluster, host)
        if last and not last.ended:
            done = _resume(cluster, host, last, options)
            if done and (not options.image or _is(options.image, done.after)):
                return done
        return _upgrade(cluster, host, options, read_last_upgrade(cluster, host, done=True))


def _is(image: Path, side: Side) -> bool:
    return image.is_file() and find_digest(Local(), str(image)) == side.sha256


def plan_upgrade(cluster: Cluster, host: Host, options: UpgradeOptions) -> list[str]:
    """Run all checks that need no new image; return the steps, with the predicted outage.

    Raises:
        Refused: the upgrade cannot be started.
    """
    last = read_last_upgrade(cluster, host, done=True)
    before, target = _preflight(cluster, host, options, last, rehearsed=True)
    if options.image and not target:
        _judge_image(cluster, host, options)
    switch, why = plan_way(cluster, host, target or before, options)
    image = f"the previous image {target.key[:12]}" if target else str(options.image or "an image built now")
    jobs = count_jobs(list_before(cluster.showing(Silent()), host, options))
    lay = ["replace the overlay with the snapshot before that upgrade"] if options.with_snapshot else []
    steps = [
        f"send {image} to {host.name}, verify its signature there; {before.key[:12]} is running",
        "take a snapshot of the running container",
        f"rehearse the image on it, with {options.nodes} compute nodes" if options.rehearsal else "NO rehearsal",
    ]
    if switch:
        return [
            *steps,
            f"take a snapshot again ({jobs}), copy the overlay while it is in use",
            "start a second instance of the image on the copy, isolated; probe its services, compare its jobs",
            "switch the addresses to it; probe every service, check every job",
            *(f"predicted {line}" for line in shown_outages(switch.away)),
            "on a failure until NAT answers: the running instance goes on as before; later ones are reported",
        ]
    predicted, basis = predict_outage(read_history(cluster, host), {}, _round_trip(host, cluster.env.clock))
    return [
        *steps,
        f"no second instance: {why}",
        f"stop the container ({jobs}), take a snapshot of the stopped overlay",
        *lay,
        "start the image, wait until every service answers, check every job",
        f"predicted outage: {predicted:.0f} s, {basis}",
        "on any failure: restore that snapshot, start the old image",
    ]


def _judge_image(cluster: Cluster, host: Host, options: UpgradeOptions) -> None:
    """Check the image that is to be sent, where it is.

    Raises:
        Refused: there is none, it cannot be trusted, or it lacks a service of the site file.
    """
    path = str(options.image)
    if not Path(path).is_file() and "/" in path and host.works("test", "-f", path):
        trust(cluster, host, path)
        return
    path = find_image(cluster, host, path, dry_run=True)
    if options.rehearsal:  # which needs Apptainer here, too
        trust(cluster, Local(), path)


def _preflight(
    cluster: Cluster, host: Host, options: UpgradeOptions, last: Upgrade | None, *, rehearsed: bool = False
) -> tuple[Side, Side | None]:
    """Return the running image, and for an undo the image to return to.

    Raises:
        Refused: an upgrade cannot be started.
    """
    check_networks(cluster, host)
    need_running(cluster, host)
    holder = query_lease(host, cluster).holder
    if holder != host.name:
        raise Refused(
            f"{holder or 'nobody'} holds the lease, not {host.name}", hint="`sms host list` shows who runs it"
        )
    if options.rehearsal:
        try:
            check_machine()
        except Refused as error:
            raise Refused(
                f"this machine cannot run a rehearsal: {error.message}", hint=f"{error.hint}; {NO_REHEARSAL}"
            ) from error
    written = read_note(cluster, host)
    running = find_instance(cluster, host)
    assert running
    if not written or written.image != running.image:
        raise Refused(
            f"the running image on {host.name} is not the one recorded at its start",
            hint=f"`sms start --host {host.name}` records it",
        )
    before = Side(running.image, written.key, written.sha256)
    check_rollback_image(host, before)
    answer = find_answer(force=options.force, rehearsed=rehearsed)
    with may_fail(cluster, "upgrade", answer):
        judged = judge_running(cluster, host)
        # An undo is not refused because partitions were closed meanwhile.
        settle(cluster, host, replace(judged, faults=()) if options.undo else judged, "upgrade", answer)
    if not options.undo:
        return before, None
    if last is None or last.after.sha256 != before.sha256:
        raise Refused("there is no upgrade to undo", hint="`sms upgrade --image FILE` switches to any image")
    check_rollback_image(host, last.before)
    if options.with_snapshot:
        _check_newer_jobs(cluster, host, last, options.force)
    return before, last.before


def _check_newer_jobs(cluster: Cluster, host: Host, last: Upgrade, force: bool) -> None:
    """Check that the state before the upgrade has all present jobs.

    Raises:
        Refused: it lacks some, and ``force`` is not set.
    """
    if not last.kept:
        raise Refused("there is no snapshot of before that upgrade", hint="omit --with-snapshot to keep the overlay")
    newer = set() if force else active_jobs(query_jobs(cluster, host)).keys() - last.jobs.keys()
    if newer:
        names = ", ".join(sorted(newer)[:10])
        raise Refused(
            f"{len(newer)} jobs are newer than snapshot {last.kept}: nodes would kill them ({names})",
            hint="without --with-snapshot nothing is lost; --force loses these jobs",
        )


def _upgrade(cluster: Cluster, host: Host, options: UpgradeOptions, last: Upgrade | None) -> UpgradeResult:
    before, target = _preflight(cluster, host, options, last)
    source, after = _find_image(cluster, host, options, target)
    with cluster.env.progress.step("verify the image") as step:
        try:
            step.detail(trust(cluster, host, after.path).signer)
        except LacksService as error:
            if options.undo:
                error.hint = "take these services out of the site file first; the overlay keeps their state"
            raise
    done = UpgradeResult(host.name, before, after, same=before.sha256 == after.sha256)
    if done.same:
        return done
    switch, done.stopped = plan_way(cluster, host, after, options)
    key = after.key[:12]
    lay = last.kept if options.with_snapshot and last else 0
    taking = SnapshotOptions(reason=f"{UPGRADE} to {key}")
    done.snapshot = lay or snapshot(cluster, host, taking).snapshot["number"]
    parts: dict[str, float] = {}
    if options.rehearsal:
        parts = _rehearse(cluster, host, options, source, done.snapshot)
        done.rehearsed = True
    else:
        cluster.env.progress.warn("the image is not rehearsed; any problem will show in production")
    if switch:
        done.away, done.predicted_s = switch.away, max((one.predicted_s for one in switch.away), default=0.0)
        for line in shown_outages(switch.away):
            cluster.env.progress.report(f"predicted {line}")
        return switch_over(cluster, host, options, done)
    cluster.env.progress.report(f"no second instance: {done.stopped}")
    done.predicted_s, basis = predict_outage(read_history(cluster, host), parts, _round_trip(host, cluster.env.clock))
    jobs = list_before(cluster, host, options)
    cluster.env.progress.report(f"predicted outage: {done.predicted_s:.0f} s, {basis}; {count_jobs(jobs)} jobs")
    now = cluster.env.clock.time()
    begun = Upgrade(cluster.site.cluster, STOPPING, before, after, now, done.snapshot, lay=lay, jobs=jobs)
    return _switch(cluster, host, options, begun, done)


def _find_image(cluster: Cluster, host: Host, options: UpgradeOptions, target: Side | None) -> tuple[str, Side]:
    """Return the new image: its path for a rehearsal on this machine, and its copy on the host."""
    if target:
        return target.path, target
    if options.image:
        source = find_image(cluster, host, str(options.image))
    else:
        assert options.build
        source = str(options.build())
    return source, send_image(cluster, host, Path(source))


def _rehearse(cluster: Cluster, host: Host, options: UpgradeOptions, image: str, number: int) -> dict[str, float]:
    """Rehearse the image; return the durations of the parts of its start.

    Raises:
        Refused: a check failed, or this machine cannot run a rehearsal.
    """
    rehearsal = RehearsalOptions(image, options.nodes, host.name, str(number), options.user, wait_s=options.wait_s)
    try:
        result = rehearse(cluster, rehearsal)
    except Refused as error:
        message = f"this machine cannot run a rehearsal: {error.message}"
        raise Refused(message, hint=f"{error.hint}; {NO_REHEARSAL}") from error
    if result.failed:
        failures = "\n  ".join(f"{check.what}: {check.seen}" for check in result.failed)
        raise Refused(
            f"the rehearsal of the image failed; production was not changed\n  {failures}",
            hint=f"sms rehearse {image} --keep --snapshot {number} --host {host.name}",
        )
    return result.parts


def _round_trip(host: Host, clock: Clock) -> float:
    """Measure the duration of an empty command on the host, in seconds."""
    host.run("true")  # the first command opens the connection
    began = clock.monotonic()
    host.run("true")
    return clock.monotonic() - began


def _resume(cluster: Cluster, host: Host, last: Upgrade, options: UpgradeOptions) -> UpgradeResult | None:
    """Resume an interrupted upgrade; None if it had not changed anything, or is rolled back.

    Raises:
        RolledBack, SmsError: as ``upgrade``.
    """
    cluster.env.progress.report(
        f"an upgrade from {last.before.key[:12]} to {last.after.key[:12]} was interrupted: {last.phase}"
    )
    if last.phase == SWITCHING:
        if options.with_snapshot and has_switched(cluster, host, last):
            return _return(cluster, host, options, last)
        return resume_switch(cluster, host, options, last)
    running = find_instance(cluster, host)
    done = UpgradeResult(host.name, last.before, last.after, resumed=True, snapshot=last.snapshot, kept=last.kept)
    if running and running.image == last.before.path and last.phase != RETURNING:
        # The old image was not stopped, or `sms start` has started it again: it owns the overlay.
        write_phase(cluster, host, last.at(RETURNED), why="the old image runs again")
        return None
    if last.phase in (RETURNING, RESTORED):
        _roll_back(cluster, host, last, options)
        return None
    return _switch(cluster, host, options, last, done)


def _return(cluster: Cluster, host: Host, options: UpgradeOptions, last: Upgrade) -> UpgradeResult:
    """Return from an interrupted switch, whose new image may not start any more, to the snapshot right before it.

    Raises:
        Refused: jobs would be lost, and ``force`` is not set.
        SmsError: as ``_roll_back``.
    """
    if find_instance(cluster, host):
        _check_newer_jobs(cluster, host, last, options.force)
    elif not options.force:
        raise Refused(
            f"nodes would kill jobs that are newer than snapshot {last.kept}, which cannot be listed now",
            hint="--force loses these jobs; `sms upgrade` without --undo resumes the upgrade",
        )
    why = "--undo --with-snapshot"
    _roll_back(cluster, host, write_phase(cluster, host, last.at(RETURNING, why=why), why=why), options)
    done = UpgradeResult(host.name, last.after, last.before, resumed=True, kept=last.kept, stopped=why)
    done.jobs = f"{count_jobs(query_jobs(cluster, host))}, as in snapshot {last.kept}"
    return done


def _switch(
    cluster: Cluster, host: Host, options: UpgradeOptions, begun: Upgrade, done: UpgradeResult
) -> UpgradeResult:
    """Switch from the old image to the new one, or roll back."""
    now = begun
    try:
        if now.phase == STOPPING:
            now = _stop(cluster, host, now, done)
        if now.phase == LAYING:
            restore_own(cluster, host, str(now.lay))
        now = write_phase(cluster, host, now.at(STARTING))
        done.kept = now.kept
        started = start(cluster, host, StartOptions(Path(now.after.path), options.wait_s, judged=True))
        assert started
        now = replace(now, outage_s=round(cluster.env.clock.time() - now.stopped_at, 2) if now.stopped_at else 0.0)
        _check_services(cluster, started)
        done.outage_s, done.parts = now.outage_s, {**done.parts, **started.parts}
        done.jobs = check_jobs(cluster, host, now)
    except BaseException as error:
        _fail(cluster, host, options, now, error)
        raise
    write_phase(cluster, host, now.at(DONE), outage_s=done.outage_s, parts=done.parts, kept=done.kept)
    make_current_here(cluster, now.after)
    return done


def _stop(cluster: Cluster, host: Host, now: Upgrade, done: UpgradeResult) -> Upgrade:
    """Stop the running image and take a snapshot of its overlay."""
    now = write_phase(cluster, host, replace(now, stopped_at=now.stopped_at or cluster.env.clock.time()))
    try:
        stopped = stop(cluster, host, keep_lease=True)
    except SmsError:
        # A killed run may have left it while stopping.
        if find_instance(cluster, host):
            raise
        stopped = stop(cluster, host, keep_lease=True)
    began = cluster.env.clock.monotonic()
    taken = snapshot(cluster, host, SnapshotOptions(reason=f"{UPGRADE} to {now.after.key[:12]}, stopped"))
    done.parts = {"stop": stopped.seconds, "snapshot": round(cluster.env.clock.monotonic() - began, 3)}
    now = replace(now, kept=taken.snapshot["number"])
    return write_phase(cluster, host, now.at(LAYING)) if now.lay else now


def _check_services(cluster: Cluster, started: Started) -> None:
    missing = started.missing(cluster.services)
    if missing:
        raise SmsError(f"no answer from {', '.join(missing)}", hint=f"sms logs {missing[0]}")


def _fail(cluster: Cluster, host: Host, options: UpgradeOptions, now: Upgrade, error: BaseException) -> None:
    """Roll back to the old image, and raise with the cause.

    Raises:
        RolledBack: done.
        SmsError: the rollback failed as well; the next run resumes it.
    """
    why = error.message if isinstance(error, SmsError) else "it was interrupted"
    cluster.env.progress.report(f"{why.splitlines()[0]}: rolling back to {now.before.key[:12]}")
    # While stopping, only the old image has used the overlay: there is nothing to restore.
    phase = RESTORED if now.phase == STOPPING else RETURNING
    try:
        now_failed = write_phase(cluster, host, now.at(phase, why=why[:2000]), why=why[:2000])
        _roll_back(cluster, host, now_failed, options)
    except SmsError as second:
        raise SmsError(
            f"{why}\n  and the rollback failed: {second.message}",
            hint=f"fix that, then `sms upgrade --host {host.name}` resumes the rollback",
        ) from error
    back = f"{now.before.key[:12]} runs again, every service answers"
    lost = "" if phase == RESTORED else f", with the overlay from before the upgrade (snapshot {now.kept})"
    raise RolledBack(
        f"{why}\n  {back}{lost}", hint="`sms rehearse --keep` reproduces it without affecting production"
    ) from error


def _roll_back(cluster: Cluster, host: Host, now: Upgrade, options: UpgradeOptions) -> None:
    """Restore the overlay and start the old image."""
    if now.phase == RETURNING:
        stop(cluster, host, keep_lease=True)
        now = restore_overlay(cluster, host, now)
    running = find_instance(cluster, host)
    if running and running.image != now.before.path:
        stop(cluster, host, keep_lease=True)
    started = start(cluster, host, StartOptions(Path(now.before.path), options.wait_s, judged=True))
    assert started
    _check_services(cluster, started)
    write_phase(cluster, host, now.at(RETURNED))
