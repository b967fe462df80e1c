"""Scheduled runs: what is written down of one, who is told of a failure, and whether all is well with snapshots."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

DAY_S = 86400
GRACE_MINUTES = 5
"""Minutes that a run may take before the age of its snapshot counts against it."""

PUT_OFF = 4
"""So many runs in a row that could not prune are a failure: the disk fills meanwhile."""
BOOT_S = 900
"""Seconds after a boot in which an appliance that starts is taken to come back with its host."""

Word = Literal["", "failed", "still failing", "well again", "missed"]
"""What people are told after a run."""


@dataclass(frozen=True)
class Run:
    """The last scheduled run on a host. Times are Unix seconds; ``number`` is the snapshot that it took.

    ``failing_since`` and ``mailed`` tell when runs began to fail and when that was mailed last; ``met_at`` when one
    found another still at work, and did nothing. ``put_off`` counts the last runs in a row that could not prune.
    ``missed`` says that runs before this one did not take place, ``missed_mailed`` when that was mailed last;
    ``generation`` is that of the lease.
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

    def text(self) -> bytes:
        """As it lies in its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def read_run(data: bytes | str | None) -> Run | None:
    """The run of a file's bytes; None where there is none, or none that can be read: the next one is written whole."""
    try:
        told = json.loads(data or b"null")
        known = {field.name for field in fields(Run)}
        run = Run(**{name: value for name, value in told.items() if name in known})
        return Run(
            **{**asdict(run), "started": float(run.started), "ended": float(run.ended), "notes": tuple(run.notes)}
        )
    except (ValueError, TypeError, AttributeError):
        return None


def follow(previous: Run | None, run: Run) -> tuple[Run, Word]:
    """The run as it is written down after ``previous``, and what people are mailed of it.

    They are told of the first failure, then once a day, then that all is well again; and of runs that did not take
    place, when one does again, once a day as well.
    """
    since = previous.failing_since if previous else None
    mailed = previous.mailed if previous else None
    told = previous.missed_mailed if previous else None
    kept: dict[str, Any] = {"met_at": previous.met_at, "met": previous.met} if previous else {}
    word: Word = ""
    if run.ok:
        if since is not None:
            word = "well again"
        elif run.missed and _is_due(told, run.ended):
            word = "missed"
        since = mailed = None
    else:
        if since is None:
            word = "failed"
        elif _is_due(mailed, run.ended):
            word = "still failing"
        since = run.ended if since is None else since
        mailed = run.ended if word else mailed
    kept["missed_mailed"] = run.ended if run.missed and word else told
    return _with(run, **kept, failing_since=since, mailed=mailed), word


def _is_due(mailed: float | None, now: float) -> bool:
    """Whether a day has passed since. A clock that was put back is no reason to keep silent."""
    return mailed is None or not 0 <= now - mailed < DAY_S


def put_off(previous: Run | None, why: str) -> tuple[int, str]:
    """How many runs in a row could not prune, this one too, and what is to be said once they are too many."""
    count = (previous.put_off if previous else 0) + 1
    if count < PUT_OFF:
        return count, ""
    return count, (
        f"prune: {count} runs in a row could not: {why}; until one can, the disk fills\n"
        "hint: `sms overlay prune` once it is free; is a push too slow?"
    )


def find_gap(
    previous: Run | None,
    *,
    now: float,
    every: int,
    installed: float,
    lease_since: float,
    generation: int,
    booted: float,
) -> str:
    """What is to be said of runs that should have been before this one, and were not.

    None are to be expected while the appliance was stopped, or on another host. Where it started with the host, and
    nobody else had it since the last run, the host was down.

    Args:
        now: when this run began, in Unix seconds, as all times here.
        every: minutes between two runs.
        installed: since when there is a schedule.
        lease_since: since when the host carries the appliance.
        generation: of the lease.
        booted: when the host was.
    """
    same = previous is not None and previous.generation is not None and generation == previous.generation + 1
    came_back = same and booted <= lease_since <= booted + BOOT_S
    since = installed if came_back else max(installed, lease_since)
    seen = (since, previous.started, previous.ended, previous.met_at or 0.0) if previous else (since,)
    last = max((moment for moment in seen if 0 < moment <= now), default=now)
    if now - last <= 2 * every * 60:
        return ""
    return (
        f"no scheduled snapshot ran for {minutes_text(now - last)} before this one, one is due every {every} min: "
        + ("the host was down" if came_back and booted > last else "were cron or systemd, or the host, down?")
    )


def meet(previous: Run | None, *, now: float, what: str) -> Run:
    """What is written down when a run found another at work: that run's record, with a note."""
    return _with(previous or Run(now, now, True), met_at=now, met=what)


def _with(run: Run, **changes: Any) -> Run:
    return Run(**{**{field.name: getattr(run, field.name) for field in fields(Run)}, **changes})


def log_line(cluster: str, run: Run, word: Word) -> str:
    """One line for syslog; empty when there is nothing to say."""
    well = f"well again, with snapshot {run.number}" if run.ok and word == "well again" else ""
    said = "; ".join(filter(None, [one_line(run.error), well, run.missed]))
    return f"overlay snapshots of {cluster}: {said}" if said else ""


def one_line(text: str) -> str:
    """A message of several lines as one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def mail_text(cluster: str, host: str, run: Run, word: Word, *, to: str, since: str) -> str:
    """The mail that says so; ``since`` is a date for people."""
    if run.ok:
        body = f"Scheduled snapshots of the overlay of {cluster} on {host} work{' again' * (word != 'missed')}, "
        body += f"the newest is {run.number}."
    else:
        if run.number is None:
            what = f"A scheduled snapshot of the overlay of {cluster} on {host} has failed:"
            so = "Until it works again, what is written since the last one is in the overlay only."
        else:
            what = f"Snapshot {run.number} of {cluster} on {host} was taken, but not all that follows was done:"
            so = "The snapshot itself counts."
        body = (
            f"{what}\n\n"
            + "".join(f"    {line}\n" for line in run.error.splitlines())
            + (f"\nThey have been failing since {since}." if word == "still failing" else "")
            + f"\n{so}\n"
            "`sms status` and `sms overlay list` show how things stand. The next mail comes in a day, or when all is\n"
            "well again."
        )
    if run.missed:
        body = f"{run.missed[0].upper()}{run.missed[1:]}\n\n{body}"
    verb = {"failed": "", "missed": "were "}.get(word, "are ")
    subject = f"[sms] {cluster}: overlay snapshots on {host} {verb}{word}"
    return f"To: {to}\nSubject: {subject}\nAuto-Submitted: auto-generated\n\n{body}\n"


@dataclass(frozen=True)
class Judgement:
    """Whether all is well with a host's snapshots; ``warnings`` say what is not."""

    healthy: bool
    warnings: tuple[str, ...] = ()


WELL = Judgement(True)


def limit_minutes(every: int, oldest: int | None) -> int:
    """The age of the newest verified snapshot, in minutes, that is too old."""
    return oldest if oldest is not None else 2 * every + GRACE_MINUTES


def judge(
    *,
    now: float,
    newest_taken: float | None,
    run: Run | None,
    every: int,
    limit: int,
    since: float,
    damaged: int = 0,
) -> Judgement:
    """How snapshots stand on the host that carries the appliance and has a schedule.

    Args:
        now: what the host's clock shows, in Unix seconds, as all times here.
        newest_taken: when the newest verified one was taken.
        every: minutes between two runs.
        limit: minutes that the newest verified one may be old.
        since: from when on runs are to be expected: the schedule is there, and the host carries the appliance.
        damaged: how many snapshots are not what was stored.
    """
    warnings = []
    interval = every * 60
    # A time in the future is as good as none: the clock has jumped.
    age = None if newest_taken is None else now - newest_taken
    since = since if since <= now else 0.0
    if now - since > limit * 60 and (age is None or abs(age) > limit * 60):
        warnings.append(_too_old(age, limit))
    if run and not run.ok:
        what = "the last scheduled snapshot failed" if run.number is None else f"snapshot {run.number} was taken, but"
        warnings.append(f"{what}: {one_line(run.error)}")
    seen = (since, run.started, run.met_at or 0.0) if run else (since,)
    last = max(moment for moment in (*seen, 0.0) if moment <= now + interval)
    if now - last > 2 * interval:
        how_long = f"for {minutes_text(now - last)}" if last else "since the clock was put back"
        warnings.append(
            f"no scheduled snapshot has run {how_long}, one is due every {every} min: does cron or systemd run there?"
        )
    healthy = not warnings
    return Judgement(healthy, (*warnings, *damage_warnings(damaged)))


def damage_warnings(damaged: int) -> tuple[str, ...]:
    """What is said of so many damaged snapshots."""
    what = "a snapshot is" if damaged == 1 else f"{damaged} snapshots are"
    return (f"{what} damaged: `sms overlay list` shows which",) if damaged else ()


def _too_old(age: float | None, limit: int) -> str:
    if age is None:
        return "there is no verified snapshot"
    if age < 0:
        return "the newest verified snapshot was taken in the future: the clock has jumped"
    return f"the newest verified snapshot is {minutes_text(age)} old, more than {limit} min"


def minutes_text(seconds: float) -> str:
    """A span of time in minutes, hours or days, for people."""
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"
