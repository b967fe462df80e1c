"""The container's state takes the place of the old one: whenever a run is killed, the next one completes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.agent import adopt_place
from appliance.agent.adopt_place import place_state


class Killed(BaseException):
    """The process is killed."""


class Calls:
    """os, with renames of which some fail, and after a number of changes the end."""

    def __init__(self, state: Path, refused: int, left: int) -> None:
        self.state, self.refused, self.left = state, refused, left

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def change(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1

    def rename(self, source: str, target: str) -> None:
        if self.refused and (source == str(self.state) or Path(source).name == "lower"):
            raise OSError(self.refused, os.strerror(self.refused))
        self.change()
        Path(source).rename(target)

    def unlink(self, path: str) -> None:
        self.change()
        Path(path).unlink()

    def rmdir(self, path: str) -> None:
        self.change()
        Path(path).rmdir()

    def sync(self) -> None:
        pass


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
            patch.setattr(adopt_place, "os", Calls(state, refused, 1))
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
    monkeypatch.setattr(adopt_place, "os", Calls(state, refused, 100))
    assert place_state(str(state)) == f"{state}.before-sms.1"
    check(state)


def test_another_error_leaves_all_as_it_was(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt_place, "os", Calls(state, errno.EACCES, 100))
    with pytest.raises(PermissionError):
        place_state(str(state))
    assert contents(state)["job_state"] == "old" and contents(state.with_name("state.sms-new"))["job_state"] == "new"
