"""Our rule against borg's own, on the same series: borg is the judge."""

from __future__ import annotations

import os
import random
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from appliance.config.model import Retention
from appliance.plan.snapshots.retention import Candidate, decide

pytestmark = pytest.mark.real

ZONE = "Europe/Berlin"
RULES = [
    Retention(last=3, hourly=4, daily=3, weekly=2, monthly=2),
    Retention(last=1, hourly=0, daily=2, weekly=0, monthly=6),
    Retention(last=2, hourly=24, daily=7, weekly=4, monthly=6),
    Retention(last=5, hourly=1, daily=0, weekly=8, monthly=0),
]


CREATE = """
import sys
from borg.archiver import Archiver
archiver = Archiver()
for number, stamp in enumerate(sys.argv[2:], 1):
    words = ["borg", "create", "--timestamp", stamp, "%s::%d" % (sys.argv[1], number), "/etc/hostname"]
    status = archiver.run(archiver.get_args(words, None))
    assert status == 0, status
"""
"""borg's own `create`, for every archive in one process: its start takes longer than all that it does here."""


@pytest.fixture(scope="module")
def times() -> list[datetime]:
    """Across New Year with its week 53, uneven, without an hour that comes twice: there we differ, and mean it."""
    chance = random.Random(4)
    at, made = datetime(2026, 12, 1, 3, 7, tzinfo=UTC), []
    for _ in range(48):
        at += timedelta(minutes=chance.choice([15, 15, 40, 90, 600, 1700, 3000]))
        made.append(at)
    return made


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, need_borg: str, times: list[datetime]) -> Path:
    folder = tmp_path_factory.mktemp("borg")
    borg(folder, need_borg, "init", "--encryption=none", str(folder / "r"))
    stamps = [at.strftime("%Y-%m-%dT%H:%M:%S") for at in times]
    # Its first line names the Python that has borg.
    python = Path(need_borg).read_text().splitlines()[0].removeprefix("#!").split()
    borg(folder, python[0], *python[1:], "-c", CREATE, str(folder / "r"), *stamps)
    return folder


@pytest.fixture(scope="module")
def need_borg() -> str:
    from tests.conftest import find_tool

    return find_tool("borg")


def borg(folder: Path, program: str, *words: str) -> str:
    """What borg says, with its cache and its keys below the folder."""
    environment = {**os.environ, "BORG_BASE_DIR": str(folder), "TZ": ZONE, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [program, *words], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    return done.stdout


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_same_stay(repository: Path, need_borg: str, times: list[datetime], rule: Retention) -> None:
    counts = [f"--keep-{name}={count}" for name, count in rule.model_dump().items()]
    said = borg(repository, need_borg, "prune", "--dry-run", "--list", *counts, str(repository / "r"))
    theirs = {int(number) for number in re.findall(r"^Keeping archive \(.*?\): +(\d+) ", said, re.MULTILINE)}
    snapshots = [Candidate(number, at.timestamp(), True) for number, at in enumerate(times, 1)]
    ours = decide(snapshots, rule, now=times[-1].timestamp(), zone=ZoneInfo(ZONE))
    assert {one.number for one in ours if one.keep} == theirs, said
    assert len(theirs) < len(times)
