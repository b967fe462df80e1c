"""Records and locks of `sms-run --jobsync`: who reads them, who uses a service, what is alive."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.services.conftest import load


@pytest.fixture
def smssync(smsfiles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("smssync.py", monkeypatch)


GOOD: dict[str, Any] = {
    "service": "it",
    "state": "ready",
    "detail": "",
    "since": 1.5,
    "holds": ["munge"],
    "process": None,
}
RECORDS: list[tuple[str, Any, bool]] = [
    ("whole", GOOD, True),
    ("another name", {**GOOD, "service": "other"}, False),
    ("unknown state", {**GOOD, "state": "gone"}, False),
    ("no detail", {**GOOD, "detail": None}, False),
    ("holds is a text", {**GOOD, "holds": "munge"}, False),
    ("holds has a number", {**GOOD, "holds": [1]}, False),
    ("no time", {**GOOD, "since": None}, False),
    ("process is a number", {**GOOD, "process": 1}, False),
    ("a list", [GOOD], False),
    ("half a file", json.dumps(GOOD)[:-9], False),
    ("empty", "", False),
    ("too long", json.dumps({**GOOD, "detail": "x" * 70000}), False),
    ("deep", "[" * 60000, False),
    ("no text", b"\xff\xfe", False),
]


@pytest.mark.parametrize(("value", "readable"), [row[1:] for row in RECORDS], ids=[row[0] for row in RECORDS])
def test_unreadable_records_are_none(smssync: ModuleType, root: Path, value: Any, readable: bool) -> None:
    path = root / "run/sms/jobsync/it.json"
    path.parent.mkdir()
    path.write_bytes(
        value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()
    )
    assert (smssync.read("it") is not None) == readable
    assert list(smssync.read_all()) == (["it"] if readable else [])


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_no_record_and_stops_nobody(smssync: ModuleType, root: Path, kind: str) -> None:
    path = root / "run/sms/jobsync/it.json"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (root / "other").write_text(json.dumps(GOOD))
        path.symlink_to(root / "other")
    else:
        path.mkdir()
    assert smssync.read("it") is None


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o600), (True, 0o644)])
def test_who_can_read_a_lock(smssync: ModuleType, root: Path, shared: bool, mode: int) -> None:
    """On a node root alone: others could hold it. In a pod the other services, which have users of their own."""
    folder = root / "run/sms/jobsync"
    folder.mkdir()
    folder.chmod(0o1777 if shared else 0o755)
    lock = smssync.Lock("it")
    assert lock.take()
    assert (folder / "it.lock").stat().st_mode & 0o777 == mode
    lock.release()


def test_names_of_other_files(smssync: ModuleType, root: Path) -> None:
    folder = root / "run/sms/jobsync"
    (folder / "x.json").mkdir(parents=True)
    (folder / "..json").write_text("{}")
    (folder / ".it.json.new~").write_text(json.dumps(GOOD))
    assert smssync.read_all() == {}


USERS: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("its task lives", {}, True, True),
    ("its task was killed and so was it", {}, False, False),
    ("its task was killed and it still runs", {"process": "this"}, False, True),
    ("another process has its number now", {"process": {"began": 1}}, False, False),
    ("of an earlier boot", {"process": {"boot": "x"}}, False, False),
    ("of a container with other numbers", {"process": {"namespace": "pid:[1]"}}, False, False),
    ("it waits", {"holds": []}, True, False),
    ("it does not need it", {"holds": ["slurmctld"]}, True, False),
    ("it is being stopped", {"state": "removal"}, True, True),
]


@pytest.mark.parametrize(("changes", "locked", "uses"), [row[1:] for row in USERS], ids=[row[0] for row in USERS])
def test_users(smssync: ModuleType, root: Path, changes: dict[str, Any], locked: bool, uses: bool) -> None:
    own = smssync.describe(os.getpid())
    process = changes.get("process")
    changes = {**changes, "process": own if process == "this" else {**own, **process} if process else None}
    lock = smssync.Lock("it")
    if locked:
        assert lock.take()
    folder = root / "run/sms/jobsync"
    folder.mkdir(exist_ok=True)
    (folder / "it.json").write_text(json.dumps({**GOOD, **changes}))
    assert smssync.users_of("munge") == (["it"] if uses else [])
    assert smssync.is_leaving("it") == (locked and changes.get("state") == "removal")
    lock.release()


def test_one_has_the_lock(smssync: ModuleType, root: Path) -> None:
    first, second = smssync.Lock("it"), smssync.Lock("it")
    assert first.take() and smssync.is_locked("it")
    assert not second.take() and first.is_there() and not second.is_there()
    (root / "run/sms/jobsync/it.lock").unlink()
    assert not smssync.is_locked("it") and not first.is_there()
    assert second.take() and not first.take()
    second.release()
    assert not smssync.is_locked("it")


LIVE: list[tuple[str, dict[str, Any] | None, bool, list[int], bool]] = [
    ("never started", None, False, [], False),
    ("runs", {}, True, [], True),
    ("waits for another", {"state": "deploy", "detail": "waits for munge"}, True, [1], True),
    ("stops", {"state": "removal"}, True, [1], True),
    ("was killed", {}, False, [], False),
    ("has ended", {"state": "removal"}, False, [], False),
    ("does not listen", {}, True, [1], False),
]


@pytest.mark.parametrize(("changes", "locked", "ports", "ok"), [row[1:] for row in LIVE], ids=[row[0] for row in LIVE])
def test_liveness(
    smssync: ModuleType,
    root: Path,
    changes: dict[str, Any] | None,
    locked: bool,
    ports: list[int],
    ok: bool,
) -> None:
    """Nothing is asked: a service that waits for another one is alive."""
    lock = smssync.Lock("it")
    if locked:
        assert lock.take()
    folder = root / "run/sms/jobsync"
    folder.mkdir(exist_ok=True)
    if changes is not None:
        (folder / "it.json").write_text(json.dumps({**GOOD, **changes}))
    answer = smssync.check_live("it", {"jobsync": {"ports": ports}, "probe": {"kind": "no such kind"}})
    assert answer["ok"] == ok, answer
    assert answer["detail"] and (answer["state"] is None) == (changes is None)
    lock.release()
