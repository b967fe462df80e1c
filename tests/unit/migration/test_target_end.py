"""The target of a migration that fails: its lease, its copy and its state."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.agent import endpoint
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import read_request
from appliance.plan.overlay.generation import read_mark
from appliance.shared.lease import Lease, peek
from appliance.shared.migration import TargetRequest
from tests.unit.migration.requests import TARGET

COMMITTED = [
    pytest.param(5, "a", 5, id="as it has taken the lease"),
    pytest.param(1005, "a", 1005, id="taken over from a failed source, and resumed"),
    pytest.param(9, "b", 5, id="superseded"),
]


@pytest.mark.parametrize(("generation", "holder", "mark"), COMMITTED)
def test_the_overlay_is_marked_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: int, holder: str, mark: int
) -> None:
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None)
    monkeypatch.setattr(endpoint, "run", lambda *argv, **more: b"")
    Path(paths["overlay"]).write_bytes(b"")
    Path(paths["lease"]).write_bytes(Lease("c", generation, holder, 1.0, "a").text())
    target.state = "up"
    target.abandon("the connection was lost")
    assert read_mark((tmp_path / "overlay.generation").read_bytes(), "c") == mark


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


def test_commands_are_shown_without_the_way_into_the_instance() -> None:
    instance = endpoint.Instance(7)
    assert endpoint.shown(instance.argv("/opt/sms/bin/sms-probe", "--wait")) == "/opt/sms/bin/sms-probe --wait"
    assert endpoint.shown(instance.network("conntrack", "-R", "-")) == "conntrack -R -"
    assert endpoint.shown(("ip", "-force", "-batch", "-", "x")) == "ip -force -batch -"
