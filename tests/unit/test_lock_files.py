"""Lock files: who could hold or replace one is not trusted, by the agent's function and by the script of hosts."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.host.base import CommandError
from appliance.host.local import Local
from appliance.shared.locks import Locked, UnsafeLock, find_holders, hold_lock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
Hold = Callable[[str], AbstractContextManager[None]]
HOLDS: dict[str, Hold] = {"function": hold_lock, "script": Local().lock}


@pytest.fixture(params=HOLDS)
def hold(request: pytest.FixtureRequest) -> Hold:
    return HOLDS[request.param]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_open_a_lock(hold: Hold, tmp_path: Path) -> None:
    path = tmp_path / "run" / "sms" / "it.lock"
    with hold(str(path)):
        assert mode(path) == 0o600 and mode(path.parent) == 0o700
        assert find_holders(str(path)) != []
        with pytest.raises(Locked), hold_lock(str(path)):
            pass
        with pytest.raises(CommandError) as caught, Local().lock(str(path)):
            pass
        assert caught.value.result.status == 75
    assert find_holders(str(path)) == [] == find_holders(str(tmp_path / "none"))


def test_a_lock_of_an_earlier_version_is_closed_to_others(hold: Hold, tmp_path: Path) -> None:
    path = tmp_path / "it.lock"
    path.touch(0o644)
    path.chmod(0o644)
    with hold(str(path)):
        assert mode(path) == 0o600


def make_unsafe(path: Path, what: str) -> None:
    if what in ("others can write it", "another user's file"):
        path.touch()
    if what == "a link to a file":
        path.with_name("other").touch()
    if what.startswith("a link"):
        path.symlink_to(path.with_name("other"))
    if what == "a pipe":
        os.mkfifo(path)
    if what == "a folder":
        path.mkdir()
    if what == "others can write it":
        path.chmod(0o622)
    if what == "all can create files beside it":
        path.parent.chmod(0o1777)
    if what.startswith("another user"):
        os.chown(path.parent if what.endswith("folder") else path, 1000, 1000)


UNSAFE = [
    "a link",
    "a link to a file",
    "a pipe",
    "a folder",
    "others can write it",
    "all can create files beside it",
    pytest.param("another user's file", marks=needs_root),
    pytest.param("another user's folder", marks=needs_root),
]


@pytest.mark.parametrize("what", UNSAFE)
def test_a_lock_that_others_could_hold_is_an_error(hold: Hold, tmp_path: Path, what: str) -> None:
    path = tmp_path / "run" / "it.lock"
    path.parent.mkdir()
    make_unsafe(path, what)
    with pytest.raises((SmsError, UnsafeLock), match="cannot be trusted as a lock") as caught, hold(str(path)):
        pass
    assert "ls -ld" in getattr(caught.value, "hint", "") and str(path) in str(caught.value)
    assert not path.with_name("other").exists() or what == "a link to a file"


@needs_root
def test_the_folder_of_a_user_has_locks_of_his_data(tmp_path: Path) -> None:
    path = tmp_path / "tls" / ".renew.lock"
    path.parent.mkdir()
    make_unsafe(path, "another user's folder")
    with hold_lock(str(path), users=True):
        pass


@needs_root
def test_a_user_cannot_hold_a_lock(hold: Hold, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "it.lock"
    path.touch(0o644)
    with hold(str(path)):
        pass
    # Only the mode of the file protects it: the user is in its folder.
    argv = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "flock", "-n", "./it.lock", "true"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "Permission denied" in done.stderr, done
