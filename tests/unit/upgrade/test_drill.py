"""A restore drill: which copy it chooses, what counts as a failure, how a scheduled one reports it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.snapshots.pull import Remote
from appliance.operations.snapshots.report import read_record
from appliance.operations.upgrade import drill as work
from appliance.operations.upgrade.drill import DrillOptions, DrillResult, drill, plan_drill, run_scheduled_drill
from appliance.operations.upgrade.rehearse import RehearsalResult
from appliance.operations.upgrade.rehearse_checks import Check
from appliance.plan.snapshots.runs import DRILLS
from tests.sites import open_debian
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.support.instances import LIST, lists

IMAGE = Image("/images/key.sif", "key", "0" * 64, "the key sign.pub")


def snapshot(number: int, generation: int, taken: float) -> dict[str, Any]:
    """A manifest as a target lists it."""
    return {
        "cluster": "sample",
        "number": number,
        "uuid": f"00000000-0000-0000-0000-{number:012}",
        "generation": generation,
        "sequence": number,
        "taken": taken,
        "host": "admin-1",
        "reason": "",
        "used_bytes": 1 << 20,
    }


class Stage:
    """The surroundings of a drill; ``there``: snapshots by target, or the error that a target reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: dict[str, list[dict[str, Any]] | SmsError] = {}
        self.checked: list[SmsError] = []
        self.failing: list[Check] = []
        self.started: list[tuple[str, int]] = []
        self.refusing: Exception | None = None
        self.damage = ""
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        for name, value in {
            "remove_leftovers": lambda *_: [],
            "choose_targets": self.choose,
            "_prepare": lambda *_, **__: IMAGE,
            "check_room": lambda *_, **__: 5,
            "check_repository": self.check,
            "warn_about_key": lambda *_: "the key was never exported",
            "list_remote": self.list,
            "run_rehearsal": self.rehearse,
        }.items():
            monkeypatch.setattr(work, name, value)

    def choose(self, *_: Any, **__: Any) -> list[str]:
        if self.refusing:
            raise self.refusing
        return [*self.there]

    def list(self, _cluster: Cluster, _host: Any, target: str, _identity: Any) -> Remote:
        found = self.there[target]
        if isinstance(found, SmsError):
            raise found
        return Remote(found, [])

    def check(self, *_: Any) -> str:
        if self.checked:
            raise self.checked.pop()
        return "fine"

    def rehearse(self, _cluster: Cluster, options: Any, ready: Any) -> RehearsalResult:
        assert options.nodes == 0
        if self.damage:
            raise SmsError(self.damage)
        self.started.append((ready.origin, ready.snapshot["number"]))
        return RehearsalResult("rh-1", "", "", "", "", 1, checks=self.failing or [Check("it starts", True, "", 1.0)])


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Its admin hosts run nothing; drills run on another machine."""
    opened = open_debian(tmp_path / "state")
    admins = {
        host.name: Fake({LIST: lists([]), ("test",): (1, "")}, name=host.name) for host in opened.site.admin_hosts
    }
    return replace(opened, env=fake_env({**admins, "drills": Local("drills")}, here="drills"))


def test_the_newest_by_order_not_by_clock(stage: Stage, cluster: Cluster) -> None:
    stage.there = {"borg": [snapshot(7, 2, 9000.0), snapshot(8, 3, 500.0)], "admin-2": [snapshot(9, 2, 9999.0)]}
    done = drill(cluster, DrillOptions())
    assert stage.started == [("borg", 8)]
    assert done.ok and (done.source, done.snapshot, done.image) == ("borg", 8, "key")
    assert done.name.endswith("-000000000008")
    assert done.notes[0] == "the key was never exported" and "not running on any host" in done.notes[1]
    shown = done.as_dict()
    assert shown["ok"] is True and shown["checks"][0]["what"] == "borg check of the repository"
    steps = plan_drill(cluster, DrillOptions())
    assert "fetch snapshot 8 from borg" in "; ".join(steps) and len(stage.started) == 1


def test_a_target_that_fails_is_a_failure_and_the_other_is_tried(stage: Stage, cluster: Cluster) -> None:
    stage.there = {"borg": Unreachable("the connection broke"), "admin-1": [snapshot(9, 2, 9.0)]}
    done = drill(cluster, DrillOptions())
    assert stage.started == [("admin-1", 9)]
    assert not done.ok and [check.what for check in done.failed] == ["snapshots at borg"]


def test_what_cannot_be_restored_is_a_failure(stage: Stage, cluster: Cluster) -> None:
    stage.there = {"borg": [snapshot(7, 2, 9.0)]}
    stage.damage = "a chunk is damaged"
    done = drill(cluster, DrillOptions())
    assert not done.ok and [(check.what, check.seen) for check in done.failed] == [
        ("it is fetched and restored", "a chunk is damaged")
    ]


def test_nothing_elsewhere_is_a_failure(stage: Stage, cluster: Cluster) -> None:
    stage.there = {"admin-2": []}
    done = drill(cluster, DrillOptions())
    assert not done.ok and not stage.started and "has no snapshot latest" in done.failed[0].seen
    assert not DrillResult("host").ok
    with pytest.raises(SmsError, match="has no snapshot latest"):
        plan_drill(cluster, DrillOptions())


def test_a_drill_waits_for_a_push(stage: Stage, cluster: Cluster) -> None:
    stage.there = {"borg": [snapshot(7, 2, 9.0)]}
    stage.checked = [Busy("another push"), Busy("another push")]
    assert drill(cluster, DrillOptions()).ok and not stage.checked
    stage.checked = [Busy("another push")] * (2 + work.BUSY_S // work.RETRY_S)
    assert [check.seen for check in drill(cluster, DrillOptions()).failed] == ["another push"]


def test_a_scheduled_one_records_what_failed(stage: Stage, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    mailed: list[str] = []

    def mail(*given: Any) -> list[str]:
        mailed.append(given[3])
        return []

    monkeypatch.setattr("appliance.operations.snapshots.report._mail", mail)
    monkeypatch.setattr("appliance.operations.snapshots.report._log", lambda *_: None)
    stage.there = {"borg": [snapshot(7, 2, 9.0)]}

    def run() -> Any:
        found = run_scheduled_drill(cluster, lambda: drill(cluster, DrillOptions()))
        assert read_record(cluster, Local(), DRILLS) == found
        return found

    assert run().ok and run().number == 7 and not mailed
    stage.failing = [Check("it knows the jobs", False, "2 of 3\nare lost", 1.0)]
    failed = run()
    assert (failed.ok, failed.number, failed.error) == (False, 7, "it knows the jobs: 2 of 3; are lost")
    stage.failing = []
    stage.refusing = Refused("no push target", hint="set one")
    assert run().error == "no push target\nhint: set one"
    stage.refusing = ZeroDivisionError("oops")
    assert run().error == "ZeroDivisionError: oops"
    stage.refusing = None
    assert run().ok
    assert mailed == ["failed", "recovered"]
