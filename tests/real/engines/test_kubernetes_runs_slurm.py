"""`sms deploy` on Kubernetes, in a lab: all services of Slurm in pods, slurmd native on the compute nodes.

First slurmctld alone, then with accounting, logins and the REST interface. Nodes reach them at node ports.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.agents import IMPORT
from appliance.operations.engines.distribute import LAYOUT, load_image
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.operations.image.build import Built
from appliance.progress import Silent
from appliance.shared.state_lease import StateLease, parse_state_lease
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
from tests.real.engines.entries import PASSWORD, USER, Entries
from tests.real.labs import build_image, fresh_lab
from tests.real.runners import LabRunner
from tests.waiting import wait_until

pytestmark = pytest.mark.real

SPACE = "lab"
WORKERS = ("worker1", "worker2")
NODES = ("node1", WORKERS[1])
"""Of Slurm. The second one is called as a cluster node is, which one machine can be: its slurmd runs on node2."""
ADDRESS, DIRECTORY = "10.77.0.32", "10.77.0.12"
"""Of worker1, at whose ports nodes reach the services, and of host-b."""
PODS = ("slurmctld-0", "slurmdbd-0", "slurmrestd-0", "login-0")
LOGIN = (ADDRESS, 32222)
BESIDE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: beside, namespace: default}
spec:
  selector: {matchLabels: {app: beside}}
  template:
    metadata: {labels: {app: beside}}
    spec:
      nodeSelector: {kubernetes.io/hostname: worker2}
      containers: [{name: c, image: "localhost/pause:sms", imagePullPolicy: Never}]
"""
"""Pods that are not of sms."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a Kubernetes cluster of two nodes; its own services container does not run."""
    need_engines("kubectl", "kubelet", "kube-proxy", "kube-apiserver", "etcd")
    with fresh_lab("t-kube", len(NODES), engines=("kubernetes",)) as lab:
        yield lab


@pytest.fixture(scope="module")
def entries(lab: Lab) -> Iterator[Entries]:
    """Its site file for the engine, and users."""
    directory = LabRunner(lab, "host-b")
    assert (directory.address, LabRunner(lab, WORKERS[0]).address) == (DIRECTORY, ADDRESS)
    node = {"cpus": 1, "memory_mb": 512}
    nodes = [
        {"name": name, "address": LabRunner(lab, host).address, **node}
        for name, host in zip(NODES, ("node1", "node2"), strict=True)
    ]
    engine = {"kubernetes": {"address": ADDRESS, "kubeconfig": "keys/kubeconfig"}}
    slurm = {"nodes": nodes, "partitions": [{"name": "normal", "default": True}]}
    try:
        made = Entries(lab, engine, directory, DIRECTORY, slurm=slurm)
        made.add_user(lab.host("node1"), lab.host("node2"))
        yield made
    finally:
        directory.remove()


@pytest.fixture(scope="module")
def built(lab: Lab, entries: Entries) -> Built:
    """Its image, which host-a has."""
    built = build_image(lab, "engines")
    give_image(lab, built)
    return built


@pytest.fixture(scope="module")
def deployer(lab: Lab, entries: Entries, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Deployer:
    """`sms deploy`, which was refused without an image, and killed once. Its pod is on worker1."""
    made, folder = Deployer(lab, "kubernetes"), tmp_path_factory.mktemp("oci") / "lab.oci"
    cluster, (first, second) = entries.open(), map(lab.host, WORKERS)
    with ThreadPoolExecutor(1) as pool:
        # Each refusal takes as long as a kubelet may take to report an image.
        written = pool.submit(make_oci, cluster, Path(built.image), folder)
        plan = made.deploy("--dry-run", ok=(3,))
        assert {each["change"] for each in plan["differences"]} == {"create"}
        assert "no node has the image" in plan["refusal"]
        assert not made.record
        assert "no node has the image" in made.sms("deploy", "--engine", "kubernetes", ok=(3,)).stderr.decode()
        assert not made.record
        written.result()
        archive = subprocess.run(("tar", "-C", folder, "-c", *LAYOUT), capture_output=True, check=True).stdout
        imported = pool.submit(second.run, *IMPORT, input=archive, timeout=300)
        assert load_image(folder, first, Silent()) == ["ctr", "podman"]
        imported.result()
    made.host.run("kubectl", "cordon", WORKERS[1])
    deployed = made.deploy_after_a_kill()
    made.host.run("kubectl", "uncordon", WORKERS[1])
    assert made.record["phase"] == "deployed"
    print(f"ready: {deployed['waited']}")
    return made


@pytest.fixture(scope="module")
def jobs(lab: Lab, deployer: Deployer) -> Jobs:
    """Jobs of a user; slurmd of each node has the controller in the pod."""
    for name, host in zip(NODES, (lab.host("node1"), lab.host("node2")), strict=True):
        host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd")
        script = f"hostname {name} && exec slurmd --conf-server {ADDRESS}:30817"
        host.run("unshare", "--uts", "sh", "-c", script, timeout=60)
    made = Jobs(lab, NODES)
    made.wait_until_idle()
    return made


def get(deployer: Deployer, *words: str) -> dict[str, Any]:
    """An object; empty where there is none."""
    found = deployer.host.run("kubectl", "-n", SPACE, "get", *words, "--ignore-not-found", "-o", "json").stdout
    return dict(json.loads(found)) if found else {}


def find_ready(deployer: Deployer, pod: str) -> str:
    """The identity of a pod whose containers are all ready; else empty."""
    found = get(deployer, "pod", pod)
    conditions = found.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return str(found["metadata"]["uid"]) if ready else ""


def await_pods(deployer: Deployer, *pods: str) -> None:
    """Return once all are ready."""
    for pod in pods:
        wait_until(lambda: find_ready(deployer, pod), f"{pod} is ready", 240, 0.5)  # noqa: B023


def delete(deployer: Deployer, *words: str) -> None:
    """Delete pods, and return at once."""
    deployer.host.run("kubectl", "-n", SPACE, "delete", *words, "--wait=false")


def worker_of(deployer: Deployer, pod: str) -> Netns:
    """The cluster node of a pod, from which its processes are in sight: what kills one needs no program in the pod."""
    return deployer.lab.host(get(deployer, "pod", pod)["spec"]["nodeName"])


def count_restarts(deployer: Deployer, pod: str) -> dict[str, int]:
    """The restarts of each container of a pod."""
    status = get(deployer, "pod", pod)["status"]
    containers = (*status["initContainerStatuses"], *status["containerStatuses"])
    return {each["name"]: each["restartCount"] for each in containers}


def read_lease(deployer: Deployer) -> StateLease:
    """The lease of the controller's state, as a program of the image prints it."""
    words = ("-c", "slurmctld", "--", "/opt/sms/bin/sms-lease", "/var/spool/slurmctld")
    return parse_state_lease(deployer.host.run("kubectl", "-n", SPACE, "exec", "slurmctld-0", *words).stdout)


def test_a_job_completes(jobs: Jobs) -> None:
    assert_all_nodes(jobs)


def test_a_second_deployment_changes_nothing(deployer: Deployer, jobs: Jobs, entries: Entries) -> None:
    """E10."""
    before = find_ready(deployer, "slurmctld-0")
    assert set(deployer.deploy()["changes"].values()) == {"unchanged"}
    assert find_ready(deployer, "slurmctld-0") == before != ""
    # What was deployed is what an export has.
    export(entries.open(), "kubernetes", deployer.lab.etc / "k8s")
    differences = deployer.host.run(
        "kubectl", "diff", "--server-side", "--field-manager=sms", "-k", "/etc/sms/k8s/site"
    )
    assert differences.text == ""


def test_status(deployer: Deployer, jobs: Jobs) -> None:
    controller = read_controller(deployer)
    assert "Bound" in controller["volume"] and "sha256:" in controller["instances"][0]["image"]


@pytest.mark.full
def test_a_node_is_drained_in_slurm_first(deployer: Deployer, jobs: Jobs) -> None:
    """E9: what the cluster node runs is not touched while a job runs there; what is not of sms is evicted, too."""
    kubectl, worker = deployer.host, WORKERS[1]
    kubectl.run("kubectl", "apply", "-f", "-", input=BESIDE.encode())

    def beside() -> str:
        listed = ("get", "pods", "-l", "app=beside", "--field-selector", f"spec.nodeName={worker},status.phase=Running")
        return kubectl.run("kubectl", *listed, "-o", "name").text

    def cordoned() -> bool:
        return kubectl.run("kubectl", "get", "node", worker, "-o", "jsonpath={.spec.unschedulable}").text == "true"

    wait_until(beside, "the other pod runs", 60)
    drain_with_a_job(deployer, jobs, worker, lambda: (bool(beside()), not cordoned()))
    assert not cordoned()
    kubectl.run("kubectl", "delete", "deployment", "beside", "--wait=false")


@pytest.mark.full
def test_a_cluster_node_is_drained_and_the_controller_moves(deployer: Deployer, jobs: Jobs) -> None:
    """Its volume can follow: jobs run on."""
    job = jobs.submit(20, "-N2", "--exclusive")
    jobs.wait_for(job, "RUNNING", 60)
    before = get(deployer, "pod", "slurmctld-0")["spec"]["nodeName"]
    assert before == WORKERS[0], "Slurm does not know it"
    done = json.loads(deployer.sms("deploy", "drain", before, "--json").stdout)
    assert done["slurm"] == "" and any("slurmctld-0" in line for line in done["engine"])
    wait_until(lambda: find_ready(deployer, "slurmctld-0"), "it is ready elsewhere", 120, 0.5)
    assert get(deployer, "pod", "slurmctld-0")["spec"]["nodeName"] != before
    assert deployer.host.run("kubectl", "get", "node", before).text.count("SchedulingDisabled") == 1
    deployer.sms("deploy", "drain", before, "--undo")
    assert "SchedulingDisabled" not in deployer.host.run("kubectl", "get", "nodes").text
    jobs.wait_for(job, "COMPLETED")


@pytest.mark.full
def test_another_configuration_and_back(deployer: Deployer, jobs: Jobs) -> None:
    """E8."""
    change_with_a_job(deployer, jobs)


@pytest.mark.full
def test_a_change_beside_sms_is_reported_and_undone(deployer: Deployer, jobs: Jobs) -> None:
    deployer.host.run("kubectl", "-n", SPACE, "scale", "statefulset", "slurmctld", "--replicas=0")
    wait_until(lambda: not get(deployer, "pod", "slurmctld-0"), "its pod is gone", 120, 0.5)
    found = deployer.status(ok=(4,))
    assert [each["name"] for each in found["drift"]] == ["slurmctld"]
    assert deployer.deploy()["changes"]["slurmctld"] == "change"
    assert deployer.status()["healthy"]
    jobs.wait_until_idle()


@pytest.mark.full
def test_what_does_not_start_is_named_and_rolled_back(deployer: Deployer, jobs: Jobs) -> None:
    """A StatefulSet would wait for ever for the pod that does not start."""

    def break_it(document: dict[str, Any]) -> None:
        document["slurm"]["extra"] = [*document["slurm"].get("extra", []), "SelectTypeParameters=CR_Nonsense"]

    with deployer.changed(break_it):
        failed = deployer.sms("deploy", "--timeout", "25s", ok=(4,)).stderr.decode()
        assert "slurmctld is not ready after 25 s: slurmctld-0: slurmctld: " in failed
        assert "slurmctld: fatal: Unable to process configuration file" in failed, failed
        assert deployer.record["phase"] == "applying"
        assert "interrupted" in json.dumps(deployer.status(ok=(4,))["warnings"])
        deployer.sms("deploy", "rollback")
    assert deployer.status()["healthy"]
    assert set(deployer.deploy()["changes"].values()) == {"unchanged"}
    jobs.wait_until_idle()


@pytest.mark.full
def test_a_stop_keeps_the_state(deployer: Deployer, jobs: Jobs) -> None:
    stop_and_start(deployer, jobs)


def test_jobs_complete_though_the_controllers_pod_is_deleted(deployer: Deployer, jobs: Jobs) -> None:
    """E6."""
    running, queued = jobs.submit_two(12)
    began = time.monotonic()
    before = find_ready(deployer, "slurmctld-0")
    delete(deployer, "pod", "slurmctld-0")
    wait_until(lambda: find_ready(deployer, "slurmctld-0") not in ("", before), "another pod is ready", 150, 0.5)
    print(f"ready again {time.monotonic() - began:.1f} s after the deletion")
    for job in (running, queued):
        jobs.wait_for(job, "COMPLETED")


@pytest.mark.full
def test_the_controller_is_not_restarted_for_a_dead_munge(deployer: Deployer, jobs: Jobs) -> None:
    """E7."""
    await_pods(deployer, "slurmctld-0")
    before = count_restarts(deployer, "slurmctld-0")
    worker_of(deployer, "slurmctld-0").run("pkill", "-KILL", "-x", "munged")
    wait_until(
        lambda: count_restarts(deployer, "slurmctld-0")["munge"] == before["munge"] + 1, "munge was restarted", 60, 0.5
    )
    wait_until(lambda: find_ready(deployer, "slurmctld-0"), "the pod is ready again", 90, 0.5)
    assert count_restarts(deployer, "slurmctld-0")["slurmctld"] == before["slurmctld"]
    assert_all_nodes(jobs)


@pytest.mark.full
def test_a_controller_that_was_killed_assigns_no_job_id_again(deployer: Deployer, jobs: Jobs) -> None:
    """In the same pod nothing is prepared again, but its state is older than the last ids; it has the lease again."""
    pod = wait_until(lambda: find_ready(deployer, "slurmctld-0"), "the pod is ready", 60, 0.5)
    submit = ("sbatch", "--parsable", "-H", "-D", "/home/alice", "--wrap", "true")
    # slurmctld saves the end of a job within 5 s: killed before, it would take the last test's job for a running one.
    time.sleep(6)
    last, before, worker = int(jobs.run(*submit)), read_lease(deployer), worker_of(deployer, "slurmctld-0")
    assert before.holder == f"slurmctld-0 {pod} on {worker.name}"
    restarts = count_restarts(deployer, "slurmctld-0")["slurmctld"]
    worker.run("pkill", "-KILL", "-x", "slurmctld")
    wait_until(
        lambda: count_restarts(deployer, "slurmctld-0")["slurmctld"] > restarts, "it was started again", 120, 0.5
    )
    wait_until(lambda: find_ready(deployer, "slurmctld-0"), "the pod is ready again", 90, 0.5)
    after = read_lease(deployer)
    assert (after.generation, after.holder) == (before.generation + 1, before.holder), "the same pod"
    first = int(wait_until(lambda: jobs.node.run(*submit, ok=None).text, "a job is submitted", 60))
    assert first >= last + 1000
    jobs.node.run("scancel", str(last), str(first))
    jobs.wait_until_idle()


@pytest.fixture(scope="module")
def grown(deployer: Deployer, jobs: Jobs) -> Jobs:
    """The same, after all services were deployed."""
    grow(deployer, jobs)
    return jobs


@pytest.mark.full
def test_a_job_is_accounted(grown: Jobs) -> None:
    """E5."""
    assert_accounted(grown)


@pytest.mark.full
def test_a_user_of_the_directory_logs_in(grown: Jobs, entries: Entries) -> None:
    """With the known host key, by the own key and by the password, which only the directory have; no other user."""
    log_in(entries, LOGIN)
    assert entries.ssh(*LOGIN, "id", "-un", password=PASSWORD) == USER
    assert "Permission denied" in entries.ssh(*LOGIN, "id", "-un", password="wrong")
    assert "node1" in entries.ssh(*LOGIN, "sinfo", "-N")


@pytest.mark.full
def test_a_user_of_accounts_logs_in_with_an_authorized_key(deployer: Deployer, grown: Jobs, entries: Entries) -> None:
    """Who is in the site's passwd only; the home in the volume has the key. root does not log in with the same."""
    refused = entries.ssh(*LOGIN, "id", "-un", user="alice")
    assert "Permission denied" in refused, "there is no key yet"
    public = (entries.keys / "alice.pub").read_bytes()
    script = (
        "umask 077 && install -d -o alice -g alice -m 0700 /home/alice /home/alice/.ssh && "
        "cat >/home/alice/.ssh/authorized_keys && chown alice:alice /home/alice/.ssh/authorized_keys"
    )
    inside = ("exec", "-i", "login-0", "-c", "login", "--", "sh", "-c", script)
    deployer.host.run("kubectl", "-n", SPACE, *inside, input=public)
    assert entries.ssh(*LOGIN, "id", "-un", user="alice") == "alice"
    assert entries.ssh(*LOGIN, "pwd", user="alice") == "/home/alice"
    job = entries.ssh(*LOGIN, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "true", user="alice")
    grown.wait_until_accounted(job)


@pytest.mark.full
def test_tokens_are_needed(grown: Jobs, entries: Entries) -> None:
    need_tokens(entries, f"http://{ADDRESS}:30820", LOGIN)


@pytest.mark.full
def test_a_dead_database_recovers_alone(deployer: Deployer, grown: Jobs) -> None:
    """E7: what ends meanwhile is accounted afterwards; neither slurmdbd nor the controller is restarted for it."""
    await_pods(deployer, *PODS)
    controller, accounting = (count_restarts(deployer, pod) for pod in ("slurmctld-0", "slurmdbd-0"))
    worker_of(deployer, "slurmdbd-0").run("pkill", "-KILL", "-x", "mariadbd")
    job = grown.run("sbatch", "--parsable", "-D", "/tmp", "--wrap", "true")
    wait_until(
        lambda: count_restarts(deployer, "slurmdbd-0")["mariadb"] == accounting["mariadb"] + 1, "it restarts", 60, 0.5
    )
    await_pods(deployer, *PODS)
    grown.wait_until_accounted(job)
    assert count_restarts(deployer, "slurmctld-0") == controller
    assert count_restarts(deployer, "slurmdbd-0")["slurmdbd"] == accounting["slurmdbd"]


@pytest.mark.full
def test_all_pods_at_once(deployer: Deployer, grown: Jobs, entries: Entries) -> None:
    """E7: they come back in their own order; jobs run on, and the host key is the same."""
    job = grown.submit(20)
    before = {pod: find_ready(deployer, pod) for pod in PODS}
    delete(deployer, "pods", "--all")
    for pod in PODS:
        wait_until(lambda: find_ready(deployer, pod) not in ("", before[pod]), f"{pod} is another", 240, 0.5)  # noqa: B023
    grown.wait_until_accounted(job)
    assert entries.ssh(*LOGIN, "id", "-un") == USER


@pytest.mark.full
def test_a_restarted_kubelet_restarts_no_service(deployer: Deployer, grown: Jobs) -> None:
    """E7."""
    await_pods(deployer, *PODS)
    before = {pod: (find_ready(deployer, pod), count_restarts(deployer, pod)) for pod in PODS}
    workers = {name: deployer.lab.host(name) for name in WORKERS}
    query = ("supervisorctl", "-c", "/lab/supervisord.conf", "pid", "kubelet")
    killed = {name: host.run(*query).text for name, host in workers.items()}
    for name, host in workers.items():
        host.run("kill", "-KILL", killed[name])
    assert grown.run("srun", "hostname") in NODES
    for name, host in workers.items():
        wait_until(lambda: host.run(*query, ok=None).text not in ("0", killed[name]), "another kubelet runs", 60)  # noqa: B023
    # It kills what it would have had to restart, at its first comparison.
    time.sleep(20)
    await_pods(deployer, *PODS)
    assert {pod: (find_ready(deployer, pod), count_restarts(deployer, pod)) for pod in PODS} == before
