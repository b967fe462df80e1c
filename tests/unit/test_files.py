"""Atomic files: several processes and threads that write one file."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from appliance.shared.files import replace_file

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


def test_what_a_killed_run_has_left_is_used(tmp_path: Path) -> None:
    path, left = tmp_path / "file", tmp_path / ".file.new~"
    left.write_bytes(b"a longer content than the new one")
    replace_file(str(path), b"new")
    assert path.read_bytes() == b"new" and not left.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    replace_file(str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
