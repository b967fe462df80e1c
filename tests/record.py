"""The record of `make test-full`: the last run of each part, as JSON in the tree, in commits of its own.

A part that has passed is not run again at the same content: that of the commit without the record.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.places import ROOT

RECORD = "tests/full.json"
OUTCOME = "SMS_TESTS_OUTCOME"
"""Set in the environment of a run of pytest: the file that it writes its outcome to."""
NO_OUTCOME = "the run ended without an outcome"


@dataclass(frozen=True)
class Outcome:
    """What came of tests: a number, identifiers, and reasons by identifier."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The last run of a part. ``date``: its end, in UTC; ``status``: that of pytest, 0 if nothing was selected."""

    part: str
    commit: str
    content: str
    date: str
    seconds: int
    status: int
    outcome: Outcome

    @property
    def good(self) -> bool:
        return self.status == 0 and not self.outcome.failed and bool(self.outcome.passed or self.outcome.skipped)


def git(*words: str, root: Path = ROOT) -> str:
    """Return the output of git; an error of it ends the run with its message."""
    return subprocess.run(
        ["git", "-c", f"safe.directory={root}", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def find_content(root: Path = ROOT) -> str:
    """Return the identity of what is committed, without the record; empty if the tree has other changes."""
    if git("status", "--porcelain", "--", ".", f":!{RECORD}", root=root):
        return ""
    lines = [line for line in git("ls-tree", "-r", "HEAD", root=root).splitlines() if not line.endswith(f"\t{RECORD}")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_outcome(path: Path) -> Outcome:
    """Return what a run of pytest has written; a killed one has failed."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return Outcome(failed=(NO_OUTCOME,))
    return Outcome(found["passed"], tuple(found["failed"]), found["skipped"])


def read_slowest(path: Path) -> list[tuple[str, float]]:
    """Return the slowest tests of a run, with their seconds; none where it has written no outcome."""
    return [(name, seconds) for name, seconds in json.loads(path.read_text())["slowest"]] if path.exists() else []


def read_record(path: Path = ROOT / RECORD) -> dict[str, Part]:
    """Return the parts by name; none if there is no record yet."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())
    outcomes = [row.pop("outcome") for row in rows]
    return {
        row["part"]: Part(**row, outcome=Outcome(one["passed"], tuple(one["failed"]), one["skipped"]))
        for row, one in zip(rows, outcomes, strict=True)
    }


def write_record(parts: Iterable[Part], path: Path = ROOT / RECORD) -> None:
    """Replace the record."""
    rows = [asdict(part) for part in sorted(parts, key=lambda part: part.part)]
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(rows, indent=1) + "\n")
    beside.rename(path)


def age(date: str, now: float) -> str:
    """Return how long ago a date of the record was, in hours or days."""
    hours = (now - calendar.timegm(time.strptime(date, "%Y-%m-%dT%H:%M:%SZ"))) / 3600
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def summarize(record: Mapping[str, Part], expected: Iterable[str], now: float) -> Iterator[str]:
    """Yield how old the last whole run is, and what of it failed, was skipped or is missing."""
    parts = [record[name] for name in sorted(expected) if name in record]
    missing = sorted(set(expected) - set(record))
    if not parts:
        yield f"make test-full: no run is recorded in {RECORD}"
        return
    commits = sorted({part.commit[:8] for part in parts})
    one = len({part.content for part in parts}) == 1 and not missing
    oldest = min(part.date for part in parts)
    passed, skipped = sum(part.outcome.passed for part in parts), sum(len(part.outcome.skipped) for part in parts)
    yield (
        f"make test-full: {'the last whole run is' if one else 'no whole run of one content; the oldest part is'}"
        f" {age(oldest, now)} old ({', '.join(commits[:5])}{' and others' if len(commits) > 5 else ''}),"
        f" {passed} passed, {skipped} skipped, {sum(not part.good for part in parts)} of {len(parts)} parts failed"
    )
    for part in parts:
        if not part.good:
            failed = part.outcome.failed or (f"status {part.status}" if part.status else "no test ran",)
            more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
            yield f"  failed at {part.commit[:8]}: {part.part}: {', '.join(failed[:3])}{more}"
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        yield f"  never run: {', '.join(missing[:5])}{more}"
