"""``sms upgrade``: rehearsed, switched, probed; on any failure the image and the overlay of before are back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab.up import check_machine
from appliance.operations.context import Cluster
from appliance.operations.history import read_history
from appliance.operations.hosts.preflight import check_bridges, check_programs, only_one
from appliance.operations.image.deliver import trust
from appliance.operations.migration.lease import look_at_lease
from appliance.operations.services.inside import need_running
from appliance.operations.services.start import Started, read_note, start
from appliance.operations.services.stop import stop
from appliance.operations.snapshots.restore import restore
from appliance.operations.snapshots.snapshot import Wanted, snapshot
from appliance.operations.upgrade.image import check_way_back, make_current_here, take_image
from appliance.operations.upgrade.note import put_back, read_last, write_phase
from appliance.operations.upgrade.rehearse import Wanted as Rehearsal
from appliance.operations.upgrade.rehearse import find_image, rehearse
from appliance.plan.machine import inside_argv, instance_name
from appliance.plan.services.jobs import JOBS, read_jobs
from appliance.plan.snapshots.retention import UPGRADE
from appliance.plan.upgrade.upgrade import (
    DONE,
    LAYING,
    RESTORED,
    RETURNED,
    RETURNING,
    STARTING,
    STOPPING,
    Side,
    Upgrade,
    active_jobs,
    count_jobs,
    lost_jobs,
    predict_outage,
    read_ended,
)
from appliance.progress import Progress
from appliance.tools import apptainer
from appliance.tools.sha256 import find_digest

SETTLE_S = 5
"""Seconds after which jobs are looked for once more: by then nodes have told the controller what they run."""
NOT_HERE = "or go without it: --no-rehearsal"


@dataclass(frozen=True)
class How:
    """How to upgrade.

    ``image``: a file here, None to build one. ``build`` makes it and gives its path. ``undo``: back to the image of
    before the last upgrade, ``with_snapshot`` to the state of before as well; ``force`` although jobs are lost by that.
    """

    image: Path | None = None
    build: Callable[[], Path] | None = None
    rehearsal: bool = True
    nodes: int = 2
    user: str = "root"
    wait_s: float = 60
    undo: bool = False
    with_snapshot: bool = False
    force: bool = False


@dataclass
class Upgraded:
    """What an upgrade did; ``same``: nothing, for that image runs already. ``parts`` in seconds, of the outage."""

    host: str
    before: Side
    after: Side
    same: bool = False
    resumed: bool = False
    rehearsed: bool = False
    snapshot: int = 0
    kept: int = 0
    jobs: str = ""
    predicted_s: float = 0.0
    outage_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def upgrade(cluster: Cluster, host: Host, progress: Progress, how: How) -> Upgraded:
    """Have another image carry on with the same overlay and the same jobs; first go on with one that was cut off.

    Raises:
        Refused: it cannot be begun, or the rehearsal failed; what ran runs.
        RolledBack: the new image does not do; image and overlay are those of before, and serve.
        SmsError: neither serves; the next run goes on.
    """
    check_programs(host)
    lock = f"{cluster.places.lock.parent}/{cluster.site.cluster}.upgrade.lock"
    with only_one(host, lock, f"another upgrade is under way on {host.name}"):
        last = read_last(cluster, host)
        if last and not last.ended:
            done = _resume(cluster, host, progress, last, how)
            if done and (not how.image or _is(cluster, how.image, done.after)):
                return done
        return _upgrade(cluster, host, progress, how, read_last(cluster, host, done=True))


def _is(cluster: Cluster, image: Path, side: Side) -> bool:
    return image.is_file() and find_digest(Local(), str(image)) == side.sha256


def plan_upgrade(cluster: Cluster, host: Host, how: How) -> list[str]:
    """Check what can be checked before an image is there; give what would be done, with the predicted outage.

    Raises:
        Refused: it cannot be begun.
    """
    before, target = _preflight(cluster, host, how, read_last(cluster, host, done=True))
    predicted, known = predict_outage(read_history(cluster, host), {}, _round_trip(host))
    image = f"image {target.key[:12]} of before" if target else str(how.image or "an image built now")
    jobs = count_jobs(_jobs(cluster, host))
    lay = ["lay the snapshot of before that upgrade in the overlay's place"] if how.with_snapshot else []
    return [
        f"take {image} to {host.name}, verify its signature there; {before.key[:12]} runs",
        "take a snapshot while the appliance runs",
        f"rehearse the image on it, with {how.nodes} compute nodes" if how.rehearsal else "NO rehearsal",
        f"stop the appliance ({jobs}), take a snapshot of the stopped overlay",
        *lay,
        "start the image, wait until every service answers, look for every job",
        f"predicted outage: {predicted:.0f} s, {known}",
        "on any failure: put that snapshot back, start the image of before",
    ]


def _preflight(cluster: Cluster, host: Host, how: How, last: Upgrade | None) -> tuple[Side, Side | None]:
    """What runs, and for an undo the image to go back to.

    Raises:
        Refused: an upgrade cannot be begun.
    """
    check_bridges(cluster, host)
    need_running(cluster, host)
    holder = look_at_lease(host, cluster).holder
    if holder != host.name:
        raise Refused(
            f"{holder or 'nobody'} holds the lease, not {host.name}", hint="`sms host list` shows who runs it"
        )
    if how.rehearsal:
        try:
            check_machine()
        except Refused as error:
            raise Refused(
                f"nothing can be rehearsed here: {error.message}", hint=f"{error.hint}; {NOT_HERE}"
            ) from error
    written = read_note(cluster, host)
    running = apptainer.find_instance(host, instance_name(cluster.site))
    assert running
    if not written or written.image != running.image:
        raise Refused(
            f"what runs on {host.name} is not what was written down at its start",
            hint=f"`sms start --host {host.name}` writes it down",
        )
    before = Side(running.image, written.key, written.sha256)
    check_way_back(host, before)
    if not how.undo:
        return before, None
    if last is None or last.after.sha256 != before.sha256:
        raise Refused("there is no upgrade to undo", hint="`sms upgrade --image FILE` takes any image")
    check_way_back(host, last.before)
    if how.with_snapshot:
        _check_forgotten(cluster, host, last, how.force)
    return before, last.before


def _check_forgotten(cluster: Cluster, host: Host, last: Upgrade, force: bool) -> None:
    """Whether the state of before knows all jobs there are now.

    Raises:
        Refused: it does not know some, and nobody said that this is fine.
    """
    if not last.kept:
        raise Refused("no snapshot was kept before that upgrade", hint="without --with-snapshot the overlay stays")
    forgotten = active_jobs(_jobs(cluster, host)).keys() - last.jobs.keys()
    if forgotten and not force:
        names = ", ".join(sorted(forgotten)[:10])
        raise Refused(
            f"{len(forgotten)} jobs came since snapshot {last.kept}: nodes would end them ({names})",
            hint="without --with-snapshot nothing is lost; --force goes on",
        )


def _upgrade(cluster: Cluster, host: Host, progress: Progress, how: How, last: Upgrade | None) -> Upgraded:
    before, target = _preflight(cluster, host, how, last)
    source, after = _take(cluster, host, progress, how, target)
    with progress.step("verify the image") as step:
        step.detail(trust(cluster, host, after.path).signer)
    done = Upgraded(host.name, before, after, same=before.sha256 == after.sha256)
    if done.same:
        return done
    key = after.key[:12]
    lay = last.kept if how.with_snapshot and last else 0
    done.snapshot = lay or snapshot(cluster, host, progress, Wanted(reason=f"{UPGRADE} to {key}")).snapshot["number"]
    parts: dict[str, float] = {}
    if how.rehearsal:
        parts = _rehearse(cluster, host, progress, how, source, done.snapshot)
        done.rehearsed = True
    else:
        progress.say("WARNING: the image is not rehearsed: whether it does is seen in production")
    done.predicted_s, known = predict_outage(read_history(cluster, host), parts, _round_trip(host))
    jobs = _jobs(cluster, host)
    progress.say(f"predicted outage: {done.predicted_s:.0f} s, {known}; {count_jobs(jobs)} jobs")
    begun = Upgrade(cluster.site.cluster, STOPPING, before, after, time.time(), done.snapshot, lay=lay, jobs=jobs)
    return _switch(cluster, host, progress, how, begun, done)


def _take(cluster: Cluster, host: Host, progress: Progress, how: How, target: Side | None) -> tuple[str, Side]:
    """The image that comes after, as a rehearsal here finds it and as it lies on the host."""
    if target:
        return target.path, target
    if how.image:
        source = find_image(cluster, host, str(how.image), progress)
    else:
        assert how.build
        source = str(how.build())
    return source, take_image(cluster, host, Path(source), progress)


def _rehearse(cluster: Cluster, host: Host, progress: Progress, how: How, image: str, number: int) -> dict[str, float]:
    """The parts of the rehearsed start.

    Raises:
        Refused: something does not work in it, or it cannot be made here.
    """
    wanted = Rehearsal(image, how.nodes, host.name, str(number), how.user, wait_s=how.wait_s)
    try:
        seen = rehearse(cluster, wanted, progress)
    except Refused as error:
        raise Refused(f"nothing can be rehearsed here: {error.message}", hint=f"{error.hint}; {NOT_HERE}") from error
    if seen.failed:
        words = "\n  ".join(f"{check.what}: {check.seen}" for check in seen.failed)
        raise Refused(
            f"the image does not do in a rehearsal; production was not touched\n  {words}",
            hint=f"sms rehearse {image} --keep --snapshot {number} --host {host.name}",
        )
    return seen.parts


def _round_trip(host: Host) -> float:
    """Seconds until a command that does nothing has ended on the host."""
    host.run("true")  # the first one makes the connection
    began = time.monotonic()
    host.run("true")
    return time.monotonic() - began


def _jobs(cluster: Cluster, host: Host) -> dict[str, str]:
    """State by id of all jobs that the running controller knows.

    Raises:
        CommandError: it does not answer.
    """
    if not cluster.find_role("controller"):
        return {}
    return read_jobs(host.run(*inside_argv(cluster.site, *JOBS)).text)


def _resume(cluster: Cluster, host: Host, progress: Progress, last: Upgrade, how: How) -> Upgraded | None:
    """Go on with an upgrade that was cut off; None where it had changed nothing, or is undone.

    Raises:
        RolledBack, SmsError: as ``upgrade``.
    """
    progress.say(f"an upgrade from {last.before.key[:12]} to {last.after.key[:12]} was cut off: {last.phase}")
    running = apptainer.find_instance(host, instance_name(cluster.site))
    done = Upgraded(host.name, last.before, last.after, resumed=True, snapshot=last.snapshot, kept=last.kept)
    if running and running.image == last.before.path and last.phase != RETURNING:
        # It was never stopped, or `sms start` had it back: the overlay is its own.
        write_phase(cluster, host, last.at(RETURNED), why="what was before runs again")
        return None
    if last.phase in (RETURNING, RESTORED):
        _return(cluster, host, progress, last, how)
        return None
    return _switch(cluster, host, progress, how, last, done)


def _switch(cluster: Cluster, host: Host, progress: Progress, how: How, begun: Upgrade, done: Upgraded) -> Upgraded:
    """From what was before to what comes after, or back."""
    now = begun
    try:
        if now.phase == STOPPING:
            now = _stop(cluster, host, progress, now, done)
        if now.phase == LAYING:
            restore(cluster, host, str(now.lay), progress)
        now = write_phase(cluster, host, now.at(STARTING))
        done.kept = now.kept
        started = start(cluster, host, progress, image=Path(now.after.path), wait_s=how.wait_s)
        assert started
        now = replace(now, outage_s=round(time.time() - now.stopped_at, 2) if now.stopped_at else 0.0)
        _check_services(cluster, started)
        done.outage_s, done.parts = now.outage_s, {**done.parts, **started.parts}
        done.jobs = _check_jobs(cluster, host, progress, now)
    except BaseException as error:
        _fail(cluster, host, progress, how, now, error)
        raise
    write_phase(cluster, host, now.at(DONE), outage_s=done.outage_s, parts=done.parts, kept=done.kept)
    make_current_here(cluster, now.after)
    return done


def _stop(cluster: Cluster, host: Host, progress: Progress, now: Upgrade, done: Upgraded) -> Upgrade:
    """Stop what runs, and keep the overlay as it left it."""
    now = write_phase(cluster, host, replace(now, stopped_at=now.stopped_at or time.time()))
    try:
        stopped = stop(cluster, host, progress, keep_lease=True)
    except SmsError:
        # A run that was killed may have left it stopping.
        if apptainer.find_instance(host, instance_name(cluster.site)):
            raise
        stopped = stop(cluster, host, progress, keep_lease=True)
    began = time.monotonic()
    taken = snapshot(cluster, host, progress, Wanted(reason=f"{UPGRADE} to {now.after.key[:12]}, stopped"))
    done.parts = {"stop": stopped.seconds, "snapshot": round(time.monotonic() - began, 3)}
    now = replace(now, kept=taken.snapshot["number"])
    return write_phase(cluster, host, now.at(LAYING)) if now.lay else now


def _check_services(cluster: Cluster, started: Started) -> None:
    missing = [service.name for service in cluster.services if service.name not in started.services]
    if missing:
        raise SmsError(f"no answer from {', '.join(missing)}", hint=f"sms logs {missing[0]}")


def _check_jobs(cluster: Cluster, host: Host, progress: Progress, now: Upgrade) -> str:
    """Every job that ran or waited is known, and runs or waits; how many, in words.

    Raises:
        SmsError: some were lost.
    """
    if now.lay:
        return f"{count_jobs(_jobs(cluster, host))}, as snapshot {now.lay} has them"
    with progress.step("look for every job") as step:
        for pause_s in (0, SETTLE_S):
            time.sleep(pause_s if active_jobs(now.jobs) else 0)
            after = _jobs(cluster, host)
            if lost := lost_jobs(now.jobs, {**_ended(cluster, host), **after}):
                raise SmsError("; ".join(lost[:10]) + (f"; and {len(lost) - 10} more" if len(lost) > 10 else ""))
        kept = active_jobs(now.jobs)
        words = f"{len(kept)} jobs of before: all there"
        step.detail(words)
    return words


def _ended(cluster: Cluster, host: Host) -> dict[str, str]:
    """Jobs that ended by themselves, as the controller's log has it: it forgets them after MinJobAge."""
    if not (controller := cluster.find_role("controller")):
        return {}
    words = ("grep", "-h", "-a", "job_complete: JobId=", f"/var/log/sms/{controller.name}.log")
    return read_ended(host.run(*inside_argv(cluster.site, *words), ok=None).text)


def _fail(cluster: Cluster, host: Host, progress: Progress, how: How, now: Upgrade, error: BaseException) -> None:
    """Return to what was before; what went wrong is told with it.

    Raises:
        RolledBack: done.
        SmsError: that failed as well; the next run goes on.
    """
    words = error.message if isinstance(error, SmsError) else "it was interrupted"
    progress.say(f"{words.splitlines()[0]}: returning to {now.before.key[:12]}")
    # Before anything but the old image had the overlay, there is nothing to put back.
    phase = RESTORED if now.phase == STOPPING else RETURNING
    try:
        _return(
            cluster, host, progress, write_phase(cluster, host, now.at(phase, why=words[:2000]), why=words[:2000]), how
        )
    except SmsError as second:
        raise SmsError(
            f"{words}\n  and the return failed: {second.message}",
            hint=f"mend that, then `sms upgrade --host {host.name}` goes on with the return",
        ) from error
    back = f"{now.before.key[:12]} runs again, every service answers"
    lost = "" if phase == RESTORED else f", with the overlay of before (snapshot {now.kept})"
    raise RolledBack(f"{words}\n  {back}{lost}", hint="`sms rehearse --keep` shows it without harm") from error


def _return(cluster: Cluster, host: Host, progress: Progress, now: Upgrade, how: How) -> None:
    """What was before serves again."""
    if now.phase == RETURNING:
        stop(cluster, host, progress, keep_lease=True)
        now = put_back(cluster, host, now, progress)
    running = apptainer.find_instance(host, instance_name(cluster.site))
    if running and running.image != now.before.path:
        stop(cluster, host, progress, keep_lease=True)
    started = start(cluster, host, progress, image=Path(now.before.path), wait_s=how.wait_s)
    assert started
    _check_services(cluster, started)
    write_phase(cluster, host, now.at(RETURNED))
