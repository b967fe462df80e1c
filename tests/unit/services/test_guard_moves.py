"""The guard and a migration that was killed together with its agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Busy
from appliance.host.base import Host
from appliance.operations.history import note
from appliance.operations.services.guard import Guard
from appliance.operations.services.holding import REASON, lock_path
from appliance.operations.under_way import mark_path, second_paths
from appliance.plan.machine import inside_argv
from appliance.plan.migration.lease import View
from appliance.shared.lease import Lease
from appliance.tools.files import HELD
from tests.sites import open_debian
from tests.support.env import FakeAgents, FakeHosts, Impatient, with_env
from tests.support.fake import Fake


class Stage:
    """A guard, and what its agent answers."""

    def __init__(self, folder: Path) -> None:
        self.agents = FakeAgents(answers={"resume": self.resume})
        self.cluster = with_env(open_debian(folder), agents=self.agents)
        self.held = False
        self.answer: dict[str, Any] = {"found": "stopping", "state": "serving"}
        self.host = Fake({("flock",): lambda *_: (HELD if self.held else 0, ""), (): (0, "")}, name="admin-1")
        self.said: list[str] = []
        self.guard = Guard(self.cluster, self.host, self.said.append)
        folder.joinpath("journal").mkdir(parents=True)

    def resume(self, host: Host, request: dict[str, Any]) -> dict[str, Any]:
        if self.held:
            raise Busy("another run is at work")
        return self.answer

    def look(self, times: int = 2) -> int:
        """Look so often; return how often the agent was asked since."""
        before = len(self.agents.requests)
        for _ in range(times):
            self.guard.resume_move()
        return len(self.agents.requests) - before


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "state")


@pytest.mark.parametrize("second", [False, True])
def test_it_is_ended_once_nobody_is_at_work(stage: Stage, second: bool) -> None:
    assert stage.look() == 0, "there is none"
    mark = Path(second_paths(stage.cluster)[0] if second else mark_path(stage.cluster))
    mark.write_text("{}")
    stage.held = True
    assert stage.look(5) == 0, "its agent lives"
    stage.held = False
    assert stage.look(1) == 0, "the other agent may still decide"
    assert stage.look(1) == 1
    assert stage.said == ["a migration was killed on admin-1 (stopping); it is serving there now"]
    mark.unlink()
    assert stage.look() == 0


class Here(FakeHosts):
    """This machine has the files of its fake."""

    def read_here(self, path: str) -> bytes | None:
        return self.this.read(path)


def test_what_a_killed_apply_held_is_released(tmp_path: Path) -> None:
    """Once nobody is at work; not where it had written its files, and not without the lease."""
    cluster = open_debian(tmp_path)
    host = Fake({("test",): (1, ""), (): (0, "")}, name="admin-1")
    cluster = with_env(cluster, hosts=Here({"admin-1": host}, "admin-1"), agents=FakeAgents(), locks=Impatient())
    (*inside,) = inside_argv(cluster.site, cluster.services)
    host.answers[(*inside, "sinfo")] = (0, f"n1 none\nn2 {REASON}\n")
    said: list[str] = []
    guard = Guard(cluster, host, said.append)

    def updates() -> list[tuple[str, ...]]:
        guard.end_hold()
        return [argv[-2:] for argv in host.asked if "update" in argv]

    note(cluster, host, "apply", "held", partitions={}, nodes="n2")
    guard.leases.views["admin-1"] = View(Lease(cluster.site.cluster, 1, "admin-1"))
    assert updates() == [], "no run has held anything since the boot"
    host.files[lock_path(cluster)] = b""
    note(cluster, host, "apply", "begun", files=["/etc/slurm/slurm.conf"])
    assert updates() == [], "the next apply completes it"
    note(cluster, host, "apply", "undone")
    guard.leases.views["admin-1"] = View(Lease(cluster.site.cluster, 2, "admin-2"))
    assert updates() == [], "another host has the services"
    guard.leases.views["admin-1"] = View(Lease(cluster.site.cluster, 3, "admin-1"))
    assert updates() == [("NodeName=n2", "State=RESUME")] and len(said) == 1
    assert len(updates()) == 1, "once"


def test_a_verb_that_does_it_meanwhile(stage: Stage) -> None:
    Path(mark_path(stage.cluster)).write_text("{}")
    stage.look(1)
    stage.answer = {"found": ""}
    assert stage.look(1) == 1 and stage.said == []
