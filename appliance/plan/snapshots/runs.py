"""Scheduled runs: the record of a run, when a failure is reported, and whether snapshots are healthy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from appliance.shared.records import RecordError, from_json

DAY_S = 86400
GRACE_MINUTES = 5
"""Minutes allowed for a run, on top of the interval, before a snapshot is too old."""

MAX_POSTPONED = 4
"""Consecutive runs without a prune that count as a failure: the disk fills meanwhile."""
MAX_PUSH_WAIT_S = DAY_S
"""Seconds for which pushes may be postponed; longer is a failure: a killed Borg may have left its lock."""
BOOT_S = 900
"""Seconds after a boot within which a start of the services container counts as part of the boot."""

DRILL_DAYS = 7
"""Days between two restore drills on a host."""

Notice = Literal["", "failed", "still failing", "recovered", "missed"]
"""What is reported by mail after a run."""


@dataclass(frozen=True)
class Subject:
    """What runs on a schedule. Its texts are filled with cluster, host and the number of the run's snapshot.

    Attributes:
        record: name of the file with the last run, beside the snapshots.
        title: the subject of mail and of lines in syslog.
        works: that runs succeed.
        failed, meanwhile: that a run failed, and what that means until one succeeds.
        failed_later, valid: the same where the run has a snapshot.
        see: what shows the current state.
    """

    record: str
    title: str
    works: str
    failed: str
    meanwhile: str
    failed_later: str
    valid: str
    see: str


SNAPSHOTS = Subject(
    record="run.json",
    title="overlay snapshots",
    works="Scheduled snapshots of the overlay of {cluster} on {host} work{again}, the newest is {number}.",
    failed="A scheduled snapshot of the overlay of {cluster} on {host} has failed:",
    meanwhile="Until it works again, data written since the last one is in the overlay only.",
    failed_later="Snapshot {number} of {cluster} on {host} was taken, but a later step failed:",
    valid="The snapshot itself is valid.",
    see="`sms status` and `sms overlay list` show the current state.",
)
DRILLS = Subject(
    record="drill.json",
    title="restore drills",
    works="Restore drills of {cluster} on {host} work{again}, the last one with snapshot {number}.",
    failed="A restore drill of {cluster} on {host} has failed:",
    meanwhile="Until one succeeds, it is not known whether the cluster can be restored from elsewhere.",
    failed_later="A restore drill of {cluster} on {host} with snapshot {number} has failed:",
    valid="Until one succeeds, it is not known whether the cluster can be restored from elsewhere.",
    see="`sms overlay drill` runs one now and shows every check.",
)
VM_SNAPSHOTS = Subject(
    record="run.json",
    title="VM snapshots",
    works="Scheduled snapshots of the VM's state of {cluster} on {host} work{again}, the newest is {number}.",
    failed="A scheduled snapshot of the VM's state of {cluster} on {host} has failed:",
    meanwhile="Until it works again, changes of inventory and files since the last one are on the VM's disk only.",
    failed_later="Snapshot {number} of the VM's state of {cluster} on {host} was taken, but a later step failed:",
    valid="The snapshot itself is valid.",
    see="`sms vm status` and `sms overlay list --vm` show the current state.",
)
VM_DRILLS = Subject(
    record="drill.json",
    title="restore drills of the VM",
    works="Restore drills of the VM of {cluster} on {host} work{again}, the last one with snapshot {number}.",
    failed="A restore drill of the VM of {cluster} on {host} has failed:",
    meanwhile="Until one succeeds, it is not known whether the VM can be restored from elsewhere.",
    failed_later="A restore drill of the VM of {cluster} on {host} with snapshot {number} has failed:",
    valid="Until one succeeds, it is not known whether the VM can be restored from elsewhere.",
    see="`sms overlay drill --vm` runs one now and shows every check.",
)


@dataclass(frozen=True)
class Run:
    """The record of the last scheduled run on a host. Times are Unix seconds; ``number`` is the snapshot it took.

    ``failing_since``: when runs began to fail; ``mailed``: when that was last mailed. ``met_at``: when a run found
    another in progress and did nothing; ``met``: its message. ``put_off``: consecutive runs that could not prune.
    ``missed``: a warning about missed runs before this one; ``missed_mailed``: when that was last mailed.
    ``generation`` is the lease's. ``push_waits_since``: since when each run has had to postpone a push.
    ``foreign``: admin hosts that are of another cluster of this name, as text.
    """

    started: float
    ended: float
    ok: bool
    number: int | None = None
    error: str = ""
    notes: tuple[str, ...] = ()
    stored_bytes: int | None = None
    failing_since: float | None = None
    mailed: float | None = None
    met_at: float | None = None
    met: str = ""
    put_off: int = 0
    missed: str = ""
    missed_mailed: float | None = None
    generation: int | None = None
    push_waits_since: float | None = None
    foreign: tuple[str, ...] = ()


def read_run(data: bytes | str | None) -> Run | None:
    """Parse a record; None where there is none or it cannot be read: the next run overwrites it."""
    try:
        return from_json(Run, data.encode() if isinstance(data, str) else data or b"")
    except RecordError:
        return None


def overtaken(previous: Run | None, run: Run) -> Run | None:
    """Return the record of a newer run, with what ``run``, whose push has lasted longer, tells about pushes; else None.

    The newer one tells about snapshots.
    """
    if previous is None or previous.started <= run.started:
        return None
    return replace(previous, push_waits_since=run.push_waits_since)


def merge_previous(previous: Run | None, run: Run) -> tuple[Run, Notice]:
    """Return the record of ``run`` with the history of ``previous``, and what to report by mail.

    The first failure is reported, further ones once a day, then the recovery; missed runs are reported by the next
    run, at most once a day.
    """
    since = previous.failing_since if previous else None
    mailed = previous.mailed if previous else None
    missed_mailed = previous.missed_mailed if previous else None
    kept = replace(run, met_at=previous.met_at, met=previous.met) if previous else run
    notice: Notice = ""
    if run.ok:
        if since is not None:
            notice = "recovered"
        elif run.missed and _is_due(missed_mailed, run.ended):
            notice = "missed"
        since = mailed = None
    else:
        if since is None:
            notice = "failed"
        elif _is_due(mailed, run.ended):
            notice = "still failing"
        since = run.ended if since is None else since
        mailed = run.ended if notice else mailed
    missed_mailed = run.ended if run.missed and notice else missed_mailed
    return replace(kept, missed_mailed=missed_mailed, failing_since=since, mailed=mailed), notice


def _is_due(mailed: float | None, now: float) -> bool:
    """Whether a day has passed since ``mailed``, or the clock was set back."""
    return mailed is None or not 0 <= now - mailed < DAY_S


def count_postponed(previous: Run | None, why: str) -> tuple[int, str]:
    """Count consecutive runs that could not prune, this one included; return the count and, at the limit, an error."""
    count = (previous.put_off if previous else 0) + 1
    if count < MAX_POSTPONED:
        return count, ""
    return count, (
        f"prune: postponed by {count} runs in a row: {why}; the disk fills meanwhile\n"
        "hint: `sms overlay prune` once the store is free; is a push too slow?"
    )


def judge_waiting_push(previous: Run | None, why: str, *, now: float) -> tuple[float, str]:
    """Return since when pushes are postponed, this run's included, and, beyond the limit, an error."""
    since = previous.push_waits_since if previous else None
    since = now if since is None else min(since, now)
    if now - since <= MAX_PUSH_WAIT_S:
        return since, ""
    return since, (
        f"pushes have been postponed for {minutes_text(now - since)}: {why}; newer snapshots are on this host only\n"
        "hint: `sms overlay push --all-missing` shows what is in the way"
    )


@dataclass(frozen=True)
class Expected:
    """Since when runs are expected on a host, in Unix seconds.

    Attributes:
        every: minutes between two runs.
        installed: when the schedule was installed.
        lease_since: since when the host holds the lease.
        generation: of the lease.
        booted: when the host booted.
    """

    every: int
    installed: float
    lease_since: float
    generation: int
    booted: float


def find_gap(previous: Run | None, expected: Expected, *, now: float) -> str:
    """Return a warning about runs missed before this one, which began at ``now``; empty where there are none.

    No runs are expected while the services container was stopped or on another host. If it started with the host and
    no other host had the lease since the last run, the host was down.
    """
    every, booted, lease_since = expected.every, expected.booted, expected.lease_since
    same = previous is not None and previous.generation is not None and expected.generation == previous.generation + 1
    came_back = same and booted <= lease_since <= booted + BOOT_S
    since = expected.installed if came_back else max(expected.installed, lease_since)
    seen = (since, previous.started, previous.ended, previous.met_at or 0.0) if previous else (since,)
    last = max((moment for moment in seen if 0 < moment <= now), default=now)
    if now - last <= 2 * every * 60:
        return ""
    return (
        f"no scheduled snapshot ran for {minutes_text(now - last)} before this one, one is due every {every} min: "
        + ("the host was down" if came_back and booted > last else "were cron or systemd, or the host, down?")
    )


def record_overlap(previous: Run | None, *, now: float, what: str) -> Run:
    """Return the record after a run that found another in progress: the previous record, with a note."""
    return replace(previous or Run(now, now, True), met_at=now, met=what)


def log_line(cluster: str, run: Run, notice: Notice, subject: Subject = SNAPSHOTS) -> str:
    """Return one line for syslog; empty when there is nothing to log."""
    recovered = f"recovered, with snapshot {run.number}" if run.ok and notice == "recovered" else ""
    text = "; ".join(filter(None, [one_line(run.error), recovered, run.missed]))
    return f"{subject.title} of {cluster}: {text}" if text else ""


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class Mail:
    """Who reports a run to whom; ``since``: formatted date since when runs fail."""

    cluster: str
    host: str
    to: str
    since: str


def mail_text(mail: Mail, run: Run, notice: Notice, subject: Subject = SNAPSHOTS) -> str:
    """Return the mail with a notice."""
    known = {"cluster": mail.cluster, "host": mail.host, "number": run.number, "again": " again" * (notice != "missed")}
    if run.ok:
        body = subject.works.format(**known)
    else:
        whole = run.number is None
        body = (
            f"{(subject.failed if whole else subject.failed_later).format(**known)}\n\n"
            + "".join(f"    {line}\n" for line in run.error.splitlines())
            + (f"\nThey have been failing since {mail.since}." if notice == "still failing" else "")
            + f"\n{subject.meanwhile if whole else subject.valid}\n"
            f"{subject.see} The next mail is sent after a day, or on\n"
            "recovery."
        )
    if run.missed:
        body = f"{run.missed[0].upper()}{run.missed[1:]}\n\n{body}"
    verb = {"failed": "", "missed": "were ", "recovered": "have "}.get(notice, "are ")
    title = f"[sms] {mail.cluster}: {subject.title} on {mail.host} {verb}{notice}"
    return f"To: {mail.to}\nSubject: {title}\nAuto-Submitted: auto-generated\n\n{body}\n"


def drill_warnings(run: Run | None, *, since: float, now: float) -> tuple[str, ...]:
    """Return warnings about the restore drills of a host that has a schedule for them.

    Args:
        since: Unix time since when they are scheduled.
        now: the host's clock.
    """
    if run and not run.ok:
        return (f"the last restore drill failed: {one_line(run.error)}",)
    last = max(moment for moment in (since, run.started if run else 0.0, 0.0) if moment <= now)
    if now - last > 2 * DRILL_DAYS * DAY_S:
        how_long = f"for {minutes_text(now - last)}" if last else "since the clock was set back"
        return (f"no restore drill has run {how_long}, one is due every {DRILL_DAYS} days",)
    return ()


@dataclass(frozen=True)
class Judgement:
    """Whether a host's snapshots are healthy, and warnings."""

    healthy: bool
    warnings: tuple[str, ...] = ()

    def of(self, what: str) -> Judgement:
        """Return the judgement with warnings that begin with what they are about."""
        return replace(self, warnings=tuple(f"{what}: {one}" for one in self.warnings))

    def plus(self, warnings: tuple[str, ...]) -> Judgement:
        """Return the judgement with further warnings, each of which is unhealthy."""
        return Judgement(self.healthy and not warnings, (*self.warnings, *warnings))


HEALTHY = Judgement(True)


def limit_minutes(every: int, oldest: int | None) -> int:
    """Return the greatest healthy age of the newest verified snapshot, in minutes."""
    return oldest if oldest is not None else 2 * every + GRACE_MINUTES


@dataclass(frozen=True)
class Found:
    """What was found on a host that holds the lease and has a schedule.

    Attributes:
        now: the host's clock, in Unix seconds, as all times here.
        newest_taken: when the newest verified snapshot was taken.
        every: minutes between two runs.
        limit: greatest healthy age of the newest verified snapshot, in minutes.
        since: since when runs are expected: the schedule is installed, and the host holds the lease.
        damaged: number of damaged snapshots.
        option: of the commands in warnings.
    """

    now: float
    newest_taken: float | None
    run: Run | None
    every: int
    limit: int
    since: float
    damaged: int = 0
    option: str = ""


def judge(found: Found) -> Judgement:
    """Judge the snapshots of a host."""
    now, newest_taken, run, every, limit = found.now, found.newest_taken, found.run, found.every, found.limit
    warnings = []
    interval = every * 60
    # A time in the future is ignored: the clock has jumped.
    age = None if newest_taken is None else now - newest_taken
    since = found.since if found.since <= now else 0.0
    if now - since > limit * 60 and (age is None or abs(age) > limit * 60):
        warnings.append(_too_old(age, limit))
    if run and not run.ok:
        what = "the last scheduled snapshot failed" if run.number is None else f"snapshot {run.number} was taken, but"
        warnings.append(f"{what}: {one_line(run.error)}")
    seen = (since, run.started, run.met_at or 0.0) if run else (since,)
    last = max(moment for moment in (*seen, 0.0) if moment <= now + interval)
    if now - last > 2 * interval:
        how_long = f"for {minutes_text(now - last)}" if last else "since the clock was set back"
        warnings.append(
            f"no scheduled snapshot has run {how_long}, one is due every {every} min: does cron or systemd run there?"
        )
    damage = judge_damage(found.damaged, verified=newest_taken is not None, option=found.option)
    foreign = run.foreign if run else ()
    return Judgement(not warnings and damage.healthy, (*warnings, *foreign, *damage.warnings))


def judge_damage(damaged: int, *, verified: bool, option: str = "") -> Judgement:
    """Judge snapshots without a schedule; ``verified``: whether one of them is undamaged."""
    return Judgement(not damaged or verified, damage_warnings(damaged, verified=verified, option=option))


def damage_warnings(damaged: int, *, verified: bool, option: str = "") -> tuple[str, ...]:
    """Return the warning about damaged snapshots, if there are any; ``option``: of the commands in it."""
    if damaged and not verified:
        commands = f"`sms overlay snapshot{option}` takes another one, `sms overlay pull{option}` fetches one"
        return (f"every snapshot is damaged: {commands}",)
    what = "a snapshot is" if damaged == 1 else f"{damaged} snapshots are"
    return (f"{what} damaged: `sms overlay list{option}` shows which",) if damaged else ()


def _too_old(age: float | None, limit: int) -> str:
    if age is None:
        return "there is no verified snapshot"
    if age < 0:
        return "the newest verified snapshot was taken in the future: the clock has jumped"
    return f"the newest verified snapshot is {minutes_text(age)} old, more than {limit} min"


def minutes_text(seconds: float) -> str:
    """Format seconds as minutes, hours or days."""
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"
