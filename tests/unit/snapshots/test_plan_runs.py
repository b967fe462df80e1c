"""Scheduled runs: who is told what, and when something is wrong with snapshots."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from email import message_from_string
from typing import Any

import pytest

from appliance.plan.snapshots.runs import (
    DAY_S,
    PUT_OFF,
    Run,
    Word,
    find_gap,
    follow,
    judge,
    limit_minutes,
    log_line,
    mail_text,
    meet,
    put_off,
    read_run,
)

T = 1_000_000.0
QUARTER = 900.0


def run(at: float, error: str = "", number: int | None = None) -> Run:
    return Run(at - 5, at, not error, number, error)


def words_of(outcomes: str, every_s: float = QUARTER) -> list[Word]:
    """What is said of a series of runs: `.` fine, `x` failed."""
    previous: Run | None = None
    said = []
    for step, outcome in enumerate(outcomes):
        previous, word = follow(previous, run(T + step * every_s, "no room" if outcome == "x" else "", step))
        said.append(word)
    return said


def test_who_is_told_what() -> None:
    assert words_of("...") == ["", "", ""]
    assert words_of(".xxx.") == ["", "failed", "", "", "well again"]
    assert words_of("x.x.") == ["failed", "well again"] * 2
    assert words_of("x" * 98 + "..") == ["failed", *[""] * 95, "still failing", "", "well again", ""]
    assert words_of("xxxx", DAY_S / 2) == ["failed", "", "still failing", ""]


def test_when_it_began_is_kept() -> None:
    first, _ = follow(None, run(T, "a"))
    second, _ = follow(first, run(T + QUARTER, "b"))
    assert (second.failing_since, second.mailed, second.error) == (T, T, "b")
    well, _ = follow(second, run(T + 2 * QUARTER))
    assert (well.failing_since, well.mailed) == (None, None)


def test_a_clock_that_was_put_back_silences_nobody() -> None:
    first, _ = follow(None, run(T, "a"))
    _, word = follow(first, run(T - 3600, "a"))
    assert word == "still failing"


def test_what_met_another_is_noted_and_kept() -> None:
    long = replace(run(T, "a"), failing_since=T, mailed=T)
    met = meet(long, now=T + QUARTER, what="another run is at work")
    assert (met.met_at, met.ok, met.failing_since) == (T + QUARTER, False, T)
    after, _ = follow(met, run(T + 2 * QUARTER))
    assert after.met == "another run is at work"
    assert meet(None, now=T, what="x").ok


def test_it_is_written_and_read() -> None:
    one = replace(run(T, "a\nb", 7), notes=("n",), stored_bytes=5, met_at=T, met="m")
    assert read_run(one.text()) == one
    assert read_run(one.text().decode()) == one


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"[]", b"null", b"7", b"{}", b'{"started": "x", "ended": 1, "ok": true}', b"\xff"]
)
def test_what_is_no_record_is_none(data: bytes | None) -> None:
    assert read_run(data) is None


def test_a_record_of_a_later_version_is_read() -> None:
    told = {**json.loads(run(T).text()), "mood": "fine"}
    assert read_run(json.dumps(told)) == run(T)


def test_syslog_gets_one_line() -> None:
    failed = run(T, "e2fsck failed\n  on /dev/loop0\n")
    assert log_line("lab", failed, "") == "overlay snapshots of lab: e2fsck failed; on /dev/loop0", "every time"
    assert log_line("lab", run(T, number=7), "") == ""
    assert log_line("lab", run(T, number=7), "well again") == "overlay snapshots of lab: well again, with snapshot 7"


def test_mails() -> None:
    failed = run(T, "no room\nthe disk is full")
    first = message_from_string(mail_text("lab", "host-a", failed, "failed", to="ops@example.org", since="today"))
    assert first["Subject"] == "[sms] lab: overlay snapshots on host-a failed"
    assert first["To"] == "ops@example.org"
    assert first["Auto-Submitted"] == "auto-generated", "no answer of somebody's holiday"
    assert "    no room\n    the disk is full\n" in first.get_payload()
    assert "since today" not in first.get_payload()
    still = mail_text("lab", "host-a", failed, "still failing", to="x", since="yesterday")
    assert "are still failing\n" in still and "failing since yesterday." in still
    well = mail_text("lab", "host-a", run(T, number=9), "well again", to="x", since="")
    assert "are well again\n" in well and "the newest is 9" in well


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
        ({"run": meet(run(T - 31 * 60), now=T - 60, what="x")}, True, ""),
        ({"run": None}, False, "no scheduled snapshot has run for 24 h"),
        ({"run": None, "since": T - 29 * 60}, True, ""),
        ({"run": run(T + 86400), "since": T + 86400}, False, "since the clock was put back"),
        ({"damaged": 2}, True, "2 snapshots are damaged: `sms overlay list` shows which"),
        ({"damaged": 1}, True, "a snapshot is damaged"),
    ],
)
def test_what_is_wrong(changed: dict[str, object], healthy: bool, words: str) -> None:
    found = judge(**{**FINE, **changed})  # type: ignore[arg-type]
    assert found.healthy is healthy
    assert words in " | ".join(found.warnings)
    assert bool(found.warnings) is bool(words)
    assert len(found.warnings) < 2


def test_the_limit() -> None:
    assert (limit_minutes(15, None), limit_minutes(15, 20), limit_minutes(1, None)) == (35, 20, 7)


def test_a_prune_that_is_put_off_again_and_again_is_a_failure() -> None:
    previous: Run | None = None
    said = []
    for step in range(PUT_OFF + 1):
        count, words = put_off(previous, "snapshots are being read")
        previous = replace(run(T + step * QUARTER), put_off=count)
        said.append(words)
    assert said[: PUT_OFF - 1] == [""] * (PUT_OFF - 1)
    assert all(words.startswith("prune: ") and "snapshots are being read" in words for words in said[PUT_OFF - 1 :])
    assert "hint: `sms overlay prune`" in said[-1]
    assert put_off(replace(run(T), put_off=0), "x") == (1, ""), "one that could begins anew"
    assert meet(previous, now=T, what="x").put_off == PUT_OFF + 1


GAP = {
    "now": T,
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
        # it was stopped, or on another host
        (T - 5 * DAY_S, {"lease_since": T - 60}, ""),
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 8, "booted": T - 2000}, ""),
        # the host was down, and the appliance with it
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 8, "booted": T - 120}, "for 5 d .*the host was down"),
        # it was down as well, but another one had it meanwhile
        (T - 5 * DAY_S, {"lease_since": T - 60, "generation": 9, "booted": T - 120}, ""),
        (T + 5 * DAY_S, {"lease_since": T - 60}, ""),  # the clock was put back
    ],
)
def test_runs_that_did_not_take_place(at: float | None, changed: dict[str, Any], words: str) -> None:
    previous = None if at is None else replace(run(at), generation=7)
    said = find_gap(previous, **{**GAP, **changed})
    assert re.search(words, said) and bool(said) is bool(words)


def test_a_gap_is_told_once_a_day() -> None:
    previous: Run | None = None
    said = []
    for missed in ("", "none ran", "", "none ran", ""):
        previous, word = follow(previous, replace(run(T + len(said) * 7200), missed=missed))
        said.append(word)
        assert bool(log_line("lab", previous, word)) is bool(missed), "syslog is told every time"
    assert said == ["", "missed", "", "", ""]
    _, word = follow(previous, replace(run(T + 2 * DAY_S), missed="none ran"))
    assert word == "missed"


def test_a_gap_before_a_failure_is_in_its_mail() -> None:
    failed, word = follow(None, replace(run(T, "no room"), missed="no scheduled snapshot ran for 5 h"))
    assert word == "failed" and failed.missed_mailed == T
    assert log_line("lab", failed, word) == "overlay snapshots of lab: no room; no scheduled snapshot ran for 5 h"
    text = mail_text("lab", "h", failed, word, to="x", since="")
    assert "No scheduled snapshot ran for 5 h" in text and "    no room\n" in text
    well = mail_text("lab", "h", replace(run(T, number=9), missed="none ran"), "missed", to="x", since="")
    assert "overlay snapshots on h were missed\n" in well and "on h work, the newest is 9" in well
