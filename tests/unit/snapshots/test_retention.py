"""Retention: a table of cases, and properties that hold for any series of snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.model import Retention
from appliance.plan.snapshots.retention import NEWEST, Candidate, decide

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)


def keep(last: int = 1, hourly: int = 0, daily: int = 0, weekly: int = 0, monthly: int = 0) -> Retention:
    return Retention(last=last, hourly=hourly, daily=daily, weekly=weekly, monthly=monthly)


def series(*times: str, zone: ZoneInfo = BERLIN) -> list[Candidate]:
    """Return snapshots 1, 2, 3 ... in order; `!` before a time: damaged; `+` after it: the repeated hour."""
    made = []
    for number, text in enumerate(times, 1):
        at = datetime.fromisoformat(text.strip("!+")).replace(tzinfo=zone, fold=int(text.endswith("+")))
        made.append(Candidate(number, at.timestamp(), not text.startswith("!")))
    return made


def kept(snapshots: Sequence[Candidate], rule: Retention, now: datetime = NOW, zone: ZoneInfo = BERLIN) -> list[int]:
    return [one.number for one in decide(snapshots, rule, now=now.timestamp(), zone=zone) if one.keep]


CASES: dict[str, tuple[list[str], Retention, list[int]]] = {
    "none": ([], keep(3, 24, 7, 4, 6), []),
    "one": (["2026-11-21"], keep(), [1]),
    "the last three": (["2026-11-21T10:00"] * 5, keep(3), [3, 4, 5]),
    "fewer than may stay": (["2026-11-20", "2026-11-21"], keep(3), [1, 2]),
    "the newest of each hour": (
        ["2026-11-21T08:00", "2026-11-21T08:59", "2026-11-21T09:00", "2026-11-21T09:30", "2026-11-21T10:00"],
        keep(1, hourly=2),
        [2, 4, 5],
    ),
    "hours without any do not count": (
        ["2026-11-18T03:00", "2026-11-19T03:00", "2026-11-20T03:00", "2026-11-21T03:00"],
        keep(1, hourly=2),
        [2, 3, 4],
    ),
    "what an earlier rule keeps does not count for a later one": (
        ["2026-11-18", "2026-11-19", "2026-11-20", "2026-11-21"],
        keep(2, daily=1),
        [2, 3, 4],
    ),
    "days by local time": (
        # 23:30 and 00:30 in Berlin are one day in Greenwich.
        ["2026-06-01T12:00", "2026-06-02T23:30", "2026-06-03T00:30", "2026-06-03T12:00"],
        keep(1, daily=1),
        [2, 4],
    ),
    "the oldest stays while a rule finds too few": (
        ["2026-11-19T01:00", "2026-11-19T02:00", "2026-11-20T01:00", "2026-11-21T01:00"],
        keep(1, daily=4),
        [1, 2, 3, 4],
    ),
    "the oldest goes when there are enough": (
        ["2026-11-19T01:00", "2026-11-19T02:00", "2026-11-20T01:00", "2026-11-21T01:00"],
        keep(1, daily=2),
        [2, 3, 4],
    ),
    "week 53 is one week in two years": (
        ["2026-12-20", "2026-12-27", "2026-12-28", "2026-12-31", "2027-01-01", "2027-01-03", "2027-01-04"],
        keep(1, weekly=2),
        [2, 6, 7],
    ),
    "the week of New Year belongs to the next year": (
        ["2025-12-21", "2025-12-28", "2025-12-29", "2026-01-04", "2026-01-05"],
        keep(1, weekly=1),
        [4, 5],
    ),
    "months": (
        ["2026-08-30", "2026-08-31", "2026-09-30", "2026-10-01", "2026-10-31", "2026-11-01"],
        keep(1, monthly=2),
        [3, 5, 6],
    ),
    "an hour that comes twice is two": (
        ["2026-10-25T01:30", "2026-10-25T02:10", "2026-10-25T02:30", "2026-10-25T02:10+", "2026-10-25T03:00"],
        keep(1, hourly=2),
        [3, 4, 5],
    ),
    "an hour that never comes is none": (
        ["2026-03-29T00:30", "2026-03-29T01:30", "2026-03-29T03:10", "2026-03-29T03:30", "2026-03-29T04:00"],
        keep(1, hourly=2),
        [2, 4, 5],
    ),
    "a day of 25 hours is one": (
        ["2026-10-24T23:00", "2026-10-25T00:00", "2026-10-25T02:30+", "2026-10-25T23:59", "2026-10-26T00:00"],
        keep(1, daily=2),
        [1, 4, 5],
    ),
    "a clock that was put back: the order tells which is newer": (
        ["2026-11-21T10:00", "2026-11-21T11:00", "2026-11-21T10:05", "2026-11-21T10:10"],
        keep(1, hourly=1),
        # 4 is the newest of all and of hour 10; 1 and 3 are older ones of that hour.
        [2, 4],
    ),
    "an hour that came twice by such a clock is one": (
        ["2026-11-21T09:00", "2026-11-21T10:00", "2026-11-21T11:00", "2026-11-21T10:10", "2026-11-21T11:10"],
        keep(1, hourly=2),
        [1, 4, 5],
    ),
    "a time in the future is a period as any other": (
        ["2026-11-20T10:00", "2031-01-01T10:00", "2026-11-21T10:00", "2026-11-21T11:00"],
        keep(1, daily=2),
        [1, 2, 4],
    ),
    "the same time for all": (["2026-11-21T10:00"] * 4, keep(1, hourly=3, daily=3), [1, 4]),
    "a damaged one uses up no place": (
        ["2026-11-18", "2026-11-19", "!2026-11-20", "2026-11-21"],
        keep(1, daily=2),
        [1, 2, 4],
    ),
    "a damaged one that is new stays": (["2026-11-20", "2026-11-21T01:00", "!2026-11-21T02:00"], keep(1), [2, 3]),
    "a damaged one goes when enough are newer": (
        ["!2026-11-18", "2026-11-19", "!2026-11-20", "2026-11-21T01:00", "2026-11-21T02:00"],
        keep(2),
        [4, 5],
    ),
    "no verified one: all stay": (["!2026-11-18", "!2026-11-19", "!2026-11-20"], keep(1), [1, 2, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_which_are_kept(name: str) -> None:
    times, rule, expected = CASES[name]
    assert kept(series(*times), rule) == expected


def test_the_newest_of_each_host_stays() -> None:
    """However they are ordered: a host whose lease was lost must not lose all of its snapshots."""
    made = series("2026-11-15", "!2026-11-16", "2026-11-17", "2026-11-18", "2026-11-21T01:00", "2026-11-21T02:00")
    hosts = ["host-b", "host-b", "host-c", "host-a", "host-a", "host-a"]
    snapshots = [replace(one, host=host) for one, host in zip(made, hosts, strict=True)]
    found = {one.number: one.why for one in decide(snapshots, keep(1), now=NOW.timestamp(), zone=BERLIN) if one.keep}
    assert found == {
        1: ("newest of host-b",),  # its newest verified one
        2: ("newest of host-b",),
        3: ("newest of host-c",),
        6: (NEWEST, "last 1"),
    }


def test_each_decision_has_a_reason() -> None:
    snapshots = series("2026-11-19", "2026-11-20T01:00", "!2026-11-20T01:30", "2026-11-20T02:00", "2026-11-21")
    reasons = {one.number: one.why for one in decide(snapshots, keep(1, daily=1), now=NOW.timestamp(), zone=BERLIN)}
    assert reasons == {
        1: ("no rule keeps it",),
        2: ("no rule keeps it",),
        3: ("not verified",),
        4: ("daily 1",),
        5: (NEWEST, "last 1"),
    }


@pytest.mark.parametrize(
    ("reason", "days", "stays"),
    [
        ("before restore of 12", 0, True),
        ("before restore of 12", 29.9, True),
        ("before restore of 12", 30.1, False),
        ("before restore of 12", -400, True),  # the clock has jumped since
        ("before upgrade to 3f2a9c, stopped", 29.9, True),
        ("before upgrade to 3f2a9c, stopped", 30.1, False),
        ("before the upgrade", 1, False),
        ("scheduled", 0, False),
    ],
)
def test_snapshots_of_a_restore_are_kept_for_thirty_days(reason: str, days: float, stays: bool) -> None:
    at = (NOW - timedelta(days=days)).timestamp()
    snapshots = [Candidate(1, at, True, reason), Candidate(2, at + 1, True), Candidate(3, at + 2, True)]
    assert (1 in kept(snapshots, keep(1))) is stays
    damaged = [Candidate(1, at, False, reason), *snapshots[1:]]
    assert (1 in kept(damaged, keep(1))) is stays, "it may be the only copy"


def test_the_default_is_the_zone_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With summer time: today's offset would be wrong."""
    import time

    snapshots = series("2026-06-01T12:00", "2026-06-02T23:30", "2026-06-03T00:30", "2026-06-03T12:00")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        found = decide(snapshots, keep(1, daily=1), now=NOW.timestamp())
        assert [one.number for one in found if one.keep] == [2, 4]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("taken", [-1e9, 0.0, 1e18, float("inf")])
def test_times_out_of_range_are_accepted(taken: float) -> None:
    assert kept([Candidate(1, taken, True), Candidate(2, 1e9, True)], keep(1, 1, 1, 1, 1)) == [1, 2]


COUNTS = st.integers(0, 4)
RULES = st.builds(keep, st.integers(1, 4), COUNTS, COUNTS, COUNTS, COUNTS)
# Within two years around now, mostly increasing, some from a clock that jumped.
TIMES = st.lists(
    st.tuples(
        st.integers(-3000, 9000),
        st.booleans(),
        st.sampled_from(["", "", "", "before restore of 1"]),
        st.sampled_from(["", "host-a", "host-b"]),
    ),
    max_size=60,
)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Draw snapshots in order, with mostly increasing times."""
    at = NOW.timestamp() - 300 * 86400
    made = []
    for number, (minutes, verified, reason, host) in enumerate(draw(TIMES), 1):
        at += minutes * 60
        made.append(Candidate(number, at, verified, reason, host))
    return made


@given(histories(), RULES, st.sampled_from([BERLIN, ZoneInfo("UTC"), ZoneInfo("Australia/Lord_Howe")]))
def test_invariants(snapshots: list[Candidate], rule: Retention, zone: ZoneInfo) -> None:
    stay = kept(snapshots, rule, zone=zone)
    left = [one for one in snapshots if one.number in stay]
    verified = [one.number for one in snapshots if one.verified]
    assert verified[-1:] == [number for number in verified[-1:] if number in stay], "the newest verified"
    assert set(verified[-rule.last :]) <= set(stay)
    assert {one.number for one in snapshots[-rule.last :]} <= set(stay), "the last, damaged or not"
    for host in ("host-a", "host-b"):
        assert set([one.number for one in snapshots if one.host == host][-1:]) <= set(stay), "the newest of each host"
    assert kept(left, rule, zone=zone) == stay, "a second run removes nothing"


@given(histories(), RULES)
def test_damaged_ones_do_not_affect_the_others(snapshots: list[Candidate], rule: Retention) -> None:
    alone = [one for one in snapshots if one.verified]
    among = {one.number for one in alone} & set(kept(snapshots, rule))
    assert sorted(among) == kept(alone, rule)


@pytest.mark.slow
def test_a_year_of_snapshots_stays_within_the_limits() -> None:
    """Pruned after each: never more than the sum of the counts; in the end there is one of each month."""
    rule, left = Retention(), [Candidate(0, NOW.timestamp() - 366 * 86400, True)]
    for number in range(1, 366 * 24):  # an hour at a time, to be quick
        left.append(Candidate(number, left[-1].taken + 3600, True))
        at = datetime.fromtimestamp(left[-1].taken, UTC)
        stay = set(kept(left, rule, now=at))
        left = [one for one in left if one.number in stay]
        assert len(left) <= 3 + 24 + 7 + 4 + 6
    months = {datetime.fromtimestamp(one.taken, BERLIN).month for one in left}
    assert len(months) == 7
