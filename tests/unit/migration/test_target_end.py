"""The target of a migration that fails: its lease, its copy and its state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.agent import endpoint
from appliance.agent.endpoint import Instance
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import read_request
from appliance.shared.lease import Lease, peek
from appliance.shared.migration import TargetRequest
from tests.unit.migration.requests import TARGET

CONFINED = ["apptainer", "exec", "--no-privs", "instance://sms-c"]

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


def test_programs_of_the_container_run_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the overlay, which an intruder may have replaced; nsenter gave them all capabilities."""
    ran: list[list[str]] = []

    def run(*argv: str, **more: object) -> bytes:
        ran.append(list(argv))
        return b""

    monkeypatch.setattr(endpoint, "run", run)
    sent: list[str] = []
    channel = SimpleNamespace(
        send=lambda kind, *body, **more: sent.append(kind), read_body=lambda message: b"line", close=lambda: None
    )
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, "inside": CONFINED}), channel)  # type: ignore[arg-type]
    target.instance = Instance(77)
    target.probe({"do": "probe", "argv": ["sms-probe"], "limit_s": 9})
    target.run_command({"do": "ask", "argv": ["squeue"]})
    target.append_logs({"do": "tails", "files": [{"path": "/var/log/messages", "bytes": 4}]})
    assert sent == ["probed", "told", "appended"]
    assert [argv[: len(CONFINED)] for argv in ran] == [CONFINED] * 3
    assert [argv[len(CONFINED)] for argv in ran] == ["sms-probe", "squeue", "dd"]
