"""Power failures and full disks at every point of every path that writes state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.recording import compile_recorder, record, run_full
from tests.crash.replay import Disk, failures, read_state, write_state
from tests.crash.workloads import WORKLOADS, WRONG

pytestmark = pytest.mark.slow
SAMPLE = ("move mark", "store", "inventory", "signing key", "seed of an overlay")
"""What each run of the tests has, of each kind one; the others are in the full one."""
REPORTED = {"OSError", "Problem", "SmsError", "CommandError", "Refused", "HttpProblem"}
"""What a full disk may raise: errors that are shown to the user."""
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in WORKLOADS]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where one can be: thousands of states are written."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sms-crash-", dir=place if place.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_power_failure_leaves_is_recovered(name: str, library: Path, memory: Path) -> None:
    records = record(name, memory / "run", library)
    root = str((memory / "run" / "root").resolve())
    disk = Disk(root)
    for one in records:
        disk.apply(one)
    seen = {path: data for path, data in disk.state().items() if not path.endswith("-shm")}
    there = {path: data for path, data in read_state(Path(root)).items() if not path.endswith("-shm")}
    assert seen == there, "the recorder has missed a change"
    number = 0
    for number, (state, marks) in enumerate(failures(root, records, memory=WORKLOADS[name].memory), 1):
        copy = memory / "state"
        write_state(state, root, copy)
        try:
            WORKLOADS[name].check(copy, marks)
        except BaseException as error:
            shutil.rmtree(memory / "run")
            raise AssertionError(f"state {number}, after {marks}: {sorted(state)}") from error
        shutil.rmtree(copy)
    print(f"{name}: {len(records)} records, {number} states")
    assert number > 2


@pytest.mark.parametrize("name", ["not flushed", "folder not flushed"])
def test_a_wrong_order_is_found(name: str, library: Path, memory: Path) -> None:
    records = record(name, memory / "run", library)
    found = 0
    for state, marks in failures(str((memory / "run" / "root").resolve()), records):
        write_state(state, str((memory / "run" / "root").resolve()), memory / "state")
        try:
            WRONG[name].check(memory / "state", marks)
        except AssertionError:
            found += 1
        shutil.rmtree(memory / "state")
    assert found


def test_an_ignored_short_write_is_found(library: Path, memory: Path) -> None:
    name, found = "not written whole", 0
    for run in run_full(name, memory, library):
        try:
            WRONG[name].check(Path(run.folder), run.marks)
        except AssertionError:
            found += 1
    assert found


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_at_any_point_loses_nothing(name: str, library: Path, memory: Path) -> None:
    runs = run_full(name, memory, library)
    assert sum(bool(run.error) for run in runs) > 2
    for run in runs:
        assert run.error in REPORTED | {""}, run
        assert run.hint or not run.error, run
        assert run.again == "", run
        WORKLOADS[name].check(Path(run.folder), run.marks)
    print(f"{name}: {len(runs)} runs, {sum(bool(run.error) for run in runs)} failed")
