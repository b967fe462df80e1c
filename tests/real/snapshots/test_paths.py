"""Snapshots compared, and single files restored: verified against trees as the kernel shows them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.loops import GET_FREE
from tests.cases import sample
from tests.real.overlays import Bed, Said, bed, file_system, sh
from tests.real.trees import Print, access_list, fingerprint, make_everything, stir, thaw_flags, write
from tests.waiting import soon

pytestmark = pytest.mark.real
SPARSE = 15 << 30
"""Bytes: nearly the longest file of a file system with blocks of 1 KiB."""


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Bed]:
    with bed(tmp_path / "bed") as made:
        yield made
        thaw_flags(made.upper)
        assert not list(made.store.glob("*.partial")) and not list((made.store / "tmp").iterdir())
        assert str(made.store) not in Path("/proc/self/mounts").read_text()
        # A program that looks at loop devices may hold one for a moment.
        soon(lambda: str(made.store) not in sh("losetup", "-l"))


def diff(overlay: Bed, a: int | None, b: int | None, *paths: str, limit: int | None = 1000) -> dict[str, Any]:
    """Changes by path, and the summary under ''."""
    said = overlay.ask("diff", a=a, b=b, overlay=str(overlay.overlay), limit=limit, paths=list(paths))
    assert said.status == 0, (said.last, said.stderr)
    rows = [row for line in said.lines if line["kind"] == "rows" for row in line["rows"]]
    whole = [row["path"] for row in rows if len(row["path"]) < 4096]  # longer ones are cut
    assert whole == list(dict.fromkeys(whole))
    return {**{row["path"]: row for row in rows}, "": said.last}


def bring(overlay: Bed, number: int, *paths: str) -> dict[str, Any]:
    """Restore paths; the overlay is unmounted for it, and mounted again."""
    overlay.unmount()
    try:
        said = overlay.ask("restore_paths", snapshot=str(number), overlay=str(overlay.overlay), paths=list(paths))
        assert said.status == 0, (said.last, said.stderr)
        placed = overlay.ask("place_paths", overlay=str(overlay.overlay), was=said.last["was"])
        assert placed.status == 0, (placed.last, placed.stderr)
        sh("e2fsck", "-fn", overlay.overlay)
    finally:
        overlay.mount()
    return said.last


def refused(said: Said, words: str, status: int = 3) -> None:
    assert (said.status, words in said.last.get("message", "")) == (status, True), (said.last, said.stderr)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_all_that_files_have_survives(overlay: Bed, tmp_path: Path) -> None:
    made = make_everything(overlay.upper / "keep")
    write(overlay.upper / "other/stays", b"1")
    before = fingerprint(overlay.upper, below=(b"keep",))
    number = overlay.take()["number"]
    thaw_flags(overlay.upper)
    for path in made.values():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    write(overlay.upper / "keep/new/one")
    subprocess.run(["chattr", "+i", overlay.upper / "keep/new", overlay.upper / "keep/new/one"], check=True)
    write(overlay.upper / "other/stays", b"2")
    said = bring(overlay, number, "/keep")
    after = fingerprint(overlay.upper, below=(b"keep",))
    assert set(after) == set(before)
    for name, one in before.items():
        assert {**after[name], "flags": 0} == {**one, "flags": 0}, name  # chattr's are not restored
    assert len(before) >= len(made) and said["notes"] == []
    assert (overlay.upper / "other/stays").read_bytes() == b"2"
    assert (overlay.upper / "keep/sparse").stat().st_blocks <= 64
    # The same, into a folder of the host.
    target = tmp_path / "out"
    said = overlay.ask("extract_paths", snapshot=str(number), paths=["/keep"], folder=str(target)).last
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    out = fingerprint(target, below=(b"keep",))
    thaw_flags(target)
    assert set(before) - set(out) == {b"/keep/whiteout"}
    for name, one in out.items():
        assert {**one, "flags": 0} == {**before[name], "flags": 0}, name
    assert said["notes"] == ["removed from the image, so not created: /keep/whiteout"]
    assert (target / "keep/sparse").stat().st_blocks <= 64


def test_a_free_loop_device_that_another_program_holds_is_waited_for(overlay: Bed) -> None:
    """`losetup` and a scan for file systems open a free device exclusively for a moment."""
    number = overlay.take()["number"]
    control = os.open("/dev/loop-control", os.O_RDWR)
    held = os.open(f"/dev/loop{fcntl.ioctl(control, GET_FREE)}", os.O_RDWR | os.O_EXCL)
    os.close(control)
    release = threading.Timer(0.5, os.close, (held,))
    release.start()
    assert diff(overlay, number, None)[""]["lines"] == 0
    release.join()


MOUNT = """
import sys
from appliance.agent.freeze import MS_RDONLY, mounted, private_mounts
private_mounts()
with mounted(sys.argv[1], "ext3", MS_RDONLY, "noload", float(sys.argv[2])):
    print("mounted")
"""


def test_a_loop_device_that_another_program_still_holds_is_waited_for(overlay: Bed) -> None:
    """It was given the same free device, and has it open exclusively until it finds it taken."""
    overlay.take()
    overlay.unmount()
    loop = sh("losetup", "--find", "--show", "--read-only", overlay.overlay).strip()
    mount = [sys.executable, "-c", MOUNT, loop]
    try:
        held = os.open(loop, os.O_RDONLY | os.O_EXCL)
        refused = subprocess.run([*mount, "0"], capture_output=True, text=True)
        assert "Device or resource busy" in refused.stderr, refused
        release = threading.Timer(0.5, os.close, (held,))
        release.start()
        assert subprocess.run([*mount, "10"], capture_output=True, text=True).stdout == "mounted\n"
        release.join()
    finally:
        sh("losetup", "--detach", loop)
        overlay.mount()


def test_what_a_comparison_tells(overlay: Bed) -> None:
    root = overlay.upper
    for name in ("content", "grown", "mode", "owner", "xattr", "touched", "gone", "kind", "same", "white", "rewritten"):
        write(root / "t" / name, name.encode() * 30_000)
    write(root / "t/wasfolder/x/y")
    write(root / "t/closed/z")
    (root / "t/link").symlink_to("a")
    first = overlay.take()["number"]
    with (root / "t/content").open("r+b") as stream:
        stream.seek(70_000)
        stream.write(b"!")
    with (root / "t/grown").open("ab") as grown:
        grown.write(b"!")
    (root / "t/mode").chmod(0o600)
    os.chown(root / "t/owner", 7, 8)
    os.setxattr(root / "t/xattr", "user.a", b"1")
    os.utime(root / "t/touched", (1, 1))
    data = (root / "t/rewritten").read_bytes()
    state = (root / "t/rewritten").stat()
    (root / "t/rewritten").unlink()
    write(root / "t/filler", b"f" * 100_000)
    write(root / "t/rewritten", data)
    os.utime(root / "t/rewritten", ns=(state.st_atime_ns, state.st_mtime_ns))
    (root / "t/gone").unlink()
    (root / "t/kind").unlink()
    (root / "t/kind").mkdir()
    (root / "t/white").unlink()
    os.mknod(root / "t/white", stat.S_IFCHR, 0)
    os.mknod(root / "t/unseen", stat.S_IFCHR, 0)
    shutil.rmtree(root / "t/wasfolder")
    os.setxattr(root / "t/closed", "trusted.overlay.opaque", b"y")
    write(root / "t/new/a/b", b"12")
    write(root / "t/copied", b"1")
    os.setxattr(root / "t/copied", "trusted.overlay.origin", b"")
    write(root / "t/merged/inner", b"1")
    os.setxattr(root / "t/merged", "trusted.overlay.origin", b"")
    (root / "t/link").unlink()
    (root / "t/link").symlink_to("b")
    expected = {
        "/t/closed": {"change": "changed", "kind": "folder", "image": "hides"},
        "/t/content": {"change": "changed", "kind": "file", "what": ["content"]},
        "/t/copied": {
            "change": "changed", "kind": "file", "size": 1, "image": "copied", "what": ["no longer the image's"]
        },
        "/t/filler": {"change": "added", "kind": "file", "size": 100_000},
        "/t/gone": {"change": "gone", "kind": "file", "was_size": 120_000},
        "/t/grown": {
            "change": "changed", "kind": "file", "what": ["content", "size"], "was_size": 150_000, "size": 150_001
        },
        "/t/kind": {
            "change": "changed", "kind": "folder", "was": "file", "what": ["type"], "entries": 0, "bytes": 0
        },
        "/t/link": {"change": "changed", "kind": "link", "what": ["link target"]},
        "/t/merged/inner": {"change": "added", "kind": "file", "size": 1},
        "/t/mode": {"change": "changed", "kind": "file", "what": ["mode"], "was_mode": "0644", "mode": "0600"},
        "/t/new": {"change": "added", "kind": "folder", "entries": 2, "bytes": 2},
        "/t/owner": {"change": "changed", "kind": "file", "what": ["owner"], "was_owner": "0:0", "owner": "7:8"},
        "/t/touched": {"change": "changed", "kind": "file", "what": ["times"]},
        "/t/unseen": {"change": "gone", "kind": "image", "image": "removed"},
        "/t/wasfolder": {"change": "gone", "kind": "folder", "entries": 2, "bytes": 1},
        "/t/white": {"change": "gone", "kind": "file", "was_size": 150_000, "image": "removed"},
        "/t/xattr": {"change": "changed", "kind": "file", "what": ["xattr"]},
    }  # fmt: skip

    def check(found: dict[str, Any]) -> None:
        summary = found.pop("")
        reported = {path: {name: value for name, value in row.items() if name != "path"} for path, row in found.items()}
        assert reported == expected
        assert list(reported) == sorted(reported)
        assert summary["counts"] == {"added": 5, "changed": 10, "gone": 6} and summary["lines"] == 17

    check(diff(overlay, first, None))
    second = overlay.take()["number"]
    check(diff(overlay, first, second))
    overlay.unmount()
    size = digest(overlay.overlay)
    check(diff(overlay, first, None))
    assert digest(overlay.overlay) == size, "looking at it must not write"
    overlay.mount()
    assert diff(overlay, second, None)[""]["lines"] == 0
    assert diff(overlay, first, second, limit=2)[""]["told"] == 2
    backwards = diff(overlay, second, first)
    assert backwards["/t/new"]["change"] == "gone" and backwards["/t/gone"]["change"] == "added"
    assert backwards["/t/unseen"] == {"path": "/t/unseen", "change": "added", "kind": "image", "image": "shows"}
    assert list(diff(overlay, first, second, "/t/new/a/b", "/t/kind", "/t/same")) == ["/t/kind", "/t/new/a/b", ""]
    everything = diff(overlay, first, second, limit=None)
    assert {"/t/new", "/t/new/a", "/t/new/a/b", "/t/wasfolder/x/y"} <= set(everything)


def naive(before: Print, after: Print) -> dict[bytes, str]:
    """What differs, from two prints."""

    def strip(one: dict[str, Any]) -> dict[str, Any]:
        folder = one["mode"].startswith("0o4")
        return {
            key: value for key, value in one.items() if key not in (("same as", "mtime") if folder else ("same as",))
        }

    found = {name: "added" for name in after if name not in before}
    found.update({name: "gone" for name in before if name not in after})
    found.update({name: "changed" for name in before if name in after and strip(before[name]) != strip(after[name])})
    return found


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_against_a_comparison_file_by_file(overlay: Bed, seed: int) -> None:
    """Random changes; a restore of the paths that a comparison reports undoes them."""
    root = overlay.upper / "r"
    root.mkdir()
    stir(root, seed, 150)
    before = fingerprint(overlay.upper, below=(b"r",))
    first = overlay.take(method="full" if seed % 2 else "delta")["number"]
    stir(root, seed + 100, 100)
    after = fingerprint(overlay.upper, below=(b"r",))
    reported = diff(overlay, first, None, limit=None)
    reported.pop("")
    assert {os.fsencode(path): row["change"] for path, row in reported.items()} == naive(before, after)
    assert len(reported) > 20
    bring(overlay, first, *list(reported)[: len(reported) // 2])
    bring(overlay, first, *reported)
    assert diff(overlay, first, None)[""]["lines"] == 0
    assert not naive(before, fingerprint(overlay.upper, below=(b"r",)))
    assert not naive(fingerprint(overlay.upper, below=(b"r",)), before)


@contextmanager
def container(overlay: Bed, lower: Path) -> Iterator[Path]:
    """What the container sees: the image below, the overlay above."""
    merged = overlay.folder / "merged"
    merged.mkdir(exist_ok=True)
    options = f"lowerdir={lower},upperdir={overlay.upper},workdir={overlay.tree / 'work'}"
    sh("mount", "-t", "overlay", "overlay", "-o", options, merged)
    try:
        yield merged
    finally:
        sh("umount", merged)


def rm(path: Path) -> str:
    return sh("rm", "-rf", path)


PATHS = ("a", "a/f", "a/b", "a/b/c", "a/b/g", "new", "new/n", "a/fresh")
CHANGES: dict[str, Any] = {
    "nothing": lambda root: None,
    "a file of the image is written": lambda root: write(root / "a/b/g", b"mine"),
    "a file of the image is removed": lambda root: rm(root / "a/b/g"),
    "a folder of the image is removed": lambda root: rm(root / "a/b"),
    "a folder of the image is recreated": lambda root: (rm(root / "a/b"), write(root / "a/b/own")),
    "the folder above is removed": lambda root: rm(root / "a"),
    "the folder above is recreated": lambda root: (rm(root / "a"), write(root / "a/b/c/own")),
    "the folder above is a file": lambda root: (rm(root / "a"), write(root / "a")),
    "the folder is a link": lambda root: (rm(root / "a/b"), (root / "a/b").symlink_to("/etc")),
    "new files": lambda root: (write(root / "new/n"), write(root / "a/fresh"), write(root / "a/b/c/d/e")),
}


APART = 5
"""Of what came after, one in so many is tried in every run, of each other one another time; in 9, one has nothing."""


def see(root: Path, path: str) -> Print:
    """What the container sees at a path."""
    found = fingerprint(root, below=(path.encode(),))
    for one in found.values():
        one.pop("attributes")
        one.pop("mtime", None)
    return found


@pytest.mark.parametrize("every", ["some", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("then", CHANGES)
def test_the_container_sees_what_it_saw(overlay: Bed, then: str, every: str, tmp_path: Path) -> None:
    """A path brought back is what the container saw there then, as overlayfs itself shows it, whatever came after."""
    before = list(CHANGES).index(then)
    lower = tmp_path / "lower"
    for name in ("a/f", "a/b/g", "a/b/h", "a/b/c/i"):
        write(lower / name, b"image's " + name.encode())
    with container(overlay, lower) as root:
        CHANGES[then](root)
        saw = {path: see(root, path) for path in PATHS}
    number = overlay.take()["number"]
    overlay.unmount()
    kept, changed = overlay.folder / "kept.img", overlay.folder / "changed.img"
    sh("cp", overlay.overlay, kept)
    done = 0
    for at, now in enumerate(CHANGES):
        if every == "some" and (at + before) % APART:
            continue
        sh("cp", kept, overlay.overlay)
        overlay.mount()
        with container(overlay, lower) as root, suppress(OSError):  # not all of it can be done after everything
            CHANGES[now](root)
        overlay.unmount()
        sh("cp", overlay.overlay, changed)
        first = 3 * before + 5 * at
        for path in PATHS if every == "all" else (PATHS[first % len(PATHS)], PATHS[(first + 3) % len(PATHS)]):
            sh("cp", changed, overlay.overlay)
            done += _comes_back(overlay, lower, number, path, saw[path], now)
    # Of a folder that was removed then, nothing in it can be restored alone: that leaves the fewest.
    assert done >= (5 if every == "all" else 1)
    overlay.mount()


def _comes_back(overlay: Bed, lower: Path, number: int, path: str, saw: Print, now: str) -> bool:
    said = overlay.ask("restore_paths", snapshot=str(number), overlay=str(overlay.overlay), paths=[f"/{path}"])
    if said.status:
        assert said.status == 3
        assert "--path /" in said.last["hint"] or "link" in said.last["message"], said.last
        return False
    assert overlay.ask("place_paths", overlay=str(overlay.overlay), was=said.last["was"]).status == 0
    overlay.mount()
    with container(overlay, lower) as root:
        sees = see(root, path)
    overlay.unmount()
    if any("hides the image's" in note for note in said.last["notes"]):
        return False
    assert sees == saw, (now, path, said.last)
    return True


def test_no_link_leads_out(overlay: Bed, tmp_path: Path) -> None:
    """A compromised container points folders at the host."""
    outside = tmp_path / "host"
    write(outside / "slurmctld/key", b"the host's")
    seen = fingerprint(outside)
    write(overlay.upper / "srv/spool/state", b"good")
    (overlay.upper / "trap").symlink_to(outside)
    write(overlay.upper / "srv/deep/x")
    (overlay.upper / "srv/deep/out").symlink_to(outside)
    first = overlay.take()["number"]
    rm(overlay.upper / "srv")
    (overlay.upper / "srv").symlink_to(outside)
    write(overlay.upper / "trap2/slurmctld/key", b"the container's")
    overlay.unmount()
    for path in ("/trap/slurmctld", "/trap/slurmctld/key"):
        said = overlay.ask("restore_paths", snapshot=str(first), overlay=str(overlay.overlay), paths=[path])
        refused(said, "/trap was a symbolic link in snapshot 1")
        target = str(tmp_path / "never")
        refused(overlay.ask("extract_paths", snapshot=str(first), paths=[path], folder=target), "/trap was a symbolic")
    overlay.mount()
    refused(overlay.ask("diff", a=first, b=None, overlay=str(overlay.overlay), paths=["/trap/x"]), "symbolic link")
    done = bring(overlay, first, "/srv/spool")
    assert done["notes"] == ["/srv was a link, and is a folder again"]
    assert (overlay.upper / "srv/spool/state").read_bytes() == b"good" and not (overlay.upper / "srv/deep").exists()
    said = overlay.ask("extract_paths", snapshot=str(first), paths=["/srv/deep", "/trap"], folder=str(tmp_path / "out"))
    assert said.status == 0, said.last
    assert (tmp_path / "out/trap").is_symlink() and (tmp_path / "out/srv/deep/out").is_symlink()
    assert not (tmp_path / "never").exists() and fingerprint(outside) == seen


@pytest.mark.parametrize(
    "path, words", [("/", "/ is the whole overlay"), ("x", "does not begin with /"), ("/a/../b", "has ..")]
)
def test_paths_that_are_none(overlay: Bed, path: str, words: str, tmp_path: Path) -> None:
    first = overlay.take()["number"]
    refused(overlay.ask("restore_paths", snapshot=str(first), overlay=str(overlay.overlay), paths=[path]), words, 2)
    folder = str(tmp_path / "out")
    refused(overlay.ask("extract_paths", snapshot=str(first), folder=folder, paths=[path]), words, 2)
    assert not Path(folder).exists()


def test_a_file_with_many_names(overlay: Bed, tmp_path: Path) -> None:
    top = overlay.upper / "h"
    write(top / "linked")
    for number in range(2000):
        os.link(top / "linked", top / f"l{number}\n\x1b")
    first = overlay.take()["number"]
    sh("rm", "-rf", top)
    assert diff(overlay, first, None)["/h"]["entries"] == 2001
    done = bring(overlay, first, "/h")
    assert done["paths"][0]["entries"] == 2002 and done["notes"] == []
    assert (top / "linked").stat().st_nlink == 2001
    assert diff(overlay, first, None)[""]["lines"] == 0
    said = overlay.ask("extract_paths", snapshot=str(first), paths=["/h"], folder=str(tmp_path / "out"))
    assert said.status == 0 and said.last["paths"][0]["entries"] == 2002


def make_deep(top: Path) -> None:
    """Make a tree that is deeper than any path."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_a_hostile_tree(overlay: Bed, tmp_path: Path) -> None:
    """It is compared and removed; no path leads to all of it, so it is restored with the whole snapshot only."""
    write(overlay.upper / "g/x")
    first = overlay.take()["number"]
    make_deep(overlay.upper / "h")
    second = overlay.take()["number"]
    assert diff(overlay, first, second)["/h"]["entries"] == 3001
    everything = diff(overlay, first, None, limit=None)
    assert max(len(path) for path in everything) <= 4096
    said = overlay.ask("extract_paths", snapshot=str(second), paths=["/h"], folder=str(tmp_path / "out"))
    refused(said, "longer than a path may be")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bed"]
    done = bring(overlay, first, "/h")
    assert done["paths"] == [{"path": "/h", "kind": "image", "entries": 0, "bytes": 0, "removed": 3002}]
    assert diff(overlay, first, None)[""]["lines"] == 0


def test_a_file_of_holes_is_not_read(overlay: Bed, tmp_path: Path) -> None:
    """Root in the container makes it at no cost; all that files have is restored with it."""
    top = overlay.upper / "h"
    write(top / "sparse", b"begins")
    os.truncate(top / "sparse", SPARSE)
    with (top / "sparse").open("r+b") as stream:
        stream.seek(SPARSE - 4)
        stream.write(b"ends")
    os.setxattr(top / "sparse", "user.a", b"1")
    os.link(top / "sparse", top / "another")
    for path in (top / "sparse", top):
        os.utime(path, ns=(1, 123456789))
    first = overlay.take()["number"]
    sh("rm", "-rf", top)
    assert bring(overlay, first, "/h")["notes"] == []
    assert diff(overlay, first, None)[""]["lines"] == 0
    said = overlay.ask("extract_paths", snapshot=str(first), paths=["/h"], folder=str(tmp_path / "out"))
    assert said.status == 0, said.last
    for here in (top, tmp_path / "out/h"):
        state = (here / "sparse").stat()
        assert (state.st_size, state.st_mtime_ns, state.st_nlink) == (SPARSE, 123456789, 2)
        assert state.st_blocks < 1000 and here.stat().st_mtime_ns == 123456789
        with (here / "sparse").open("rb") as stream:
            assert stream.read(7) == b"begins\0"
            stream.seek(-5, os.SEEK_END)
            assert stream.read() == b"\0ends"
        assert os.getxattr(here / "another", "user.a") == b"1"


def test_names_outside_are_reported(overlay: Bed) -> None:
    write(overlay.upper / "p/one")
    os.link(overlay.upper / "p/one", overlay.upper / "two")
    first = overlay.take()["number"]
    write(overlay.upper / "p/one", b"changed")
    said = bring(overlay, first, "/p")
    assert said["notes"] == [
        "1 files have further hard links outside of the restored paths; these are separate files now"
    ]
    assert (overlay.upper / "p/one").read_bytes() == b"x" and (overlay.upper / "two").read_bytes() == b"changed"


def test_a_file_system_without_attributes(overlay: Bed, tmp_path: Path) -> None:
    write(overlay.upper / "p/one", b"1")
    os.setxattr(overlay.upper / "p/one", "user.a", b"1")
    os.setxattr(overlay.upper / "p/one", "system.posix_acl_access", access_list((2, 6, 77)))
    write(overlay.upper / "p/two", b"2")
    first = overlay.take()["number"]
    target = tmp_path / "ram"
    target.mkdir()
    sh("mount", "-t", "ramfs", "none", target)
    try:
        said = overlay.ask("extract_paths", snapshot=str(first), paths=["/p"], folder=str(target / "out"))
        assert said.status == 0, said.last
        assert (target / "out/p/one").read_bytes() + (target / "out/p/two").read_bytes() == b"12"
        assert said.last["notes"] == ["2 attributes were not set: the target's file system does not support them"]
    finally:
        sh("umount", target)


def test_a_stopped_overlay_that_was_not_closed(overlay: Bed) -> None:
    """What is only in its journal is seen, and nothing is written into it."""
    write(overlay.upper / "before")
    first = overlay.take()["number"]
    write(overlay.upper / "after/x")
    descriptor = os.open(overlay.upper, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    crashed = overlay.folder / "crashed.img"
    shutil.copy(overlay.overlay, crashed)
    assert "needs_recovery" in sh("dumpe2fs", "-h", crashed)
    was = digest(crashed)
    said = overlay.ask("diff", a=first, b=None, overlay=str(crashed), limit=9)
    rows = [row["path"] for line in said.lines if line["kind"] == "rows" for row in line["rows"]]
    assert rows == ["/after"] and digest(crashed) == was
    said = overlay.ask("restore_paths", snapshot=str(first), overlay=str(crashed), paths=["/after"])
    assert said.status == 0 and digest(crashed) == was
    assert overlay.ask("place_paths", overlay=str(crashed), was=said.last["was"]).status == 0
    assert "/after" not in sh("debugfs", "-R", "ls -p /upper", crashed)
    sh("e2fsck", "-fn", crashed)


KILLED = """
import os, signal
from appliance.agent import protocol
step = protocol.step
def deadly(name, text):
    step(name, text)
    if name == {name!r}: os.kill(os.getpid(), signal.SIGKILL)
protocol.step = deadly
"""


@pytest.mark.parametrize("step", sample(("copy", "restore", "check", "rename"), "restore", "rename"))
def test_killed_on_the_way_back(overlay: Bed, step: str, tmp_path: Path) -> None:
    write(overlay.upper / "p/state", b"then" * 50_000)
    first = overlay.take()["number"]
    write(overlay.upper / "p/state", b"now")
    overlay.unmount()
    was = digest(overlay.overlay)
    request: dict[str, Any] = {"snapshot": str(first), "overlay": str(overlay.overlay), "paths": ["/p"]}
    before = KILLED.format(name=step)
    said = overlay.ask("restore_paths", before=before, **request)
    if step == "rename":
        said = overlay.ask("place_paths", before=before, overlay=str(overlay.overlay), was=said.last["was"])
    assert said.status == -9 and step in said.steps
    time.sleep(0.1)
    assert digest(overlay.overlay) == was
    soon(lambda: str(overlay.folder) not in sh("losetup", "-l"))
    # The overlay starts as ever, and the next run clears what is left.
    sh("e2fsck", "-fn", overlay.overlay)
    said = overlay.ask("restore_paths", **request)
    assert overlay.ask("place_paths", overlay=str(overlay.overlay), was=said.last["was"]).status == 0
    assert [path.name for path in overlay.folder.glob("ov.img*")] == ["ov.img"]
    overlay.mount()
    assert (overlay.upper / "p/state").read_bytes() == b"then" * 50_000


@pytest.mark.parametrize("step", sample(("restore", "rename"), "rename"))
def test_killed_on_the_way_out(overlay: Bed, step: str, tmp_path: Path) -> None:
    write(overlay.upper / "p/state")
    first = overlay.take()["number"]
    folder = tmp_path / "out"
    request: dict[str, Any] = {"snapshot": str(first), "folder": str(folder), "paths": ["/p"]}
    assert overlay.ask("extract_paths", before=KILLED.format(name=step), **request).status == -9
    assert not folder.exists() and str(overlay.store) not in Path("/proc/self/mounts").read_text()
    soon(lambda: str(overlay.store) not in sh("losetup", "-l"))
    assert overlay.ask("extract_paths", **request).status == 0
    assert (folder / "p/state").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bed", "out"]
    refused(overlay.ask("extract_paths", **request), "already exists")


SLOW = """
import os, signal, threading
from appliance.agent import rsync
rsync.RSYNC += ("--bwlimit=50",)
threading.Timer(2, lambda: os.kill(os.getpid(), signal.{name})).start()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("command", ["restore_paths", "extract_paths"])
def test_killed_while_rsync_copies(overlay: Bed, command: str, name: str, tmp_path: Path) -> None:
    """With the agent its rsync ends, and with that its mounts and loop devices."""
    write(overlay.upper / "p/state", os.urandom(10 << 20))
    first = overlay.take()["number"]
    write(overlay.upper / "p/state", b"now")
    overlay.unmount()
    was = digest(overlay.overlay)
    request: dict[str, Any] = {"snapshot": str(first), "paths": ["/p"]}
    request["overlay" if command == "restore_paths" else "folder"] = str(
        overlay.overlay if command == "restore_paths" else tmp_path / "out"
    )
    said = overlay.ask(command, before=SLOW.format(name=name), **request)
    assert said.status == (-9 if name == "SIGKILL" else 1) and said.steps[-1] == "restore", (said.last, said.stderr)
    soon(lambda: str(overlay.folder) not in sh("losetup", "-l"))
    soon(lambda: "--bwlimit=50" not in sh("ps", "-eo", "args"))
    assert digest(overlay.overlay) == was and not (tmp_path / "out").exists()
    if name == "SIGTERM":
        assert [path.name for path in tmp_path.iterdir()] == ["bed"]
        assert [path.name for path in overlay.folder.glob("ov.img*")] == ["ov.img"]
    done = overlay.ask(command, **request)
    assert done.status == 0, (done.last, done.stderr)
    (overlay.folder / "ov.img.with-paths").unlink(missing_ok=True)
    overlay.mount()


@pytest.mark.parametrize("step", sample(("open", "compare"), "compare"))
def test_killed_while_it_compares(overlay: Bed, step: str) -> None:
    first = overlay.take()["number"]
    request: dict[str, Any] = {"a": first, "b": None, "overlay": str(overlay.overlay)}
    assert overlay.ask("diff", before=KILLED.format(name=step), **request).status == -9
    soon(lambda: str(overlay.store) not in sh("losetup", "-l"))
    assert overlay.ask("diff", **request).status == 0
    overlay.unmount()  # it has no other user
    overlay.mount()


def test_while_it_runs_and_when_it_was_used(overlay: Bed) -> None:
    first = overlay.take()["number"]
    request: dict[str, Any] = {"snapshot": str(first), "overlay": str(overlay.overlay), "paths": ["/var"]}
    refused(overlay.ask("restore_paths", **request), "is in use")
    overlay.unmount()
    said = overlay.ask("restore_paths", **request)
    overlay.mount()
    write(overlay.upper / "written/meanwhile")
    refused(overlay.ask("place_paths", overlay=str(overlay.overlay), was=said.last["was"]), "was used meanwhile")
    overlay.unmount()
    said = overlay.ask("restore_paths", **request)
    overlay.mount()
    write(overlay.upper / "written/again")
    overlay.unmount()
    refused(overlay.ask("place_paths", overlay=str(overlay.overlay), was=said.last["was"]), "was used meanwhile")
    overlay.mount()
    assert (overlay.upper / "written/again").exists()
    assert [path.name for path in overlay.folder.glob("ov.img*")] == ["ov.img"]


def test_damage_is_found_before_anything_is_replaced(overlay: Bed, tmp_path: Path) -> None:
    write(overlay.upper / "p/state", os.urandom(300_000))
    write(overlay.upper / "q", b"sound")
    manifest = overlay.take(method="delta")
    data = (overlay.upper / "p/state").read_bytes()
    write(overlay.upper / "p/state", os.urandom(300_000))
    overlay.unmount()
    for chunk in (overlay.store / "chunks").rglob("*"):
        if chunk.is_file() and data[150_000:150_400] in chunk.read_bytes():
            chunk.write_bytes(chunk.read_bytes().replace(data[150_000:150_400], bytes(400)))
    was = digest(overlay.overlay)
    number = manifest["number"]
    request: dict[str, Any] = {"snapshot": str(number), "overlay": str(overlay.overlay), "paths": ["/p"]}
    refused(overlay.ask("restore_paths", **request), "is damaged", 1)
    folder = tmp_path / "out"
    refused(overlay.ask("extract_paths", snapshot=str(number), folder=str(folder), paths=["/p"]), "is damaged", 1)
    assert digest(overlay.overlay) == was and not list(tmp_path.glob("*out*"))
    assert [path.name for path in overlay.folder.glob("ov.img*")] == ["ov.img"]
    overlay.mount()
    # What does not need it is still to be had.
    assert bring(overlay, number, "/q")["paths"][0]["entries"] == 1


def test_no_room(overlay: Bed, tmp_path: Path) -> None:
    write(overlay.upper / "p/state", os.urandom(30 << 20))
    first = overlay.take()["number"]
    rm(overlay.upper / "p")
    write(overlay.upper / "other", os.urandom(30 << 20))
    overlay.unmount()
    was = digest(overlay.overlay)
    request: dict[str, Any] = {"snapshot": str(first), "overlay": str(overlay.overlay), "paths": ["/p"]}
    refused(overlay.ask("restore_paths", **request), "the overlay is too small for it", 1)
    with file_system(tmp_path / "small", "ext4", 16) as small:
        said = overlay.ask("extract_paths", snapshot=str(first), folder=str(small / "out"), paths=["/p"])
        refused(said, "is full", 1)
        assert [path.name for path in small.iterdir()] == ["lost+found"]
        # The copy does not fit beside it.
        sh("truncate", "-s", "8M", small / "ov.img")
        sh("mkfs.ext3", "-q", "-F", small / "ov.img")
        write(small / "fill", os.urandom(12 << 20))
        refused(overlay.ask("restore_paths", **{**request, "overlay": str(small / "ov.img")}), "no room for a copy")
    with file_system(tmp_path / "full", "ext4", 64) as small:  # nor do the files fit into the store
        shutil.copytree(overlay.store, small / "store")
        write(small / "fill", os.urandom(16 << 20))
        request = {"store": str(small / "store"), "snapshot": str(first), "paths": ["/p"]}
        refused(overlay.ask("extract_paths", folder=str(tmp_path / "out"), **request), "no room in")
        refused(overlay.ask("restore_paths", overlay=str(overlay.overlay), **request), "no room in")
    assert digest(overlay.overlay) == was and not (tmp_path / "out").exists()
    assert [path.name for path in overlay.folder.glob("ov.img*")] == ["ov.img"]
    overlay.mount()
