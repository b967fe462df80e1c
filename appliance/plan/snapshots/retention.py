"""Retention: the rules of `sms overlay prune`, with the semantics of borg prune."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from appliance.config.model import Retention

RESTORE = "before restore"
"""Prefix of the reason of snapshots that a restore took."""
UPGRADE = "before upgrade"
"""Prefix of the reason of snapshots that an upgrade took, for rollback."""
RESTORE_DAYS = 30
"""Days for which snapshots with these prefixes are kept regardless of the rules."""
NEWEST = "newest verified"
LAST_DAY = 253_000_000_000
"""A time in the year 9987, the latest that is accepted."""


@dataclass(frozen=True)
class Candidate:
    """The input of the rules for one snapshot; ``taken`` is in Unix seconds. ``host`` took it; empty: not known."""

    number: int
    taken: float
    verified: bool
    reason: str = ""
    host: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether a snapshot is kept; ``why`` has the rules that keep it, or the reason for its removal."""

    number: int
    keep: bool
    why: tuple[str, ...]


PERIODS: dict[str, Callable[[datetime], object]] = {
    # The repeated hour at the end of summer time counts as two.
    "hourly": lambda at: (at.year, at.month, at.day, at.hour, at.utcoffset(), at.fold),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
}
"""The rules by period, the shortest first; the keys are the settings with the counts."""


def decide(
    snapshots: Sequence[Candidate], retention: Retention, *, now: float, zone: tzinfo | None = None
) -> list[Decision]:
    """Decide for each snapshot whether it is kept.

    Age is given by the order, not by the time: clocks jump. Damaged snapshots do not count towards a rule; one is kept
    until ``last`` verified ones are newer, because it may be the only one with the latest data. The newest one of each
    host is always kept, and its newest verified one: however they are ordered, no host loses all of its snapshots.

    Args:
        snapshots: oldest first.
        now: Unix seconds.
        zone: time zone of hours, days, weeks and months; this machine's when None.
    """
    kept: dict[int, list[str]] = {one.number: [] for one in snapshots}
    newest_first = [one for one in reversed(snapshots) if one.verified]
    for one in newest_first[:1]:
        kept[one.number].append(NEWEST)
    # Snapshots of a restore or an upgrade are kept by their own rule and do not count towards the others.
    for number, rule in _by_count([one for one in newest_first if not _is_protected(one, now)], retention, zone):
        kept[number].append(rule)
    for number in _damaged(snapshots, retention.last):
        kept[number].append("not verified, but new")
    for one in snapshots:
        if _is_protected(one, now):
            kept[one.number].append(one.reason)
    for one in newest_of_hosts(snapshots):
        if not kept[one.number]:
            kept[one.number].append(f"newest of {one.host}")
    return [
        Decision(one.number, bool(kept[one.number]), tuple(kept[one.number]) or (_why_not(one),)) for one in snapshots
    ]


def newest_of_hosts(snapshots: Sequence[Candidate]) -> list[Candidate]:
    """Return the newest snapshot of each host, and its newest verified one.

    Args:
        snapshots: oldest first.
    """
    newest = {(one.host, verified): one for one in snapshots for verified in {False, one.verified} if one.host}
    return list(newest.values())


def _by_count(
    newest_first: Sequence[Candidate], retention: Retention, zone: tzinfo | None
) -> Iterator[tuple[int, str]]:
    """Yield number and rule of the snapshots that a count keeps.

    As in borg, a snapshot kept by an earlier rule does not count for a later one; and a rule that finds fewer
    than its count keeps the oldest of all as well.
    """
    kept = {one.number for one in newest_first[: retention.last]}
    for place, one in enumerate(newest_first[: retention.last], 1):
        yield one.number, f"last {place}"
    for rule, period in PERIODS.items():
        limit: int = getattr(retention, rule)
        found = 0
        seen: set[object] = set()
        for one in newest_first:
            if found == limit:
                break
            key = period(_local(one.taken, zone))
            if key in seen:
                continue
            seen.add(key)
            if one.number not in kept:
                kept.add(one.number)
                found += 1
                yield one.number, f"{rule} {found}"
        if found < limit and newest_first and newest_first[-1].number not in kept:
            kept.add(newest_first[-1].number)
            yield newest_first[-1].number, f"{rule} {found + 1} (oldest)"


def _damaged(snapshots: Sequence[Candidate], last: int) -> Iterator[int]:
    """Yield the damaged snapshots that fewer than ``last`` verified ones follow."""
    followed = 0
    for one in reversed(snapshots):
        if followed >= last:
            return
        if one.verified:
            followed += 1
        else:
            yield one.number


def _is_protected(one: Candidate, now: float) -> bool:
    """Whether a restore or an upgrade took it in the last RESTORE_DAYS days, or in the future after a clock jump."""
    return one.reason.startswith((RESTORE, UPGRADE)) and now - one.taken <= RESTORE_DAYS * 86400


def _why_not(one: Candidate) -> str:
    return "no rule keeps it" if one.verified else "not verified"


def _local(taken: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(min(max(taken, 0.0), LAST_DAY), zone)
