"""What makes `sms status` unhealthy, its JSON and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from appliance.cli.services.status import view
from appliance.host.base import Host
from appliance.operations import preflight
from appliance.operations.context import Cluster
from appliance.operations.hosts.guarded import guard_version, version_path
from appliance.operations.overlay.mirrored import MirrorState
from appliance.operations.services import status
from appliance.operations.services.reach import Reach
from appliance.operations.snapshots.status import SnapshotStatus
from appliance.operations.start_note import StartNote, start_note_path
from appliance.operations.vm.deferred import Deferred
from appliance.plan.migration.under_way import Move
from appliance.plan.services.confinement import Confinement
from appliance.plan.services.discarded import Discarded
from appliance.plan.services.inside import Inside, Process
from appliance.plan.services.links import NetworkState
from appliance.plan.services.nodes import NetworkProbe, NodesView, SilentNode
from appliance.plan.services.probes import ProbeAnswer
from appliance.plan.snapshots.runs import Run
from appliance.shared.lease import Lease
from appliance.shared.records import to_json
from appliance.tools.apptainer import Instance
from appliance.tools.files import HELD
from appliance.tools.scripts import script_argv
from tests.confined import INSPECT, confined_output
from tests.places import ROOT
from tests.sites import open_debian
from tests.support.env import fake_env
from tests.support.fake import Answer, Fake
from tests.support.instances import LIST, lists

FULL = "the overlay is {}% full; `sms overlay grow +1G` makes it larger"
OUTDATED = (
    "the guard on host-a is of another version of sms, or does not know the admin hosts of the site file; "
    "`sms start` replaces it, where /etc/sms/sms.yaml lists the same"
)
UNGUARDED = (
    "no guard runs on host-a: nothing stops it here if another host takes over; `sms start --host host-a` starts one"
)


CONFINED: dict[tuple[str, ...], Answer] = {
    ("find",): (0, ""),
    INSPECT: (0, confined_output(Confinement((), "", "", ()), joined=False)),
}
"""Of a host without any of the paths that are hidden."""


def running_host(cluster: Cluster, running: list[Instance], **answers: Answer) -> Fake:
    """A host where the services container runs."""
    running.append(Instance("sms-sample", 7, "/i.sif"))
    programs: dict[tuple[str, ...], Answer] = {(name,): answer for name, answer in answers.items()}
    host = Fake({**CONFINED, **programs, LIST: lists(running), LINKS: (0, "")}, name="host-a")
    host.files[start_note_path(cluster)] = to_json(StartNote("/i.sif", "", "", "", 1, "host-a", 0.0))
    return host


def simulate_reach(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, inside: Inside, reach: Reach, probed: list[bool] | None = None
) -> None:
    """What the container, whose services answer, knows of itself and its nodes, which has tests of its own.

    ``probed`` gets whether it was with the capabilities of the container alone.
    """
    answers = tuple(ProbeAnswer(service.name, True) for service in cluster.services)

    def inspect(_: Cluster, __: Host, *, confined: bool) -> Inside:
        if probed is not None:
            probed.append(confined)
        return replace(inside, answers=answers)

    monkeypatch.setattr(status, "inspect_inside", inspect)
    monkeypatch.setattr(status, "inspect_reach", lambda *_: reach)


def without_vm(path: Path, hosts: int = 1) -> Cluster:
    opened = open_debian(path)
    changes = {"admin_hosts": opened.site.admin_hosts[:1] * hosts, "provisioning": None}
    return replace(opened, site=opened.site.model_copy(update=changes), env=fake_env())


LINKS = script_argv("collect-links")
OLD = "this version of sms cannot start "


@pytest.mark.parametrize(
    ("labels", "seccomp", "warning"),
    [
        ({"sms.key": "k", "sms.confined": "1"}, 2, ""),
        ({"sms.key": "k", "sms.confined": "1"}, 0, preflight.UNCONFINED),
        ({"sms.key": "k"}, 0, OLD),
        ({"sms.key": "k"}, 2, OLD),
    ],
)
def test_what_an_earlier_version_built_or_started_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], seccomp: int, warning: str
) -> None:
    """A reboot or a failover would be refused, and nobody would know before."""
    cluster = without_vm(tmp_path)
    probed, running = list[bool](), list[Instance]()
    simulate_reach(monkeypatch, cluster, Inside(), Reach(), probed)
    host = running_host(cluster, running, test=(0, ""))
    host.answers[script_argv("image-metadata")] = (0, json.dumps({"data": {"attributes": {"labels": labels}}}))
    host.files["/proc/7/status"] = f"NoNewPrivs:\t{int(seccomp > 0)}\nSeccomp:\t{seccomp}\n".encode()
    found = status._container_status(cluster, host, Lease(cluster.site.cluster, 1, "host-a", 0.0), "")
    assert found.healthy is not bool(warning) and len(found.warnings) == bool(warning)
    assert all(line.startswith(warning) for line in found.warnings)
    assert probed == [seccomp == 2]
    if warning == OLD:
        assert "`sms build`" in found.warnings[0] and str(cluster.places.current) in found.warnings[0]
    running.clear()
    idle = status._container_status(cluster, host, Lease(cluster.site.cluster), "")
    assert any(line.startswith(OLD) for line in idle.warnings) is (warning == OLD), "a host that may take over"


@pytest.mark.parametrize(
    ("percent", "guarded", "problems", "warning"),
    [
        (69, True, [], ""),
        (69, True, [], OUTDATED),
        (70, True, [], FULL.format(70)),
        (97, True, [], FULL.format(97)),
        (1, False, [], UNGUARDED),
        (1, True, ["bridge br-prov does not exist"], "bridge br-prov does not exist"),
    ],
)
def test_what_is_unhealthy_although_services_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    percent: int,
    guarded: bool,
    problems: list[str],
    warning: str,
) -> None:
    outdated = warning == OUTDATED
    cluster = without_vm(tmp_path, hosts=2)
    simulate_reach(monkeypatch, cluster, Inside({"size": 100 << 20, "used": percent << 20}), Reach(problems=problems))
    host = running_host(cluster, [], test=(1, ""), flock=(HELD if guarded else 0, ""))
    lock = str(cluster.places.guard_lock)
    host.answers["test", "-e", lock] = (0, "")
    host.files |= {lock: b"7", version_path(cluster): b"7 1" if outdated else f"7 {guard_version(cluster)}".encode()}
    found = status._container_status(cluster, host, Lease(cluster.site.cluster, 1, "host-a", 0.0), "")
    assert (found.healthy, found.warnings) == (not warning, [warning] if warning else [])
    assert found.guarded is guarded


@pytest.mark.parametrize("under_way", [True, False])
def test_the_target_of_a_move_runs_isolated_without_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    """While the move is under way, a person must not stop what he takes for a second services container."""
    cluster = without_vm(tmp_path, hosts=2)
    simulate_reach(monkeypatch, cluster, Inside(), Reach())
    host = running_host(cluster, [], test=(1, ""))
    move = Move("migrate", "host-b", "host-a", "host-a", "started", "", under_way, 5.0, "alice", "admin", 42)
    lease = Lease(cluster.site.cluster, 1, "host-b", 0.0)
    found = status._container_status(cluster, host, lease, "", move=move)
    assert (found.running, found.healthy, found.guarded) == (True, False, False)
    assert found.warnings[0] == f"{move.text}; {move.hint}"
    assert sum(line.startswith("it runs on host-a, but host-b holds the lease") for line in found.warnings) == 1
    assert (UNGUARDED in found.warnings) is not under_way
    shown = json.loads(json.dumps(found.as_dict()))["move"]
    facts = {"verb": "migrate", "source": "host-b", "target": "host-a", "host": "host-a", "state": "started"}
    assert shown == {
        **facts,
        "step": "",
        "under_way": under_way,
        "since": 5.0,
        "by": "alice",
        "on": "admin",
        "process": 42,
    }


def test_json_and_table() -> None:
    """The keys of --json are an interface."""
    lease = Lease("c", 4, "host-a", 5.0, "host-a")
    state = MirrorState("btrfs", True, ({"file": "/a", "state": "whole"},), ("x",), 2, 1)
    newest = {"number": 7, "age_s": 60.0, "method": "trace", "frozen_ms": 3.0, "running": True}
    snapshots = SnapshotStatus(3, [2], newest, 1 << 20, 30, "cron", 15, Run(5.0, 6.0, True))
    vm = Deferred("vm", "10.77.0.2", False, ("nodes that boot",))
    answers = [status.Answer("chrony", True, "stratum 3", 1.5)]
    found = status.Status("c", "host-a", True, True, lease, answers, {"path": "/i"}, {"size": 2, "used": 1}, state)
    found = replace(found, snapshots=snapshots, provisioning=vm, warnings=["w"], guarded=True)
    found = replace(
        found,
        networks=(NetworkState("public", "bridge", "br-pub", "veth1", (), 2, ("10.0.0.9",), ("p",)),),
        nodes=NodesView(4, (SilentNode("n1", "down+not_responding", "Not responding", False),)),
        probes=(NetworkProbe("10.0.0.0/16", ("n1",), 6818, False, "d"),),
        stopped=(Process(9, 1, "T", 1.0, "master"),),
        held=("12", "13_4"),
        strangers=(1001,),
        discarded=(Discarded("collector", 7, "2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00"),),
    )
    shown = json.loads(json.dumps(found.as_dict()))
    facts = {"cluster": "c", "generation": 4, "holder": "host-a", "since": 5.0}
    facts |= {"file": "host-a", "last": "", "sequence": 0, "cluster_uuid": "", "adopted": 0, "floor": 0}
    assert list(shown) == [
        *("cluster", "host", "running", "healthy", "lease", "services", "image", "overlay", "mirror", "uptime_s"),
        *("warnings", "snapshots", "vm_snapshots", "provisioning", "networks", "nodes", "probes", "stopped", "held"),
        *("strangers", "discarded", "guarded", "move"),
    ]
    assert (shown["held"], shown["strangers"], shown["discarded"][0]["lines"]) == (["12", "13_4"], [1001], 7)
    assert shown["networks"] == [
        {
            "name": "public",
            "attach": "bridge",
            "bridge": "br-pub",
            "port": "veth1",
            "uplinks": [],
            "answering": 2,
            "silent": ["10.0.0.9"],
            "problems": ["p"],
            "mtu": 0,
        }
    ]
    silent = [{"name": "n1", "state": "down+not_responding", "reason": "Not responding", "acknowledged": False}]
    silent[0] |= {"registered": True, "accepts": None}
    assert shown["nodes"] == {
        "count": 4,
        "silent": silent,
        "problem": "",
        "required": 0,
        "refusing": [],
        "taken_out": [],
    }
    assert shown["probes"] == [{"network": "10.0.0.0/16", "nodes": ["n1"], "port": 6818, "ok": False, "detail": "d"}]
    assert shown["stopped"] == [{"pid": 9, "parent": 1, "state": "T", "age_s": 1.0, "name": "master"}]
    assert shown["lease"] == facts
    assert shown["mirror"]["members"] == [{"file": "/a", "state": "whole"}] and shown["mirror"]["problems"] == ["x"]
    assert list(shown["snapshots"]) == [
        *("count", "damaged", "newest", "bytes", "limit_minutes", "schedule", "every_minutes", "last_run"),
        *("drills", "last_drill", "problem"),
    ]
    assert shown["snapshots"]["last_run"]["started"] == 5.0
    assert shown["provisioning"] == {
        "hostname": "vm",
        "address": "10.77.0.2",
        "up": False,
        "waits": ["nodes that boot"],
    }
    broken = replace(found, lease_problem="cannot be read", mirror=None, provisioning=None)
    shown = json.loads(json.dumps(broken.as_dict()))
    assert shown["lease"] == {**facts, "problem": "cannot be read"} and "lease_problem" not in shown
    assert (shown["mirror"], shown["provisioning"]) == (None, None)
    output = StringIO()
    for one in (found, broken):
        Console(file=output, width=200).print(view(one))
    for words in (
        "/a whole",
        "7, 60 s ago, by trace",
        "vm (10.77.0.2) is off",
        "generation 4",
        "not known",
        "br-pub no uplink",
        "4, 1 do",
    ):
        assert words in output.getvalue(), words


def test_without_an_engine_nothing_of_engines_is_imported() -> None:
    """Nor what connects to other hosts: it takes as long as all else."""
    code = (
        "import sys; import appliance.operations.services.serving, appliance.operations.services.status;"
        "import appliance.cli.screen, appliance.operations.deployed;"
        "heavy = ('ansible_runner', 'appliance.engines', 'appliance.operations.engines', 'jinja2', 'paramiko');"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "\n"
