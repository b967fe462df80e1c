"""The record of `make test-full`: what is recorded, left out at the same content, and reported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.record import (
    NO_OUTCOME,
    OUTCOME,
    RECORD,
    Outcome,
    Part,
    find_content,
    read_outcome,
    read_record,
    summarize,
    write_record,
)
from tests.run import find_parts

DAY = 24 * 3600
NOW = 1_800_000_000.0
GOOD = Part("tests/real/a", "c" * 40, "content", "2027-01-14T08:00:00Z", 12, 0, Outcome(3, (), {"x": "no KVM"}))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    bad = replace(GOOD, part="tests/real/b", status=1, outcome=Outcome(1, ("b::one",)))
    path = tmp_path / "full.json"
    assert read_record(path) == {}
    write_record([bad, GOOD], path)
    assert read_record(path) == {GOOD.part: GOOD, bad.part: bad}
    assert [one.good for one in read_record(path).values()] == [True, False]


@pytest.mark.slow
def test_a_run_writes_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    cases = "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\ndef test_not(): pytest.skip('no tool')\n"
    (tmp_path / "test_it.py").write_text(cases)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    outcome = tmp_path / "outcome"
    environment = {"PYTHONPATH": str(ROOT), OUTCOME: str(outcome), "PATH": "/usr/bin:/bin"}
    assert subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True).returncode == 1
    found = read_outcome(outcome)
    assert (found.passed, found.failed) == (1, ("test_it.py::test_bad",))
    assert found.skipped == {"test_it.py::test_not": "Skipped: no tool"}


def test_a_run_that_was_killed_has_failed(tmp_path: Path) -> None:
    assert read_outcome(tmp_path / "none").failed == (NO_OUTCOME,)


def test_the_content_is_the_tree_without_the_record(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    def commit(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-qm", name)
        return find_content(tmp_path)

    git("init", "-q")
    first = commit("code", "1")
    assert commit(RECORD, "[]") == first
    (tmp_path / RECORD).write_text("[1]")
    assert find_content(tmp_path) == first, "a run in progress has changed the record"
    assert commit("code", "2") not in (first, "")
    (tmp_path / "code").write_text("3")
    assert find_content(tmp_path) == ""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], ["no run is recorded"]),
        ([GOOD], ["the last whole run is 1 hours old (cccccccc), 3 passed, 1 skipped, 0 of 1 parts failed"]),
        (
            [GOOD, replace(GOOD, part="b", content="other", commit="d" * 40, date="2027-01-11T09:00:00Z")],
            ["no whole run of one content; the oldest part is 3 days old (cccccccc, dddddddd)"],
        ),
        ([GOOD, replace(GOOD, part="b", status=2)], ["1 of 2 parts failed", "failed at cccccccc: b: status 2"]),
        ([replace(GOOD, outcome=Outcome())], ["1 of 1 parts failed", "failed at cccccccc: tests/real/a: no test ran"]),
        (
            [replace(GOOD, outcome=Outcome(0, ("w", "x", "y", "z")))],
            ["1 of 1 parts failed", "tests/real/a: w, x, y and 1 more"],
        ),
    ],
)
def test_what_make_test_reports_of_it(parts: list[Part], expected: list[str]) -> None:
    now = 1_799_917_200.0
    lines = list(summarize({part.part: part for part in parts}, [part.part for part in parts], now))
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True)), lines


def test_a_part_that_never_ran_is_named() -> None:
    assert list(summarize({GOOD.part: GOOD}, [GOOD.part, "new"], NOW))[-1] == "  never run: new"


def test_the_record_of_this_tree_can_be_read() -> None:
    assert all(json.dumps(part) for part in read_record())
    assert len(set(find_parts())) == len(find_parts())
