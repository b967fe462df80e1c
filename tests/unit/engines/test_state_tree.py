"""The state of services as a tree: listed, read and written by the program that runs inside the image."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from appliance.share import share

SCRIPT = share("definitions", "scripts", "state-tree").read_text()
HEAD = b"\0\0\0\x11PROTOCOL_VERSION\0"


def run(command: str, *pairs: str, input: bytes = b"", ok: bool = True) -> bytes:
    argv = (sys.executable, "-I", "-c", SCRIPT, command, *pairs)
    result = subprocess.run(argv, input=input, capture_output=True, check=False)
    assert (result.returncode == 0) == ok, result.stderr.decode()
    return result.stdout if ok else result.stderr


def pair(folder: Path) -> str:
    return f"/var/spool/state={folder}"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "hash.1").mkdir(parents=True)
    (folder / "hash.1" / "script").write_bytes(b"#!/bin/sh\n")
    (folder / "hash.1").chmod(0o710)
    (folder / "job_state").write_bytes(HEAD + b"\x26\x00rest")
    (folder / "node_state").write_bytes(HEAD + b"\x25\x00rest")
    (folder / "clustername").write_text("lab|77\n")
    (folder / "mysql_upgrade_info").write_text("10.11.6-MariaDB")
    (folder / "link").symlink_to("job_state")
    os.link(folder / "job_state", folder / "same")
    os.mkfifo(folder / "fifo", 0o622)
    (folder / "caf\udce9").write_bytes(b"a name that is not text")
    (folder / ".sms-lease").write_text("{}")
    (folder / "job_state").chmod(0o600)
    return folder


def test_a_copy_is_the_same(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "older").mkdir()
    (copy / ".sms-lease").write_text("its own")
    found = json.loads(run("list", pair(state)))
    run("write", pair(copy), input=run("read", pair(state)))
    assert json.loads(run("list", pair(copy))) == found
    assert (copy / ".sms-lease").read_text() == "its own"
    assert not (copy / "older").exists()
    assert (found["slurm"], found["mariadb"], found["clustername"]) == (0x2600, "10.11", "lab|77")
    names = {name.rpartition("/")[2] for name in found["entries"]}
    assert names == {"state", "hash.1", "script", "job_state", "node_state", "clustername", "mysql_upgrade_info",
                     "link", "same", "fifo", "caf\\xe9"}  # fmt: skip


def test_a_second_copy_replaces_the_first(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    run("write", pair(copy), input=run("read", pair(state)))
    inode = (copy / "hash.1").stat().st_ino
    (state / "link").unlink()
    (state / "link").mkdir()
    (state / "node_state").unlink()
    (state / "clustername").write_text("other")
    run("write", pair(copy), input=run("read", pair(state)))
    assert json.loads(run("list", pair(copy))) == json.loads(run("list", pair(state)))
    assert (copy / "hash.1").stat().st_ino == inode, "a folder that was there stays"


@pytest.mark.parametrize("change", ["content", "mode", "target", "file"])
def test_each_difference_is_seen(state: Path, change: str) -> None:
    before = json.loads(run("list", pair(state)))
    if change == "content":
        (state / "hash.1" / "script").write_bytes(b"#!/bin/ksh")
    elif change == "mode":
        (state / "hash.1").chmod(0o700)
    elif change == "target":
        (state / "link").unlink()
        (state / "link").symlink_to("node_state")
    else:
        (state / "hash.1" / "more").touch()
    after = json.loads(run("list", pair(state)))
    assert after["digest"] != before["digest"] and after["entries"] != before["entries"]


def test_a_survey_reads_no_content(state: Path) -> None:
    found: dict[str, Any] = json.loads(run("brief", pair(state)))
    assert (found["slurm"], found["digest"]) == (0x2600, "") and "entries" not in found


def test_a_single_file_and_one_that_is_missing(state: Path, tmp_path: Path) -> None:
    pairs = [f"/var/log/messages={state}/hash.1/script", f"/var/mail={tmp_path}/none"]
    copy = tmp_path / "copy"
    targets = [f"/var/log/messages={copy}/var/log/messages", f"/var/mail={copy}/var/mail"]
    run("write", *targets, input=run("read", *pairs))
    assert (copy / "var/log/messages").read_bytes() == b"#!/bin/sh\n"
    assert json.loads(run("list", *targets)) == json.loads(run("list", *pairs))


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    found.uid, found.gid = os.getuid(), os.getgid()
    return found


@pytest.mark.parametrize(
    "entries",
    [
        [("etc/passwd", tarfile.REGTYPE, "")],
        [("var/spool/state/../../outside", tarfile.REGTYPE, "")],
        [("var/spool/state/way", tarfile.SYMTYPE, ".."), ("var/spool/state/way/outside", tarfile.REGTYPE, "")],
        [("var/spool/state/one", tarfile.LNKTYPE, "etc/passwd")],
        [("var/spool/state/device", tarfile.CHRTYPE, "")],
        [("var/spool/state", tarfile.SYMTYPE, ".."), ("var/spool/state/outside", tarfile.REGTYPE, "")],
    ],
    ids=["elsewhere", "dots", "behind a link", "hard link", "device", "the folder is a link"],
)
def test_nothing_outside_is_written(tmp_path: Path, entries: list[tuple[str, bytes, str]]) -> None:
    (tmp_path / "into").mkdir()
    data = archive(*((entry(*each), b"x" if each[1] == tarfile.REGTYPE else b"") for each in entries))
    run("write", pair(tmp_path / "into"), input=data, ok=False)
    assert [path.name for path in tmp_path.iterdir()] == ["into"]
    assert not (tmp_path.parent / "outside").exists()
    assert (tmp_path / "into").is_symlink() or not [path for path in (tmp_path / "into").rglob("*") if path.is_file()]
