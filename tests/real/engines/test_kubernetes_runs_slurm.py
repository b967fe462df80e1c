"""The exported objects on Kubernetes: all services of Slurm in pods, slurmd native on the nodes of a lab."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import DISK
from appliance.lab.engines.kubernetes import Kubernetes
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.operations.image.build import Built
from appliance.progress import Silent
from appliance.shared.state_lease import StateLease, parse_state_lease
from tests.real.engines.entries import PASSWORD, UID, USER, Entries
from tests.real.labs import build_image, fresh_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

ADDRESS = "10.77.0.31"
"""Of the cluster node, in the lab's provisioning network."""
SPACE = "lab"
NODES = ("node1", "node2")
SELECTOR = "app.kubernetes.io/name=slurmctld"
PODS = ("slurmctld-0", "slurmdbd-0", "slurmrestd-0", "login-0")
LOGIN = (ADDRESS, 32222)
FILES = {
    "munge-key": ("munge.key", "munge_key"),
    "jwt-key": ("jwt_hs256.key", "jwt_key"),
    "sssd-conf": ("sssd.conf", "sssd_conf"),
    "ssh-host-key": ("ssh_host_ed25519_key", "ssh_host_key"),
}
"""Secrets: the key in each, and the file's name in the site file."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab; its own services container does not run."""
    with fresh_lab("t-kube", len(NODES)) as lab:
        yield lab


@pytest.fixture(scope="module")
def entries(kubernetes: Kubernetes, lab: Lab) -> Entries:
    """Its site file for the engine, and users."""
    kubernetes.own.join(lab, ADDRESS)
    return Entries(lab, {"kubernetes": {"address": ADDRESS}}, kubernetes.own, ADDRESS)


@pytest.fixture(scope="module")
def built(lab: Lab, entries: Entries) -> Built:
    """Its image."""
    return build_image(lab, "engines")


@pytest.fixture(scope="module")
def objects(
    kubernetes: Kubernetes, entries: Entries, built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder of the exported objects, which are applied."""
    cluster = entries.open()
    kubernetes.load_image(Path(make_oci(cluster, Path(built.image), DISK / "t-kube.oci", Silent()).path))
    folder = tmp_path_factory.mktemp("export") / "k8s"
    export(cluster, "kubernetes", folder)
    kubernetes.kubectl("apply", "-f", str(folder / "site/namespace.yaml"))
    for secret, (key, name) in FILES.items():
        source = f"--from-file={key}={entries.secrets[name]}"
        kubernetes.kubectl("-n", SPACE, "create", "secret", "generic", secret, source)
    kubernetes.kubectl("apply", "-k", str(folder / "site"))
    sets = kubernetes.get("-n", SPACE, "statefulsets")["items"]
    count = sum("volumeClaimTemplates" in each["spec"] for each in sets)
    wait_until(lambda: len(kubernetes.get("-n", SPACE, "pvc")["items"]) == count, "all claims are there", 60, 0.5)
    kubernetes.provide_volumes(SPACE)
    yield folder
    kubernetes.kubectl("delete", "namespace", SPACE, "--wait=false", ok=None)


def find_ready(kubernetes: Kubernetes, pod: str) -> str:
    """The identity of a pod whose containers are all ready; else empty."""
    found = kubernetes.get("-n", SPACE, "pod", pod, "--ignore-not-found")
    conditions = found.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return str(found["metadata"]["uid"]) if ready else ""


@pytest.fixture(scope="module")
def node(kubernetes: Kubernetes, lab: Lab, objects: Path, entries: Entries) -> Netns:
    """A compute node; slurmd of each has the controller in the pod. Every pod is ready."""
    await_pods(kubernetes)
    entries.add_user(*map(lab.host, NODES))
    for name in NODES:
        host = lab.host(name)
        host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd")
        host.run("sh", "-c", f"slurmd --conf-server {ADDRESS}:30817", timeout=60)
    first = lab.host(NODES[0])
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: first.run(*idle, ok=None).text == str(len(NODES)), "the nodes are idle", 120, 0.5)
    return first


def await_pods(kubernetes: Kubernetes) -> None:
    """Return once all are ready."""
    for pod in PODS:
        wait_until(lambda: find_ready(kubernetes, pod), f"{pod} is ready", 240, 0.5)  # noqa: B023


def as_alice(node: Netns, *argv: str) -> str:
    """What a command of a user prints."""
    return node.run("runuser", "-u", "alice", "--", *argv, timeout=120).text


def test_a_job_completes_and_is_accounted(node: Netns) -> None:
    assert sorted(as_alice(node, "srun", "-N2", "hostname").split()) == sorted(NODES)
    listed = ("sacct", "-n", "-X", "-P", "-o", "State,User,AllocNodes", "-S", "now-1hour")
    wait_until(lambda: "COMPLETED|alice|2" in as_alice(node, *listed).split("\n"), "sacct shows it", 30)


def test_a_user_of_the_directory_logs_in(node: Netns, entries: Entries) -> None:
    """With the known host key, by the own key and by the password, which only the directory have; no other user."""
    assert entries.ssh(*LOGIN, "id") == f"uid={UID}({USER}) gid={UID}({USER}) groups={UID}({USER})"
    assert entries.ssh(*LOGIN, "id", "-un", password=PASSWORD) == USER
    assert "Permission denied" in entries.ssh(*LOGIN, "id", "-un", password="wrong")
    assert "node1" in entries.ssh(*LOGIN, "sinfo", "-N")
    job = entries.ssh(*LOGIN, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "'id -un'")
    assert job.isdecimal()
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,User")
    wait_until(lambda: entries.ssh(*LOGIN, *listed) == f"COMPLETED|{USER}", "the job completes", 60)


def test_a_user_of_accounts_logs_in_with_an_authorized_key(
    kubernetes: Kubernetes, node: Netns, entries: Entries
) -> None:
    """Who is in the site's passwd only; the home in the volume has the key. root does not log in with the same."""
    refused = entries.ssh(*LOGIN, "id", "-un", user="alice")
    assert "Permission denied" in refused, "there is no key yet"
    public = (entries.keys / "alice.pub").read_bytes()
    script = (
        "umask 077 && install -d -o alice -g alice -m 0700 /home/alice /home/alice/.ssh && "
        "cat >/home/alice/.ssh/authorized_keys && chown alice:alice /home/alice/.ssh/authorized_keys"
    )
    inside = ("-n", SPACE, "exec", "-i", "login-0", "-c", "login", "--", "sh", "-c", script)
    kubernetes.kubectl(*inside, input=public)
    assert entries.ssh(*LOGIN, "id", "-un", user="alice") == "alice"
    assert entries.ssh(*LOGIN, "pwd", user="alice") == "/home/alice"
    job = entries.ssh(*LOGIN, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "true", user="alice")
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,User")
    wait_until(lambda: entries.ssh(*LOGIN, *listed, user="alice") == "COMPLETED|alice", "the job completes", 60)


def test_tokens_are_needed(node: Netns, entries: Entries) -> None:
    url = f"http://{ADDRESS}:30820/slurm/v0.0.38/nodes"
    assert " 200 " not in f" {entries.request(url)} " and "401" in entries.request(url)
    token = entries.ssh(*LOGIN, "scontrol", "token").removeprefix("SLURM_JWT=")
    answer = entries.request(url, token)
    assert answer.endswith("200 application/json") and '"node1"' in answer
    assert "200 application" not in entries.request(url, token[:-5] + "AAAAA")


def test_a_second_deployment_changes_nothing(kubernetes: Kubernetes, node: Netns, objects: Path) -> None:
    differences = kubernetes.kubectl("diff", "-k", str(objects / "site"), ok=None)
    assert (differences.status, differences.text) == (0, "")


def test_jobs_complete_though_the_controllers_pod_is_deleted(kubernetes: Kubernetes, node: Netns) -> None:
    submit = ("sbatch", "--parsable", "-N2", "--exclusive", "-D", "/home/alice", "--wrap", "sleep 12; hostname")
    running, queued = as_alice(node, *submit), as_alice(node, *submit)

    def state(job: str) -> str:
        return node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text

    wait_until(lambda: state(running) == "RUNNING", "the first runs", 30)
    began = time.monotonic()
    before = find_ready(kubernetes, "slurmctld-0")
    kubernetes.kubectl("-n", SPACE, "delete", "pod", "slurmctld-0", "--wait=false")
    wait_until(lambda: find_ready(kubernetes, "slurmctld-0") not in ("", before), "another pod is ready", 150, 0.5)
    print(f"ready again {time.monotonic() - began:.1f} s after the deletion")
    for job in (running, queued):
        wait_until(lambda: state(job) == "COMPLETED", f"job {job} completes", 120, 0.5)  # noqa: B023


def count_restarts(kubernetes: Kubernetes, pod: str) -> dict[str, int]:
    """The restarts of each container of a pod."""
    status = kubernetes.get("-n", SPACE, "pod", pod)["status"]
    containers = (*status["initContainerStatuses"], *status["containerStatuses"])
    return {each["name"]: each["restartCount"] for each in containers}


def test_the_controller_is_not_restarted_for_a_dead_munge(kubernetes: Kubernetes, node: Netns) -> None:
    def restarts() -> dict[str, int]:
        return count_restarts(kubernetes, "slurmctld-0")

    wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready", 60, 0.5)
    before = restarts()
    # `kubectl exec` would need a program that its user may run: from the cluster node, all are in sight.
    kubernetes.own.run("pkill", "-KILL", "-x", "munged")
    wait_until(lambda: restarts()["munge"] == before["munge"] + 1, "munge was restarted", 60, 0.5)
    wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready again", 90, 0.5)
    assert restarts()["slurmctld"] == before["slurmctld"]
    assert sorted(as_alice(node, "srun", "-N2", "hostname").split()) == sorted(NODES)


def read_lease(kubernetes: Kubernetes) -> StateLease:
    """The lease of the controller's state, as a program of the image prints it."""
    words = ("-c", "slurmctld", "--", "/opt/sms/bin/sms-lease", "/var/spool/slurmctld")
    return parse_state_lease(kubernetes.kubectl("-n", SPACE, "exec", "slurmctld-0", *words).stdout)


def test_a_controller_that_was_killed_assigns_no_job_id_again(kubernetes: Kubernetes, node: Netns) -> None:
    """In the same pod nothing is prepared again, but its state is older than the last ids; it has the lease again."""
    pod = wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready", 60, 0.5)
    submit = ("sbatch", "--parsable", "-H", "-D", "/home/alice", "--wrap", "true")
    last, before = int(as_alice(node, *submit)), read_lease(kubernetes)
    (name,) = (each["spec"]["nodeName"] for each in kubernetes.get("-n", SPACE, "pods", "-l", SELECTOR)["items"])
    assert before.holder == f"slurmctld-0 {pod} on {name}"
    kubernetes.own.run("pkill", "-KILL", "-x", "slurmctld")

    def restarted() -> bool:
        statuses = kubernetes.get("-n", SPACE, "pod", "slurmctld-0")["status"]["containerStatuses"]
        return any(each["restartCount"] and each["started"] for each in statuses)

    wait_until(restarted, "it was started again", 120, 0.5)
    wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready again", 90, 0.5)
    after = read_lease(kubernetes)
    assert (after.generation, after.holder) == (before.generation + 1, before.holder), "the same pod"
    first = int(wait_until(lambda: node.run(*submit, ok=None).text, "a job is submitted", 60))
    assert first >= last + 1000
    node.run("scancel", str(last), str(first))


@pytest.mark.full
def test_a_dead_database_recovers_alone(kubernetes: Kubernetes, node: Netns) -> None:
    """What ends meanwhile is accounted afterwards; neither slurmdbd nor the controller is restarted for it."""
    await_pods(kubernetes)
    controller, accounting = (count_restarts(kubernetes, pod) for pod in ("slurmctld-0", "slurmdbd-0"))
    kubernetes.own.run("pkill", "-KILL", "-x", "mariadbd")
    job = as_alice(node, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "true")
    wait_until(
        lambda: count_restarts(kubernetes, "slurmdbd-0")["mariadb"] == accounting["mariadb"] + 1, "it restarts", 60, 0.5
    )
    await_pods(kubernetes)
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")
    wait_until(lambda: node.run(*listed, ok=None).text == "COMPLETED", "the job is accounted", 120)
    assert count_restarts(kubernetes, "slurmctld-0") == controller
    assert count_restarts(kubernetes, "slurmdbd-0")["slurmdbd"] == accounting["slurmdbd"]


@pytest.mark.full
def test_all_pods_at_once(kubernetes: Kubernetes, node: Netns, entries: Entries) -> None:
    """They come back in their own order; jobs run on, and the host key is the same."""
    job = as_alice(node, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "sleep 20")
    before = {pod: find_ready(kubernetes, pod) for pod in PODS}
    kubernetes.kubectl("-n", SPACE, "delete", "pods", "--all", "--wait=false")
    for pod in PODS:
        wait_until(lambda: find_ready(kubernetes, pod) not in ("", before[pod]), f"{pod} is another", 240, 0.5)  # noqa: B023
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State")
    wait_until(lambda: node.run(*listed, ok=None).text == "COMPLETED", "the job completes", 120)
    assert entries.ssh(*LOGIN, "id", "-un") == USER


@pytest.mark.full
def test_a_restarted_kubelet_restarts_no_service(kubernetes: Kubernetes, node: Netns) -> None:
    await_pods(kubernetes)
    before = {pod: (find_ready(kubernetes, pod), count_restarts(kubernetes, pod)) for pod in PODS}
    own = kubernetes.own
    (kubelet,) = (each for each in own.daemons if each.log.name == "kubelet.log")
    argv = [str(word) for word in kubelet.process.args][len(own.host.prefix) :]  # type: ignore[union-attr]
    os.kill(kubelet.pid, signal.SIGKILL)
    kubelet.process.wait(60)
    own.daemons.remove(kubelet)
    assert as_alice(node, "srun", "hostname") in NODES
    own.start("kubelet", *argv)
    # It kills what it would have had to restart, at its first comparison.
    wait_until(kubernetes.nodes_are_ready, "the node is ready", 120, 0.5)
    time.sleep(20)
    await_pods(kubernetes)
    assert {pod: (find_ready(kubernetes, pod), count_restarts(kubernetes, pod)) for pod in PODS} == before
