"""Changes to files by commands of the host, in real folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.errors import Refused
from appliance.host.local import Local
from appliance.tools import files
from appliance.tools.programs import find_program
from appliance.tools.space import need_space
from tests.support.fake import Fake

HERE = Local()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_rename_replaces_only_on_request(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new"), old.write_text("old")
    files.rename(HERE, str(new), str(old))
    assert (new.read_text(), old.read_text()) == ("new", "old")
    files.rename(HERE, str(new), str(old), replace=True)
    assert old.read_text() == "new" and not new.exists()
    files.place(HERE, str(old), str(new), replace=False)
    assert new.read_text() == "new" and not old.exists()


def test_a_link_replaces_a_file_or_a_link(tmp_path: Path) -> None:
    path = tmp_path / "current"
    path.write_text("x")
    for target in ("a.sif", "b.sif", "b.sif"):
        files.link(HERE, str(path), target)
        assert str(path.readlink()) == target and [one.name for one in tmp_path.iterdir()] == ["current"]


def test_files_are_made_for_root_only(tmp_path: Path) -> None:
    path, copy = tmp_path / "x", tmp_path / "copy"
    path.write_text("before")
    path.chmod(0o644)
    files.make_file(HERE, str(path))
    assert path.read_bytes() == b"" and mode(path) == 0o600
    files.make_file(HERE, str(path), 1 << 20)
    assert path.stat().st_size == 1 << 20 and path.stat().st_blocks == 0
    with path.open("r+b") as stream:
        stream.write(b"data")
    path.chmod(0o644)
    files.copy_sparse(HERE, str(path), str(copy), timeout=60)
    assert copy.read_bytes() == path.read_bytes() and mode(copy) == 0o600 and copy.stat().st_blocks < 64
    assert files.size_of(HERE, str(path), str(tmp_path / "none"), str(copy)) == 2 << 20


@pytest.mark.parametrize(
    ("folder", "file", "unsafe"),
    [(0o755, 0o644, False), (0o755, 0o666, True), (0o777, 0o644, True), (0o1777, 0o644, False), (0o755, 0o664, True)],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root")
def test_what_others_can_write(tmp_path: Path, folder: int, file: int, unsafe: bool) -> None:
    path = tmp_path / "folder" / "x"
    path.parent.mkdir()
    path.write_text("x")
    path.parent.chmod(folder)
    path.chmod(file)
    assert files.others_can_write(HERE, str(path)) == unsafe
    os.chown(path, 1, 1)
    assert files.others_can_write(HERE, str(path))


def test_memory() -> None:
    assert files.free_memory_mb(HERE) > 0 and files.used_memory_mb(HERE, os.getpid()) > 0
    meminfo = "MemTotal:  9000 kB\nMemAvailable:    4096 kB\n"
    answers = {("cat", "/proc/meminfo"): (0, meminfo), ("cat", "/proc/7/status"): (0, "Name:\tq\n"), ("cat",): (1, "")}
    host = Fake(answers)
    assert files.free_memory_mb(host) == 4
    assert (files.used_memory_mb(host, 7), files.used_memory_mb(host, 8)) == (0, 0)


def test_programs_are_found_in_the_path() -> None:
    assert find_program(HERE, "sh").endswith("/sh") and find_program(HERE, "no-such-program") == ""


def test_too_little_space_is_refused(tmp_path: Path) -> None:
    need_space(HERE, str(tmp_path / "not-there"), 1, "MiB free, it may need %d", hint="")
    with pytest.raises(Refused, match=r"MiB free, it may need 1099511627776$"):
        need_space(HERE, str(tmp_path), 1 << 60, "MiB free, it may need %d", hint="free space")
