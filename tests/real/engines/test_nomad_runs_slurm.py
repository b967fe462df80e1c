"""`sms deploy` on Nomad, in a lab: all services on an admin host, munge and slurmd on its compute nodes.

First the three jobs of document 000, then with accounting, logins and the REST interface.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.nomad import inside_script
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.members import API, DISK, STATE
from appliance.lab.engines.nomad import NomadClient
from appliance.operations.engines.export import export
from appliance.operations.image.build import Built
from appliance.plan.services.runs import NOT_CONFINED
from appliance.shared.state_lease import LEASE_FILE, StateLease, parse_state_lease
from tests.real.engines.conftest import need_engines
from tests.real.engines.deploying import (
    Deployer,
    Jobs,
    assert_accounted,
    assert_all_nodes,
    change_with_a_job,
    drain_with_a_job,
    give_image,
    grow,
    log_in,
    need_tokens,
    read_controller,
    stop_and_start,
)
from tests.real.engines.entries import USER, Entries
from tests.real.labs import build_image, fresh_lab
from tests.real.runners import LabRunner
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NODES = ("node1", "node2")
FIRST = ("slurm-ctl", "munge", "slurm-cn")
"""The jobs of document 000."""
SERVICES = {
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
    """A lab with Nomad, whose nodes run neither munge nor slurmd."""
    need_engines("nomad")
    with fresh_lab("t-nomad", len(NODES), engines=("nomad",)) as lab:
        for name in NODES:
            lab.host(name).run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "munged", "slurmd")
        yield lab


@pytest.fixture(scope="module")
def entries(lab: Lab) -> Iterator[Entries]:
    """Its site file for the engine, and users."""
    directory = LabRunner(lab, "host-b")
    assert (directory.address, lab.layout.engine_addresses["nomad"]) == (DIRECTORY, ADDRESS)
    try:
        made = Entries(lab, {"nomad": {"address": ADDRESS, "api": API}}, directory, DIRECTORY)
        made.add_user(*map(lab.host, NODES))
        yield made
    finally:
        directory.remove()


@pytest.fixture(scope="module")
def built(lab: Lab, entries: Entries) -> Built:
    """Its image, on host-a, which has the state as well."""
    built = build_image(lab, "engines")
    give_image(lab, built)
    return built


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> NomadClient:
    """Its servers and clients."""
    runners = [LabRunner(lab, name) for name in ("server1", "host-a", *NODES)]
    return NomadClient(runners[:1], runners[1:])


@pytest.fixture(scope="module")
def deployer(lab: Lab, built: Built, cluster: NomadClient) -> Deployer:
    """`sms deploy`, which was killed once and has ended then: all three jobs of document 000 run."""
    made = Deployer(lab, "nomad")
    plan = made.deploy("--dry-run")
    assert {each["name"]: each["change"] for each in plan["differences"]} == dict.fromkeys(FIRST, "create")
    assert not made.record and not [name for name in FIRST if cluster.nomad("job", "status", name, ok=None).status == 0]
    done = made.deploy_after_a_kill()
    assert made.record["phase"] == "deployed" and done["generation"] == 1
    print(f"ready: {done['waited']}")
    return made


@pytest.fixture(scope="module")
def user(lab: Lab, deployer: Deployer) -> Jobs:
    """Jobs of a user; all nodes are idle."""
    made = Jobs(lab, NODES)
    made.wait_until_idle()
    return made


@pytest.fixture(scope="module")
def exported(entries: Entries, deployer: Deployer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The exported jobs of compute nodes by name, which more services do not change."""
    folder = tmp_path_factory.mktemp("export") / "jobs"
    export(entries.open(), "nomad", folder)
    return {name: (folder / f"{name}.nomad.hcl").read_bytes() for name in ("munge", "slurm-cn")}


def plan(cluster: NomadClient, job: bytes) -> int:
    """The status of `nomad job plan`."""
    return cluster.nomad("job", "plan", "-", ok=None, input=job).status


def is_healthy(cluster: NomadClient, job: str) -> bool:
    """Whether all checks of its one allocation pass."""
    found = cluster.running(job)
    if len(found) != 1:
        return False
    try:
        checks = cluster.get(f"client/allocation/{found[0]['ID']}/checks") or {}
    except ValueError:  # an agent that has just been started again answers nothing
        return False
    return bool(checks) and all(each["Status"] == "success" for each in checks.values())


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


def restarts(allocation: dict[str, Any]) -> dict[str, int]:
    """The restarts of each task of an allocation."""
    return {name: task["Restarts"] for name, task in allocation["TaskStates"].items()}


def test_a_job_completes(user: Jobs) -> None:
    """E11: `sms deploy` has planned and run the three jobs."""
    assert_all_nodes(user)


def test_a_second_deployment_changes_nothing(
    deployer: Deployer, cluster: NomadClient, user: Jobs, entries: Entries, tmp_path: Path
) -> None:
    """E10."""
    before = {name: [each["ID"] for each in cluster.running(name)] for name in FIRST}
    assert deployer.deploy()["changes"] == dict.fromkeys(FIRST, "unchanged")
    assert {name: [each["ID"] for each in cluster.running(name)] for name in FIRST} == before
    # What was deployed is what an export has.
    export(entries.open(), "nomad", tmp_path / "jobs")
    texts = {name: (tmp_path / f"jobs/{name}.nomad.hcl").read_bytes() for name in FIRST}
    assert {name: plan(cluster, text) for name, text in texts.items()} == dict.fromkeys(FIRST, 0)


def test_status(deployer: Deployer, user: Jobs) -> None:
    read_controller(deployer)
    assert "signed by" in deployer.sms("deploy", "status").text
    assert deployer.holder == "engine:nomad"
    refused = deployer.sms("start", ok=(3,)).stderr.decode()
    assert "nomad has the services" in refused and "sms migrate --to container" in refused


def test_a_node_is_drained_in_slurm_first(deployer: Deployer, cluster: NomadClient, user: Jobs) -> None:
    """E9."""

    def uses() -> list[bool]:
        running = ({each["NodeName"] for each in cluster.running(name)} for name in ("munge", "slurm-cn"))
        return ["node2" in names for names in running]

    drain_with_a_job(deployer, user, "node2", uses)
    assert deployer.status()["healthy"]


@pytest.mark.full
def test_another_configuration_and_back(deployer: Deployer, user: Jobs) -> None:
    """E8."""
    change_with_a_job(deployer, user)


@pytest.mark.parametrize(
    "beside",
    [
        ("job", "stop", "-detach", "slurm-ctl"),
        pytest.param(("job", "scale", "-detach", "slurm-ctl", "0"), marks=pytest.mark.full),
    ],
)
def test_a_change_beside_sms_is_reported_and_undone(
    deployer: Deployer, cluster: NomadClient, user: Jobs, beside: tuple[str, ...]
) -> None:
    """X4: what the Terraform provider does not see."""
    cluster.nomad(*beside)
    wait_until(lambda: not cluster.running("slurm-ctl"), "it is stopped", 120)
    found = deployer.status(ok=(4,))
    assert [each["name"] for each in found["drift"]] == ["slurm-ctl"]
    assert deployer.sms("status", ok=(4,)).status == 4
    assert deployer.deploy()["changes"]["slurm-ctl"] == "change"
    assert deployer.status()["healthy"]
    user.wait_until_idle()


@pytest.mark.full
def test_a_stop_keeps_the_state(deployer: Deployer, user: Jobs) -> None:
    stop_and_start(deployer, user)


@pytest.mark.full
def test_jobs_complete_though_the_controller_is_restarted(lab: Lab, cluster: NomadClient, user: Jobs) -> None:
    """E6."""
    running, queued = user.submit_two(12)
    (before,) = cluster.running("slurm-ctl")
    first = read_lease(lab)
    assert first.holder == f"{before['ID']} on host-a"
    cluster.nomad("alloc", "stop", "-detach", before["ID"])
    wait_until(
        lambda: [each["ID"] for each in cluster.running("slurm-ctl")] not in ([], [before["ID"]]), "another one", 150
    )
    for job in (running, queued):
        user.wait_for(job, "COMPLETED")
    (after,) = cluster.running("slurm-ctl")
    second = read_lease(lab)
    assert (second.generation, second.holder) == (first.generation + 1, f"{after['ID']} on host-a")


@pytest.mark.full
def test_a_job_runs_on_though_slurmd_is_restarted(cluster: NomadClient, user: Jobs, exported: dict[str, bytes]) -> None:
    """Its task is restarted, then stopped for a changed one: what it has started is not in the task's cgroup."""
    go, node = "/home/alice/go", user.node
    script = f"srun sh -c 'until [ -e {go} ]; do sleep 0.2; done; echo it ran on'"
    job = user.run("sbatch", "--parsable", "-w", node.name, "-o", "/home/alice/out", "--wrap", script)
    step = ("squeue", "-h", "-s", "-j", job, "-o", "%i")
    wait_until(lambda: f"{job}.0" in node.run(*step, ok=None).text.split(), "the step runs", 60)
    slurmd = ready_pid(node, "slurmd")
    (own,) = (each["ID"] for each in cluster.running("slurm-cn") if each["NodeName"] == node.name)
    cluster.nomad("alloc", "restart", own)
    restarted = wait_until(lambda: (pid := ready_pid(node, "slurmd")) not in (0, slurmd) and pid, "another slurmd", 90)
    text = exported["slurm-cn"]
    changed = text.replace(b'"--jobsync",\n          "slurmd"', b'"--wait", "200", "--jobsync", "slurmd"')
    assert changed != text
    cluster.submit(changed.decode())
    wait_until(lambda: ready_pid(node, "slurmd") not in (0, restarted), "another task", 120)
    assert user.state(job) == "RUNNING"
    node.run("touch", go)
    user.wait_for(job, "COMPLETED", 60)
    assert (node.read("/home/alice/out") or b"").decode() == "it ran on\n"
    cluster.submit(text.decode())
    wait_until(lambda: plan(cluster, text) == 0, "the job as it was", 60)


@pytest.mark.full
def test_munge_stops_after_its_users_and_does_not_wait_for_ever(
    cluster: NomadClient, user: Jobs, exported: dict[str, bytes]
) -> None:
    """E14: the engine may stop both at once, or munge alone."""
    node = user.node
    wait_until(lambda: ready_pid(node, "munge") and ready_pid(node, "slurmd"), "both run", 90)
    cluster.nomad("job", "stop", "-detach", "munge")
    wait_until(lambda: record(node, "munge")["detail"] == "is needed by slurmd", "it waits", 30)
    assert node.run("sh", "-c", "munge -n | unmunge").status == 0, "and answers"
    cluster.nomad("job", "stop", "-detach", "slurm-cn")
    wait_until(lambda: record(node, "munge")["status"] == record(node, "slurmd")["status"] == 0, "both ended", 60)
    assert record(node, "munge")["times"]["ended"] >= record(node, "slurmd")["times"]["ended"]
    for name in ("slurm-cn", "munge"):
        cluster.submit(exported[name].decode())
    slurmd = wait_until(lambda: ready_pid(node, "munge") and ready_pid(node, "slurmd"), "both run", 90)
    cluster.nomad("job", "stop", "-detach", "munge")
    wait_until(lambda: record(node, "munge")["status"] == 0, "it stops all the same", 120)
    assert ready_pid(node, "slurmd") == slurmd, "which is not restarted for it"
    cluster.submit(exported["munge"].decode())
    wait_until(lambda: ready_pid(node, "munge"), "it answers", 60)


def test_slurmd_does_not_start_as_document_000_has_it(user: Jobs) -> None:
    """X8: with -Z, where slurm.conf names the node."""
    dynamic = ("slurmd", "-D", "-Z", "--conf-server", f"{ADDRESS}:6817", "--conf", "Feature=compute")
    assert b"Duplicated NodeName" in user.node.run(*dynamic, ok=(1,), timeout=60).stderr


def test_the_key_is_not_readable_by_the_api(lab: Lab, cluster: NomadClient, user: Jobs) -> None:
    """With read-fs all of an allocation is, but the folder `secrets` of its tasks."""
    (one,) = (each["ID"] for each in cluster.running("slurm-ctl"))
    placed = cluster.nomad("alloc", "fs", one, "alloc/data/etc/slurm/slurm.conf")
    assert b"SlurmctldHost" in placed.stdout, "others are"
    assert cluster.nomad("alloc", "fs", one, "alloc/data/etc/munge/munge.key").stdout == b""
    secret = cluster.nomad("alloc", "fs", one, "munge/secrets/munge.key", ok=None)
    assert secret.stdout.startswith(b"Reading secret file prohibited"), secret
    folder = f"{DISK}/nomad/alloc/{one}"
    found = lab.host("host-a").run("find", folder, "-name", "munge.key", "-size", "+0").text.split()
    assert found == [f"{folder}/munge/secrets/munge.key"]


WRITES = """\
read -r pattern </proc/sys/kernel/core_pattern
if echo "$pattern" >/proc/sys/kernel/core_pattern; then echo written; fi
if grep -E ' /etc/(hosts|localtime) ' /proc/self/mountinfo; then echo mounted; fi
echo tried
"""


def test_root_in_a_task_cannot_change_its_client(lab: Lab, cluster: NomadClient, user: Jobs) -> None:
    """Each task of the controller's job, with another program; one without the mounts does not start."""
    (one,) = (each["ID"] for each in cluster.running("slurm-ctl"))
    folder = f"{DISK}/nomad/alloc/{one}"
    for task in cluster.get("job/slurm-ctl")["TaskGroups"][0]["Tasks"]:
        own = f"{folder}/{task['Name']}"
        folders = {"ALLOC": f"{folder}/alloc", "TASK": f"{own}/local", "SECRETS": f"{own}/secrets"}
        environment = ("env", f"NOMAD_ALLOC_ID={one}", *(f"NOMAD_{name}_DIR={path}" for name, path in folders.items()))
        args = task["Config"]["args"]
        tried = lab.host("host-a").run(*environment, "sh", "-euc", inside_script(args, ("sh", "-euc", WRITES)))
        assert tried.text == "tried", task["Name"]
        bare = [word for word in args if word != "--bind=/proc/sys:/proc/sys:ro"]
        check = bare.index("/mnt/confined.sh")
        script = inside_script([*bare[: check - 2]], ("/bin/sh", "-eu", *bare[check : check + 4], "echo", "ran"))
        done = lab.host("host-a").run(*environment, "sh", "-euc", script, ok=None)
        assert done.status == NOT_CONFINED and not done.stdout, task["Name"]


@pytest.fixture(scope="module")
def grown(deployer: Deployer, cluster: NomadClient, user: Jobs) -> Jobs:
    """The same, after all services were deployed; each job of them has its secrets, and no others."""
    grow(deployer, user)
    for name, items in SERVICES.items():
        found = json.loads(cluster.nomad("var", "get", "-out", "json", f"nomad/jobs/{name}").stdout)["Items"]
        assert {*found} - {"created_by"} == {*items}, name
    return user


@pytest.mark.full
def test_a_job_is_accounted(grown: Jobs) -> None:
    """E5."""
    assert_accounted(grown)


@pytest.mark.full
def test_a_user_of_the_directory_logs_in(grown: Jobs, entries: Entries) -> None:
    """With the known host key; commands that nodes connect to work, too, as tasks have the network of the host."""
    log_in(entries, LOGIN)
    assert entries.ssh(*LOGIN, "cd /tmp && srun -N2 id -un").split() == [USER, USER]


@pytest.mark.full
def test_tokens_are_needed(grown: Jobs, entries: Entries) -> None:
    need_tokens(entries, f"http://{ADDRESS}:6820", LOGIN)


@pytest.mark.full
def test_checks_are_on_the_loopback(lab: Lab, cluster: NomadClient, grown: Jobs) -> None:
    (one,) = (each["ID"] for each in cluster.running("slurm-ctl"))
    listening = lab.host("host-a").run("ss", "-Hltn", "sport", "=", ":16817").text.split("\n")
    assert [line.split()[3] for line in listening] == ["127.0.0.1:16817"]

    def statuses() -> list[str]:
        checks = json.loads(cluster.nomad("alloc", "checks", "-json", one).stdout)
        return sorted(each["Status"] for each in checks.values())

    wait_until(lambda: statuses() == ["success"] * 6, "all succeed", 60)


@pytest.mark.full
def test_a_dead_database_recovers_alone(lab: Lab, cluster: NomadClient, grown: Jobs) -> None:
    """E7: what ends meanwhile is accounted afterwards; the controller's tasks are the same."""
    (before,) = cluster.running("slurm-ctl")
    lab.host("host-a").run("pkill", "-KILL", "-x", "mariadbd")
    grown.wait_until_accounted(grown.run("sbatch", "--parsable", "-D", "/tmp", "--wrap", "true"), seconds=180)
    (after,) = cluster.running("slurm-ctl")
    assert after["ID"] == before["ID"]
    assert restarts(after) == restarts(before)


@pytest.mark.full
def test_a_restarted_client_restarts_no_service(lab: Lab, cluster: NomadClient, grown: Jobs) -> None:
    """E7: tasks are children of its executors: they run on, and the client finds them again."""
    host = lab.host("host-a")
    before = {name: cluster.running(name)[0] for name in SERVICES}
    agent = ("supervisorctl", "-c", "/lab/supervisord.conf", "pid", "nomad")
    killed = host.run(*agent).text
    host.run("kill", "-KILL", killed)
    assert grown.run("srun", "hostname") in NODES
    wait_until(lambda: host.run(*agent, ok=None).text not in ("0", killed), "another agent runs", 60)
    for name in SERVICES:
        wait_until(lambda: is_healthy(cluster, name), f"{name} is healthy", 120)  # noqa: B023
    after = {name: cluster.running(name)[0] for name in SERVICES}
    assert {name: (each["ID"], restarts(each)) for name, each in after.items()} == {
        name: (each["ID"], restarts(each)) for name, each in before.items()
    }
