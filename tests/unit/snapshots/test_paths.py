"""Paths in the container: parse, display, walk; differences as text."""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent import diff, names, rsync
from appliance.agent import main as agent_main
from appliance.agent.paths import creating
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, disk_error
from appliance.agent.trees import Contents
from appliance.cli import main
from appliance.cli.snapshots.paths_view import diff_line, diff_summary, restored_paths_lines
from appliance.errors import Refused
from appliance.operations.snapshots.paths import (
    Diff,
    ExtractOptions,
    RestoredPaths,
    Rows,
    extract_paths,
    rehearse_paths,
    restore_paths,
)
from appliance.shared import files
from appliance.shared.results import PathResult
from appliance.text import printable
from tests.sites import open_debian
from tests.support.fake import Fake

NAME = st.binary(min_size=1, max_size=40).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("", "an empty path does not begin with /"),
        ("var/spool", "does not begin with /"),
        ("./x", "does not begin with /"),
        ("~/x", "does not begin with /"),
        ("/var/../etc", "has .. in it"),
        ("/..", "has .. in it"),
        ("/a\0b", "is not a path"),
        ("/" + "x" * 256, "has a name that is too long"),
        ("/x" * 2100, "is not a path"),
        ("/\ud800", "is not text"),
    ],
)
def test_invalid_paths(text: str, wrong: str) -> None:
    with pytest.raises(Problem, match=wrong) as caught:
        names.split_path(text)
    assert caught.value.status == 2 and caught.value.hint
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "text, parts",
    [
        ("/", ()),
        ("//", ()),
        ("/./", ()),
        ("/var/spool/", (b"var", b"spool")),
        ("//var///spool/.", (b"var", b"spool")),
        ("/a b/...", (b"a b", b"...")),
        ("/new\nline", (b"new\nline",)),
        ("/-rf", (b"-rf",)),
        ("/\udcff", (b"\xff",)),
        ("/grün", ("grün".encode(),)),
    ],
)
def test_valid_paths(text: str, parts: names.Names) -> None:
    assert names.split_path(text) == parts


@given(st.lists(NAME, max_size=8).map(tuple))
def test_any_name_survives_the_command_line_and_json(parts: names.Names) -> None:
    """From the command line to the request, and back in the report."""
    word = os.fsdecode(names.join(parts))
    request = json.loads(json.dumps({"paths": [word]}))
    assert names.split_path(request["paths"][0]) == parts
    fields = json.loads(json.dumps(names.path_fields(parts)))
    raw = base64.b64decode(fields["base64"]) if "base64" in fields else fields["path"].encode()
    assert raw == names.join(parts)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_displayed_paths_are_printable(parts: list[bytes]) -> None:
    assert names.show(parts).isprintable()
    assert printable(names.path_fields(parts)["path"]).isprintable()
    assert len(names.join(parts)) <= names.LONGEST


@given(st.text(max_size=50))
def test_any_text_is_a_valid_path_or_refused(text: str) -> None:
    try:
        parts = names.split_path(text)
    except Problem:
        return
    assert not {b"", b".", b".."} & set(parts)
    assert not any(b"/" in part or b"\0" in part for part in parts)


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"ab"]), max_size=4).map(tuple), max_size=8))
def test_a_path_below_another_is_left_out(paths: list[names.Names]) -> None:
    kept = names.outermost(paths)
    assert kept == sorted(set(kept))
    for path in paths:
        assert sum(path[: len(one)] == one for one in kept) == 1


def test_a_deep_tree_needs_few_descriptors(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    with names.DirCursor(root) as cursor:
        for _ in range(1500):
            os.mkdir(b"d", dir_fd=cursor.here)
            cursor.down(b"d")
        assert sum(one >= 0 for one in cursor.open) <= names.MAX_OPEN + 2
        inode = os.fstat(cursor.here).st_ino
        for _ in range(1500):
            cursor.up()
        assert len(cursor.open) == 1 and os.fstat(cursor.here).st_ino == tmp_path.stat().st_ino != inode
        entries, _ = diff.measure(cursor, b"d")
        assert entries == 1499
    os.close(root)
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # too deep for pytest to remove


def test_links_are_never_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("../elsewhere")
    root = os.open(tmp_path / "root", os.O_RDONLY)
    with names.DirCursor(root) as cursor:
        with pytest.raises(OSError):
            cursor.down(b"link")
        assert not names.enter(cursor, b"link")
        assert [path for path, _ in names.walk(cursor, b"link")] == [[b"link"]]
        with pytest.raises(Problem, match=r"/link was a symbolic link before, to \.\./elsewhere"):
            diff.descend(cursor, [b"link"], "before")
    os.close(root)


def test_a_moved_folder_is_detected(tmp_path: Path) -> None:
    deep = tmp_path / "root" / "/".join("d" * (names.MAX_OPEN + 5))
    deep.mkdir(parents=True)
    (tmp_path / "trap").mkdir()
    root = os.open(tmp_path / "root", os.O_RDONLY)
    with names.DirCursor(root) as cursor:
        for _ in range(names.MAX_OPEN + 5):
            cursor.down(b"d")
        (tmp_path / "root" / "d" / "d").rename(tmp_path / "trap" / "d")
        with pytest.raises(names.Moved):
            while len(cursor.open) > 1:
                cursor.up()
    os.close(root)


@given(st.sets(st.binary(max_size=3)), st.sets(st.binary(max_size=3)))
def test_names_of_both_trees_are_merged_in_order(a: set[bytes], b: set[bytes]) -> None:
    merged = list(diff.merge(sorted(a), sorted(b)))
    assert merged == [(name, name in a, name in b) for name in sorted(a | b)]


class Bytes(Contents):
    """A file in memory; with ``holes``, windows of zeros are holes."""

    def __init__(self, data: bytes, holes: bool) -> None:
        self.data = data
        self.size = len(data)
        self.holes = holes

    def windows(self) -> Iterator[int]:
        for number in range(-(-self.size // CHUNK)):
            if not self.holes or any(self.window(number)):
                yield number

    def window(self, number: int) -> bytes:
        return self.data[number * CHUNK : (number + 1) * CHUNK]


PIECES = st.lists(st.sampled_from([bytes(CHUNK), b"x" * CHUNK, bytes(100) + b"y"]), max_size=4).map(b"".join)


@given(PIECES, PIECES, st.booleans(), st.booleans())
def test_holes_equal_zeros(a: bytes, b: bytes, holes_a: bool, holes_b: bool) -> None:
    assert diff.same_contents(Bytes(a, holes_a), Bytes(a, holes_b))
    assert diff.same_contents(Bytes(a, holes_a), Bytes(b, holes_b)) == (a == b)


def test_a_walk_visits_everything_once(tmp_path: Path) -> None:
    for path in ("top/b/deep/er/x", "top/a", "top/c"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"12")
    root = os.open(tmp_path, os.O_RDONLY)
    with names.DirCursor(root) as cursor:
        found = [b"/".join(path).decode() for path, _ in names.walk(cursor, b"top")]
        assert found == ["top", "top/a", "top/b", "top/b/deep", "top/b/deep/er", "top/b/deep/er/x", "top/c"]
        assert len(cursor.open) == 1 and diff.measure(cursor, b"top") == (6, 6)
        assert not list(names.walk(cursor, b"missing"))
    os.close(root)


NOT_SET = [
    'rsync: [receiver] rsync_xal_set: fsetxattr("/o/.f.ZU","user.a") failed: Operation not supported (95)',
    'rsync: rsync_xal_set: lsetxattr("/o/f","user.a") failed: Operation not supported (95)',
    "rsync: [receiver] set_acl: sys_acl_set_file(.f.ZU, ACL_TYPE_ACCESS): Operation not supported (95)",
]
PARTIAL = (
    "rsync error: some files/attrs were not transferred (see previous errors) (code 23) at main.c(1394) [sender=3.5.0]"
)


@pytest.mark.parametrize(
    ("status", "lines", "outside", "outcome"),
    [
        (0, [], False, 0),
        (23, [*NOT_SET, PARTIAL], True, 3),
        (23, [*NOT_SET, PARTIAL], False, "rsync ended with status 23: .*fsetxattr"),
        (
            23,
            [NOT_SET[0], 'rsync: chown "/o/f" failed: Operation not permitted (1)', PARTIAL],
            True,
            "status 23: .*chown",
        ),
        (11, ['rsync: [receiver] write failed on "/o/big": No space left on device (28)'], True, errno.ENOSPC),
        (11, ['rsync: write failed on "/o/big": Disk quota exceeded (122)'], False, errno.EDQUOT),
        (
            23,
            ['rsync: open "/o/(28)\x1b" failed: Input/output error (5)', PARTIAL],
            False,
            r"\(28\)\\x1b.*error \(5\)$",
        ),
        (1, ["rsync: --acls: unknown option"], True, "status 1: rsync: --acls"),
        (-9, [], True, "rsync ended with status -9"),
    ],
)
def test_messages_of_rsync(status: int, lines: list[str], outside: bool, outcome: int | str) -> None:
    if isinstance(outcome, str):
        with pytest.raises(Problem, match=outcome):
            rsync.judge(status, lines, outside=outside)
    elif status in (0, 23):
        assert rsync.judge(status, lines, outside=outside) == outcome
    else:
        with pytest.raises(OSError) as caught:
            rsync.judge(status, lines, outside=outside)
        assert caught.value.errno == outcome


def test_what_not_even_root_may_create_is_explained() -> None:
    """An immutable folder (chattr +i) above a path that is restored."""
    refused = OSError(errno.EPERM, "Operation not permitted")
    with pytest.raises(Problem, match=r"^/var/new: operation not permitted$") as caught, creating((b"var", b"new")):
        raise refused
    line = 'rsync: [receiver] mkstemp "/var/.new.4Yb2" failed: Operation not permitted (1)'
    with pytest.raises(Problem, match="mkstemp") as of_rsync:
        rsync.judge(23, [line], outside=False)
    for found in (caught.value, of_rsync.value, disk_error(refused, "/root/new")):
        assert "`lsattr -d`" in found.hint and "`chattr -i`" in found.hint
    with pytest.raises(OSError, match="No space"), creating((b"var",)):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["/x/lab.img.with-paths", None])
def test_a_file_that_not_even_root_may_create_is_explained(
    name: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the overlay; a refusal that is not about a file has other reasons."""

    def refuse(request: dict[str, Any]) -> dict[str, Any]:
        raise PermissionError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr(agent_main, "find_command", lambda _: refuse)
    assert agent_main.main(["restore_paths", "{}"]) == 1
    problem = json.loads(capfd.readouterr().out)
    assert problem["message"] == (f"{name}: " if name else "") + "operation not permitted"
    assert ("`chattr -i`" in problem["hint"]) == bool(name)


def test_paths_that_rsync_would_cut_are_refused() -> None:
    with pytest.raises(Problem, match=r"/d/d/.*is longer than a path may be") as caught:
        rsync.copy(-1, -1, [(b"d",) * 2048], outside=False)
    assert caught.value.status == 3 and len(caught.value.message) < 300
    assert rsync.copy(-1, -1, [], outside=False) == 0


LINES: list[tuple[dict[str, Any], str]] = [
    ({"path": "/etc/a", "change": "added", "kind": "file", "size": 12}, "+ /etc/a  file, 12 B"),
    (
        {"path": "/srv", "change": "added", "kind": "folder", "entries": 1, "bytes": 2048, "image": "hides"},
        "+ /srv/  folder, 1 entry, 2.0 KiB, hides the image's folder, if it has one",
    ),
    ({"path": "/l", "change": "gone", "kind": "link"}, "- /l  link"),
    (
        {"path": "/etc/motd", "change": "gone", "kind": "image", "image": "removed"},
        "- /etc/motd  removed from the image",
    ),
    (
        {"path": "/m", "change": "added", "kind": "image", "image": "shows"},
        "+ /m  the image's version is visible again",
    ),
    (
        {"path": "/f", "change": "gone", "kind": "file", "was_size": 1, "image": "removed"},
        "- /f  file, 1 B, removed from the image too, if it has one",
    ),
    (
        {"path": "/f", "change": "changed", "kind": "file", "what": ["content", "size"], "was_size": 1, "size": 3},
        "~ /f  content, size 1 B -> 3 B",
    ),
    (
        {"path": "/d", "change": "changed", "kind": "folder", "what": ["mode"], "was_mode": "0755", "mode": "0700"},
        "~ /d/  mode 0755 -> 0700",
    ),
    ({"path": "/d", "change": "changed", "kind": "folder", "image": "hides"}, "~ /d/  hides the image's folder"),
    ({"path": "/x", "change": "changed", "kind": "file", "was": "link", "what": ["type"]}, "~ /x  link -> file"),
    ({"path": "/x", "change": "changed", "kind": "file", "what": ["xattr"]}, "~ /x  attributes"),
    ({"path": "/\x1b[2J\n", "change": "gone", "kind": "pipe"}, "- /\\x1b[2J\\n  pipe"),
    ({"path": "/", "change": "changed", "kind": "folder", "what": ["owner"], "was_owner": "0:0", "owner": "1:1"},
     "~ /  owner 0:0 -> 1:1"),
]  # fmt: skip


@pytest.mark.parametrize("row, line", LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_difference_is_one_line(row: dict[str, Any], line: str) -> None:
    assert diff_line(row) == line


def test_summary_of_a_comparison() -> None:
    counts = {"added": 2000, "changed": 1, "gone": 0}
    assert diff_summary(Diff("h", 3, None, counts, 1200, 1000, Rows())) == (
        "snapshot 3 -> now on h: 2000 added, 1 changed, 0 gone; 1000 of 1200 lines are shown, --all shows all"
    )
    assert diff_summary(Diff("h", 3, 4, {}, 0, 0, Rows())) == "snapshot 3 and snapshot 4: no differences"


def test_rows_of_any_name_are_kept() -> None:
    rows = Rows()
    rows.add([{"path": "/\ud800\n"}, {"path": "/b"}])
    assert [row["path"] for row in rows] == ["/\ud800\n", "/b"] == [row["path"] for row in rows]


def test_output_of_a_restore_of_paths() -> None:
    paths: tuple[PathResult, ...] = (
        {"path": "/a", "kind": "folder", "entries": 3, "bytes": 10, "removed": 2},
        {"path": "/b", "kind": "image", "entries": 0, "bytes": 0, "removed": 1},
        {"path": "/c", "kind": "removed", "entries": 1, "bytes": 0, "removed": 0},
    )
    assert list(restored_paths_lines("lab", RestoredPaths("h", 7, paths, ("x\n",), 1.0, kept=8))) == [
        "note: x\\n",
        "/a: 3 entries, 10 B; 2 replaced",
        "/b: the image's, as in the snapshot",
        "/c: removed from the image, as in the snapshot",
        "restored into the overlay on h from snapshot 7 of lab (1.0 s)",
        "the previous overlay is snapshot 8; to undo: sms overlay restore 8",
    ]
    assert list(restored_paths_lines("lab", RestoredPaths("h", 7, paths[:1], (), 0.0, changed=False))) == [
        "/a: as in snapshot 7 of lab already, nothing was changed"
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--to", "/x"], "--to needs --path"),
        (["--path", "/x", "--as", "y"], "--as restores the whole snapshot"),
        (["--path", ""], "argument --path: is empty"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["overlay", "restore", "3", *words]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_whiteout_is_not_a_device() -> None:
    def state(mode: int, device: int) -> os.stat_result:
        return os.stat_result((mode, 1, 1, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": device})

    assert names.kind_of(state(stat.S_IFCHR, 0)) == "removed"
    assert names.kind_of(state(stat.S_IFCHR, 259)) == "device"
    assert names.kind_of(state(stat.S_IFBLK, 0)) == "device"


def test_a_host_without_rsync_is_refused() -> None:
    cluster = open_debian()

    def run(argv: tuple[str, ...], given: bytes | None) -> tuple[int, str]:
        return 0, "rsync" if argv[-1] == "rsync" else ""

    host = Fake({("sh",): run})
    for verb in (
        lambda: rehearse_paths(cluster, host, "3", ["/etc"]),
        lambda: restore_paths(cluster, host, "3", ["/etc"]),
        lambda: extract_paths(cluster, host, ExtractOptions("3", ["/etc"], "/root/x")),
    ):
        with pytest.raises(Refused, match=f"rsync is not installed on {host.name}") as caught:
            verb()
        assert "sms doctor" in caught.value.hint


@given(st.lists(st.sampled_from([0, 1, 4096, 4097, 100_000]), min_size=1, max_size=8), st.sampled_from([4096, 10_000]))
def test_units_with_data(lengths: list[int], unit: int) -> None:
    """Alternately holes and data; a file system may keep small holes as data."""
    with tempfile.TemporaryFile() as file:
        wanted, offset = set(), 0
        for index, length in enumerate(lengths):
            if index % 2 and length:
                files.write_at(file.fileno(), b"x" * length, offset)
                wanted |= set(range(offset // unit, (offset + length - 1) // unit + 1))
            offset += length
        file.truncate(offset)
        found = list(files.data_units(file.fileno(), offset, unit))
        assert found == sorted(set(found)) and set(found) >= wanted
        assert all(number * unit < offset for number in found)


def test_messages_of_rsync_are_bounded() -> None:
    script = "import sys; sys.stdin.read(); sys.stderr.write('rsync: rsync_xal_set: x\\n' * 50_000 + 'a' * (1 << 20))"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        lines, more = rsync._exchange(child, b"name" * 100_000)
    assert len(lines) == rsync.MAX_LINES and max(map(len, lines)) <= rsync.MAX_LINE
    assert more == 50_000 - rsync.MAX_LINES
