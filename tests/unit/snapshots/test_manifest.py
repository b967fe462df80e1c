"""Manifests received from another host: which are valid, and what of them is kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.agent import transfer
from appliance.agent.manifest import LAST_NUMBER, check_manifest
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, Store
from appliance.config.model import Retention
from appliance.errors import SmsError
from appliance.operations.snapshots import transfer as flow_transfer
from appliance.plan.snapshots.offsite import archive_name, read_comment
from appliance.plan.snapshots.retention import Candidate, decide
from appliance.shared.lease import LAST_GENERATION
from appliance.units import LARGEST_OVERLAY
from tests import stores

FULL_CHECKS = {"e2fsck": "clean", "state_files": 3, "state_bytes": 9, "state_unread": True, "heads": ["/a/b"]}


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """A manifest as a store returns it."""
    store = Store(str(tmp_path / "a"))
    return stores.add_snapshot(store, [b"x" * CHUNK], checks=FULL_CHECKS).manifest.to_dict()


def test_valid_manifests(manifest: dict[str, Any]) -> None:
    assert check_manifest(manifest).to_dict() == manifest
    assert check_manifest(manifest, "lab").to_dict() == manifest
    assert check_manifest(json.loads(json.dumps(manifest))).to_dict() == manifest
    received = {**manifest, "came": {"from": "the repository, of host-a", "number": 3, "at": 1.5}}
    assert check_manifest(received).to_dict() == received


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("taken", float("nan")),
        ("taken", float("inf")),
        ("taken", -1.0),
        ("taken", 1e15),
        ("taken", 10**400),
        ("taken", True),
        ("taken", "1"),
        ("generation", 10**10),
        ("generation", LAST_GENERATION + 1),
        ("generation", -1),
        ("generation", True),
        ("generation", 1.0),
        ("number", 10**12),
        ("number", LAST_NUMBER + 1),
        ("number", 0),
        ("number", True),
        ("size", 0),
        ("size", (1 << 44) + 1),
        ("size", 1e9),
        ("used_bytes", -1),
        ("new_bytes", None),
        ("frozen_ms", float("nan")),
        ("frozen_ms", "20"),
        ("running", 1),
        ("uuid", "x" * 36),
        ("uuid", "ab" * 16 + "\n"),
        ("digests", "AB" * 32),
        ("format", 2),
        ("format", True),
        ("host", "host\x1b[2J"),
        ("host", ""),
        ("host", "h" * 254),
        ("host", None),
        ("cluster", "../other"),
        ("slurm_cluster", 1),
        ("image", {"key": 1}),
        ("image", None),
        ("method", "delta\n"),
        ("found_by", ["trace"]),
        ("checks", None),
        ("checks", {"e2fsck": "\x1b]0;x\x07"}),
        ("checks", {"e2fsck": "clean", "state_files": "3"}),
        ("checks", {"e2fsck": "clean", "state_files": float("nan")}),
        ("checks", {"e2fsck": "clean", "heads": [1]}),
        ("checks", {"e2fsck": "clean", "heads": "/a"}),
        ("notes", "x"),
        ("notes", [1]),
        ("notes", [""] * 1001),
        ("reason", None),
        ("reason", "x" * 4001),
        ("came", "host-a"),
        ("came", {"from": "host-a", "number": 10**12, "at": 1.0}),
        ("sequence", 0),
        ("sequence", True),
        ("sequence", (1 << 40) + 1),
    ],
)
def test_invalid_values(manifest: dict[str, Any], name: str, value: object) -> None:
    with pytest.raises(Problem, match=f"invalid {name}"):
        check_manifest({**manifest, name: value})


def as_519381b_wrote(**changes: Any) -> bytes:
    """A manifest.json as version 519381b wrote it."""
    manifest = {
        "cluster": "lab",
        "slurm_cluster": "lab",
        "host": "host-a",
        "generation": 4,
        "image": {"key": "k", "sha256": "s"},
        "uuid": "0b5a9c1e-9d6c-4a52-9f5e-0d4a1f2b3c4d",
        "taken": 1700000000.25,
        "running": True,
        "frozen_ms": 21.5,
        "method": "delta",
        "found_by": "trace",
        "size": CHUNK,
        "used_bytes": CHUNK,
        "new_bytes": 0,
        "checks": {"e2fsck": "clean", "state_files": 3, "state_bytes": 9, "heads": ["/a/b"], "state_unread": True},
        "notes": ["a note"],
        "reason": "before an upgrade",
        "format": 1,
        "number": 7,
        "digests": "ab" * 32,
        **changes,
    }
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def write_snapshot(root: Path, text: bytes) -> None:
    folder = root / "000007"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_text(hashlib.sha256(text).hexdigest() + "\n")
    (folder / "health.json").write_text('{"ok": true, "at": 1.5}')


@pytest.mark.parametrize("came", [{}, {"came": {"from": "host-b", "number": 3, "at": 1.5}}])
def test_manifests_of_version_519381b(tmp_path: Path, came: dict[str, Any]) -> None:
    """They are read, and what is listed, sent and stored of them has the same bytes."""
    text = as_519381b_wrote(**came)
    write_snapshot(tmp_path, text)
    found, broken = Store(str(tmp_path)).list()
    assert broken == {} and len(found) == 1
    assert json.dumps(found[0].manifest.to_dict()) == json.dumps(json.loads(text))
    assert check_manifest(json.loads(text)) == found[0].manifest
    listed = {**json.loads(text), "health": {"ok": True, "at": 1.5}}
    assert json.dumps(found[0].to_dict()) == json.dumps(listed)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": "x"}, "size is not a int"),
        ({"taken": float("nan")}, "taken is not a float"),
        ({"checks": None}, "checks is not an object"),
        ({"format": 2}, "unknown format 2"),
    ],
)
def test_an_invalid_stored_manifest_is_damage(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    write_snapshot(tmp_path, as_519381b_wrote(**changes))
    assert Store(str(tmp_path)).list() == ([], {7: why})


def test_every_key_is_required(manifest: dict[str, Any]) -> None:
    for name in manifest:
        with pytest.raises(Problem, match=f"invalid {name}"):
            check_manifest({key: value for key, value in manifest.items() if key != name})
    others: tuple[Any, ...] = (None, [], "x", 7)
    for other in others:
        with pytest.raises(Problem, match="not a snapshot of a known format"):
            check_manifest(other)


def test_a_manifest_of_another_cluster_is_refused(manifest: dict[str, Any]) -> None:
    with pytest.raises(Problem, match="of cluster lab, not of sample"):
        check_manifest(manifest, "sample")


def test_texts_become_one_line_without_control_characters(manifest: dict[str, Any]) -> None:
    kept = check_manifest(
        {**manifest, "reason": "up\x1b[31mgrade\nof Grün", "notes": ["a\r\nb\u202e"], "health": {}, "x": "y" * 999}
    )
    assert (kept.reason, kept.notes) == (r"up\x1b[31mgrade of Grün", [r"a b\u202e"])
    assert not {"health", "x"} & set(kept.to_dict()), "unknown keys are not kept"


def test_what_a_newer_version_added_is_ignored(manifest: dict[str, Any]) -> None:
    came = {"from": "host-b", "number": 3, "at": 1.5}
    of = {**manifest, "came": came, "checks": {"e2fsck": "clean"}, "image": {"key": "k", "sha256": "s"}}
    newer = {**of, "more": 1, **{name: {**of[name], "more": [1]} for name in ("came", "checks", "image")}}
    assert check_manifest(newer) == check_manifest(of)


def test_accepted_times_work_in_retention(manifest: dict[str, Any]) -> None:
    for taken in (0, 0.0, 252999999999.9):
        one = check_manifest({**manifest, "taken": taken})
        assert decide([Candidate(1, one.taken, True, one.reason)], Retention(), now=1e9)


def test_both_ends_of_a_transfer_have_the_same_limits() -> None:
    assert flow_transfer.MAX_CHUNKS * CHUNK == LARGEST_OVERLAY
    assert flow_transfer.MAX_BYTES["a manifest"] == transfer.LONGEST_MANIFEST


def test_a_number_far_ahead_is_not_kept(tmp_path: Path) -> None:
    """It would use up the numbers of six digits."""
    store = Store(str(tmp_path / "s"))
    stores.add_snapshot(store, [b"x"])
    with store.writing():
        assert transfer.begin_numbered(store, LAST_NUMBER)[0] == 2
        assert transfer.begin_numbered(store, 40_000)[0] == 40_000, "a year of snapshots, into a new store"


class FakeSession:
    """A session whose far side sends ``data`` and then zeros without end."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.received = 0
        self.largest = 0

    def read_exactly(self, size: int) -> bytes:
        self.largest = max(self.largest, size)
        data, self.data = self.data[:size], self.data[size:]
        return data + bytes(size - len(data))

    def write(self, data: bytes) -> None:
        self.received += len(data)

    def read(self) -> bytes:
        return b""

    def end(self) -> None:
        pass

    def outcome(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(("manifest_bytes", "digest_bytes"), [((1 << 32) - 1, 0), (9, 1 << 62), (9, (1 << 33) + 32)])
def test_an_oversized_offer_is_refused(manifest_bytes: int, digest_bytes: int) -> None:
    exporter = FakeSession(flow_transfer.HEADER.pack(b"SMS1", manifest_bytes, digest_bytes))
    with pytest.raises(SmsError, match="more than the limit of"):
        flow_transfer.relay_snapshot(exporter, FakeSession())  # type: ignore[arg-type]
    assert exporter.largest <= flow_transfer.HEADER.size


def test_an_oversized_reply_is_refused() -> None:
    exporter, importer = FakeSession(flow_transfer.HEADER.pack(b"SMS1", 9, 32)), FakeSession(b"\xff\xff\xff\xff")
    with pytest.raises(SmsError, match="a list of chunks of 4294967295 bytes"):
        flow_transfer.relay_snapshot(exporter, importer)  # type: ignore[arg-type]
    assert importer.largest == 4


def test_long_parts_are_relayed_in_blocks() -> None:
    size = 20 * flow_transfer.BLOCK + 32
    exporter, importer = FakeSession(flow_transfer.HEADER.pack(b"SMS1", 9, size)), FakeSession(b"\x00\x20\x00\x00")
    flow_transfer.relay_snapshot(exporter, importer)  # type: ignore[arg-type]
    assert importer.received == flow_transfer.HEADER.size + 9 + size
    assert exporter.received == 4 + 0x200000
    assert max(exporter.largest, importer.largest) == flow_transfer.BLOCK


@pytest.mark.parametrize(
    ("name", "value"), [("taken", "nan"), ("taken", float("nan")), ("generation", True), ("reason", 3), ("host", None)]
)
def test_archives_with_invalid_manifests_are_ignored(manifest: dict[str, Any], name: str, value: object) -> None:
    manifest = {**manifest, "uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12}
    assert read_comment(json.dumps(manifest), archive_name(manifest))
    invalid = {**manifest, name: value}
    assert read_comment(json.dumps(invalid), archive_name(invalid)) is None
    assert read_comment("[" * 100_000, "x") is None
