"""The lease of a folder with state: who may take it, and when a holder has lost it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from appliance.shared.lease import peek
from appliance.shared.state_lease import LEASE_FILE, LOCK_FILE, StateLease, parse_state_lease
from tests.unit.services.conftest import load, run_program

FOLDER = "/var/spool/slurmctld"


class Clock:
    """Seconds since boot, which pass when a test says so; the program sees no others."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def smslease(smsfiles: ModuleType, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    load("smssync.py", monkeypatch)
    module = load("smslease.py", monkeypatch)
    monkeypatch.setattr(time, "clock_gettime", lambda _: clock())
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setenv("SMS_HOLDER", "one")
    return module


@pytest.fixture
def folder(root: Path) -> Path:
    path = root / FOLDER[1:]
    path.mkdir(parents=True)
    return path


@pytest.fixture
def make(smslease: ModuleType, folder: Path) -> Iterator[Callable[[], Any]]:
    """A task of this host; several of them share its locks."""
    made: list[Any] = []

    def one() -> Any:
        made.append(smslease.Lease(FOLDER))
        return made[-1]

    yield one
    for each in made:
        each.unlock()


def read(folder: Path) -> StateLease:
    return parse_state_lease((folder / LEASE_FILE).read_bytes())


def elsewhere(folder: Path, **changes: Any) -> None:
    """Write the lease as a task of another host, whose locks are not seen here."""
    fields = {"generation": 4, "holder": "two", "boot": "another", "token": "t", "since": 1.5, **changes}
    (folder / LEASE_FILE).write_text(json.dumps(fields))


def beat(folder: Path, number: int) -> None:
    (folder / LOCK_FILE).write_text(f"t {number:12d}\n")


# Taking it


def test_each_task_takes_the_next_generation(make: Callable[[], Any], folder: Path) -> None:
    for generation in (1, 2, 3):
        task = make()
        assert task.attempt() == ""
        assert (read(folder).generation, read(folder).holder) == (generation, "one")
        assert peek((folder / LEASE_FILE).read_bytes()) == (generation, "one"), "as that of an overlay"
        task.release()
        assert (read(folder).generation, read(folder).holder, read(folder).last) == (generation, None, "one")


def test_another_task_of_the_host_waits_for_the_lock_alone(make: Callable[[], Any], clock: Clock) -> None:
    first, second = make(), make()
    assert first.attempt() == ""
    for _ in range(3):
        clock.now += 1000
        assert second.attempt() == "one holds it"
    first.unlock()  # it was killed
    assert second.attempt() == "", "no waiting: it is dead"
    assert second.mine["generation"] == 2


def test_a_holder_on_another_host_is_waited_for(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock
) -> None:
    elsewhere(folder)
    task = make()
    for number in range(3):
        beat(folder, number)
        assert "two holds it (generation 4)" in task.attempt()
        clock.now += smslease.TTL_S - 1
        assert "two holds it" in task.attempt()
    clock.now += 1
    assert "only slow" in task.attempt(), "taken, but not used yet"
    assert (read(folder).generation, read(folder).holder) == (5, "one")
    clock.now += smslease.SETTLE_S - 1
    assert "only slow" in task.attempt()
    clock.now += 1
    assert task.attempt() == ""


def test_one_that_was_only_slow_sees_who_took_it(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock
) -> None:
    """Whatever it writes, its service has ended before the other one's begins."""
    slow = make()
    assert slow.attempt() == ""
    slow.mine["boot"] = "another"
    elsewhere(folder, generation=2)
    assert smslease.RENEW_S < smslease.SETTLE_S
    slow.renew()
    assert "two has it (generation 2)" in slow.lost
    assert read(folder).holder == "two", "it has not written over it"


def test_of_two_that_take_it_at_once_one_stays(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock
) -> None:
    elsewhere(folder)
    task = make()
    assert "two holds it" in task.attempt()
    clock.now += smslease.TTL_S
    assert "only slow" in task.attempt()
    elsewhere(folder, holder="three", generation=5)
    clock.now += smslease.SETTLE_S
    assert "three has the same generation (5)" in task.attempt()
    assert task.mine is None and "three holds it" in task.attempt()


def test_the_first_lease_of_all_is_written_by_one(make: Callable[[], Any], folder: Path) -> None:
    task, read_it = make(), folder / LEASE_FILE

    def write_meanwhile() -> Any:
        found = dict(free)
        elsewhere(folder, generation=1)
        return found

    free = task.read()
    task.read = write_meanwhile
    assert task.attempt() == "another task has taken it just now"
    assert json.loads(read_it.read_text())["holder"] == "two"
    assert sorted(path.name for path in folder.iterdir()) == [LEASE_FILE, LOCK_FILE]


def test_without_locks_the_number_decides(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without flock: a holder of this host is not taken for dead."""

    def flock(*_: Any) -> None:
        raise OSError(smslease.NO_LOCKS[0], "none")

    monkeypatch.setattr(smslease.fcntl, "flock", flock)
    elsewhere(folder, boot=smslease.smssync.boot())
    task = make()
    assert "two holds it" in task.attempt()
    clock.now += smslease.TTL_S
    assert "only slow" in task.attempt()
    monkeypatch.setattr(smslease.fcntl, "flock", fcntl.flock)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "[" * 60000, '{"generation": -1}', '{"generation": "4"}', '{"generation": 1, "holder": 5}'),
        *('{"generation": 1, "holder": "a\\u0000b"}', '{"generation": 1, "since": "x"}', '{"generation": 1e400}'),
    ],
)
def test_a_damaged_lease_is_not_an_empty_one(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, text: str
) -> None:
    (folder / LEASE_FILE).write_text(text)
    with pytest.raises(smslease.Refused, match="damaged"):
        make().attempt()
    with pytest.raises((ValueError, TypeError)):
        parse_state_lease(text.encode())
    assert (folder / LEASE_FILE).read_text() == text


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_not_followed(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, kind: str
) -> None:
    path = folder / LEASE_FILE
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/etc/passwd")
    with pytest.raises((smslease.Refused, OSError)):
        make().attempt()


# Holding it

RENEWALS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("its own", {}, ""),
    ("removed", None, ""),
    ("of an older generation", {"generation": 1, "token": "t", "holder": "two"}, ""),
    ("of a newer generation", {"generation": 3, "token": "t", "holder": "two"}, "two has it (generation 3)"),
    ("the same generation of another", {"token": "t", "holder": "two"}, "two has the same generation (2)"),
    ("moved", {"generation": 3, "moved": "container"}, "moved to container (generation 3)"),
]


@pytest.mark.parametrize(("changes", "why"), [row[1:] for row in RENEWALS], ids=[row[0] for row in RENEWALS])
def test_renewals(
    make: Callable[[], Any], folder: Path, clock: Clock, changes: dict[str, Any] | None, why: str
) -> None:
    make().attempt()
    task = make()
    (folder / LEASE_FILE).write_text('{"generation": 1}')
    (folder / LOCK_FILE).unlink()
    assert "only slow" in task.attempt()
    task.settle_at = None
    before = (folder / LOCK_FILE).read_bytes()
    own = json.loads((folder / LEASE_FILE).read_text())
    if changes is None:
        (folder / LEASE_FILE).unlink()
    else:
        (folder / LEASE_FILE).write_text(json.dumps({**own, **changes}))
    clock.now += 5
    task.renew()
    assert why in task.lost and bool(task.lost) == bool(why)
    if not why:
        assert json.loads((folder / LEASE_FILE).read_text()) == own
    assert ((folder / LOCK_FILE).read_bytes() != before) == (not why), "it is silent once it is lost"


def test_one_that_was_frozen_does_not_renew(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock
) -> None:
    task = make()
    task.attempt()
    before = (folder / LOCK_FILE).read_bytes()
    clock.now += smslease.LIMIT_S
    assert task.check() == ""
    clock.now += 1
    task.renew()
    assert "could not be renewed for 21 s" in task.lost and task.check() == task.lost
    assert (folder / LOCK_FILE).read_bytes() == before
    task.release()
    assert read(folder).holder == "one", "it is not released: another one has it perhaps"


def test_a_removed_lock_is_made_again(make: Callable[[], Any], folder: Path) -> None:
    task, other = make(), make()
    task.attempt()
    (folder / LOCK_FILE).unlink()
    task.renew()
    assert task.lost == "" and other.attempt() == "one holds it"
    (folder / LOCK_FILE).unlink()
    assert other.lock()
    task.renew()
    assert task.lost == "another task has locked the folder"


def test_times_leave_room() -> None:
    """A holder has ended its service before another one counts it as dead."""
    text = (Path(__file__).parents[3] / "definitions/runtime/smslease.py").read_text()
    values = {
        line.split(" = ")[0]: line.split(" = ")[1].split("  #")[0] for line in text.splitlines() if "_S = " in line
    }
    renew, limit, ttl = (int(values[name]) for name in ("RENEW_S", "LIMIT_S", "TTL_S"))
    assert renew * 3 < limit < ttl - 2 * renew


# Moves


def test_a_moved_state_is_not_started(make: Callable[[], Any], smslease: ModuleType, root: Path, folder: Path) -> None:
    assert run_program("sms-lease", root, "--moved", "container", FOLDER).returncode == 0
    with pytest.raises(smslease.Refused, match=r"moved to container .generation 1.*sms migrate"):
        make().attempt()
    done = run_program("sms-lease", root, "--free", "7", FOLDER)
    assert parse_state_lease(done.stdout).generation == 7
    task = make()
    assert task.attempt() == ""
    assert task.mine["generation"] == 8


def test_a_change_twice_is_the_same(root: Path, folder: Path) -> None:
    for words in (("--moved", "container"), ("--free", "7")):
        first, second = (run_program("sms-lease", root, *words, FOLDER).stdout for _ in range(2))
        assert first == second != b""
    assert run_program("sms-lease", root, "--free", "6", FOLDER).returncode == 3
    assert read(folder).generation == 7


def test_no_change_of_a_lease_that_is_held(make: Callable[[], Any], root: Path, folder: Path) -> None:
    task = make()
    task.attempt()
    for words in (("--moved", "container"), ("--free", "7")):
        done = run_program("sms-lease", root, *words, FOLDER)
        assert done.returncode == 3 and b"one holds it" in done.stderr
    assert json.loads(run_program("sms-lease", root, FOLDER).stdout)["holder"] == "one"


def test_a_holder_of_before_a_reboot_counts_as_ended_when_it_is_silent(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power failure: a change of the lease waits as long as the next task would."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(smslease.time, "sleep", sleep)
    elsewhere(folder)
    beat(folder, 1)
    began, lease = clock.now, make()
    assert lease.lock()
    lease.outlast(lease.read())
    assert smslease.TTL_S <= clock.now - began < 2 * smslease.TTL_S


def test_a_holder_elsewhere_that_lives_is_not_outlasted(
    make: Callable[[], Any], smslease: ModuleType, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds
        beat(folder, int(clock.now))

    monkeypatch.setattr(smslease.time, "sleep", sleep)
    elsewhere(folder)
    beat(folder, 1)
    began, lease = clock.now, make()
    assert lease.lock()
    with pytest.raises(smslease.Refused, match=r"two holds it .generation 4"):
        lease.outlast(lease.read())
    assert clock.now - began < smslease.TTL_S


def test_the_text_form_is_the_same_on_both_sides(make: Callable[[], Any], smslease: ModuleType, folder: Path) -> None:
    assert (smslease.LEASE, smslease.LOCK) == (LEASE_FILE, LOCK_FILE)
    make().attempt()
    lease = read(folder)
    assert lease.text() == (folder / LEASE_FILE).read_bytes()
    assert smslease.parse(lease.text()) == json.loads(lease.text())
