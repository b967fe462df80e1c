"""The exported objects on Kubernetes: the controller in a pod, slurmd native on the nodes of a lab."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import DISK
from appliance.lab.engines.kubernetes import Kubernetes
from appliance.operations.context import open_cluster
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.operations.image.build import Built
from appliance.progress import Silent
from appliance.shared.state_lease import StateLease, parse_state_lease
from tests.real.labs import build_image, fresh_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

ADDRESS = "10.77.0.31"
"""Of the cluster node, in the lab's provisioning network."""
SPACE = "lab"
NODES = ("node1", "node2")
SELECTOR = "app.kubernetes.io/name=slurmctld"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab; its own services container does not run."""
    with fresh_lab("t-kube", len(NODES)) as lab:
        yield lab


@pytest.fixture(scope="module")
def built(lab: Lab) -> Built:
    """Its image."""
    return build_image(lab)


@pytest.fixture(scope="module")
def objects(kubernetes: Kubernetes, lab: Lab, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the exported objects, which are applied; every pod is ready."""
    kubernetes.host.join(lab, ADDRESS)
    path = lab.etc / "engines.yaml"
    document = yaml.safe_load((lab.etc / "sms.yaml").read_text())
    document["engines"] = {"kubernetes": {"address": ADDRESS}}
    path.write_text(yaml.safe_dump(document))
    cluster = open_cluster(path, None, Silent())
    kubernetes.load_image(Path(make_oci(cluster, Path(built.image), DISK / "t-kube.oci", Silent()).path))
    folder = tmp_path_factory.mktemp("export") / "k8s"
    export(cluster, "kubernetes", folder)
    kubernetes.kubectl("apply", "-f", str(folder / "site/namespace.yaml"))
    key = f"--from-file=munge.key={lab.etc}/keys/munge.key"
    kubernetes.kubectl("-n", SPACE, "create", "secret", "generic", "munge-key", key)
    kubernetes.kubectl("apply", "-k", str(folder / "site"))
    count = len(kubernetes.get("-n", SPACE, "statefulsets")["items"])
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
def node(kubernetes: Kubernetes, lab: Lab, objects: Path) -> Netns:
    """A compute node; slurmd of each has the controller in the pod."""
    wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready", 180, 0.5)
    for name in NODES:
        host = lab.host(name)
        host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd")
        host.run("sh", "-c", f"slurmd --conf-server {ADDRESS}:30817", timeout=60)
    first = lab.host(NODES[0])
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: first.run(*idle, ok=None).text == str(len(NODES)), "the nodes are idle", 120, 0.5)
    return first


def as_alice(node: Netns, *argv: str) -> str:
    """What a command of a user prints."""
    return node.run("runuser", "-u", "alice", "--", *argv, timeout=120).text


def test_a_job_completes(node: Netns) -> None:
    assert sorted(as_alice(node, "srun", "-N2", "hostname").split()) == sorted(NODES)


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


def test_the_controller_is_not_restarted_for_a_dead_munge(kubernetes: Kubernetes, node: Netns) -> None:
    def restarts() -> dict[str, int]:
        status = kubernetes.get("-n", SPACE, "pod", "slurmctld-0")["status"]
        containers = (*status["initContainerStatuses"], *status["containerStatuses"])
        return {each["name"]: each["restartCount"] for each in containers}

    wait_until(lambda: find_ready(kubernetes, "slurmctld-0"), "the pod is ready", 60, 0.5)
    before = restarts()
    # `kubectl exec` would need a program that its user may run: from the cluster node, all are in sight.
    kubernetes.host.run("pkill", "-KILL", "-x", "munged")
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
    kubernetes.host.run("pkill", "-KILL", "-x", "slurmctld")

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
