"""Changes of a folder that is in use: each one is in a later delta, however it was made."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.agent.adopt_changes import SETTLED_NS, ChangedFiles
from appliance.agent.protocol import Problem

INSIDE = "/var/lib/slurm/state"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; what was changed before the test counts as settled."""
    folder = tmp_path / "state"
    (folder / "hash.1").mkdir(parents=True)
    for name in ("job_state", "hash.1/script", "hash.1/environment", ".sms-lease"):
        (folder / name).write_text("old")
    (folder / "link").symlink_to("job_state")
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + SETTLED_NS - 20_000_000)
    time.sleep(0.05)
    return folder


def read(data: bytes) -> tuple[list[str], dict[str, bytes]]:
    """Removed paths, and the content of each other entry of a delta."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        first, *others = archive.getmembers()
        assert first.name == ".sms-removed"
        removed = archive.extractfile(first)
        assert removed
        names = [os.fsdecode(path) for path in removed.read().split(b"\0") if path]
        found = {}
        for entry in others:
            content = archive.extractfile(entry) if entry.isreg() else None
            found[entry.name.removeprefix(INSIDE[1:] + "/")] = content.read() if content else b""
        return [name.removeprefix(INSIDE + "/") for name in names], found


def as_it_is(path: Path) -> None:
    """A file of the same size and time of change."""
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text("new")
    new.replace(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CASES: dict[str, tuple[Callable[[Path], object], list[str], dict[str, bytes]]] = {
    "nothing": (lambda top: None, [], {}),
    "content": (lambda top: (top / "hash.1/script").write_text("newer"), [], {"hash.1/script": b"newer"}),
    "content of the same size and time": (lambda top: as_it_is(top / "job_state"), [], {"job_state": b"xxx"}),
    "replaced": (lambda top: replaced(top / "hash.1/script"), [], {"hash.1": b"", "hash.1/script": b"new"}),
    "mode": (lambda top: (top / "job_state").chmod(0o640), [], {"job_state": b"old"}),
    "removed": (lambda top: (top / "hash.1/script").unlink(), ["hash.1/script"], {"hash.1": b""}),
    "folder removed": (
        lambda top: shutil.rmtree(top / "hash.1"),
        ["hash.1"],
        {"var/lib/slurm/state": b""},
    ),
    "a folder in the place of a file": (
        lambda top: to_folder(top / "job_state"),
        [],
        {"var/lib/slurm/state": b"", "job_state": b""},
    ),
    "a name that is not text": (
        lambda top: (top / "hash.1" / "a\udce9").write_text("new"),
        [],
        {"hash.1": b"", "hash.1/a\udce9": b"new"},
    ),
    "the lease": (lambda top: (top / ".sms-lease").write_text("new"), [], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_in_the_next_delta_and_in_no_later_one(state: Path, case: str) -> None:
    change, removed, changed = CASES[case]
    files = ChangedFiles(str(state), INSIDE)
    assert files.note() == (6, 9)
    change(state)
    time.sleep(0.05)
    data, count, _ = files.delta()
    assert read(data) == (removed, changed)
    assert count >= len(removed) + len(changed)
    assert read(files.delta()[0]) == ([], {})


def test_what_was_changed_just_now_is_read_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change a second time without another time of change."""
    now = (state / "job_state").stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: now)
    files = ChangedFiles(str(state), INSIDE)
    files.note()
    for _ in range(2):
        assert read(files.delta()[0])[1]["job_state"] == b"old"


class ChangedMeanwhile(ChangedFiles):
    """The folder is changed as soon as it has been listed."""

    def __init__(self, *where: str) -> None:
        super().__init__(*where)
        self.change: Callable[[], object] = lambda: None

    def _scan(self) -> Iterator[tuple[bytes, os.stat_result]]:
        found = list(super()._scan())
        self.change()
        return iter(found)


def test_an_entry_that_goes_away_meanwhile_is_removed_later(state: Path) -> None:
    files = ChangedMeanwhile(str(state), INSIDE)
    files.note()
    (state / "job_state").write_text("new")
    files.change = lambda: (state / "job_state").unlink(missing_ok=True)
    assert "job_state" not in read(files.delta()[0])[1]
    assert read(files.delta()[0])[0] == ["job_state"]


def test_what_is_not_a_folder_is_refused(state: Path) -> None:
    with pytest.raises(Problem, match="is not a folder"):
        ChangedFiles(str(state / "link"), INSIDE).note()
    (state.parent / "way").symlink_to(state)
    with pytest.raises(Problem, match="is not a folder"):
        ChangedFiles(str(state.parent / "way"), INSIDE).note()
    with pytest.raises(Problem, match="before a note"):
        ChangedFiles(str(state), INSIDE).delta()


def test_no_link_leads_out_of_a_root(tmp_path: Path, state: Path) -> None:
    """Those who write the state may replace a folder while it is read, in a container by a link to the host's files."""
    root, secrets = tmp_path / "root", tmp_path / "secrets"
    (root / "var").mkdir(parents=True)
    state.rename(root / "var/state")
    time.sleep(0.05)
    secrets.mkdir()
    (secrets / "script").write_text("of the host")
    files = ChangedMeanwhile("/var/state", INSIDE, str(root))
    assert files.note() == (6, 9)
    (root / "var/state/job_state").write_text("new")
    (root / "var/state/hash.1/script").write_text("new")

    def replace() -> None:
        shutil.rmtree(root / "var/state/hash.1")
        (root / "var/state/hash.1").symlink_to(secrets)

    files.change = replace
    assert read(files.delta()[0]) == ([], {"job_state": b"new"})


class Growing(ChangedFiles):
    """One of its files grows after it was listed."""

    def _scan(self) -> Iterator[tuple[bytes, os.stat_result]]:
        yield from list(super()._scan())
        os.truncate(f"{self.folder}/job_state", 1 << 40)


@pytest.mark.parametrize("kind", [ChangedFiles, Growing])
def test_a_file_without_an_end_is_refused(state: Path, kind: type[ChangedFiles]) -> None:
    """A sparse file of the container: nothing of it is read."""
    files = kind(str(state), INSIDE)
    files.note()
    os.truncate(state / "job_state", 1 << 40 if kind is ChangedFiles else 0)
    tracemalloc.start()
    with pytest.raises(Problem, match="changes by more than 960 MiB"):
        files.delta()
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
