"""Power failures and full disks at every point of every path that writes state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.recording import compile_recorder, record, run_full
from tests.crash.replay import Disk, failures, read_state, sample, write_state
from tests.crash.workloads import WORKLOADS, WRONG

pytestmark = pytest.mark.slow
STATES, RUNS = 20, 5
"""Samples of a workload: states after a power failure, and runs on a full disk; the full run of the tests has all."""
REPORTED = {"OSError", "Problem", "SmsError", "CommandError", "Refused", "HttpProblem"}
"""What a full disk may raise: errors that are shown to the user."""
CASES = [
    *(pytest.param(name, True, id=f"{name}, sampled") for name in WORKLOADS),
    *(pytest.param(name, False, id=name, marks=pytest.mark.full) for name in WORKLOADS),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where one can be: thousands of states are written."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sms-crash-", dir=place if place.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize(("name", "sampled"), CASES)
def test_whatever_a_power_failure_leaves_is_recovered(name: str, sampled: bool, library: Path, memory: Path) -> None:
    records = record(name, memory / "run", library)
    root = str((memory / "run" / "root").resolve())
    disk = Disk(root)
    for one in records:
        disk.apply(one)
    seen = {path: data for path, data in disk.state().items() if not path.endswith("-shm")}
    there = {path: data for path, data in read_state(Path(root)).items() if not path.endswith("-shm")}
    assert seen == there, "the recorder has missed a change"
    states = list(enumerate(failures(root, records, memory=WORKLOADS[name].memory), 1))
    assert len(states) > 2
    for number, (state, marks) in sample(states, STATES if sampled else len(states)):
        copy = memory / "state"
        write_state(state, root, copy)
        try:
            WORKLOADS[name].check(copy, marks)
        except BaseException as error:
            shutil.rmtree(memory / "run")
            raise AssertionError(f"state {number}, after {marks}: {sorted(state)}") from error
        shutil.rmtree(copy)
    print(f"{name}: {len(records)} records, {len(states)} states")


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


@pytest.mark.parametrize(("name", "sampled"), CASES)
def test_a_disk_that_is_full_at_any_point_loses_nothing(name: str, sampled: bool, library: Path, memory: Path) -> None:
    runs = run_full(name, memory, library, RUNS if sampled else 0)
    assert sum(bool(run.error) for run in runs) > (0 if sampled else 2)
    for run in runs:
        assert run.error in REPORTED | {""}, run
        assert run.hint or not run.error, run
        assert run.again == "", run
        WORKLOADS[name].check(Path(run.folder), run.marks)
    print(f"{name}: {len(runs)} runs, {sum(bool(run.error) for run in runs)} failed")
