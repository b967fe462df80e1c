"""The judgement of what runs on an engine, and of what it needs."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from appliance.cli.engine_facts import status_lines
from appliance.config.engines import SecretRef
from appliance.engines.nomad import inside_script
from appliance.engines.render import make_bundle
from appliance.errors import Refused, Unverified
from appliance.host.base import Unreachable
from appliance.operations.context import Cluster
from appliance.operations.engines import deploy_status, waiting
from appliance.operations.engines.bundles import render_bundle
from appliance.operations.engines.deploy_status import DeployStatus
from appliance.operations.engines.deployed import begin
from appliance.operations.engines.engine import Part, WorkloadState
from appliance.operations.engines.kubernetes import REPORTED_S, OnKubernetes
from appliance.operations.engines.nomad import OnNomad
from appliance.operations.engines.waiting import STEADY_S, Restarts
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools.engine import BOUNDED
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Client, read_allocation, read_job
from tests.support.env import FakeClock, fake_env
from tests.support.fake import Fake
from tests.support.nomad import WithNomad, on_nomad
from tests.unit.engines.cases import CASES, make_input
from tests.unit.engines.deployments import BUNDLE, GOOD_PART, NODE_BUNDLE, READY, RECORD


@pytest.mark.parametrize(
    ("state", "ready", "why"),
    [
        (WorkloadState("a", "service", True, 1, (READY,)), True, ""),
        (WorkloadState("a", "service", False, 1), False, "it is not there"),
        (WorkloadState("a", "service", True, 0), False, "it is stopped, or scaled to 0"),
        (WorkloadState("a", "node", True, 0), True, ""),
        (WorkloadState("a", "node", True, 2, (READY,)), False, "1 of 2 run"),
        (WorkloadState("a", "service", True, 1, (READY,), problem="somebody has stopped the job"), False, "somebody"),
        (WorkloadState("a", "service", True, 1, (replace(READY, current=False, why="old"),)), False, "old"),
        (WorkloadState("a", "service", True, 1, (READY, replace(READY, ready=False, why="new"))), False, "new"),
        (
            WorkloadState("a", "service", True, 1, (replace(READY, parts=(Part("munge", False, 2, "it ended"),)),)),
            True,
            "",
        ),
    ],
)
def test_when_a_workload_is_ready(state: WorkloadState, ready: bool, why: str) -> None:
    assert state.ready == ready
    assert ready or why in state.why


def test_an_image_that_no_node_has_is_refused() -> None:
    """Once kubelets have had the time to report it."""
    clock = FakeClock()
    env = fake_env(clock=clock)
    ready = [{"type": "Ready", "status": "True"}]
    nodes = [
        {
            "metadata": {"name": "n1"},
            "status": {"conditions": ready, "images": [{"names": ["localhost/sms/sample:k"]}]},
        },
        {"metadata": {"name": "n2"}, "status": {"conditions": ready, "images": []}},
    ]
    limited = (*BOUNDED, "kubectl", "--namespace=lab", "--request-timeout=30s")
    fake = Fake(
        {
            (*limited, "version"): (0, '{"serverVersion": {"major": "1", "minor": "34+"}}'),
            (*limited, "get", "nodes"): (0, json.dumps({"items": nodes})),
        }
    )
    found = OnKubernetes(Kubectl(fake, "lab"), {"munge_key": SecretRef(name="munge-key", key="munge.key")}, env)
    bundle = replace(BUNDLE, image="localhost/sms/sample:k")
    found.check(MagicMock(), bundle)
    for one in (replace(found, node="n2"), found):
        image = bundle.image if one.node else "localhost/sms/sample:other"
        with pytest.raises(Refused, match="no node has the image") as caught:
            one.check(MagicMock(), replace(bundle, image=image))
        assert "sms image oci" in caught.value.hint and sum(clock.slept) > REPORTED_S
        clock.slept.clear()


@pytest.mark.parametrize(("case", "job"), [("nomad-small", "slurm-ctl"), ("nomad-full", "login")])
def test_a_command_runs_as_its_task_does(tmp_path: Path, case: str, job: str) -> None:
    """Also where the folder of the state is empty, as there is none."""
    target, site, changes = CASES[case]
    bundle = make_bundle(target, make_input(tmp_path, site, changes))
    item = bundle.find(job)
    assert item
    lines = [line.strip().rstrip(",") for line in item.text.splitlines()]
    start = len(lines) - 1 - lines[::-1].index('"/opt/sms/bin/sms-run"')
    while not lines[start].startswith("args"):
        start -= 1
    args = [json.loads(line) for line in lines[start + 1 : lines.index("]", start)]]
    script = inside_script(args, ["scontrol", "ping", "it's $HOME"])
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "verified.sh").write_text('printf "%s\\n" "$@"\n')
    environment = {
        "NOMAD_TASK_DIR": f"{tmp_path}/local", "NOMAD_ALLOC_DIR": "/al loc", "NOMAD_SECRETS_DIR": "/s",
        "NOMAD_ALLOC_ID": "a", "PATH": "/bin",
    }  # fmt: skip
    printed = subprocess.run(
        ["/bin/sh", "-euc", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[-3:] == ["scontrol", "ping", "it's $HOME"]
    assert "/al loc/data/run:/run" in printed
    assert printed[:2] == args[2:4]
    assert "/opt/sms/bin/sms-run" not in shlex.join(printed)
    assert inside_script(["-D"], ["x"]) == ""


def test_an_engine_that_does_not_answer_has_not_stopped_anything() -> None:
    """Else a stop would release the lease while the services run."""
    runs = WorkloadState("a", "service", True, 1, (READY,))
    engine = MagicMock()
    engine.states.side_effect = [[runs], Unreachable("no answer"), [runs], [replace(runs, instances=())]]
    waiting.wait_for_end(engine, BUNDLE, FakeClock(), Silent())
    assert engine.states.call_count == 4
    engine.states.side_effect = Unreachable("no answer")
    with pytest.raises(Unverified, match="it is not known what runs: no answer"):
        waiting.wait_for_end(engine, BUNDLE, FakeClock(), Silent())


def test_a_wait_outlasts_an_engine_that_does_not_answer() -> None:
    runs = WorkloadState("a", "service", True, 1, (READY,))
    engine = MagicMock()
    engine.states.side_effect = [[replace(runs, instances=())], Unreachable("no answer"), [runs]]
    engine.nudge.side_effect = Unreachable("no answer")
    done = waiting.wait(engine, BUNDLE, BUNDLE.items[1:], clock=FakeClock(), progress=Silent(), timeout_s=60)
    assert done.keys() == {"a"}


def test_a_job_of_nodes_that_was_restarted_is_not_ready_yet() -> None:
    clock = FakeClock()

    def state(restarts: int, kind: str = "node") -> WorkloadState:
        parts = (replace(GOOD_PART, restarts=restarts),)
        return WorkloadState("slurm-cn", kind, True, 1, (replace(READY, parts=parts),))

    seen = Restarts(clock)
    assert seen.judge(state(3)).ready, "before the wait"
    assert seen.judge(state(3)).ready
    assert "restarted" in seen.judge(state(4)).why
    assert "restarted" in seen.judge(state(4)).why, "for a while"
    clock.sleep(STEADY_S + 1)
    assert seen.judge(state(4)).ready
    assert seen.judge(state(5, "service")).ready, "of those, the engine's checks say when"


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b'{"name": "slurmd", "ok": true, "detail": "Slurmd PID"}', True),
        (b'{"name": "slurmd", "ok": false, "detail": "no socket"}', False),
        (b"python3: no such file", False),
    ],
)
def test_services_of_nodes_are_asked(answer: bytes, ready: bool) -> None:
    """That their process lives says nothing."""
    program = MagicMock()
    allocation = read_allocation(
        {
            "ID": "0123456789", "NodeName": "node1", "ClientStatus": "running", "DesiredStatus": "run",
            "TaskStates": {"slurm-cn": {"State": "running"}},
        }
    )  # fmt: skip
    program.clients.return_value = [Client("1", "node1", "ready", True, False, "compute", "10.0.0.2")]
    program.job.return_value = read_job({"ID": "slurm-cn", "Type": "system"})
    program.allocations.return_value = [allocation]
    args = ["--jobsync", "slurmd"]
    program.spec.return_value = {"TaskGroups": [{"Tasks": [{"Name": "slurm-cn", "Config": {"args": args}}]}]}
    program.exec.return_value = SimpleNamespace(stdout=answer, status=0)
    found = OnNomad(program, "host-a", "compute", fake_env())
    (state,) = found.states(NODE_BUNDLE)
    assert state.ready
    (probed,) = found.probe(NODE_BUNDLE, [state])
    assert probed.ready == ready
    assert program.exec.call_args.args[-1] == "slurmd"


def test_a_slurmd_beside_nomad_is_found() -> None:
    program = MagicMock()
    clients = [
        Client(name, name, "ready", True, False, pool, address)
        for name, pool, address in (
            ("host-a", "default", "10.0.0.1"), ("node1", "compute", "10.0.0.2"), ("node2", "compute", "10.0.0.3"),
            ("node3", "compute", "10.0.0.4"), ("node4", "compute", "localhost"),
        )
    ]  # fmt: skip
    program.clients.return_value = clients
    program.get.return_value = {"Drivers": {"raw_exec": {"Healthy": True}}}
    program.allocations.return_value = [SimpleNamespace(node="node3", state="running")]
    program.host.works.side_effect = lambda *argv: "10.0.0.2" not in argv
    cluster = MagicMock()
    OnNomad(program, "host-a", "compute", fake_env()).check(cluster, NODE_BUNDLE, send=False)
    ((line,), _) = cluster.env.progress.report.call_args
    assert line.startswith("warning: node2 already runs a slurmd")


def test_a_dry_run_needs_an_image(tmp_path: Path) -> None:
    """Neither the client nor this machine has one, which the deployment would find."""
    program, cluster = MagicMock(), MagicMock()
    program.clients.return_value = [Client("host-a", "host-a", "ready", True, False, "default", "10.0.0.1")]
    program.get.return_value = {"Drivers": {"raw_exec": {"Healthy": True}}}
    cluster.site.admin_hosts = [SimpleNamespace(name="host-a")]
    cluster.places.current = tmp_path / "lab.sif"
    bundle = replace(NODE_BUNDLE, items=())
    engine = OnNomad(program, "host-a", "compute", fake_env())
    cluster.host.return_value.works.return_value = False
    with pytest.raises(Refused, match="there is no image"):
        engine.check(cluster, bundle, send=False)
    cluster.host.return_value.works.return_value = True
    engine.check(cluster, bundle, send=False)


@pytest.mark.parametrize(
    ("phase", "healthy", "state"),
    [
        ("deployed", True, "healthy; deployment 3"),
        ("applying", True, "healthy so far, and not finished; deployment 3, applying"),
        ("stopped", True, "stopped; deployment 3"),
        ("applying", False, "UNHEALTHY; deployment 3, applying"),
    ],
)
def test_an_unfinished_deployment_is_not_shown_as_healthy(phase: str, healthy: bool, state: str) -> None:
    first = next(status_lines(DeployStatus("sample", replace(RECORD, phase=phase), healthy)))
    assert first == f"sample on nomad: {state}"


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        (None, []),
        ("host-a", ["the services container of host-a has the services of lab: `sms status`"]),
        ("engine:nomad", ["nomad still has the state: `sms deploy` starts the services again"]),
    ],
)
def test_what_was_stopped_and_drained_is_told(
    cluster: Cluster, tmp_path: Path, holder: str | None, said: list[str]
) -> None:
    host, cluster = WithNomad("host-a"), on_nomad(cluster, tmp_path)
    bundle = render_bundle(cluster, "nomad")
    record = replace(RECORD, digest=bundle.digest)
    begin(cluster, host, bundle, record)
    host.has_clients("n1", "n2", drained="n2")
    for item in bundle.items:
        host.has_job(item.name, runs=item.kind == "node")
    host.write(str(cluster.places.lease), Lease(cluster.site.cluster, 7, holder, 1.0, "host-a").text())
    found = deploy_status.deploy_status(cluster, host, record=replace(record, phase="stopped"))
    assert found.healthy and not any(one.problem for one in found.workloads)
    drained = "n2 is drained on nomad: nothing starts there; `sms deploy drain n2 --undo` uses it again"
    assert list(found.warnings) == [*said, drained]
