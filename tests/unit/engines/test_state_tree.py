"""The state of services as a tree: listed, read and written by the program that runs inside the image."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from contextlib import suppress
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


TOP = ("var/spool/state", tarfile.DIRTYPE, "")
HOSTILE = {
    "elsewhere": [("etc/passwd", tarfile.REGTYPE, "")],
    "dots": [TOP, ("var/spool/state/../../outside", tarfile.REGTYPE, "")],
    "behind a link": [
        TOP,
        ("var/spool/state/way", tarfile.SYMTYPE, ".."),
        ("var/spool/state/way/outside", tarfile.REGTYPE, ""),
    ],
    "behind a folder that became a link": [
        TOP,
        ("var/spool/state/way", tarfile.DIRTYPE, ""),
        ("var/spool/state/way", tarfile.SYMTYPE, ".."),
        ("var/spool/state/way/outside", tarfile.REGTYPE, ""),
    ],
    "behind a folder that it does not have": [TOP, ("var/spool/state/way/outside", tarfile.REGTYPE, "")],
    "hard link": [TOP, ("var/spool/state/one", tarfile.LNKTYPE, "etc/passwd")],
    "device": [TOP, ("var/spool/state/device", tarfile.CHRTYPE, "")],
    "below a link": [("var/spool/state", tarfile.SYMTYPE, ".."), ("var/spool/state/outside", tarfile.REGTYPE, "")],
    "a link": [("var/spool/state", tarfile.SYMTYPE, "..")],
    "second name of a link": [
        TOP,
        ("var/spool/state/way", tarfile.SYMTYPE, ".."),
        ("var/spool/state/two", tarfile.LNKTYPE, "var/spool/state/way"),
    ],
    "lease": [TOP, ("var/spool/state/.sms-lease", tarfile.REGTYPE, "")],
    "depth": [TOP, *((f"var/spool/state/{'/'.join('a' * depth)}", tarfile.DIRTYPE, "") for depth in range(1, 200))],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_outside_is_written(tmp_path: Path, case: str) -> None:
    (tmp_path / "into").mkdir()
    data = archive(*((entry(*each), b"x" if each[1] == tarfile.REGTYPE else b"") for each in HOSTILE[case]))
    why = run("write", pair(tmp_path / "into"), input=data, ok=False)
    assert why.startswith((b"the archive has ", b"the state has more")) and b"Traceback" not in why
    assert [path.name for path in tmp_path.iterdir()] == ["into"]
    assert not (tmp_path.parent / "outside").exists()
    assert (tmp_path / "into").is_symlink() or not [path for path in (tmp_path / "into").rglob("*") if path.is_file()]


LINKED = {
    "link": (tarfile.SYMTYPE, "/etc/shadow"),
    "fifo": (tarfile.FIFOTYPE, ""),
    "device": (tarfile.CHRTYPE, ""),
}


@pytest.mark.parametrize("command", ["write", "change"])
@pytest.mark.parametrize("case", LINKED)
def test_a_host_gets_files_and_folders_only(tmp_path: Path, command: str, case: str) -> None:
    """An undo of an adoption writes what the container sends to the old node."""
    kind, target = LINKED[case]
    new = tmp_path / "state.sms-new"
    new.mkdir()
    data = archive((entry(*TOP), b""), (entry("var/spool/state/one", kind, target), b""))
    why = run(command, f"like={tmp_path}", pair(new), input=data, ok=False)
    assert why.startswith(b"the archive has neither a file nor a folder") and b"state/one" in why
    assert not list(new.iterdir())


@pytest.mark.parametrize("command", ["write", "change"])
def test_a_host_gets_no_bits_and_owners_of_the_container(tmp_path: Path, command: str) -> None:
    if os.getuid():
        pytest.skip("only root changes owners")
    old, new = tmp_path / "state", tmp_path / "state.sms-new"
    old.mkdir()
    (old / "by-root").touch()
    os.chown(old, 450, 451)
    entries = [entry(*TOP), *(entry(f"var/spool/state/{name}") for name in ("slurm", "root", "other"))]
    for one, owner in zip(entries, [(0, 0), (450, 451), (0, 0), (0, 42)], strict=True):
        (one.uid, one.gid), one.mode = owner, 0o6777
    new.mkdir()
    run(command, f"like={old}", pair(new), input=archive(*((one, b"") for one in entries)))
    found = {path.name: path.stat() for path in (new, *new.iterdir())}
    assert {name: (one.st_uid, one.st_gid, one.st_mode & 0o7777) for name, one in found.items()} == {
        "state.sms-new": (0, 0, 0o700),
        "slurm": (450, 451, 0o777),
        "root": (0, 0, 0o777),
        "other": (450, 451, 0o777),
    }


@pytest.mark.parametrize("command", ["write", "change"])
def test_a_host_is_not_filled(tmp_path: Path, command: str) -> None:
    """A sparse file of the container has no size of its own; the error comes before anything of it is written."""
    new = tmp_path / "state.sms-new"
    new.mkdir()
    large = entry("var/spool/state/large")
    large.size = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    data = archive((entry(*TOP), b""))[:512] + large.tobuf()
    why = run(command, f"like={tmp_path}", pair(new), input=data, ok=False)
    assert why.startswith(b"the archive has more than what is free") and not list(new.iterdir())


def test_links_do_not_lead_owner_or_mode_outside(tmp_path: Path) -> None:
    """A folder in the place of a link; the mode is that of what was written."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "way").symlink_to(outside)
    folder = entry("var/spool/state/way", tarfile.DIRTYPE)
    folder.mode = 0o777
    link = entry("var/spool/state/other", tarfile.SYMTYPE, str(outside))
    link.mode = 0o777
    run("write", pair(tmp_path / "into"), input=archive((entry("var/spool/state", tarfile.DIRTYPE), b""), (folder, b""),
                                                        (link, b"")))  # fmt: skip
    assert outside.stat().st_mode & 0o777 == 0o700 and not (tmp_path / "into" / "way").is_symlink()


def test_a_link_is_not_the_state(state: Path, tmp_path: Path) -> None:
    """Only its target would be missing from the copy; in the image itself it is followed."""
    link = tmp_path / "link"
    link.symlink_to(state)
    assert b"is a link" in run("brief", pair(link), ok=False)
    found = json.loads(run("list", f"{link}={link}"))["entries"]
    assert (
        found[f"{link}/hash.1/script"]
        == json.loads(run("list", pair(state)))["entries"]["/var/spool/state/hash.1/script"]
    )


def test_links_of_an_overlay_lead_to_where_they_do_in_a_container(tmp_path: Path) -> None:
    """Root in the container makes them; what runs outside has another root."""
    root, outside = tmp_path / "overlay", tmp_path / "secret"
    (root / "var/spool/mail").mkdir(parents=True)
    (root / "var/spool/mail/box").write_text("mail")
    outside.mkdir()
    (outside / "box").write_text("secret")
    for name, target in {
        "absolute": "/var/spool/mail",
        "relative": "spool/mail",
        "above": "../../../var/spool/mail",
    }.items():
        (root / "var" / name).symlink_to(target)
        found = json.loads(run("list", f"/state={root}/./var/{name}"))
        assert found["entries"]["/state/box"][4] == 4
    (root / "var/out").symlink_to(outside)
    assert json.loads(run("brief", f"/state={root}/./var/out"))["files"] == 0
    (root / "var/loop").symlink_to("loop")
    assert b"too many links" in run("brief", f"/state={root}/./var/loop", ok=False)


@pytest.mark.parametrize(("depth", "refused"), [(128, False), (129, True), (1200, True)])
def test_folders_that_are_nested_deeply(tmp_path: Path, depth: int, refused: bool) -> None:
    """Where the source is checked, before anything is stopped, as where its copy is written; both can be removed."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    subprocess.run(["mkdir", "-p", f"{root}/.moving/{'/'.join('a' * depth)}"], check=True)
    for command in ("brief", "list", "read"):
        found = run(command, pair(root / ".moving"), ok=not refused)
        assert not refused or b"more than 128 folders" in found
    if not refused:
        run("write", pair(copy), input=found)
        assert json.loads(run("list", pair(copy)))["files"] == depth + 1
    run("discard", str(root))
    assert list(root.iterdir()) == []


def test_there_is_an_end_to_the_number_of_files(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = run("read", pair(state))
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT.replace("ENTRIES = 128, 4000000", "ENTRIES = 128, 5"))
    assert b"more than 5 files" in run("brief", pair(state), ok=False)
    assert b"more than 5 files" in run("write", pair(tmp_path / "copy"), input=data, ok=False)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
@pytest.mark.parametrize("command", ["write", "change"])
def test_the_head_of_an_entry_has_a_limit(tmp_path: Path, command: str, kind: bytes) -> None:
    """It could fill the memory of who reads it: that ends before it is read."""
    head = tarfile.TarInfo("x")
    head.type, head.size = kind, 1 << 32
    assert b"a head of 4294967296 bytes" in run(command, pair(tmp_path / "copy"), input=head.tobuf(), ok=False)


def test_a_list_of_what_is_removed_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    head = tarfile.TarInfo(".sms-removed")
    head.size = 1 << 32
    assert b"the archive removes too much" in run("change", pair(tmp_path / "copy"), input=head.tobuf(), ok=False)


def test_a_state_in_use_is_read(tmp_path: Path) -> None:
    """Files are written, shortened, renamed and removed meanwhile: of each, the tar has something or nothing."""
    folder, ended = tmp_path / "state", threading.Event()
    for number in range(100):
        (folder / f"hash.{number}").mkdir(parents=True)

    def write(number: int = 0) -> None:
        while not ended.is_set():
            number = (number + 1) % 100
            (folder / f"hash.{number}" / "script").write_bytes(b"x" * 200_000)
            os.truncate(folder / f"hash.{number}" / "script", 10)
            (folder / f"hash.{number}" / "script").rename(folder / f"hash.{number}" / "other")
            with suppress(FileNotFoundError):
                (folder / f"hash.{(number + 50) % 100}" / "other").unlink()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            with tarfile.open(fileobj=io.BytesIO(run("read", pair(folder)))) as archive:
                assert len([one for one in archive if one.isdir()]) == 101
    finally:
        ended.set()
        writer.join()


def test_what_is_cut_off_is_refused(state: Path, tmp_path: Path) -> None:
    whole = run("read", pair(state))
    for part in (b"", whole[: len(whole) // 3 + 100]):
        said = run("write", pair(tmp_path / "copy"), input=part, ok=False).decode()
        assert "ended early" in said and "Traceback" not in said


def removed(*paths: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return entry(".sms-removed"), b"".join(path + b"\0" for path in paths)


STATE = b"/var/spool/state"


def test_changes_are_applied_and_the_rest_stays(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    run("write", pair(copy), input=run("read", pair(state)))
    (copy / ".sms-lease").write_text("its own")
    inode = (copy / "node_state").stat().st_ino
    folder = entry("var/spool/state/hash.2", tarfile.DIRTYPE)
    folder.mode = 0o710
    changed = [
        removed(STATE + b"/hash.1", STATE + b"/link", STATE + b"/caf\xe9", STATE + b"/none", STATE + b"/none/below"),
        (folder, b""),
        (entry("var/spool/state/hash.2/script"), b"new"),
        (entry("var/spool/state/job_state"), b"changed"),
        (entry("var/spool/state/fifo"), b"a file"),
    ]
    run("change", pair(copy), input=archive(*changed))
    names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))
    files = ["clustername", "fifo", "hash.2", "hash.2/script", "job_state", "mysql_upgrade_info", "node_state", "same"]
    assert names == [".sms-lease", *files]
    assert (copy / "job_state").read_bytes() == b"changed" and (copy / "same").read_bytes() == HEAD + b"\x26\x00rest"
    assert (copy / "hash.2").stat().st_mode & 0o777 == 0o710
    assert (copy / "node_state").stat().st_ino == inode


def test_no_change_is_one(state: Path) -> None:
    before = run("list", pair(state))
    run("change", pair(state), input=archive(removed()))
    assert run("list", pair(state)) == before


CHANGES: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {
    **{
        case: [(entry(*each), b"x" if each[1] == tarfile.REGTYPE else b"") for each in entries]
        for case, entries in HOSTILE.items()
    },
    "through a link that is there": [(entry("var/spool/state/out/outside"), b"x")],
    "removes what is elsewhere": [removed(b"/etc/passwd")],
    "removes by dots": [removed(STATE + b"/../outside")],
    "removes the lease": [removed(STATE + b"/.sms-lease")],
    "removes all": [removed(STATE)],
    "removes a second time": [removed(), removed(STATE + b"/kept")],
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_writes_nothing_outside(tmp_path: Path, case: str) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (into / "out").symlink_to(tmp_path)
    for name in (".sms-lease", "kept"):
        (into / name).touch()
    why = run("change", pair(into), input=archive(*CHANGES[case]), ok=False)
    assert why.startswith((b"the archive ", b"the state has more")) and b"Traceback" not in why
    assert [path.name for path in tmp_path.iterdir()] == ["into"]
    assert (into / "kept").exists() and (into / ".sms-lease").exists()


def test_a_change_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    into, outside = tmp_path / "into", tmp_path / "outside"
    for folder in (into, outside):
        folder.mkdir()
    (outside / "file").touch()
    (into / "out").symlink_to(outside)
    run("change", pair(into), input=archive(removed(STATE + b"/out/file")))
    assert (outside / "file").exists()
    run("change", pair(into), input=archive(removed(STATE + b"/out")))
    assert (outside / "file").exists() and not (into / "out").is_symlink()


class Root:
    """The folder of a volume, with a state of before and a copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path, text in (("spool/state", "old"), ("dump", "old"), (".moving/spool/state", "new")):
            (folder / path).mkdir(parents=True)
            (folder / path / "file").write_text(text)

    def accept(self, *words: str, ok: bool = True) -> bytes:
        return run("accept", ".before-7", *(f"{self.folder}={word}" if "/" in word else word for word in words), ok=ok)

    def text(self, path: str) -> str:
        return (self.folder / path / "file").read_text()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


def test_a_copy_is_put_in_place(root: Root) -> None:
    root.accept("/spool/state", "without", "/dump")
    assert root.text("spool/state") == "new" and not (root.folder / "dump").exists()
    assert [root.text(f".before-7/{path}") for path in ("spool/state", "dump")] == ["old", "old"]


def test_what_an_earlier_attempt_kept_stays(root: Root) -> None:
    root.accept("/spool/state")
    (root.folder / ".moving/spool/state").mkdir()
    (root.folder / ".moving/spool/state/file").write_text("newer")
    root.accept("/spool/state")
    found = [root.text(path) for path in ("spool/state", ".before-7/spool/state", ".before-7.1/spool/state")]
    assert found == ["newer", "old", "new"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("/spool/state", "/dump"), b"the copy lacks /dump"),
        (("/dump", "without", "/spool/state"), b"the copy lacks /dump"),
        (("without", "/spool/state"), b"the copy should not have /spool/state"),
    ],
)
def test_a_copy_that_is_not_there_replaces_nothing(root: Root, words: tuple[str, ...], message: bytes) -> None:
    assert message in root.accept(*words, ok=False)
    assert (root.text("spool/state"), root.text("dump"), root.text(".moving/spool/state")) == ("old", "old", "new")


def test_a_copy_is_discarded(root: Root) -> None:
    run("discard", str(root.folder))
    assert not (root.folder / ".moving").exists() and root.text("spool/state") == "old"
    run("prepare", str(root.folder))
    assert list((root.folder / ".moving").iterdir()) == []
