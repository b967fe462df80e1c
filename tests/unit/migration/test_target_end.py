"""The target of a migration that fails: its lease, its copy and its state."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.agent import endpoint
from appliance.agent.endpoint import read_mark
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import read_request
from appliance.shared.lease import Lease, peek
from appliance.shared.migration import TargetRequest
from tests.unit.migration.requests import TARGET

CASES = [
    pytest.param(3, "a", (3, "a"), id="stale: another host has served since"),
    pytest.param(4, "b", (4, "b"), id="as at the beginning"),
    pytest.param(5, "a", (5, "b"), id="written by this migration"),
    pytest.param(6, "b", (6, "b"), id="written by the source since"),
]


@pytest.mark.parametrize(("generation", "holder", "after"), CASES)
def test_lease_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: int, holder: str, after: tuple[int, str]
) -> None:
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None)
    monkeypatch.setattr(endpoint, "run", lambda *argv, **more: b"")
    target.host_state.save_state("copy")
    before = Lease("c", generation, holder, 1.0, "a").text()
    Path(paths["lease"]).write_bytes(before)
    target.abandon("no space left on device")
    found = Path(paths["lease"]).read_bytes()
    assert peek(found) == after
    assert (found == before) == (after == (generation, holder)), "a full disk may refuse a needless write"
    assert not Path(paths["mark"]).exists()
    assert "backed out" in Path(paths["history"]).read_text()


def test_an_interrupted_rollback_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host crashed after the copy was renamed back, before the overlay that it had replaced was."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    monkeypatch.setattr(endpoint, "run", lambda *argv, **more: b"")
    monkeypatch.setattr(endpoint, "find_instance", lambda name: None)
    monkeypatch.setattr(endpoint, "wait_until_unused", lambda *_: None)
    copy, replaced = tmp_path / "overlay.partial", tmp_path / "overlay.past-4"
    copy.write_bytes(b"copy")
    replaced.write_bytes(b"before")
    Path(paths["lease"]).write_bytes(Lease("c", 5, "b", 1.0, "a").text())
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None)
    target.host_state.save_state("up", inode=copy.stat().st_ino)
    saved = read_mark(paths["mark"])
    assert saved
    target.recover(saved)
    assert (tmp_path / "overlay").read_bytes() == b"before" and copy.read_bytes() == b"copy"
    assert not Path(paths["mark"]).exists()
