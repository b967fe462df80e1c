"""Manifests that come from another host: what is taken for one, and what of it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.agent import transfer
from appliance.agent.manifest import LAST_GENERATION, LAST_NUMBER, check_manifest
from appliance.agent.store import CHUNK, Store
from appliance.agent.words import Problem
from appliance.config.model import Overlay, Retention
from appliance.errors import SmsError
from appliance.operations.snapshots import transfer as flow_transfer
from appliance.plan.snapshots.offsite import archive_name, read_comment
from appliance.plan.snapshots.retention import Candidate, decide
from tests import stores

FULL_CHECKS = {"e2fsck": "clean", "state_files": 3, "state_bytes": 9, "state_unread": True, "heads": ["/a/b"]}


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """One as a store tells it."""
    store = Store(str(tmp_path / "a"))
    return stores.add_snapshot(store, [b"x" * CHUNK], checks=FULL_CHECKS).manifest


def test_what_a_store_has_is_one(manifest: dict[str, Any]) -> None:
    assert check_manifest(manifest) == manifest
    assert check_manifest(manifest, "lab") == manifest
    assert check_manifest(json.loads(json.dumps(manifest))) == manifest
    came = {**manifest, "came": {"from": "the repository, of host-a", "number": 3, "at": 1.5}}
    assert check_manifest(came) == came


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
        ("generation", 10**9),
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
        ("image", {"other": "x"}),
        ("image", None),
        ("method", "delta\n"),
        ("found_by", ["trace"]),
        ("checks", None),
        ("checks", {"e2fsck": "\x1b]0;x\x07"}),
        ("checks", {"e2fsck": "clean", "state_files": "3"}),
        ("checks", {"e2fsck": "clean", "state_files": float("nan")}),
        ("checks", {"e2fsck": "clean", "heads": [1]}),
        ("checks", {"e2fsck": "clean", "heads": "/a"}),
        ("checks", {"e2fsck": "clean", "more": 1}),
        ("notes", "x"),
        ("notes", [1]),
        ("notes", [""] * 1001),
        ("reason", None),
        ("reason", "x" * 4001),
        ("came", "host-a"),
        ("came", {"from": "host-a", "number": 10**12, "at": 1.0}),
    ],
)
def test_what_is_none(manifest: dict[str, Any], name: str, value: object) -> None:
    with pytest.raises(Problem, match=f"no good {name}"):
        check_manifest({**manifest, name: value})


def test_every_key_is_wanted(manifest: dict[str, Any]) -> None:
    for name in manifest:
        with pytest.raises(Problem, match=f"no good {name}"):
            check_manifest({key: value for key, value in manifest.items() if key != name})
    for other in (None, [], "x", 7):
        with pytest.raises(Problem, match="no snapshot that is known"):
            check_manifest(other)


def test_another_clusters_is_refused(manifest: dict[str, Any]) -> None:
    with pytest.raises(Problem, match="of cluster lab, not of sample"):
        check_manifest(manifest, "sample")


def test_texts_of_people_become_one_line_without_control(manifest: dict[str, Any]) -> None:
    kept = check_manifest(
        {**manifest, "reason": "up\x1b[31mgrade\nof Grün", "notes": ["a\r\nb\u202e"], "health": {}, "x": "y" * 999}
    )
    assert (kept["reason"], kept["notes"]) == (r"up\x1b[31mgrade of Grün", [r"a b\u202e"])
    assert "health" not in kept and "x" not in kept, "what nobody here knows is not kept"


def test_what_is_let_in_can_be_thinned_out(manifest: dict[str, Any]) -> None:
    for taken in (0, 0.0, 252999999999.9):
        one = check_manifest({**manifest, "taken": taken})
        assert decide([Candidate(1, one["taken"], True, one["reason"])], Retention(), now=1e9)


def test_the_largest_is_the_sites() -> None:
    from appliance.agent import manifest as ours

    (most,) = [one.le for one in Overlay.model_fields["size_mb"].metadata if hasattr(one, "le")]
    assert ours.LARGEST == most << 20 == flow_transfer.MOST_CHUNKS * CHUNK
    assert flow_transfer.MOST["a manifest"] == transfer.LONGEST_MANIFEST


def test_a_number_far_ahead_gives_way(tmp_path: Path) -> None:
    """Taken over, it would leave no numbers of six digits to those that follow."""
    store = Store(str(tmp_path / "s"))
    stores.add_snapshot(store, [b"x"])
    with store.writing():
        assert transfer.begin_as(store, LAST_NUMBER)[0] == 2
        assert transfer.begin_as(store, 40_000)[0] == 40_000, "a year's, into a store that was made anew"


class Saying:
    """A conversation in which the far side says this, and goes on for ever."""

    def __init__(self, said: bytes = b"") -> None:
        self.said = said
        self.heard = 0
        self.largest = 0

    def read_exactly(self, size: int) -> bytes:
        self.largest = max(self.largest, size)
        data, self.said = self.said[:size], self.said[size:]
        return data + bytes(size - len(data))

    def write(self, data: bytes) -> None:
        self.heard += len(data)

    def read(self) -> bytes:
        return b""

    def end(self) -> None:
        pass

    def outcome(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(("manifest_bytes", "digest_bytes"), [((1 << 32) - 1, 0), (9, 1 << 62), (9, (1 << 33) + 32)])
def test_an_offer_without_end_is_refused(manifest_bytes: int, digest_bytes: int) -> None:
    giving = Saying(flow_transfer.HEAD.pack(b"SMS1", manifest_bytes, digest_bytes))
    with pytest.raises(SmsError, match="no snapshot has one of more than"):
        flow_transfer.connect(giving, Saying())  # type: ignore[arg-type]
    assert giving.largest <= flow_transfer.HEAD.size


def test_an_answer_without_end_is_refused() -> None:
    giving, taking = Saying(flow_transfer.HEAD.pack(b"SMS1", 9, 32)), Saying(b"\xff\xff\xff\xff")
    with pytest.raises(SmsError, match="what is wanted of 4294967295 bytes"):
        flow_transfer.connect(giving, taking)  # type: ignore[arg-type]
    assert taking.largest == 4


def test_what_is_long_goes_on_in_blocks() -> None:
    size = 20 * flow_transfer.BLOCK + 32
    giving, taking = Saying(flow_transfer.HEAD.pack(b"SMS1", 9, size)), Saying(b"\x00\x40\x00\x00")
    flow_transfer.connect(giving, taking)  # type: ignore[arg-type]
    assert taking.heard == flow_transfer.HEAD.size + 9 + size
    assert giving.heard == 4 + 0x400000
    assert max(giving.largest, taking.largest) == flow_transfer.BLOCK


@pytest.mark.parametrize(
    ("name", "value"), [("taken", "nan"), ("taken", float("nan")), ("generation", True), ("reason", 3), ("host", None)]
)
def test_an_archive_that_tells_nonsense_is_none_of_ours(manifest: dict[str, Any], name: str, value: object) -> None:
    manifest = {**manifest, "uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12}
    assert read_comment(json.dumps(manifest), archive_name(manifest))
    told = {**manifest, name: value}
    assert read_comment(json.dumps(told), archive_name(told)) is None
    assert read_comment("[" * 100_000, "x") is None
