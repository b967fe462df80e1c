"""What is deployed, its record, and the judgement of what runs."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from appliance.cli.engine_facts import status_lines
from appliance.config.engines import SecretRef
from appliance.engines.deploy import Bundle, Item
from appliance.engines.nomad import inside_script
from appliance.engines.render import make_bundle, render
from appliance.errors import Busy, ConfigError, Refused, SmsError, Unverified
from appliance.host.base import Unreachable
from appliance.host.fake import Fake
from appliance.host.local import Local
from appliance.operations import preflight
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.deployed import APPLYING, DEPLOYED, Deployed, read_deployed, record_path, refuse_deployed
from appliance.operations.engines import deploy as deploy_module
from appliance.operations.engines import deploy_plan, deploy_status, drain, waiting
from appliance.operations.engines.deploy import deploy, rollback, stop
from appliance.operations.engines.deploy_plan import plan_rollback, plan_stop
from appliance.operations.engines.deploy_status import DeployStatus
from appliance.operations.engines.deployed import begin, find_deployed, read_bundle
from appliance.operations.engines.engine import Difference, Instance, Part, WorkloadState
from appliance.operations.engines.kubernetes import OnKubernetes
from appliance.operations.engines.move_lock import lock_moves
from appliance.operations.engines.nomad import OnNomad
from appliance.operations.engines.secret_files import compare_secrets, new_secrets
from appliance.operations.engines.waiting import STEADY_S, Restarts
from appliance.operations.engines.writer import refuse_interrupted, refuse_moved, refuse_other_writer
from appliance.operations.lease import Leases
from appliance.operations.migration import failover
from appliance.operations.services.unfinished import moved_path
from appliance.plan.migration.lease import View
from appliance.plan.migration.state import COMMITTING, COPYING, RETURNED, STARTING, StateMove
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.shared.records import from_json, to_json
from appliance.shared.state_lease import StateLease
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Client, read_allocation, read_job
from tests.sites import GOOD
from tests.unit.engines.cases import CASES, make_input

BUNDLE = Bundle(
    "nomad",
    "sample",
    "default",
    "/i.sif",
    "b",
    (Item("b", "service", "job", after=("a",)), Item("a", "service", "job")),
)
RECORD = Deployed("nomad", APPLYING, 3, BUNDLE.digest, "", 1.0, "host-a")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(GOOD + f"state: {tmp_path}/state\n")
    found = open_cluster(path, None, Silent())
    one = found.site.model_copy(update={"admin_hosts": found.site.admin_hosts[:1]})
    return replace(found, site=one)


@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-balanced", "nomad", "nomad-small"])
def test_what_is_deployed_is_what_is_exported(tmp_path: Path, name: str) -> None:
    target, site, changes = CASES[name]
    given = make_input(tmp_path, site, changes)
    bundle, files = make_bundle(target, given), render(target, given).files
    assert from_json(Bundle, to_json(bundle)) == bundle
    assert bundle.digest == make_bundle(target, given).digest
    if target == "nomad":
        assert {f"{one.name}.nomad.hcl": one.text for one in bundle.items} == {
            path: text for path, text in files.items() if path.endswith(".nomad.hcl")
        }
    else:
        assert {one.name for one in bundle.items} == {"namespace"} | {
            Path(path).stem for path in files if path.startswith("base/") and "kustomization" not in path
        }
    waves = [[one.name for one in wave] for wave in bundle.waves()]
    at = {one: number for number, wave in enumerate(waves) for one in wave}
    assert all(at[need] < at[one.name] for one in bundle.items for need in one.after)
    assert bundle.controller in at


def test_only_nomad_and_kubernetes(tmp_path: Path) -> None:
    target, site, changes = CASES["compose"]
    with pytest.raises(ConfigError):
        make_bundle(target, make_input(tmp_path, site, changes))


def test_workloads_that_need_each_other_are_one_group() -> None:
    circle = (Item("a", "service", "", after=("b",)), Item("b", "service", "", after=("a",)))
    assert [[one.name for one in wave] for wave in replace(BUNDLE, items=circle).waves()] == [["a", "b"]]


def test_the_record_is_there_before_and_names_what_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    assert read_deployed(cluster, host) is None
    begin(cluster, host, BUNDLE, RECORD, Silent())
    assert find_deployed(cluster, host) == RECORD
    assert read_bundle(cluster, host, BUNDLE.digest) == BUNDLE
    other = replace(BUNDLE, image="/j.sif")
    begin(cluster, host, other, replace(RECORD, digest=other.digest, previous=BUNDLE.digest), Silent())
    assert read_bundle(cluster, host, BUNDLE.digest) == BUNDLE
    third = replace(BUNDLE, image="/k.sif")
    begin(cluster, host, third, replace(RECORD, digest=third.digest, previous=other.digest), Silent())
    assert read_bundle(cluster, host, BUNDLE.digest) is None
    kept = tmp_path / "state" / "engines" / cluster.site.cluster / f"{other.digest}.json"
    kept.write_text(kept.read_text().replace("/j.sif", "/x.sif"))
    assert read_bundle(cluster, host, other.digest) is None, "another content"
    assert kept.stat().st_mode & 0o077 == 0


def test_an_unreadable_record_is_an_error_not_none(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    for text in (b"", b"{}", b'{"engine": 1}', json.dumps({"engine": "nomad"}).encode()):
        host.write(record_path(cluster), text)
        with pytest.raises(Refused, match="is unreadable"):
            read_deployed(cluster, host)


def test_another_engine_with_the_services_refuses(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    refuse_other_writer(cluster, host, BUNDLE, RECORD)
    with pytest.raises(Refused, match="kubernetes has the services"):
        refuse_other_writer(cluster, host, BUNDLE, replace(RECORD, engine="kubernetes"))
    refuse_other_writer(cluster, host, BUNDLE, replace(RECORD, engine="kubernetes", phase="stopped"))


@pytest.mark.parametrize(
    ("holder", "runs", "message"),
    [
        (None, False, ""),
        ("engine:nomad", False, ""),
        (None, True, "the services container runs on host-a"),
        ("host-a", False, "host-a has the lease"),
        ("engine:kubernetes", False, "kubernetes has the services and their state"),
        ("host-b", False, "host-b cannot be queried and has the lease"),
    ],
)
def test_who_has_the_lease_refuses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, holder: str | None, runs: bool, message: str
) -> None:
    """Also where nothing runs: a host that was stopped for a reboot starts the services again."""
    views = {"host-a": View(Lease(cluster.site.cluster, 7, holder, 1.0, "host-a"), runs), "host-b": View(None)}

    def query(leases: Leases) -> dict[str, View]:
        leases.views = views
        return views

    monkeypatch.setattr(Leases, "query", query)
    host = Local("host-a")
    with pytest.raises(Refused, match=message) if message else nullcontext() as caught:
        refuse_other_writer(cluster, host, BUNDLE, None)
    assert not message or holder == "host-b" or "sms migrate --to nomad" in caught.value.hint


@pytest.mark.parametrize("moved", ["container", ""])
def test_a_state_that_was_moved_away_is_not_deployed_again(cluster: Cluster, tmp_path: Path, moved: str) -> None:
    """It is older than where it was moved to, and tasks would only end with status 3."""
    nomad = cluster.site.engines.nomad.model_copy(update={"address": "10.0.0.9", "state": tmp_path / "nomad"})
    engines = cluster.site.engines.model_copy(update={"nomad": nomad})
    here = replace(cluster, site=cluster.site.model_copy(update={"engines": engines}))
    for one in here.site.admin_hosts:
        here._hosts[one.name] = Local(one.name)
    bundle = replace(BUNDLE, items=(Item("slurm-ctl", "service", "", lease="/var/spool/slurmctld"),))
    refuse_moved(here, bundle)
    path = tmp_path / "nomad/var/spool/slurmctld/.sms-lease"
    path.parent.mkdir(parents=True)
    path.write_bytes(StateLease(4, moved=moved).text())
    if not moved:
        refuse_moved(here, bundle)
        return
    with pytest.raises(Refused, match="slurm-ctl on nomad was moved to the container"):
        refuse_moved(here, bundle)


@pytest.mark.parametrize("engine", ["nomad", "kubernetes"])
@pytest.mark.parametrize(
    ("there", "own", "given", "outcome"),
    [
        (None, False, None, "refused"),
        (None, False, b"new", "written"),
        (b"old", True, b"new", "written"),
        (b"new", True, b"new", "same"),
        (b"old", True, None, "same"),
        (b"old", False, b"new", "different"),
        (b"new", False, b"new", "same"),
    ],
)
def test_secrets_of_an_engine(
    cluster: Cluster, tmp_path: Path, engine: str, there: bytes | None, own: bool, given: bytes | None, outcome: str
) -> None:
    """Those that sms has created follow the site file, also after a new key; others are only compared."""
    if given is not None:
        (tmp_path / "key").write_bytes(given)
    secrets = cluster.site.secrets.model_copy(update={"munge_key": tmp_path / "key" if given is not None else None})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"secrets": secrets}))
    bundle = replace(BUNDLE, items=(Item("a", "service", "", secrets=("munge_key",)),))
    text = base64.b64encode(there).decode() if there is not None else ""
    program = MagicMock()
    found: OnNomad | OnKubernetes
    if engine == "nomad":
        items = {"munge_key": text} | ({"created_by": "sms"} if own else {})
        found = OnNomad(program, "host-a", "compute")
        program.get.return_value = {}
        program.variable.return_value = items if there is not None else {}
        program.allocations.return_value = [SimpleNamespace(id="x", runs=True)]
        put, restart = program.put_variable, program.stop_allocation
    else:
        labels = {"app.kubernetes.io/part-of": "sms"} if own else {}
        present = {"data": {"munge.key": text}, "metadata": {"labels": labels}}
        found = OnKubernetes(program, {"munge_key": SecretRef(name="munge-key", key="munge.key")})
        program.get.return_value = present if there is not None else None
        put, restart = program.put_secret, program.delete
    if outcome == "refused":
        with pytest.raises(Refused, match="has no `secrets"):
            compare_secrets(cluster, bundle, found)
        return
    assert len(compare_secrets(cluster, bundle, found)) == (outcome == "different")
    new = new_secrets(cluster, bundle, found)
    assert [value for _, value in new] == ([given] if outcome == "written" else [])
    assert "b'old'" not in repr([one for one, _ in new])
    found.prepare(bundle, new)
    assert put.called == (outcome == "written") and restart.called == (outcome == "written" and there is not None)
    if put.called and engine == "nomad":
        assert put.call_args.args[1] == {"munge_key": base64.b64encode(b"new").decode(), "created_by": "sms"}


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
    begin(cluster, host, BUNDLE, RECORD, Silent())
    begin(cluster, host, A, replace(RECORD, digest=A.digest, previous=BUNDLE.digest), Silent())
    for verb in ("deploy", "rollback") if refused else ():
        with pytest.raises(Refused, match="was interrupted"):
            CHANGES[verb](cluster, host)


@pytest.mark.parametrize("engine", ["nomad", "kubernetes"])
def test_a_new_secret_reaches_what_runs_also_after_a_kill(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """The first run ends between the write and the restart; the next one restarts what may have the earlier secret."""
    (tmp_path / "key").write_bytes(b"new")
    secrets = cluster.site.secrets.model_copy(update={"munge_key": tmp_path / "key"})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"secrets": secrets}))
    bundle = replace(BUNDLE, items=(Item("a", "service", "", secrets=("munge_key",)),))
    program, text = MagicMock(), base64.b64encode(b"old").decode()
    found: OnNomad | OnKubernetes
    if engine == "nomad":
        variable = {"munge_key": text, "created_by": "sms"}
        found = OnNomad(program, "host-a", "compute")
        program.get.return_value = {}
        program.variable.side_effect = lambda _: dict(variable)
        program.put_variable.side_effect = lambda _, items: variable.update(items)
        program.allocations.return_value = [SimpleNamespace(id="x", runs=True)]
        restart = program.stop_allocation
    else:
        present = {"data": {"munge.key": text}, "metadata": {"labels": {"app.kubernetes.io/part-of": "sms"}}}
        found = OnKubernetes(program, {"munge_key": SecretRef(name="munge-key", key="munge.key")})
        program.get.return_value = present

        def put(_: str, values: dict[str, bytes], labels: dict[str, str]) -> None:
            present["data"] = {name: base64.b64encode(value).decode() for name, value in values.items()}
            present["metadata"] = {"labels": labels}

        program.put_secret.side_effect = put
        restart = program.delete
    restart.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        found.prepare(bundle, new_secrets(cluster, bundle, found))
    restart.reset_mock(side_effect=True)
    assert compare_secrets(cluster, bundle, found) == []
    found.prepare(bundle, new_secrets(cluster, bundle, found))
    assert restart.call_count == 1
    found.prepare(bundle, new_secrets(cluster, bundle, found))
    assert restart.call_count == 1, "once"


A, B, C = (replace(BUNDLE, image=f"/{name}.sif") for name in "abc")


@pytest.mark.parametrize(
    ("digest", "previous", "phase", "then", "expected"),
    [
        (A, "", DEPLOYED, B, A),
        (B, A, DEPLOYED, C, B),
        (B, A, APPLYING, C, A),
        (B, A, "stopped", C, B),
        (B, A, APPLYING, A, ""),
        (B, A, APPLYING, B, A),
        (A, "", APPLYING, B, ""),
    ],
    ids=["first", "second", "after one that failed", "stopped", "rollback", "again", "only one that failed"],
)
def test_a_rollback_goes_back_to_what_was_ready(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, digest: Bundle, previous: Bundle | str, phase: str, then: Bundle,
    expected: Bundle | str,
) -> None:  # fmt: skip
    def name(one: Bundle | str) -> str:
        return one.digest if isinstance(one, Bundle) else one

    monkeypatch.setattr(deploy_module, "find_signed", lambda *_: None)
    before = replace(RECORD, digest=name(digest), previous=name(previous), phase=phase)
    record = deploy_module._next_record(cluster, Local("host-a"), then, before)
    assert record.previous == name(expected)
    other = deploy_module._next_record(cluster, Local("host-a"), replace(then, engine="kubernetes"), before)
    assert other.previous == "", "that of another engine cannot be applied"


def test_an_image_that_is_not_signed_leaves_the_lease(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Refused("it is not signed")

    monkeypatch.setattr(deploy_module, "find_signed", refuse)
    monkeypatch.setattr(deploy_module, "take_for_engine", lambda *_: pytest.fail("the lease is taken"))
    host = Local(cluster.site.admin_hosts[0].name)
    run = deploy_module.Run(None, MagicMock(), Silent(), 1)
    with pytest.raises(Refused, match="not signed"):
        deploy_module.apply_bundle(cluster, host, MagicMock(), BUNDLE, [], run)
    assert find_deployed(cluster, host) is None


def test_the_container_does_not_start_what_an_engine_has(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    refuse_deployed(cluster, host)
    here = cluster.services[0].name
    for services, phase, refused in (
        ((here, "other"), APPLYING, True),
        (("other",), APPLYING, False),
        ((here,), "stopping", True),
        ((here,), "stopped", False),
    ):
        begin(cluster, host, BUNDLE, replace(RECORD, services=services, phase=phase), Silent())
        with pytest.raises(Refused, match=f"nomad has {here}") if refused else nullcontext():
            refuse_deployed(cluster, host)


GOOD_PART = Part("slurmctld", True, 0)
READY = Instance("slurmctld-0", "n1", True, True, (GOOD_PART,))


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


def test_an_image_that_no_node_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.operations.engines import kubernetes

    monkeypatch.setattr(kubernetes, "REPORTED_S", 0)
    ready = [{"type": "Ready", "status": "True"}]
    nodes = [
        {
            "metadata": {"name": "n1"},
            "status": {"conditions": ready, "images": [{"names": ["localhost/sms/sample:k"]}]},
        },
        {"metadata": {"name": "n2"}, "status": {"conditions": ready, "images": []}},
    ]
    limited = ("kubectl", "--namespace=lab", "--request-timeout=30s")
    fake = Fake(
        {
            (*limited, "version"): (0, '{"serverVersion": {"major": "1", "minor": "34+"}}'),
            (*limited, "get", "nodes"): (0, json.dumps({"items": nodes})),
        }
    )
    found = OnKubernetes(Kubectl(fake, "lab"), {"munge_key": SecretRef(name="munge-key", key="munge.key")})
    bundle = replace(BUNDLE, image="localhost/sms/sample:k")
    found.check(None, bundle, Silent())  # type: ignore[arg-type]
    for one in (replace(found, node="n2"), found):
        image = bundle.image if one.node else "localhost/sms/sample:other"
        with pytest.raises(Refused, match="no node has the image") as caught:
            one.check(None, replace(bundle, image=image), Silent())  # type: ignore[arg-type]
        assert "sms image oci" in caught.value.hint


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


def test_a_failover_from_an_engine_records_that_it_has_the_services_no_more(cluster: Cluster) -> None:
    """Else no admin host could start them again."""
    host = Local(cluster.site.admin_hosts[0].name)
    begin(cluster, host, BUNDLE, replace(RECORD, services=(cluster.services[0].name,)), Silent())
    plan = failover.Plan(host.name, ("host-b",), 1, False, None, ())
    failover._forget_engine(cluster, host, plan, Silent())
    with pytest.raises(Refused, match="nomad has"):
        refuse_deployed(cluster, host)
    failover._forget_engine(cluster, host, replace(plan, old=("engine:nomad",)), Silent())
    refuse_deployed(cluster, host)


def test_an_engine_that_does_not_answer_has_not_stopped_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a stop would release the lease while the services run."""
    runs = WorkloadState("a", "service", True, 1, (READY,))
    engine = MagicMock()
    engine.states.side_effect = [[runs], Unreachable("no answer"), [runs], [replace(runs, instances=())]]
    monkeypatch.setattr(waiting, "POLL_S", 0)
    waiting.wait_for_end(engine, BUNDLE, Silent())
    assert engine.states.call_count == 4
    engine.states.side_effect = Unreachable("no answer")
    monkeypatch.setattr(waiting, "END_S", -1000)
    with pytest.raises(Unverified, match="it is not known what runs: no answer"):
        waiting.wait_for_end(engine, BUNDLE, Silent())


def test_a_wait_outlasts_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = WorkloadState("a", "service", True, 1, (READY,))
    engine = MagicMock()
    engine.states.side_effect = [[replace(runs, instances=())], Unreachable("no answer"), [runs]]
    engine.nudge.side_effect = Unreachable("no answer")
    monkeypatch.setattr(waiting, "POLL_S", 0)
    assert waiting.wait(engine, BUNDLE, BUNDLE.items[1:], progress=Silent(), timeout_s=60).keys() == {"a"}


def test_a_job_of_nodes_that_was_restarted_is_not_ready_yet() -> None:
    def state(restarts: int, kind: str = "node") -> WorkloadState:
        parts = (replace(GOOD_PART, restarts=restarts),)
        return WorkloadState("slurm-cn", kind, True, 1, (replace(READY, parts=parts),))

    seen = Restarts()
    assert seen.judge(state(3)).ready, "before the wait"
    assert seen.judge(state(3)).ready
    assert "restarted" in seen.judge(state(4)).why
    assert "restarted" in seen.judge(state(4)).why, "for a while"
    seen.at["slurm-cn"] -= STEADY_S
    assert seen.judge(state(4)).ready
    assert seen.judge(state(5, "service")).ready, "of those, the engine's checks say when"


NODE_BUNDLE = replace(BUNDLE, items=(Item("slurm-cn", "node", "job", ("slurm-cn",)),))


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
    found = OnNomad(program, "host-a", "compute")
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
    progress = MagicMock()
    OnNomad(program, "host-a", "compute").check(MagicMock(), NODE_BUNDLE, progress, send=False)
    ((line,), _) = progress.report.call_args
    assert line.startswith("warning: node2 already runs a slurmd")


def test_a_dry_run_needs_an_image(tmp_path: Path) -> None:
    """Neither the client nor this machine has one, which the deployment would find."""
    program, cluster = MagicMock(), MagicMock()
    program.clients.return_value = [Client("host-a", "host-a", "ready", True, False, "default", "10.0.0.1")]
    program.get.return_value = {"Drivers": {"raw_exec": {"Healthy": True}}}
    cluster.site.admin_hosts = [SimpleNamespace(name="host-a")]
    cluster.places.current = tmp_path / "lab.sif"
    bundle = replace(NODE_BUNDLE, items=())
    engine = OnNomad(program, "host-a", "compute")
    cluster.host.return_value.works.return_value = False
    with pytest.raises(Refused, match="there is no image"):
        engine.check(cluster, bundle, MagicMock(), send=False)
    cluster.host.return_value.works.return_value = True
    engine.check(cluster, bundle, MagicMock(), send=False)


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
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, holder: str | None, said: list[str]
) -> None:
    host, program = Local("host-a"), MagicMock()
    begin(cluster, host, BUNDLE, RECORD, Silent())
    program.job.return_value = read_job({"ID": "a", "Type": "service", "Stop": True, "TaskGroups": []})
    program.allocations.return_value = []
    program.clients.return_value = [
        Client(name, name, "ready", eligible, False, "compute", "") for name, eligible in (("n1", True), ("n2", False))
    ]
    lease = Lease(cluster.site.cluster, 7, holder, 1.0, "host-a")
    monkeypatch.setattr(deploy_status, "find_engine", lambda *_: OnNomad(program, "host-a", "compute"))
    monkeypatch.setattr(deploy_status, "query_lease", lambda *_: lease)
    monkeypatch.setattr(deploy_status, "render_bundle", lambda *_: BUNDLE)
    found = deploy_status.deploy_status(cluster, host, record=replace(RECORD, phase="stopped"))
    assert found.healthy and not any(one.problem for one in found.workloads)
    drained = "n2 is drained on nomad: nothing starts there; `sms deploy drain n2 --undo` uses it again"
    assert list(found.warnings) == [*said, drained]


def test_dry_runs_of_a_stop_and_of_a_rollback(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would stop, in its order; the differences to what was before, not to the site file."""
    host, engine = Local("host-a"), MagicMock()
    engine.states.return_value = [WorkloadState("a", "service", True, 1, (Instance("x", "n1", True, True, ()),))]
    engine.differences.side_effect = lambda bundle: [Difference(bundle.image, "change", "")]
    monkeypatch.setattr(deploy_plan, "find_engine", lambda *_: engine)
    monkeypatch.setattr(deploy_plan, "refuse_other_writer", lambda *_: None)
    monkeypatch.setattr(deploy_plan, "compare_secrets", lambda *_: [])
    begin(cluster, host, BUNDLE, RECORD, Silent())
    assert list(plan_stop(cluster, host).items()) == [("b", "unchanged"), ("a", "stop")]
    with pytest.raises(Refused, match="nothing was deployed before"):
        plan_rollback(cluster, host, Silent())
    other = replace(BUNDLE, image="/j.sif")
    begin(cluster, host, other, replace(RECORD, digest=other.digest, previous=BUNDLE.digest), Silent())
    assert [one.name for one in plan_rollback(cluster, host, Silent()).differences] == ["/i.sif"]
    changed = {name for name, *_ in engine.method_calls} - {"states", "differences", "check"}
    assert not changed


CHANGES: dict[str, Callable[[Cluster, Local], object]] = {
    "deploy": lambda cluster, host: deploy(cluster, host, "nomad", Silent(), timeout_s=1),
    "rollback": lambda cluster, host: rollback(cluster, host, Silent(), timeout_s=1),
    "stop": lambda cluster, host: stop(cluster, host, Silent()),
    "drain": lambda cluster, host: drain.drain(cluster, host, "n1", Silent(), timeout_s=1),
    "undo": lambda cluster, host: drain.undo(cluster, host, "n1", Silent()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_changed_while_a_move_is_at_work(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The engine is not even queried; afterwards the same command begins."""
    monkeypatch.setattr(preflight, "LOCK_WAIT_S", 0)
    host = Local(cluster.site.admin_hosts[0].name)
    begin(cluster, host, BUNDLE, RECORD, Silent())
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
    begin(cluster, host, bundle, replace(RECORD, digest=bundle.digest), Silent())
    found = (drain.plan_undo if undo else drain.plan_drain)(cluster, host, "n1")
    assert (found.steps, found.slurm) == (steps, engine.state if engine.answers else "")
    with pytest.raises(Refused if engine.answers else SmsError):
        (drain.plan_undo if undo else drain.plan_drain)(cluster, host, "n9")
