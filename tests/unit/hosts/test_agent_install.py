"""The agent's file on a host: copied once; those of other versions are removed in the end."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.shared.lease import SwapLease
from appliance.tools import agent
from appliance.tools.agent import Agents
from tests.support.fake import Fake


def test_old_versions_go_when_a_new_one_comes(tmp_path: Path) -> None:
    agents = Agents(str(tmp_path))
    ages_h = {"agent-0123.pyz": 72, "agent-4567.pyz": 50, "agent-89ab.pyz": 20, "sms.lock": 99, "agent-89ab": 99}
    for name, hours in ages_h.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - hours * 3600,) * 2)
    ours = Path(agents.install(Local())[-1])
    assert {path.name for path in tmp_path.iterdir()} == {"agent-89ab.pyz", "sms.lock", "agent-89ab", ours.name}
    os.utime(ours, (0, 0))
    assert agents.install(Local())[-1] == str(ours) and ours.exists(), "its own age counts for nothing"


def test_it_comes_to_a_host_that_has_no_folder_for_it(tmp_path: Path) -> None:
    agents = Agents(str(tmp_path / "a" / "b"))
    assert Path(agents.install(Local())[-1]).read_bytes() == agent.build_zipapp()


def test_several_runs_install_it_at_once(tmp_path: Path) -> None:
    agents = Agents(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = {one[-1] for one in pool.map(lambda _: agents.install(Local()), range(8))}
    assert [str(path) for path in tmp_path.iterdir()] == list(found)
    assert (tmp_path / Path(found.pop()).name).read_bytes() == agent.build_zipapp()


class Slow(Fake):
    """A host on which each command takes a moment."""

    def __init__(self) -> None:
        reply = '{"kind": "result", "reply": "written"}'
        super().__init__(
            {
                ("sh",): (0, "python3"),
                ("test",): (1, ""),
                ("find",): (0, ""),
                ("mv",): (0, ""),
                ("python3",): (0, reply),
            }
        )
        self.limits: list[float] = []

    def run(self, *argv: str, timeout: float | None = 60, **options: Any) -> Result:
        assert timeout
        self.limits.append(timeout)
        time.sleep(0.01)
        return super().run(*argv, timeout=timeout, **options)

    perform = Host.perform


def test_a_request_keeps_to_its_time_with_all_that_precedes_it() -> None:
    """The search for Python, the copy of the agent, the request: on a disk that hangs each could take a minute."""
    host = Slow()
    assert Agents().perform(host, SwapLease("/x", ""), timeout=5) == "written"
    assert len(host.limits) == 5 and host.limits[0] <= 5
    assert all(later <= earlier - 0.01 for earlier, later in pairwise(host.limits))
