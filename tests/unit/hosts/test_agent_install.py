"""The agent's file on a host: copied once; those of other versions are removed in the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from appliance.host.local import Local
from appliance.tools import agent


def test_old_versions_go_when_a_new_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "FOLDER", str(tmp_path))
    ages_h = {"agent-0123.pyz": 72, "agent-4567.pyz": 50, "agent-89ab.pyz": 20, "sms.lock": 99, "agent-89ab": 99}
    for name, hours in ages_h.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - hours * 3600,) * 2)
    ours = Path(agent.install(Local())[-1])
    assert {path.name for path in tmp_path.iterdir()} == {"agent-89ab.pyz", "sms.lock", "agent-89ab", ours.name}
    os.utime(ours, (0, 0))
    assert agent.install(Local())[-1] == str(ours) and ours.exists(), "its own age counts for nothing"


def test_it_comes_to_a_host_that_has_no_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "FOLDER", str(tmp_path / "a" / "b"))
    assert Path(agent.install(Local())[-1]).read_bytes() == agent.build_zipapp()
