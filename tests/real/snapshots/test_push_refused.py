"""Pushes and pulls that are refused, or fail for lack of room: nothing is changed, and the hint says what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Busy, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.snapshots.pull import pull
from appliance.operations.snapshots.push import WOULD_PUSH, exit_status
from tests import stores
from tests.conftest import find_tool
from tests.real.overlays import file_system
from tests.real.snapshots.conftest import Place, behind_ssh
from tests.real.sshd import Server
from tests.stores import keep_image, make_image
from tests.support.env import Impatient, with_env

pytestmark = pytest.mark.real


def break_passphrase(place: Place) -> Place:
    place.passphrase.write_text("another one\n")
    return place


def open_passphrase(place: Place) -> Place:
    place.passphrase.chmod(0o640)
    return place


def lose_passphrase(place: Place) -> Place:
    place.passphrase.unlink()
    return place


def empty_passphrase(place: Place) -> Place:
    place.passphrase.write_text("")
    return place


def other_files(place: Place) -> Place:
    (place.folder / "files").mkdir()
    (place.folder / "files" / "x").touch()
    return place.with_borg(repository=f"{place.folder}/files")


def no_disk(place: Place) -> Place:
    return place.with_borg(repository=f"{place.folder}/not/mounted")


def keyfile(place: Place) -> Place:
    place.borg("init", "--encryption=keyfile-blake2", f"{place.folder}/theirs")
    return place.with_borg(repository=f"{place.folder}/theirs")


def unencrypted(place: Place) -> Place:
    place.borg("init", "--encryption=none", f"{place.folder}/theirs")
    return place.with_borg(repository=f"{place.folder}/theirs")


def emptied(place: Place) -> Place:
    """Not one that we were making: nothing is deleted."""
    subprocess.run(
        ["sh", "-c", 'rm -r "$1"/data/* "$1"/index* "$1"/hints* "$1"/integrity*', "x", place.folder / "repo"]
    )
    return place


REFUSED: dict[str, tuple[Callable[[Place], Place], str, str]] = {
    "wrong passphrase": (break_passphrase, "does not open", "copy"),
    "passphrase for all to read": (open_passphrase, "must be readable only by root", "chmod 600"),
    "no passphrase": (lose_passphrase, "no passphrase file", "umask 077"),
    "empty passphrase": (empty_passphrase, "is empty", "write the passphrase"),
    "a folder of other files": (other_files, "is not a Borg repository", "another path"),
    "a disk that is not mounted": (no_disk, "does not exist", "mounted"),
    "somebody's with a key file": (keyfile, "was not created by this site", "used by nothing else"),
    "somebody's without encryption": (unencrypted, "was not created by this site", "used by nothing else"),
    "an emptied one": (emptied, "was not created by this site", "used by nothing else"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(with_one: Place, name: str) -> None:
    with_one.add(seed=2)
    spoil, words, hint = REFUSED[name]
    spoilt = spoil(with_one)
    before = sorted(str(path) for path in with_one.folder.rglob("*") if "/borg/" not in str(path))
    failed = spoilt.failed()
    assert words in failed.error
    assert hint in failed.hint
    assert exit_status([failed]) == 3, "as a pull has it"
    with pytest.raises(Refused, match=f"{words}|there is no repository"):
        spoilt.remote()
    after = sorted(str(path) for path in with_one.folder.rglob("*") if "/borg/" not in str(path))
    assert before == after


SSH: dict[str, tuple[dict[str, str], str, str]] = {
    "unknown host key": ({"known_hosts": "no_hosts"}, "host key is not in known_hosts", "ssh-keyscan -p"),
    "other host key": ({"known_hosts": "wrong_hosts"}, "host key does not match", "fingerprint"),
    "refused": ({"ssh_key": "other_user"}, "authentication failed", "authorized_keys"),
}


@pytest.mark.parametrize("name", SSH)
def test_what_ssh_refuses(with_one: Place, server: Server, name: str) -> None:
    far = behind_ssh(with_one, server)
    far.add(seed=2)
    changes, words, hint = SSH[name]
    spoilt = far.with_borg(**{key: server.folder / value for key, value in changes.items()})
    failed = spoilt.failed()
    assert words in failed.error, failed
    assert hint in failed.hint


def test_a_closed_port(with_one: Place, server: Server) -> None:
    far = behind_ssh(with_one, server)
    far.add(seed=2)
    closed = far.with_borg(repository=f"ssh://root@127.0.0.1:1{far.folder}/repo").failed()
    # borg does not always wait for ssh's own words.
    assert "Connection refused" in closed.error or "Connection closed" in closed.error
    assert "run the command again" in closed.hint
    assert far.pushed()


def test_borg_is_not_there(place: Place, tmp_path: Path) -> None:
    place.add()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (
        "sh",
        "env",
        "python3",
        "stat",
        "cat",
        "flock",
        "mkdir",
        "dirname",
        "chmod",
        "rm",
        "sync",
        "mv",
        "find",
    ):
        (programs / name).symlink_to(find_tool(name))

    class Poor(Local):
        def run(self, *argv: str, **more: Any) -> Any:
            return super().run("env", f"PATH={programs}", *argv, **more)

    failed = replace(place, host=Poor("host-a")).failed()
    assert "borg is not installed on host-a" in failed.error
    assert "apt-get install borgbackup" in failed.hint


def test_somebody_else_is_at_work_on_it(with_one: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tools.borg.LOCK_WAIT_S", 1)
    place = with_one
    place.add(seed=2)
    environment = {**os.environ, "BORG_PASSCOMMAND": f"cat {place.passphrase}"}
    with subprocess.Popen(
        ["borg", "with-lock", str(place.folder / "repo"), "sh", "-c", "echo on; read x"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == b"on\n"
        failed = place.failed()
        assert "is locked by another borg" in failed.error
        assert "borg break-lock" in failed.hint
        other.stdin.write(b"\n")
        other.stdin.close()
    place.pushed()


def test_a_second_run_is_refused(place: Place) -> None:
    place = replace(place, cluster=with_env(place.cluster, locks=Impatient()))
    place.add()
    with place.host.lock(str(place.cluster.places.borg_lock)):
        assert "another push or pull is at work" in place.failed().error
        with pytest.raises(Busy):
            pull(place.cluster, place.host, "borg", "latest")
        assert [one.state for one in place.push(dry_run=True)] == [WOULD_PUSH]
    place.pushed()


def test_no_room_in_the_repository(place: Place, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with file_system(tmp_path / "disk", "ext4", 8) as disk:
        small = place.with_borg(repository=f"{disk}/repo")
        small.add()
        small.pushed()
        big = make_image(tmp_path / "big.img", seed=3, size_mb=32, files=60)
        keep_image(small.store, big, cluster=small.cluster.site.cluster)
        failed = small.failed()
        assert "no space left" in failed.error, failed
        assert "earlier ones are intact" in failed.error
        assert small.numbers() == [1]
        small.assert_comes_back(1)


def test_no_room_where_it_comes_back_to(place: Place, tmp_path: Path) -> None:
    keep_image(
        place.store, make_image(tmp_path / "big.img", seed=3, size_mb=32, files=60), cluster=place.cluster.site.cluster
    )
    place.pushed()
    (tmp_path / "disk").mkdir()
    with file_system(tmp_path / "disk", "ext4", 6) as disk:
        other = place.elsewhere().changed("snapshots", directory=disk)
        with pytest.raises(SmsError, match="is full"):
            pull(other.cluster, other.host, "borg", "latest")
        assert stores.numbers(other.store) == []
