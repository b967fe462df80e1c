"""The exported jobs on Nomad, in a lab: all services on an admin host, munge and slurmd on its compute nodes."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import LabRunner
from appliance.lab.engines.nomad import NomadCluster
from appliance.operations.engines.export import export
from appliance.operations.image.build import Built
from appliance.shared.state_lease import LEASE_FILE, StateLease, parse_state_lease
from tests.copies import give
from tests.real.engines.conftest import need_engines
from tests.real.engines.entries import UID, USER, Entries
from tests.real.labs import build_image, fresh_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

STATE = "/var/lib/sms/nomad/lab"
NODES = ("node1", "node2")
JOBS = {
    "slurmdbd": ("munge_key", "jwt_key", "sssd_conf"),
    "slurm-ctl": ("munge_key", "jwt_key", "sssd_conf"),
    "slurmrestd": ("munge_key",),
    "login": ("munge_key", "ssh_host_key", "sssd_conf"),
}
"""Jobs of services, with the items of their variables."""
ADDRESS = "10.77.0.11"
DIRECTORY = "10.77.0.12"
"""Of host-a, which runs the services, and of host-b."""
LOGIN = (ADDRESS, 2222)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose nodes run neither munge nor slurmd."""
    need_engines("nomad")
    with fresh_lab("t-nomad", len(NODES)) as lab:
        for name in NODES:
            lab.host(name).run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "munged", "slurmd")
        yield lab


@pytest.fixture(scope="module")
def runners(lab: Lab) -> Iterator[dict[str, LabRunner]]:
    """Its hosts by name; what is started there ends with the module."""
    runners = {name: LabRunner(lab, name) for name in ("host-a", "host-b", *NODES)}
    try:
        yield runners
    finally:
        for runner in runners.values():
            runner.remove()


@pytest.fixture(scope="module")
def entries(lab: Lab, runners: dict[str, LabRunner]) -> Entries:
    """Its site file for the engine, and users."""
    assert runners["host-b"].address == DIRECTORY
    return Entries(lab, {"nomad": {"address": ADDRESS}}, runners["host-b"], DIRECTORY)


@pytest.fixture(scope="module")
def built(lab: Lab, entries: Entries) -> Built:
    """Its image."""
    return build_image(lab, "engines")


@pytest.fixture(scope="module")
def cluster(lab: Lab, runners: dict[str, LabRunner], built: Built) -> NomadCluster:
    """A server on host-b; clients on host-a, which has the image and the folder of the state, and on the nodes."""
    host = lab.host("host-a")
    host.run("mkdir", "-p", "-m", "0700", "/var/lib/sms/images", STATE)
    give(host, built.image, f"/var/lib/sms/images/{built.key}.sif")
    host.run("ln", "-sfn", f"{built.key}.sif", "/var/lib/sms/images/lab.sif")
    settings: dict[str, dict[str, Any]] = {name: {"node_pool": "compute", "max_kill_timeout": "300s"} for name in NODES}
    volumes = {"sms-lab": {"path": STATE, "read_only": False}}
    settings["host-a"] = {"host_volume": volumes, "max_kill_timeout": "400s"}
    clients = [runners["host-a"], *(runners[name] for name in NODES)]
    return NomadCluster([runners["host-b"]], clients, settings)


@pytest.fixture(scope="module")
def jobs(entries: Entries, cluster: NomadCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The exported jobs by name, which run: those of document 000, accounting, logins and the REST interface."""
    folder = tmp_path_factory.mktemp("export") / "jobs"
    export(entries.open(), "nomad", folder)
    for name, items in JOBS.items():
        values = {item: base64.b64encode(entries.secrets[item].read_bytes()).decode() for item in items}
        given = json.dumps({"Items": values}).encode()
        cluster.nomad("var", "put", "-in", "json", f"nomad/jobs/{name}", "-", input=given)
    jobs = {name: (folder / f"{name}.nomad.hcl").read_bytes() for name in (*JOBS, "munge", "slurm-cn")}
    for text in jobs.values():
        # 1: it would create allocations.
        assert plan(cluster, text) == 1
        cluster.submit(text.decode())
    for name in jobs:
        count = 1 if name in JOBS else len(NODES)
        wait_until(lambda: len(cluster.running(name)) == count, f"{name} runs", 120)  # noqa: B023
    return jobs


def plan(cluster: NomadCluster, job: bytes) -> int:
    """The status of `nomad job plan`."""
    return cluster.nomad("job", "plan", "-", ok=None, input=job).status


@pytest.fixture(scope="module")
def node(lab: Lab, cluster: NomadCluster, jobs: dict[str, bytes], entries: Entries) -> Netns:
    """A compute node; all are idle, and all services answer."""
    node = lab.host(NODES[0])
    entries.add_user(*map(lab.host, NODES))
    for name in JOBS:
        wait_until(lambda: is_healthy(cluster, name), f"{name} is healthy", 240)  # noqa: B023
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: node.run(*idle, ok=None).text == str(len(NODES)), "the nodes are idle", 120, 0.5)
    return node


def is_healthy(cluster: NomadCluster, job: str) -> bool:
    """Whether all checks of its one allocation pass."""
    found = cluster.running(job)
    if len(found) != 1:
        return False
    checks = cluster.get(f"client/allocation/{found[0]['ID']}/checks") or {}
    return bool(checks) and all(each["Status"] == "success" for each in checks.values())


def as_alice(node: Netns, *argv: str) -> str:
    """What a command of a user prints."""
    return node.run("runuser", "-u", "alice", "--", *argv, timeout=120).text


def test_a_job_completes_and_is_accounted(node: Netns) -> None:
    assert sorted(as_alice(node, "srun", "-N2", "hostname").split()) == sorted(NODES)
    listed = ("sacct", "-n", "-X", "-P", "-o", "State,User,AllocNodes", "-S", "now-1hour")
    wait_until(lambda: "COMPLETED|alice|2" in as_alice(node, *listed).split("\n"), "sacct shows it", 30)


def test_a_user_of_the_directory_logs_in(node: Netns, entries: Entries) -> None:
    """With the known host key; commands that nodes connect to work, too, as tasks have the network of the host."""
    assert entries.ssh(*LOGIN, "id") == f"uid={UID}({USER}) gid={UID}({USER}) groups={UID}({USER})"
    assert entries.ssh(*LOGIN, "cd /tmp && srun -N2 id -un").split() == [USER, USER]
    job = entries.ssh(*LOGIN, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "true")
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,User")
    wait_until(lambda: entries.ssh(*LOGIN, *listed) == f"COMPLETED|{USER}", "the job completes", 60)


def test_tokens_are_needed(node: Netns, entries: Entries) -> None:
    url = f"http://{ADDRESS}:6820/slurm/v0.0.38/nodes"
    assert " 200 " not in f" {entries.request(url)} " and "401" in entries.request(url)
    token = entries.ssh(*LOGIN, "scontrol", "token").removeprefix("SLURM_JWT=")
    answer = entries.request(url, token)
    assert answer.endswith("200 application/json") and '"node1"' in answer


def test_a_second_deployment_changes_nothing(cluster: NomadCluster, node: Netns, jobs: dict[str, bytes]) -> None:
    assert {name: plan(cluster, text) for name, text in jobs.items()} == dict.fromkeys(jobs, 0)


def test_jobs_complete_though_the_controller_is_restarted(lab: Lab, cluster: NomadCluster, node: Netns) -> None:
    submit = ("sbatch", "--parsable", "-N2", "--exclusive", "-D", "/home/alice", "--wrap", "sleep 12; hostname")
    running, queued = as_alice(node, *submit), as_alice(node, *submit)

    def state(job: str) -> str:
        return node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text

    wait_until(lambda: state(running) == "RUNNING", "the first runs", 30)
    (before,) = cluster.running("slurm-ctl")
    first = read_lease(lab)
    assert first.holder == f"{before['ID']} on host-a"
    cluster.nomad("alloc", "stop", "-detach", before["ID"])
    wait_until(
        lambda: [each["ID"] for each in cluster.running("slurm-ctl")] not in ([], [before["ID"]]), "another one", 150
    )
    for job in (running, queued):
        wait_until(lambda: state(job) == "COMPLETED", f"job {job} completes", 120, 0.5)  # noqa: B023
    (after,) = cluster.running("slurm-ctl")
    second = read_lease(lab)
    assert (second.generation, second.holder) == (first.generation + 1, f"{after['ID']} on host-a")


def read_lease(lab: Lab) -> StateLease:
    """The lease of the controller's state."""
    return parse_state_lease(lab.host("host-a").read(f"{STATE}/var/spool/slurmctld/{LEASE_FILE}") or b"")


def record(node: Netns, service: str) -> dict[str, Any]:
    """What sms-run has recorded of a service of a node."""
    return dict(json.loads(node.read(f"/run/sms/jobsync/{service}.json") or b"{}"))


def ready_pid(node: Netns, service: str) -> int:
    """The process of a service that is ready; 0 while it is not."""
    found = record(node, service)
    return int(found["process"]["pid"]) if found.get("state") == "ready" else 0


def test_a_job_runs_on_though_slurmd_is_restarted(cluster: NomadCluster, node: Netns, jobs: dict[str, bytes]) -> None:
    """Its task is restarted, then stopped for a changed one: what it has started is not in the task's cgroup."""
    go = "/home/alice/go"
    script = f"srun sh -c 'until [ -e {go} ]; do sleep 0.2; done; echo it ran on'"
    job = as_alice(node, "sbatch", "--parsable", "-w", node.name, "-o", "/home/alice/out", "--wrap", script)
    step = ("squeue", "-h", "-s", "-j", job, "-o", "%i")
    wait_until(lambda: f"{job}.0" in node.run(*step, ok=None).text.split(), "the step runs", 60)
    slurmd = ready_pid(node, "slurmd")
    (own,) = (each["ID"] for each in cluster.running("slurm-cn") if each["NodeName"] == node.name)
    cluster.nomad("alloc", "restart", own)
    restarted = wait_until(lambda: (pid := ready_pid(node, "slurmd")) not in (0, slurmd) and pid, "another slurmd", 90)
    changed = jobs["slurm-cn"].replace(b'"--jobsync",\n          "slurmd"', b'"--wait", "200", "--jobsync", "slurmd"')
    assert changed != jobs["slurm-cn"]
    cluster.submit(changed.decode())
    wait_until(lambda: ready_pid(node, "slurmd") not in (0, restarted), "another task", 120)
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    node.run("touch", go)
    wait_until(
        lambda: node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text == "COMPLETED", "it", 60, 0.5
    )
    assert (node.read("/home/alice/out") or b"").decode() == "it ran on\n"
    cluster.submit(jobs["slurm-cn"].decode())
    wait_until(lambda: plan(cluster, jobs["slurm-cn"]) == 0, "the job as it was", 60)


def test_the_key_is_not_readable_by_the_api(lab: Lab, cluster: NomadCluster, node: Netns) -> None:
    """With read-fs all of an allocation is, but the folder `secrets` of its tasks."""
    (one,) = (each["ID"] for each in cluster.running("slurm-ctl"))
    placed = cluster.nomad("alloc", "fs", one, "alloc/data/etc/slurm/slurm.conf")
    assert b"SlurmctldHost" in placed.stdout, "others are"
    assert cluster.nomad("alloc", "fs", one, "alloc/data/etc/munge/munge.key").stdout == b""
    secret = cluster.nomad("alloc", "fs", one, "munge/secrets/munge.key", ok=None)
    assert secret.stdout.startswith(b"Reading secret file prohibited"), secret
    folder = f"{LabRunner.disk}/nomad/alloc/{one}"
    found = lab.host("host-a").run("find", folder, "-name", "munge.key", "-size", "+0").text.split()
    assert found == [f"{folder}/munge/secrets/munge.key"]


def test_checks_are_on_the_loopback(lab: Lab, cluster: NomadCluster, node: Netns) -> None:
    (one,) = (each["ID"] for each in cluster.running("slurm-ctl"))
    listening = lab.host("host-a").run("ss", "-Hltn", "sport", "=", ":16817").text.split("\n")
    assert [line.split()[3] for line in listening] == ["127.0.0.1:16817"]

    def statuses() -> list[str]:
        checks = json.loads(cluster.nomad("alloc", "checks", "-json", one).stdout)
        return sorted(each["Status"] for each in checks.values())

    wait_until(lambda: statuses() == ["success"] * 6, "all succeed", 60)


def test_slurmd_does_not_start_as_document_000_has_it(node: Netns) -> None:
    """X8: with -Z, where slurm.conf names the node."""
    dynamic = ("slurmd", "-D", "-Z", "--conf-server", f"{ADDRESS}:6817", "--conf", "Feature=compute")
    assert b"Duplicated NodeName" in node.run(*dynamic, ok=(1,), timeout=60).stderr


@pytest.mark.full
def test_a_dead_database_recovers_alone(lab: Lab, cluster: NomadCluster, node: Netns) -> None:
    """What ends meanwhile is accounted afterwards; the controller's tasks are the same."""
    (before,) = cluster.running("slurm-ctl")
    lab.host("host-a").run("pkill", "-KILL", "-x", "mariadbd")
    job = as_alice(node, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "true")
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")
    wait_until(lambda: node.run(*listed, ok=None).text == "COMPLETED", "the job is accounted", 180)
    (after,) = cluster.running("slurm-ctl")
    assert after["ID"] == before["ID"]
    assert restarts(after) == restarts(before)


def restarts(allocation: dict[str, Any]) -> dict[str, int]:
    """The restarts of each task of an allocation."""
    return {name: task["Restarts"] for name, task in allocation["TaskStates"].items()}


@pytest.mark.full
def test_a_restarted_client_restarts_no_service(
    cluster: NomadCluster, runners: dict[str, LabRunner], node: Netns
) -> None:
    """Tasks are children of its executors: they run on, and the client finds them again."""
    runner = runners["host-a"]
    before = {name: cluster.running(name)[0] for name in JOBS}
    (agent,) = (each for each in runner.daemons if each.log.name == "nomad.log")
    os.kill(agent.pid, signal.SIGKILL)
    agent.process.wait(60)
    runner.daemons.remove(agent)
    assert as_alice(node, "srun", "hostname") in NODES
    cluster.start_agent(runner)
    for name in JOBS:
        wait_until(lambda: is_healthy(cluster, name), f"{name} is healthy", 120)  # noqa: B023
    after = {name: cluster.running(name)[0] for name in JOBS}
    assert {name: (each["ID"], restarts(each)) for name, each in after.items()} == {
        name: (each["ID"], restarts(each)) for name, each in before.items()
    }


@pytest.mark.full
def test_munge_stops_after_its_users_and_does_not_wait_for_ever(
    cluster: NomadCluster, node: Netns, jobs: dict[str, bytes]
) -> None:
    """E14: the engine may stop both at once, or munge alone."""
    wait_until(lambda: ready_pid(node, "munge") and ready_pid(node, "slurmd"), "both run", 90)
    cluster.nomad("job", "stop", "-detach", "munge")
    wait_until(lambda: record(node, "munge")["detail"] == "is needed by slurmd", "it waits", 30)
    assert node.run("sh", "-c", "munge -n | unmunge").status == 0, "and answers"
    cluster.nomad("job", "stop", "-detach", "slurm-cn")
    wait_until(lambda: record(node, "munge")["status"] == record(node, "slurmd")["status"] == 0, "both ended", 60)
    assert record(node, "munge")["times"]["ended"] >= record(node, "slurmd")["times"]["ended"]
    for name in ("slurm-cn", "munge"):
        cluster.submit(jobs[name].decode())
    slurmd = wait_until(lambda: ready_pid(node, "munge") and ready_pid(node, "slurmd"), "both run", 90)
    cluster.nomad("job", "stop", "-detach", "munge")
    wait_until(lambda: record(node, "munge")["status"] == 0, "it stops all the same", 120)
    assert ready_pid(node, "slurmd") == slurmd, "which is not restarted for it"
    cluster.submit(jobs["munge"].decode())
    wait_until(lambda: ready_pid(node, "munge"), "it answers", 60)
