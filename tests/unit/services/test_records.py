"""Records: what is written is read again, and what is not one is refused with the field's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, Optional, TypedDict

import pytest

from appliance.operations.start_note import StartNote, parse_note
from appliance.operations.upgrade.rehearse_folders import RECORD, Record, read_record, write_record
from appliance.operations.vm.snapshots import VmSnapshot, read_listed
from appliance.plan.overlay.mirror import read_mirror
from appliance.plan.upgrade.upgrade import read_upgrade
from appliance.plan.vm.holder import Holder, read_holder
from appliance.shared.records import RecordError, check_value, from_json, to_json


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Whole:
    number: int
    parts: tuple[Part, ...] = ()
    words: list[str] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    maybe: Optional[Part] = None  # noqa: UP045 - Python 3.9 reads these, too
    flag: bool = False
    more: Any = None
    either: str | None = None


WHOLE = Whole(1, (Part("a", 0.5), Part("b")), ["x"], {"y": 2}, Part("c"), True, [1, {"z": None}], "e")


def test_round_trip() -> None:
    assert from_json(Whole, to_json(WHOLE)) == WHOLE
    assert from_json(Whole, b'{"number": 3, "unknown": [1]}') == Whole(3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it is not an object"),
        ("null", "it is not an object"),
        ("{}", "number is missing"),
        ('{"number": "1"}', "number is not a int"),
        ('{"number": true}', "number is not a int"),
        ('{"number": 1.0}', "number is not a int"),
        ('{"number": 1, "flag": 1}', "flag is not a bool"),
        ('{"number": 1, "parts": {}}', "parts is not a tuple"),
        ('{"number": 1, "parts": [{"name": "a"}, {}]}', r"parts\[1\]\.name is missing"),
        ('{"number": 1, "parts": [{"name": "a", "seconds": "1"}]}', r"parts\[0\]\.seconds is not a float"),
        ('{"number": 1, "parts": [{"name": "a", "seconds": NaN}]}', r"parts\[0\]\.seconds is not a float"),
        (
            '{"number": 1, "parts": [{"name": "a", "seconds": 1%s}]}' % ("0" * 400),
            r"parts\[0\]\.seconds is not a float",
        ),
        ('{"number": 1, "words": [null]}', r"words\[0\] is not a str"),
        ('{"number": 1, "by_name": {"y": "2"}}', r"by_name\.y is not a int"),
        ('{"number": 1, "maybe": []}', "maybe is not an object"),
        ('{"number": 1, "either": 5}', "either is not a str"),
    ],
)
def test_invalid_records(text: str, error: str) -> None:
    with pytest.raises(RecordError, match=error):
        from_json(Whole, text.encode())


def test_start_note_of_version_519381b() -> None:
    """As that version wrote it."""
    written = {
        "image": "/i.sif",
        "key": "k",
        "sha256": "d",
        "signer": "s",
        "generation": 4,
        "host": "h",
        "started": 5.5,
    }
    assert from_json(StartNote, json.dumps(written, indent=1).encode()) == StartNote(**written)  # type: ignore[arg-type]


NOTE = {
    "image": "/i/a b.sif",
    "key": "k",
    "sha256": "ab" * 32,
    "signer": "s",
    "generation": 4,
    "host": "h",
    "started": 5.5,
}


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({}, True),
        ({"image": "", "sha256": ""}, True),
        ({"image": "/i/..a.sif"}, True),
        ({"image": "i/a.sif"}, False),
        ({"image": "/i/../etc/a.sif"}, False),
        ({"image": "/i/.."}, False),
        ({"image": "/i/a\n.sif"}, False),
        ({"sha256": "../../etc/cron.d/x"}, False),
        ({"sha256": "AB" * 32}, False),
    ],
)
def test_a_start_note_names_an_image_and_a_digest(changes: dict[str, str], sound: bool) -> None:
    """Root of another admin host can write it."""
    assert (parse_note(json.dumps({**NOTE, **changes}).encode()) is not None) is sound


def test_mirror_note_of_version_519381b() -> None:
    """As that version wrote it, while a rebuild ran."""
    member = {"number": 1, "folder": "/a", "devid": 1, "uuid": "u1", "lost": ""}
    pending = {"number": 3, "folder": "/c", "devid": 2, "uuid": "", "lost": ""}
    written = {
        "cluster": "c",
        "kind": "btrfs",
        "size": 5 << 30,
        "members": [member, {**member, "number": 2, "lost": "it missed writes"}],
        "uuid": "u",
        "pending": pending,
        "due": "",
        "mounted_on": "host-a",
        "scrubbed": 1700000000.5,
        "mended": 0,
    }
    text = (json.dumps(written, indent=1) + "\n").encode()
    found = read_mirror(text, "c")
    assert found and to_json(found) == text
    alone = (json.dumps({**written, "pending": None, "mounted_on": None, "scrubbed": 0}) + "\n").encode()
    other = read_mirror(alone, "c")
    assert other and (other.pending, other.mounted_on, other.scrubbed) == (None, None, 0.0)


def test_rehearsal_record_of_version_519381b(tmp_path: Path) -> None:
    """As that version wrote it; an unreadable one gives only the name."""
    written = {"name": "rh-0a1b2c3d", "image": "k", "snapshot": 7, "made": 1700000000.5, "kept": True}
    text = json.dumps(written, indent=1).encode()
    (tmp_path / RECORD).write_bytes(text)
    record = read_record(tmp_path)
    assert record == Record("rh-0a1b2c3d", "k", 7, 1700000000.5, kept=True)
    write_record(tmp_path, record)
    assert (tmp_path / RECORD).read_bytes() == text
    for damaged in (text[:-5], b"[]", b"\xff", b'{"name": 1}'):
        (tmp_path / RECORD).write_bytes(damaged)
        assert read_record(tmp_path) == Record(tmp_path.name, "", 0, 0.0)


def test_upgrade_record_of_version_519381b() -> None:
    """As that version wrote it."""
    sides = {"before": {"path": "/o", "key": "o", "sha256": "a"}, "after": {"path": "/n", "key": "n", "sha256": "b"}}
    written = {
        "cluster": "c",
        "phase": "starting",
        **sides,
        "began": 1700000000.5,
        "snapshot": 3,
        "kept": 4,
        "lay": 0,
        "jobs": {"7": "RUNNING"},
        "stopped_at": 0.0,
        "outage_s": 0.0,
        "why": "",
    }
    text = (json.dumps(written, indent=1) + "\n").encode()
    found = read_upgrade(text, "c")
    assert found and (found.phase, found.after.key, found.kept, found.jobs) == ("starting", "n", 4, {"7": "RUNNING"})
    assert json.loads(to_json(found)) == {**written, "inode": 0}


def test_holder_record_of_version_519381b() -> None:
    """As that version wrote it."""
    assert read_holder(b'{"holder": "host-a", "generation": 3}\n') == Holder("host-a", 3)


def test_vm_snapshots_of_version_519381b() -> None:
    """As that version wrote their records, and damaged ones."""
    written = {"taken": 5.5, "frozen_ms": 21.0, "running": True, "reason": "x", "key": "k", "verified": True}
    stopped = {**written, "taken": 6, "frozen_ms": 0, "running": False}
    texts = {"one": json.dumps(written), "two": json.dumps(stopped), "list": "[]", "cut": '{"taken": 5', "bad": "{}"}
    output = "".join(f"{name}\t4\t{text}\n" for name, text in texts.items())
    found = {one.name: one for one in read_listed(output)}
    one = VmSnapshot("one", 5.5, 21.0, True, "x", "k", True)
    assert (found["one"], found["one"].size_bytes) == (one, 4096)
    assert json.loads(found["one"].note()) == {**written, "generation": 0, "sequence": 0, "cluster_uuid": ""}
    assert found["two"] == VmSnapshot("two", 6.0, 0.0, False, "x", "k", True)
    for name in ("list", "cut", "bad"):
        assert (found[name].taken, found[name].reason) == (0, "its record cannot be read")


class Piece(TypedDict):
    """With a key that may be absent."""

    name: str
    size: NotRequired[int | None]


class Pieces(TypedDict, total=False):
    """Without any that must be there."""

    parts: Sequence[str | Piece]
    details: Mapping[str, object]
    numbers: dict[str, int]


def test_typed_dicts_are_checked_and_keep_other_keys() -> None:
    whole = {"parts": ["a", {"name": "b", "new": 1}, {"name": "c", "size": None}], "details": {"x": []}, "more": 1}
    assert check_value(Pieces, whole) == whole
    assert check_value(list[Piece], []) == []


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Pieces, {"parts": [{}]}, "parts[0].name is missing"),
        (Pieces, {"parts": "a"}, "parts is not a Sequence"),
        (Pieces, {"numbers": {"a": True}}, "numbers.a is not a int"),
        (Pieces, {"numbers": {"a": 1 << 63}}, "numbers.a is out of range"),
        (Pieces, {"details": 3}, "details is not a Mapping"),
        (Pieces, [], "it is not an object"),
        (list[Piece], [{"name": "a", "size": "b"}], "[0].size is not a int"),
    ],
)
def test_values_of_other_types_are_named(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(RecordError, match=re.escape(words)):
        check_value(kind, value)
