"""Scheduled runs: notices, records, and when snapshots are unhealthy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from email import message_from_string
from typing import Any

import pytest

from appliance.plan.snapshots.runs import (
    DAY_S,
    DRILLS,
    MAX_POSTPONED,
    Expected,
    Found,
    Judgement,
    Mail,
    Notice,
    Run,
    count_postponed,
    drill_warnings,
    find_gap,
    judge,
    judge_damage,
    judge_waiting_push,
    limit_minutes,
    log_line,
    mail_text,
    merge_previous,
    overtaken,
    read_run,
    record_overlap,
)
from appliance.shared.records import to_json

T = 1_000_000.0
QUARTER = 900.0


def run(at: float, error: str = "", number: int | None = None) -> Run:
    return Run(at - 5, at, not error, number, error)


def notices_of(outcomes: str, every_s: float = QUARTER) -> list[Notice]:
    """Return the notices of a series of runs: `.` succeeded, `x` failed."""
    previous: Run | None = None
    notices = []
    for step, outcome in enumerate(outcomes):
        previous, notice = merge_previous(previous, run(T + step * every_s, "no room" if outcome == "x" else "", step))
        notices.append(notice)
    return notices


def test_notices() -> None:
    assert notices_of("...") == ["", "", ""]
    assert notices_of(".xxx.") == ["", "failed", "", "", "recovered"]
    assert notices_of("x.x.") == ["failed", "recovered"] * 2
    assert notices_of("x" * 98 + "..") == ["failed", *[""] * 95, "still failing", "", "recovered", ""]
    assert notices_of("xxxx", DAY_S / 2) == ["failed", "", "still failing", ""]


def test_the_first_failure_is_kept() -> None:
    first, _ = merge_previous(None, run(T, "a"))
    second, _ = merge_previous(first, run(T + QUARTER, "b"))
    assert (second.failing_since, second.mailed, second.error) == (T, T, "b")
    recovered, _ = merge_previous(second, run(T + 2 * QUARTER))
    assert (recovered.failing_since, recovered.mailed) == (None, None)


def test_a_run_that_a_newer_one_has_overtaken_tells_about_pushes_only() -> None:
    """Its push took longer than the interval: what the newer run found of snapshots stays."""
    newer = replace(run(T + QUARTER, "the disk is full"), push_waits_since=T + QUARTER, failing_since=T + QUARTER)
    assert overtaken(newer, run(T)) == replace(newer, push_waits_since=None), "it was pushed after all"
    assert overtaken(run(T), newer) is None and overtaken(None, newer) is None
    assert overtaken(newer, newer) is None


def test_a_clock_set_back_does_not_suppress_notices() -> None:
    first, _ = merge_previous(None, run(T, "a"))
    _, notice = merge_previous(first, run(T - 3600, "a"))
    assert notice == "still failing"


def test_overlaps_are_recorded_and_kept() -> None:
    long = replace(run(T, "a"), failing_since=T, mailed=T)
    met = record_overlap(long, now=T + QUARTER, what="another run is at work")
    assert (met.met_at, met.ok, met.failing_since) == (T + QUARTER, False, T)
    after, _ = merge_previous(met, run(T + 2 * QUARTER))
    assert after.met == "another run is at work"
    assert record_overlap(None, now=T, what="x").ok


def test_records_are_written_and_read() -> None:
    one = replace(run(T, "a\nb", 7), notes=("n",), stored_bytes=5, met_at=T, met="m")
    assert read_run(to_json(one)) == one
    assert read_run(to_json(one).decode()) == one


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"[]", b"null", b"7", b"{}", b'{"started": "x", "ended": 1, "ok": true}', b"\xff"]
)
def test_unreadable_records_are_none(data: bytes | None) -> None:
    assert read_run(data) is None


def test_a_record_of_a_later_version_is_read() -> None:
    record = {**json.loads(to_json(run(T))), "unknown": "x"}
    assert read_run(json.dumps(record)) == run(T)


def test_a_record_of_version_519381b_is_read() -> None:
    """As that version wrote it."""
    written = {
        "started": T,
        "ended": T + 1.5,
        "ok": False,
        "number": None,
        "error": "e",
        "notes": ["n"],
        "stored_bytes": 5,
        "failing_since": T,
        "mailed": T,
        "met_at": None,
        "met": "",
        "put_off": 2,
        "missed": "",
        "missed_mailed": None,
        "generation": 3,
    }
    text = (json.dumps(written, indent=1) + "\n").encode()
    record = read_run(text)
    assert record and (record.started, record.notes, record.put_off, record.generation) == (T, ("n",), 2, 3)
    assert json.loads(to_json(record)) == {**written, "push_waits_since": None, "foreign": []}


def test_drills_are_reported_as_runs_are() -> None:
    failed = replace(run(T, "borg check: damaged"), number=None)
    assert log_line("lab", failed, "failed", DRILLS) == "restore drills of lab: borg check: damaged"
    text = mail_text(Mail("lab", "host-a", "x", ""), failed, "failed", DRILLS)
    assert "[sms] lab: restore drills on host-a failed\n" in text and "whether the cluster can be restored" in text
    assert "`sms overlay drill` runs one now" in text
    text = mail_text(Mail("lab", "h", "x", ""), run(T, number=9), "recovered", DRILLS)
    assert "work again, the last one with snapshot 9" in text


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("drill", "since", "warning"),
    [
        (None, NOW - 13 * 86400, ""),
        (None, NOW - 15 * 86400, "no restore drill has run for 15 d"),
        (run(NOW - 13 * 86400, number=3), 0, ""),
        (run(NOW - 15 * 86400, number=3), 0, "no restore drill has run for 15 d"),
        (run(NOW - 15 * 86400, number=3), NOW - 60, ""),
        (run(NOW, "jobs: 2 lost"), 0, "the last restore drill failed: jobs: 2 lost"),
        # The clock was set back.
        (run(NOW + 900 * 86400, number=3), NOW + 900 * 86400, "no restore drill has run since the clock was set back"),
    ],
)
def test_drills_that_failed_or_are_missing(drill: Run | None, since: float, warning: str) -> None:
    found = drill_warnings(drill, since=since, now=NOW)
    assert [text.startswith(warning) for text in found] == [True] * bool(warning)
    assert Judgement(True).plus(found).healthy is not bool(found)


def test_syslog_gets_one_line() -> None:
    failed = run(T, "e2fsck failed\n  on /dev/loop0\n")
    assert log_line("lab", failed, "") == "overlay snapshots of lab: e2fsck failed; on /dev/loop0", "every time"
    assert log_line("lab", run(T, number=7), "") == ""
    assert log_line("lab", run(T, number=7), "recovered") == "overlay snapshots of lab: recovered, with snapshot 7"


def test_mails() -> None:
    failed = run(T, "no room\nthe disk is full")
    first = message_from_string(mail_text(Mail("lab", "host-a", "ops@example.org", "today"), failed, "failed"))
    assert first["Subject"] == "[sms] lab: overlay snapshots on host-a failed"
    assert first["To"] == "ops@example.org"
    assert first["Auto-Submitted"] == "auto-generated", "prevents automatic replies"
    assert "    no room\n    the disk is full\n" in first.get_payload()
    assert "since today" not in first.get_payload()
    still = mail_text(Mail("lab", "host-a", "x", "yesterday"), failed, "still failing")
    assert "are still failing\n" in still and "failing since yesterday." in still
    recovered = mail_text(Mail("lab", "host-a", "x", ""), run(T, number=9), "recovered")
    assert "have recovered\n" in recovered and "the newest is 9" in recovered


FINE = {
    "now": T,
    "newest_taken": T - 300,
    "run": run(T - 290, number=3),
    "every": 15,
    "limit": 35,
    "since": T - 86400,
}


@pytest.mark.parametrize(
    ("changed", "healthy", "words"),
    [
        ({}, True, ""),
        ({"newest_taken": T - 36 * 60}, False, "is 36 min old, more than 35 min"),
        ({"newest_taken": T - 34 * 60}, True, ""),
        ({"newest_taken": None}, False, "there is no verified snapshot"),
        ({"newest_taken": None, "run": None, "since": T - 60}, True, ""),  # only just installed
        ({"newest_taken": T - 7 * DAY_S, "since": T - 60}, True, ""),  # it was stopped for a week
        ({"newest_taken": T + 3600}, False, "taken in the future: the clock has jumped"),
        ({"newest_taken": T + 60}, True, ""),
        ({"run": run(T - 290, "no room")}, False, "the last scheduled snapshot failed: no room"),
        ({"run": run(T - 31 * 60)}, False, "no scheduled snapshot has run for 31 min, one is due every 15 min"),
        ({"run": record_overlap(run(T - 31 * 60), now=T - 60, what="x")}, True, ""),
        ({"run": None}, False, "no scheduled snapshot has run for 24 h"),
        ({"run": None, "since": T - 29 * 60}, True, ""),
        ({"run": run(T + 86400), "since": T + 86400}, False, "since the clock was set back"),
        ({"damaged": 2}, True, "2 snapshots are damaged: `sms overlay list` shows which"),
        ({"damaged": 1}, True, "a snapshot is damaged"),
        ({"damaged": 2, "newest_taken": None, "since": T - 60}, False, "every snapshot is damaged"),
    ],
)
def test_judgement(changed: dict[str, object], healthy: bool, words: str) -> None:
    found = judge(Found(**{**FINE, **changed}))  # type: ignore[arg-type]
    assert found.healthy is healthy
    assert words in " | ".join(found.warnings)
    assert bool(found.warnings) is bool(words)
    assert len(found.warnings) < 2


@pytest.mark.parametrize(("damaged", "verified", "healthy"), [(0, False, True), (2, True, True), (2, False, False)])
def test_without_a_schedule(damaged: int, verified: bool, healthy: bool) -> None:
    assert judge_damage(damaged, verified=verified).healthy is healthy


def test_the_limit() -> None:
    assert (limit_minutes(15, None), limit_minutes(15, 20), limit_minutes(1, None)) == (35, 20, 7)


def test_prunes_postponed_too_often_are_a_failure() -> None:
    previous: Run | None = None
    errors = []
    for step in range(MAX_POSTPONED + 1):
        count, error = count_postponed(previous, "snapshots are being read")
        previous = replace(run(T + step * QUARTER), put_off=count)
        errors.append(error)
    assert errors[: MAX_POSTPONED - 1] == [""] * (MAX_POSTPONED - 1)
    assert all(
        error.startswith("prune: ") and "snapshots are being read" in error for error in errors[MAX_POSTPONED - 1 :]
    )
    assert "hint: `sms overlay prune`" in errors[-1]
    assert count_postponed(replace(run(T), put_off=0), "x") == (1, ""), "a prune resets the count"
    assert record_overlap(previous, now=T, what="x").put_off == MAX_POSTPONED + 1


def test_pushes_postponed_for_longer_than_a_day_are_a_failure() -> None:
    """A drill takes hours, but nothing ever releases the lock that a Borg killed with its host has left."""
    previous, errors = run(T), []
    for hours in (0, 6, 24, 25):
        since, error = judge_waiting_push(previous, "it is locked", now=T + hours * 3600)
        previous = replace(run(T + hours * 3600), push_waits_since=since)
        errors.append(error)
    assert since == T and errors[:3] == [""] * 3
    assert "postponed for 25 h: it is locked" in errors[3] and "hint: `sms overlay push --all-missing`" in errors[3]
    assert judge_waiting_push(run(T), "x", now=T + 1) == (T + 1, ""), "a push resets it"
    assert judge_waiting_push(previous, "x", now=T - 9) == (T - 9, ""), "the clock was set back"


GAP = {
    "every": 15,
    "installed": T - 9 * DAY_S,
    "lease_since": T - 8 * DAY_S,
    "generation": 7,
    "booted": T - 10 * DAY_S,
}


@pytest.mark.parametrize(
    ("at", "changed", "words"),
    [
        (T - 900, {}, ""),
        (T - 29 * 60, {}, ""),
        (T - 31 * 60, {}, "for 31 min before this one, one is due every 15 min: were cron"),
        (T - 5 * DAY_S, {}, "for 5 d before this one"),
        (T - 5 * DAY_S, {"every": 6000}, ""),
        (None, {}, "for 8 d"),
        (None, {"lease_since": T - 60}, ""),
        (T - 5 * DAY_S, {"installed": T - 60}, ""),
        # the services container was stopped, or on another host
        (T - 5 * DAY_S, {"lease_since": T - 60}, ""),
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 8, "booted": T - 2000}, ""),
        # the host was down, and the services container with it
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 8, "booted": T - 120}, "for 5 d .*the host was down"),
        # the host was down as well, but another host had the lease meanwhile
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 9, "booted": T - 120}, ""),
        (T + 5 * DAY_S, {"lease_since": T - 60}, ""),  # the clock was set back
    ],
)
def test_missed_runs(at: float | None, changed: dict[str, Any], words: str) -> None:
    previous = None if at is None else replace(run(at), generation=7)
    warning = find_gap(previous, Expected(**{**GAP, **changed}), now=T)
    assert re.search(words, warning) and bool(warning) is bool(words)


def test_a_gap_is_reported_once_a_day() -> None:
    previous: Run | None = None
    notices: list[str] = []
    for missed in ("", "none ran", "", "none ran", ""):
        previous, notice = merge_previous(previous, replace(run(T + len(notices) * 7200), missed=missed))
        notices.append(notice)
        assert bool(log_line("lab", previous, notice)) is bool(missed), "every gap is logged"
    assert notices == ["", "missed", "", "", ""]
    _, notice = merge_previous(previous, replace(run(T + 2 * DAY_S), missed="none ran"))
    assert notice == "missed"


def test_a_gap_before_a_failure_is_in_its_mail() -> None:
    failed, notice = merge_previous(None, replace(run(T, "no room"), missed="no scheduled snapshot ran for 5 h"))
    assert notice == "failed" and failed.missed_mailed == T
    assert log_line("lab", failed, notice) == "overlay snapshots of lab: no room; no scheduled snapshot ran for 5 h"
    text = mail_text(Mail("lab", "h", "x", ""), failed, notice)
    assert "No scheduled snapshot ran for 5 h" in text and "    no room\n" in text
    missed = mail_text(Mail("lab", "h", "x", ""), replace(run(T, number=9), missed="none ran"), "missed")
    assert "overlay snapshots on h were missed\n" in missed and "on h work, the newest is 9" in missed
