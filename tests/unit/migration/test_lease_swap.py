"""The one way to write a lease file: which writer wins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.agent.endpoint import HostState
from appliance.agent.protocol import read_request
from appliance.shared.lease import BUSY, LOST_RACE, SAME, WRITTEN, Lease, SwapLease, digest, peek
from appliance.shared.locks import hold_lock
from appliance.shared.migration import TargetRequest
from tests.unit.migration.requests import TARGET

OLD = Lease("c", 5, "a", 1.0, "a").text()
NEW = Lease("c", 6, "b", 2.0, "b").text()
LOWER = Lease("c", 4, "b", 2.0, "b").text()
NEWER_VERSION = json.dumps({"cluster": "c", "generation": 7, "holder": "b", "since": 0, "more": {}}).encode()

CASES: list[tuple[bytes | None, SwapLease, str]] = [
    (None, SwapLease("", "", digest=digest(None)), WRITTEN),
    (None, SwapLease("", "", digest=digest(OLD)), LOST_RACE),
    (OLD, SwapLease("", "", digest=digest(OLD)), WRITTEN),
    (OLD, SwapLease("", "", digest=digest(None)), LOST_RACE),
    (OLD, SwapLease("", "", digest=digest(NEW)), LOST_RACE),
    (OLD, SwapLease("", "", digest=digest(NEW), written=(digest(OLD),)), WRITTEN),
    (OLD, SwapLease("", "", digest=digest(NEW), written=(digest(OLD),), own=False), SAME),
    (OLD, SwapLease("", ""), WRITTEN),
    (OLD, SwapLease("", "", generation=5), WRITTEN),
    (OLD, SwapLease("", "", generation=4), LOST_RACE),
    (None, SwapLease("", "", generation=0), WRITTEN),
    (OLD, SwapLease("", LOWER.decode()), LOST_RACE),
    (OLD, SwapLease("", LOWER.decode(), digest=digest(OLD)), LOST_RACE),
    (OLD, SwapLease("", OLD.decode()), WRITTEN),
    (NEWER_VERSION, SwapLease("", ""), LOST_RACE),
    (b"{", SwapLease("", ""), WRITTEN),
    (b"{", SwapLease("", "", digest=digest(OLD)), LOST_RACE),
]


@pytest.mark.parametrize(("before", "swap", "outcome"), CASES)
def test_outcome(tmp_path: Path, before: bytes | None, swap: SwapLease, outcome: str) -> None:
    path = tmp_path / "made" / "c.lease"
    if before is not None:
        path.parent.mkdir()
        path.write_bytes(before)
    swap = replace(swap, path=str(path), text=swap.text or NEW.decode())
    assert swap.perform() == outcome
    after = swap.text.encode() if outcome == WRITTEN else before
    assert (path.read_bytes() if path.exists() else None) == after
    assert sorted(one.name for one in path.parent.iterdir()) == ["c.lease"] * path.exists() + ["c.lease.lock"]
    if outcome == WRITTEN:
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_locked_file_is_busy(tmp_path: Path) -> None:
    path = str(tmp_path / "c.lease")
    with hold_lock(path + ".lock"):
        assert SwapLease(path, NEW.decode()).perform() == BUSY


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (None, (0, "")),
        (b"{", (0, "")),
        (b"[]", (0, "")),
        (b"[" * 100_000, (0, "")),
        (b'{"generation": "5", "holder": 1}', (0, "")),
        (Lease("c", 3, None).text(), (3, "")),
        (OLD, (5, "a")),
        (NEWER_VERSION, (7, "b")),
    ],
)
def test_peek(data: bytes | None, found: tuple[int, str]) -> None:
    assert peek(data) == found


@pytest.mark.parametrize(("shared", "file"), [(False, "a"), (True, "b")])
def test_the_agent_of_a_migration_writes_by_the_same_rules(tmp_path: Path, shared: bool, file: str) -> None:
    path = tmp_path / "c.lease"
    state = HostState(read_request(TargetRequest, {**TARGET, "lease": str(path), "shared": shared}), "arrive")
    assert (state.generation(), state.holder()) == (0, "")
    assert not state.write_lease("b", 6, only_from=5)
    assert state.write_lease("b", 6, only_from=0) and not state.write_lease("b", 5)
    assert (state.generation(), state.holder()) == (6, "b")
    found = json.loads(path.read_bytes())
    assert (found["file"], found["cluster"]) == (file, "c")
