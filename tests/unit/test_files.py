"""Atomic files: several processes and threads that write one file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.host.base import write_argv
from appliance.shared.files import path_beside, replace_file
from tests.places import ROOT

ROUNDS = 40
WRITER = """\
import sys
from appliance.shared.files import replace_file
for number in range(int(sys.argv[3])):
    replace_file(sys.argv[1], (sys.argv[2] * (number * 37 % 5000 + 1)).encode())
"""


def test_two_processes_and_two_threads_write_one_file(tmp_path: Path) -> None:
    """None fails, a reader sees the whole content of one of them, and nothing is left."""
    path, errors, done = tmp_path / "file", list[BaseException](), threading.Event()
    replace_file(str(path), b"0")

    def write(letter: bytes) -> None:
        try:
            for number in range(ROUNDS):
                replace_file(str(path), letter * (number * 37 % 5000 + 1))
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        while not done.is_set():
            if len(set(path.read_bytes())) != 1:
                errors.append(AssertionError("mixed or empty"))

    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter, str(ROUNDS)], stderr=subprocess.PIPE)
        for letter in "ab"
    ]
    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"c", b"d")]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    reported = [process.communicate()[1].decode() for process in processes]
    done.set()
    reader.join()
    assert errors == [] and [process.returncode for process in processes] == [0, 0], reported
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def load_smsfiles() -> Any:
    """The module of the container, without a compiled copy beside it."""
    found: dict[str, Any] = {}
    exec((ROOT / "definitions/runtime/smsfiles.py").read_text(), found)
    return SimpleNamespace(**found)


smsfiles = load_smsfiles()


def write_by_shell(path: Path, data: bytes) -> None:
    argv = write_argv(str(path), 0o600, len(data))
    subprocess.run(argv, input=data, check=True, timeout=20)


WRITERS: dict[str, Callable[[Path, bytes], object]] = {
    "agent": lambda path, data: replace_file(str(path), data),
    "shell": write_by_shell,
    "container": lambda path, data: smsfiles.replace(str(path), data, 0o600, os.geteuid(), os.getegid()),
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path, bytes], object]:
    return WRITERS[request.param]


KINDS = ["file", "file of another mode", "link", "pipe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["cron.d", "logrotate.d"])
def test_what_a_killed_run_has_left_is_removed(
    write: Callable[[Path, bytes], object], tmp_path: Path, folder: str, kind: str, request: pytest.FixtureRequest
) -> None:
    path, other = tmp_path / folder / "file", tmp_path / "other"
    path.parent.mkdir()
    other.write_text("other")
    left = Path(path_beside(str(path)))
    assert left == Path(smsfiles.path_beside(str(path)))
    if kind == "link":
        left.symlink_to(other)
    elif kind == "pipe":
        if request.node.callspec.params["write"] == "shell":
            return  # its folders are those of root
        os.mkfifo(left)
    else:
        left.write_bytes(b"a longer content than the new one")
        left.chmod(0o600 if kind == "file" else 0o444)
    write(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["file"] and other.read_text() == "other"


@pytest.mark.parametrize("others", [*WRITERS])
def test_a_writer_that_lives_is_waited_for(write: Callable[[Path, bytes], object], tmp_path: Path, others: str) -> None:
    path = tmp_path / "file"

    def repeat(by: Callable[[Path, bytes], object], data: bytes) -> None:
        try:
            for _ in range(20):
                by(path, data)
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    threads = [threading.Thread(target=repeat, args=both) for both in ((write, b"a" * 9), (WRITERS[others], b"b" * 9))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == [] and path.read_bytes() in (b"a" * 9, b"b" * 9)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


READERS = {
    "run-parts": ["run-parts", "--list", "{}"],
    "dnsmasq": ["dnsmasq", "--test", "--conf-file=/dev/null", "--conf-dir={}"],
    "nft": ["sh", "-c", """printf 'include "%s/*"\n' "$1" | nft -c -f -""", "sh", "{}"],
    "visudo": ["sh", "-c", """printf '@includedir %s\n' "$1" >"$1.conf" && visudo -c -f "$1.conf" """, "sh", "{}"],
}
"""Programs that read a whole folder."""


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_of_a_folder_takes_what_a_killed_run_left(tmp_path: Path, reader: str) -> None:
    for program in {reader, READERS[reader][0]}:
        if not shutil.which(program):
            pytest.skip(f"there is no {program} on this machine")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    argv = [word.format(folder) if "{}" in word and "sh" not in word else word for word in READERS[reader]]
    before = subprocess.run(argv, capture_output=True, text=True, check=False)
    Path(path_beside(str(folder / "file"))).write_text("this is nothing that it can read\n")
    after = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout) and after.returncode == 0, after


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    replace_file(str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
