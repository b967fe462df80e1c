"""The one way to write a lease file: which writer wins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.agent.host_state import HostState
from appliance.agent.protocol import read_request
from appliance.agent.system import System
from appliance.shared.lease import BUSY, LOST_RACE, SAME, WRITTEN, Lease, SwapLease, digest, parse_lease, peek
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


def test_a_locked_file_is_busy_unless_the_caller_has_locked_it(tmp_path: Path) -> None:
    path = str(tmp_path / "c.lease")
    with hold_lock(path + ".lock"):
        assert SwapLease(path, NEW.decode()).perform() == BUSY
        assert SwapLease(path, NEW.decode(), locked=True).perform() == WRITTEN


def test_a_writer_that_does_not_know_the_file_keeps_its_sequence_number(tmp_path: Path) -> None:
    path = tmp_path / "c.lease"
    path.write_bytes(Lease("c", 5, "a", 1.0, "a", sequence=41).text())
    assert SwapLease(str(path), NEW.decode()).perform() == WRITTEN
    assert parse_lease(path.read_bytes()) == Lease("c", 6, "b", 2.0, "b", sequence=41)


UUID = "11111111-0000-4000-8000-111111111111"


def test_a_writer_that_does_not_know_the_cluster_keeps_its_uuid(tmp_path: Path) -> None:
    """Such as the agents of a migration."""
    path = tmp_path / "c.lease"
    path.write_bytes(Lease("c", 5, "a", 1.0, "a", cluster_uuid=UUID, adopted=3).text())
    state = HostState(read_request(TargetRequest, {**TARGET, "lease": str(path)}), "arrive", System())
    assert state.write_lease("b", 6)
    found = parse_lease(path.read_bytes())
    assert (found.holder, found.generation, found.cluster_uuid, found.adopted) == ("b", 6, UUID, 3)


@pytest.mark.parametrize(
    "facts", [{"cluster_uuid": "x"}, {"cluster_uuid": 7}, {"cluster_uuid": UUID + "\n"}, {"adopted": -1}]
)
def test_invalid_identities(facts: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_lease(json.dumps({"cluster": "c", **facts}).encode())


@pytest.mark.parametrize("since", ["NaN", "Infinity", "-Infinity", "1e300", "1" + "0" * 400, "-1", "true", '"now"'])
def test_a_lease_of_no_time(since: str) -> None:
    """Python's JSON has numbers that are none, and those that no clock shows."""
    with pytest.raises((ValueError, TypeError)):
        parse_lease(b'{"cluster": "c", "since": %s}' % since.encode())


def test_a_lease_that_is_nested_deeply(tmp_path: Path) -> None:
    """It is reported as invalid, and replaced only by a writer that requires no digest."""
    deep = b"[" * 4096
    with pytest.raises(ValueError, match="nested"):
        parse_lease(deep)
    (tmp_path / "lease").write_bytes(deep)
    assert SwapLease(str(tmp_path / "lease"), Lease("c", 1).text().decode()).perform() == WRITTEN


def test_a_lease_of_version_519381b() -> None:
    """As that version wrote it; and as long as no snapshot was taken, it can read ours."""
    written = {"cluster": "c", "generation": 5, "holder": "a", "since": 1.0, "file": "a"}
    text = (json.dumps(written, indent=1) + "\n").encode()
    assert parse_lease(text) == Lease("c", 5, "a", 1.0, "a", "", 0)
    assert text == OLD


@pytest.mark.parametrize("sequence", [-1, True, "1", 1.0, None, 1 << 41])
def test_invalid_sequence_numbers(sequence: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_lease(json.dumps({"cluster": "c", "sequence": sequence}).encode())


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
    request = read_request(TargetRequest, {**TARGET, "lease": str(path), "shared": shared})
    state = HostState(request, "arrive", System())
    assert (state.generation(), state.holder()) == (0, "")
    assert not state.write_lease("b", 6, only_from=5)
    assert state.write_lease("b", 6, only_from=0) and not state.write_lease("b", 5)
    assert (state.generation(), state.holder()) == (6, "b")
    found = json.loads(path.read_bytes())
    assert (found["file"], found["cluster"]) == (file, "c")
