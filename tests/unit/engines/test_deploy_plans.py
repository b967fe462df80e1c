"""What the verbs of a deployment would do, and what keeps them from doing it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.engines.deploy import Bundle
from appliance.errors import Busy, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.engines import drain
from appliance.operations.engines.deploy import deploy, rollback, stop
from appliance.operations.engines.deploy_plan import plan_rollback, plan_stop
from appliance.operations.engines.deployed import begin, find_deployed
from appliance.operations.engines.engine import Instance, WorkloadState
from appliance.operations.engines.move_lock import lock_moves
from appliance.operations.engines.writer import refuse_interrupted
from appliance.operations.services.unfinished import moved_path
from appliance.plan.migration.state import COMMITTING, COPYING, RETURNED, STARTING, StateMove
from appliance.shared.lease import Lease
from appliance.shared.records import to_json
from tests.support.env import FakeClock, FakeHosts, Impatient, with_env
from tests.support.nomad import WithNomad
from tests.unit.engines.deployments import BUNDLE, GOOD_PART, RECORD

OTHER = replace(BUNDLE, image="/j.sif", items=tuple(replace(one, text="another job") for one in BUNDLE.items))
"""What is deployed after ``BUNDLE``."""


def test_dry_runs_of_a_stop_and_of_a_rollback(cluster: Cluster) -> None:
    """What would stop, in its order; the differences to what was before, not to the site file."""
    host = WithNomad("host-a")
    cluster = with_env(cluster, hosts=FakeHosts({"host-a": host}))
    host.has_clients("host-a")
    host.has_job("a", allocation="x")
    begin(cluster, host, BUNDLE, RECORD)
    assert list(plan_stop(cluster, host).changes.items()) == [("b", "unchanged"), ("a", "stop")]
    with pytest.raises(Refused, match="nothing was deployed before"):
        plan_rollback(cluster, host)
    begin(cluster, host, OTHER, replace(RECORD, digest=OTHER.digest, previous=BUNDLE.digest))
    host.write(str(cluster.places.current), b"an image")
    plan = plan_rollback(cluster, host)
    assert [one.name for one in plan.differences] == ["b", "a"] and not plan.refusal
    assert host.planned == ["job", "job"] and not host.commands


CHANGES: dict[str, Callable[[Cluster, Local], object]] = {
    "deploy": lambda cluster, host: deploy(cluster, host, "nomad", timeout_s=1),
    "rollback": lambda cluster, host: rollback(cluster, host, timeout_s=1),
    "stop": lambda cluster, host: stop(cluster, host),
    "drain": lambda cluster, host: drain.drain(cluster, host, "n1", timeout_s=1),
    "undo": lambda cluster, host: drain.undo(cluster, host, "n1"),
}


@pytest.mark.parametrize(
    ("phase", "refused"), [(COPYING, True), (COMMITTING, True), (RETURNED, False), (STARTING, False)]
)
def test_an_interrupted_move_goes_on_first(cluster: Cluster, phase: str, *, refused: bool) -> None:
    """Its state on the engine is locked until then; after the commit the lease is another one."""
    host = Local(cluster.site.admin_hosts[0].name)
    lease = Lease(cluster.site.cluster, 7 + (phase == STARTING), "engine:nomad", 1.0, host.name)
    host.write(str(cluster.places.lease), lease.text())
    move = StateMove(cluster.site.cluster, phase, "nomad", "kubernetes", 1.0, 8)
    host.write(moved_path(cluster), to_json(move))
    with pytest.raises(Refused, match="was interrupted") if refused else nullcontext() as caught:
        refuse_interrupted(cluster, host)
    assert not refused or "`sms migrate --to nomad` starts them there" in str(caught and caught.value.hint)
    begin(cluster, host, BUNDLE, RECORD)
    begin(cluster, host, OTHER, replace(RECORD, digest=OTHER.digest, previous=BUNDLE.digest))
    for verb in ("deploy", "rollback") if refused else ():
        with pytest.raises(Refused, match="was interrupted"):
            CHANGES[verb](cluster, host)


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_changed_while_a_move_is_at_work(cluster: Cluster, name: str) -> None:
    """The engine is not even queried; afterwards the same command begins."""
    cluster = with_env(cluster, locks=Impatient(), clock=FakeClock())
    host = Local(cluster.site.admin_hosts[0].name)
    begin(cluster, host, BUNDLE, RECORD)
    with lock_moves(cluster, host), pytest.raises(Busy, match="another `sms migrate --to` or `sms deploy`") as caught:
        CHANGES[name](cluster, host)
    assert caught.value.status == 3 and caught.value.hint and find_deployed(cluster, host) == RECORD
    with pytest.raises(SmsError) as begun:
        CHANGES[name](cluster, host)
    assert not isinstance(begun.value, Busy)


class Slurm:
    """An engine with machine n1, whose controller has node n1."""

    name = "nomad"

    def __init__(self, state: str, reason: str = "", jobs: str = "", *, answers: bool = True) -> None:
        self.state, self.reason, self.jobs, self.answers = state, reason, jobs, answers

    def control(self, bundle: Bundle, *argv: str) -> SimpleNamespace:
        assert argv[0] in ("sinfo", "squeue"), "nothing is changed"
        text = self.jobs if argv[0] == "squeue" else f"n1|{self.state}|{self.reason}\n"
        return SimpleNamespace(status=0 if self.answers else 1, text=text, stdout=text.encode(), stderr=b"no answer")

    def has_node(self, node: str) -> bool:
        return node == "n1"

    def states(self, bundle: Bundle) -> list[WorkloadState]:
        parts = [(GOOD_PART, "n1"), (GOOD_PART, "n2")]
        return [
            WorkloadState(item.name, "node", True, 1, (Instance("x", node, True, True, (part,)),))
            for item, (part, node) in zip(bundle.items, parts, strict=True)
        ]


@pytest.mark.parametrize(
    ("engine", "undo", "steps"),
    [
        (Slurm("idle"), False, ("drain n1 in Slurm", "drain n1 on nomad", "stop b there")),
        (
            Slurm("allocated", jobs="7\n12\n7\n"),
            False,
            ("drain n1 in Slurm", "wait for 2 jobs: 7, 12", "drain n1 on nomad", "stop b there"),
        ),
        (Slurm("drained", "disk"), False, ("drain n1 on nomad", "stop b there")),
        (Slurm("drained", drain.REASON), True, ("let nomad use n1", "resume n1 in Slurm")),
        (Slurm("drained*", "disk"), True, ("let nomad use n1", "leave it drained in Slurm, for disk")),
        (Slurm("idle"), True, ("let nomad use n1",)),
        (
            Slurm("", answers=False),
            True,
            (
                "let nomad use n1",
                "wait for the controller, which does not answer",
                "resume n1 in Slurm if this drained it",
            ),
        ),
    ],
)  # fmt: skip
def test_a_dry_run_of_a_drain(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, engine: Slurm, undo: bool, steps: tuple[str, ...]
) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    monkeypatch.setattr(drain, "find_engine", lambda *_: engine)
    bundle = replace(BUNDLE, controller="a")
    begin(cluster, host, bundle, replace(RECORD, digest=bundle.digest))
    found = (drain.plan_undo if undo else drain.plan_drain)(cluster, host, "n1")
    assert (found.steps, found.slurm) == (steps, engine.state if engine.answers else "")
    with pytest.raises(Refused if engine.answers else SmsError):
        (drain.plan_undo if undo else drain.plan_drain)(cluster, host, "n9")
