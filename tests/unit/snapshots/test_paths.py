"""Paths in the container: checked, told, walked; differences as a person reads them."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent import names, tree
from appliance.agent.copier import PAGE, runs
from appliance.agent.sides import Contents
from appliance.agent.store import CHUNK
from appliance.agent.words import Problem
from appliance.cli import main
from appliance.cli.snapshots.paths_view import brought_lines, diff_line, diff_summary
from appliance.operations.snapshots.paths import Brought, Diff, Rows
from appliance.text import printable

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
        ("/a\0b", "is no path"),
        ("/" + "x" * 256, "has a name that is too long"),
        ("/x" * 2100, "is no path"),
        ("/\ud800", "is no text"),
    ],
)
def test_what_is_no_path(text: str, wrong: str) -> None:
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
def test_what_is_one(text: str, parts: names.Names) -> None:
    assert names.split_path(text) == parts


@given(st.lists(NAME, max_size=8).map(tuple))
def test_any_name_comes_through_the_command_line_and_json(parts: names.Names) -> None:
    """As it is given on the command line, in the request, back again in what is told."""
    word = os.fsdecode(names.join(parts))
    request = json.loads(json.dumps({"paths": [word]}))
    assert names.split_path(request["paths"][0]) == parts
    told = json.loads(json.dumps(names.tell(parts)))
    raw = base64.b64decode(told["base64"]) if "base64" in told else told["path"].encode()
    assert raw == names.join(parts)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_what_is_shown_is_harmless(parts: list[bytes]) -> None:
    assert names.show(parts).isprintable()
    assert printable(names.tell(parts)["path"]).isprintable()
    assert len(names.join(parts)) <= names.LONGEST


@given(st.text(max_size=50))
def test_any_text_is_a_path_or_refused(text: str) -> None:
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


def test_a_deep_tree_takes_few_descriptors(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    with names.Ladder(root) as ladder:
        for _ in range(1500):
            os.mkdir(b"d", dir_fd=ladder.here)
            ladder.down(b"d")
        assert sum(one >= 0 for one in ladder.open) <= names.KEPT + 2
        inode = os.fstat(ladder.here).st_ino
        for _ in range(1500):
            ladder.up()
        assert ladder.depth == 0 and os.fstat(ladder.here).st_ino == tmp_path.stat().st_ino != inode
        entries, _ = tree.measure(ladder, b"d")
        assert entries == 1499
    os.close(root)
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # too deep for pytest to remove


def test_a_link_is_never_gone_into(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("../elsewhere")
    root = os.open(tmp_path / "root", os.O_RDONLY)
    with names.Ladder(root) as ladder:
        with pytest.raises(OSError):
            ladder.down(b"link")
        assert not tree.into(ladder, b"link")
        with pytest.raises(Problem, match=r"/link was a symbolic link before, to \.\./elsewhere"):
            tree.descend(ladder, [b"link"], "before")
    os.close(root)


def test_a_folder_that_moves_away_is_noticed(tmp_path: Path) -> None:
    deep = tmp_path / "root" / "/".join("d" * (names.KEPT + 5))
    deep.mkdir(parents=True)
    (tmp_path / "trap").mkdir()
    root = os.open(tmp_path / "root", os.O_RDONLY)
    with names.Ladder(root) as ladder:
        for _ in range(names.KEPT + 5):
            ladder.down(b"d")
        (tmp_path / "root" / "d" / "d").rename(tmp_path / "trap" / "d")
        with pytest.raises(names.Moved):
            while ladder.depth:
                ladder.up()
    os.close(root)


@given(st.sets(st.binary(max_size=3)), st.sets(st.binary(max_size=3)))
def test_names_of_both_sides_come_in_order(a: set[bytes], b: set[bytes]) -> None:
    merged = list(tree.merge(sorted(a), sorted(b)))
    assert merged == [(name, name in a, name in b) for name in sorted(a | b)]


class Bytes(Contents):
    """A file in memory; windows of zeros alone are holes if so wanted."""

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
def test_holes_are_zeros(a: bytes, b: bytes, holes_a: bool, holes_b: bool) -> None:
    assert tree.same_contents(Bytes(a, holes_a), Bytes(a, holes_b))
    assert tree.same_contents(Bytes(a, holes_a), Bytes(b, holes_b)) == (a == b)


@given(st.lists(st.sampled_from([bytes(PAGE), b"x" * PAGE, b"tail"]), max_size=6).map(b"".join))
def test_pages_of_zeros_are_not_written(data: bytes) -> None:
    out = bytearray(len(data))
    for begin, end in runs(memoryview(data)):
        assert any(data[begin:end])
        out[begin:end] = data[begin:end]
    assert out == data


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
    ({"path": "/m", "change": "added", "kind": "image", "image": "shows"}, "+ /m  the image's shows again"),
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


def test_what_a_comparison_ends_with() -> None:
    counts = {"added": 2000, "changed": 1, "gone": 0}
    assert diff_summary(Diff("h", 3, None, counts, 1200, 1000, Rows())) == (
        "snapshot 3 -> now on h: 2000 added, 1 changed, 0 gone; 1000 of 1200 lines are shown, --all shows all"
    )
    assert diff_summary(Diff("h", 3, 4, {}, 0, 0, Rows())) == "snapshot 3 and snapshot 4: no differences"


def test_rows_of_any_name_are_kept() -> None:
    rows = Rows()
    rows.add([{"path": "/\ud800\n"}, {"path": "/b"}])
    assert [row["path"] for row in rows] == ["/\ud800\n", "/b"] == [row["path"] for row in rows]


def test_what_came_back_is_told() -> None:
    paths = (
        {"path": "/a", "kind": "folder", "entries": 3, "bytes": 10, "removed": 2},
        {"path": "/b", "kind": "image", "entries": 0, "bytes": 0, "removed": 1},
        {"path": "/c", "kind": "removed", "entries": 1, "bytes": 0, "removed": 0},
    )
    assert list(brought_lines("lab", Brought("h", 7, paths, ("x\n",), 1.0, kept=8))) == [
        "note: x\\n",
        "/a: 3 entries, 10 B; 2 gave way",
        "/b: the image's, as in the snapshot",
        "/c: removed from the image, as in the snapshot",
        "the overlay on h has this from snapshot 7 of lab now (1.0 s)",
        "what it replaced is snapshot 8; the way back: sms overlay restore 8",
    ]
    assert list(brought_lines("lab", Brought("h", 7, paths[:1], (), 0.0, changed=False))) == [
        "/a: as in snapshot 7 of lab already, nothing was changed"
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--to", "/x"], "--to needs --path"),
        (["--path", "/x", "--as", "y"], "--as restores all of a snapshot"),
        (["--path", ""], "argument --path: is empty"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["overlay", "restore", "3", *words]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_whiteout_is_no_device() -> None:
    def state(mode: int, device: int) -> os.stat_result:
        return os.stat_result((mode, 1, 1, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": device})

    assert names.kind_of(state(stat.S_IFCHR, 0)) == "removed"
    assert names.kind_of(state(stat.S_IFCHR, 259)) == "device"
    assert names.kind_of(state(stat.S_IFBLK, 0)) == "device"
