"""`sms deploy` on Kubernetes: the controller in a pod, slurmd native on the nodes of a lab."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.lab import Lab
from appliance.operations.context import open_cluster
from appliance.operations.engines.distribute import load_image
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.operations.image.build import Built
from appliance.operations.lab.lab import lab_up
from appliance.progress import Silent
from tests.real.engines.conftest import need_engines
from tests.real.engines.deploying import Deployer, Jobs, change_with_a_job, give_image, stop_and_start
from tests.real.labs import build_image, remove_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME, SPACE = "t-deploy-kube", "lab"
NODES = ("node1", "node2")
WORKERS = ("worker1", "worker2")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a Kubernetes cluster of two nodes; its own services container does not run."""
    need_engines("kubectl", "kubelet", "kube-proxy", "kube-apiserver", "etcd")
    remove_lab(NAME)
    lab_up(NAME, len(NODES), Silent(), engines=("kubernetes",))
    try:
        yield Lab.open(NAME)
    finally:
        remove_lab(NAME)


@pytest.fixture(scope="module")
def built(lab: Lab) -> Built:
    """Its image, which host-a has."""
    built = build_image(lab)
    give_image(lab, built)
    return built


@pytest.fixture(scope="module")
def deployer(lab: Lab, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Deployer:
    """`sms deploy`, which was refused without an image, and killed once."""
    made = Deployer(lab, "kubernetes", {})
    plan = made.deploy("--dry-run", ok=(3,))
    assert {each["change"] for each in plan["differences"]} == {"create"}
    assert "no node has the image" in plan["refusal"]
    assert not made.record
    assert "no node has the image" in made.sms("deploy", "--engine", "kubernetes", ok=(3,)).stderr.decode()
    assert not made.record
    cluster = open_cluster(lab.etc / "engines.yaml", None, Silent())
    folder = Path(make_oci(cluster, Path(built.image), tmp_path_factory.mktemp("oci") / "lab.oci", Silent()).path)
    for name in WORKERS:
        assert load_image(folder, lab.host(name), Silent()) == ["ctr", "podman"]
    done = made.deploy_after_a_kill()
    assert made.record["phase"] == "deployed"
    print(f"ready: {done['waited']}")
    return made


@pytest.fixture(scope="module")
def jobs(lab: Lab, deployer: Deployer) -> Jobs:
    """Jobs of a user; slurmd of each node has the controller in the pod."""
    settings = deployer.document["engines"]["kubernetes"]
    server = f"{settings['address']}:{6817 if settings.get('service') == 'LoadBalancer' else 30817}"
    for name in NODES:
        host = lab.host(name)
        host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd")
        host.run("sh", "-c", f"slurmd --conf-server {server}", timeout=60)
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


def test_a_job_completes(jobs: Jobs) -> None:
    assert sorted(jobs.run("srun", "-N2", "hostname").split()) == sorted(NODES)


def test_a_second_deployment_changes_nothing(deployer: Deployer, jobs: Jobs, tmp_path: Path) -> None:
    before = find_ready(deployer, "slurmctld-0")
    assert set(deployer.deploy()["changes"].values()) == {"unchanged"}
    assert find_ready(deployer, "slurmctld-0") == before != ""
    # What was deployed is what an export has.
    folder = deployer.lab.etc / "k8s"
    export(open_cluster(deployer.lab.etc / "engines.yaml", None, Silent()), "kubernetes", folder)
    differences = deployer.host.run(
        "kubectl", "diff", "--server-side", "--field-manager=sms", "-k", "/etc/sms/k8s/site"
    )
    assert differences.text == ""


def test_status(deployer: Deployer, jobs: Jobs) -> None:
    found = deployer.status()
    assert found["healthy"] and not found["drift"] and not found["pending"]
    (controller,) = (each for each in found["workloads"] if each["name"] == "slurmctld")
    parts = {part["name"]: part for part in controller["instances"][0]["parts"]}
    assert parts["slurmctld"]["ready"] and "UP" in parts["slurmctld"]["detail"], parts
    assert "Bound" in controller["volume"] and "sha256:" in controller["instances"][0]["image"]
    assert deployer.sms("status").text.startswith("lab on kubernetes: healthy")


def test_a_change_beside_sms_is_reported_and_undone(deployer: Deployer, jobs: Jobs) -> None:
    deployer.host.run("kubectl", "-n", SPACE, "scale", "statefulset", "slurmctld", "--replicas=0")
    wait_until(lambda: not get(deployer, "pod", "slurmctld-0"), "its pod is gone", 120, 0.5)
    found = deployer.status(ok=(4,))
    assert [each["name"] for each in found["drift"]] == ["slurmctld"]
    assert deployer.deploy()["changes"]["slurmctld"] == "change"
    assert deployer.status()["healthy"]
    jobs.wait_until_idle()


def test_another_configuration_and_back(deployer: Deployer, jobs: Jobs) -> None:
    change_with_a_job(deployer, jobs)


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
def test_nodes_are_drained_in_slurm_first(deployer: Deployer, jobs: Jobs) -> None:
    job = jobs.submit(8, "-w", "node2")
    jobs.wait_for(job, "RUNNING", 60)
    deployer.sms("deploy", "drain", "node2")
    assert (jobs.state(job), jobs.node_states()["node2"]) == ("COMPLETED", "drained")
    deployer.sms("deploy", "drain", "node2", "--undo")
    jobs.wait_until_idle()


@pytest.mark.full
def test_a_cluster_node_is_drained_and_the_controller_moves(deployer: Deployer, jobs: Jobs) -> None:
    """Its volume can follow: jobs run on."""
    job = jobs.submit(20, "-N2", "--exclusive")
    jobs.wait_for(job, "RUNNING", 60)
    before = get(deployer, "pod", "slurmctld-0")["spec"]["nodeName"]
    done = json.loads(deployer.sms("deploy", "drain", before, "--json").stdout)
    assert done["slurm"] == "" and any("slurmctld-0" in line for line in done["engine"])
    wait_until(lambda: find_ready(deployer, "slurmctld-0"), "it is ready elsewhere", 120, 0.5)
    assert get(deployer, "pod", "slurmctld-0")["spec"]["nodeName"] != before
    assert deployer.host.run("kubectl", "get", "node", before).text.count("SchedulingDisabled") == 1
    deployer.sms("deploy", "drain", before, "--undo")
    assert "SchedulingDisabled" not in deployer.host.run("kubectl", "get", "nodes").text
    jobs.wait_for(job, "COMPLETED")


@pytest.mark.full
def test_a_stop_keeps_the_state(deployer: Deployer, jobs: Jobs) -> None:
    stop_and_start(deployer, jobs)
