"""Which snapshots stay: the rule of `sms overlay prune`, as borg prune has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from appliance.config.model import Retention

RESTORE = "before restore"
"""How the reason of a snapshot begins that a restore kept."""
UPGRADE = "before upgrade"
"""How the reasons of those begin that an upgrade took, to go back to."""
RESTORE_DAYS = 30
"""For so long such a one stays, whatever the rule says."""
NEWEST = "newest verified"
LAST_DAY = 253_000_000_000
"""A time in the year 9987: what lies beyond it is no date."""


@dataclass(frozen=True)
class Candidate:
    """A snapshot as the rule sees it; ``taken`` is Unix time, in seconds."""

    number: int
    taken: float
    verified: bool
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether a snapshot stays; ``why`` has the rules that keep it, or the words for its going."""

    number: int
    keep: bool
    why: tuple[str, ...]


def _hour(at: datetime) -> object:
    # An hour that comes twice, when clocks are put back, is two.
    return at.year, at.month, at.day, at.hour, at.utcoffset(), at.fold


def _day(at: datetime) -> object:
    return at.year, at.month, at.day


def _week(at: datetime) -> object:
    return at.isocalendar()[:2]


def _month(at: datetime) -> object:
    return at.year, at.month


PERIODS: dict[str, Callable[[datetime], object]] = {"hourly": _hour, "daily": _day, "weekly": _week, "monthly": _month}
"""The rules of periods by the setting that says how many, the shortest first."""


def decide(
    snapshots: Sequence[Candidate], retention: Retention, *, now: float, zone: tzinfo | None = None
) -> list[Decision]:
    """Say of each snapshot whether it stays.

    What is newer the order tells, not the time: clocks jump. Damaged ones take nobody's place; one stays
    until ``last`` verified ones are newer, for it may be the only one with what was written last.

    Args:
        snapshots: the oldest first.
        now: Unix time.
        zone: whose hours, days, weeks and months count; this machine's when None.
    """
    kept: dict[int, list[str]] = {one.number: [] for one in snapshots}
    newest_first = [one for one in reversed(snapshots) if one.verified]
    for one in newest_first[:1]:
        kept[one.number].append(NEWEST)
    # What a restore or an upgrade kept stays by itself, and takes nobody's place either.
    for number, rule in _by_count([one for one in newest_first if not _is_kept_by_a_verb(one, now)], retention, zone):
        kept[number].append(rule)
    for number in _damaged(snapshots, retention.last):
        kept[number].append("not verified, but new")
    for one in snapshots:
        if _is_kept_by_a_verb(one, now):
            kept[one.number].append(one.reason)
    return [
        Decision(one.number, bool(kept[one.number]), tuple(kept[one.number]) or (_why_not(one),)) for one in snapshots
    ]


def _by_count(
    newest_first: Sequence[Candidate], retention: Retention, zone: tzinfo | None
) -> Iterator[tuple[int, str]]:
    """Number and rule of those that a count keeps.

    As in borg, what an earlier rule keeps does not count for a later one; and where a rule finds fewer than it
    may keep, the oldest of all stays for it, until there are enough.
    """
    kept = {one.number for one in newest_first[: retention.last]}
    for place, one in enumerate(newest_first[: retention.last], 1):
        yield one.number, f"last {place}"
    for rule, period in PERIODS.items():
        wanted: int = getattr(retention, rule)
        found = 0
        seen: set[object] = set()
        for one in newest_first:
            if found == wanted:
                break
            key = period(_local(one.taken, zone))
            if key in seen:
                continue
            seen.add(key)
            if one.number not in kept:
                kept.add(one.number)
                found += 1
                yield one.number, f"{rule} {found}"
        if found < wanted and newest_first and newest_first[-1].number not in kept:
            kept.add(newest_first[-1].number)
            yield newest_first[-1].number, f"{rule} {found + 1} (oldest)"


def _damaged(snapshots: Sequence[Candidate], last: int) -> Iterator[int]:
    """Damaged ones that fewer than ``last`` verified ones follow."""
    followed = 0
    for one in reversed(snapshots):
        if followed >= last:
            return
        if one.verified:
            followed += 1
        else:
            yield one.number


def _is_kept_by_a_verb(one: Candidate, now: float) -> bool:
    """Whether a restore or an upgrade kept it, less than so many days ago or, by a clock that jumped, in the future."""
    return one.reason.startswith((RESTORE, UPGRADE)) and now - one.taken <= RESTORE_DAYS * 86400


def _why_not(one: Candidate) -> str:
    return "no rule keeps it" if one.verified else "not verified"


def _local(taken: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(min(max(taken, 0.0), LAST_DAY), zone)
