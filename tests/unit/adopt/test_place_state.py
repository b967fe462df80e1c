"""The container's state takes the place of the old one: whenever a run is killed, the next one completes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from appliance.agent.adopt_place import place_state


class Killed(BaseException):
    """The process is killed."""


class Calls:
    """Renames of which some fail, and after a number of changes the end; what ``shutil`` removes does not count."""

    def __init__(self, patch: pytest.MonkeyPatch, state: Path, refused: int, left: int) -> None:
        self.state, self.refused, self.left = state, refused, left
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, partial(self.call, getattr(os, name)))
        patch.setattr(os, "sync", lambda: None)

    def call(self, change: Callable[..., None], path: str, *target: str, **by_descriptor: int | None) -> None:
        if not by_descriptor:
            if target and self.refused and (path == str(self.state) or Path(path).name == "lower"):
                raise OSError(self.refused, os.strerror(self.refused))
            if not self.left:
                raise Killed
            self.left -= 1
        change(path, *target, **by_descriptor)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The old state, the new one, and one of an earlier undo."""
    for folder, text in (("state", "old"), ("state.sms-new", "new"), ("state.before-sms", "earlier")):
        (tmp_path / folder / "lower").mkdir(parents=True)
        for name in ("job_state", "lower/script"):
            (tmp_path / folder / name).write_text(text)
    (tmp_path / "state" / "only_old").touch()
    (tmp_path / "state.sms-new" / "only_new").touch()
    (tmp_path / "state").chmod(0o750)
    return tmp_path / "state"


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(state: Path) -> None:
    new = {"job_state": "new", "lower/script": "new", "only_new": ""}
    assert contents(state) == new and state.stat().st_mode & 0o777 == 0o750
    old = {"job_state": "old", "lower/script": "old", "only_old": ""}
    assert contents(state.with_name("state.before-sms.1")) == old
    assert contents(state.with_name("state.before-sms")) == {"job_state": "earlier", "lower/script": "earlier"}
    assert sorted(path.name for path in state.parent.iterdir() if any(path.iterdir())) == [
        *("state", "state.before-sms", "state.before-sms.1"),
    ]


@pytest.mark.parametrize("refused", [0, errno.EXDEV, errno.EBUSY])
def test_a_state_is_put_in_place_after_each_kill(state: Path, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Also where the folder cannot be renamed, nor an entry of it, as on an overlay."""
    kills = 0
    for left in range(40):
        with monkeypatch.context() as patch:
            Calls(patch, state, refused, 1)
            try:
                place_state(str(state))
                break
            except Killed:
                kills += 1
        assert left < 39
    check(state)
    assert kills >= (5 if refused else 1)
    assert place_state(str(state)) == ""


@pytest.mark.parametrize("refused", [0, errno.EXDEV])
def test_where_the_old_one_is(state: Path, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    Calls(monkeypatch, state, refused, 100)
    assert place_state(str(state)) == f"{state}.before-sms.1"
    check(state)


def test_another_error_leaves_all_as_it_was(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, state, errno.EACCES, 100)
    with pytest.raises(PermissionError):
        place_state(str(state))
    assert contents(state)["job_state"] == "old" and contents(state.with_name("state.sms-new"))["job_state"] == "new"
