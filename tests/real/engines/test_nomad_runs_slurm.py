"""The exported jobs on Nomad, in a lab: the controller on an admin host, munge and slurmd on its compute nodes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import LabRunner
from appliance.lab.engines.nomad import NomadCluster
from appliance.operations.context import open_cluster
from appliance.operations.engines.export import export
from appliance.operations.image.build import Built
from appliance.progress import Silent
from tests.copies import give
from tests.real.engines.conftest import need_engines
from tests.real.labs import build_image, fresh_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

STATE = "/var/lib/sms/nomad/lab"
NODES = ("node1", "node2")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose nodes run neither munge nor slurmd."""
    need_engines("nomad")
    with fresh_lab("t-nomad", len(NODES)) as lab:
        for name in NODES:
            lab.host(name).run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "munged", "slurmd")
        yield lab


@pytest.fixture(scope="module")
def built(lab: Lab) -> Built:
    """Its image."""
    return build_image(lab)


@pytest.fixture(scope="module")
def cluster(lab: Lab, built: Built) -> Iterator[NomadCluster]:
    """A server on host-b; clients on host-a, which has the image and the folder of the state, and on the nodes."""
    host = lab.host("host-a")
    host.run("mkdir", "-p", "-m", "0700", "/var/lib/sms/images", STATE)
    give(host, built.image, f"/var/lib/sms/images/{built.key}.sif")
    host.run("ln", "-sfn", f"{built.key}.sif", "/var/lib/sms/images/lab.sif")
    runners = {name: LabRunner(lab, name) for name in ("host-a", "host-b", *NODES)}
    settings: dict[str, dict[str, Any]] = {name: {"node_pool": "compute"} for name in NODES}
    settings["host-a"] = {"host_volume": {"sms-lab": {"path": STATE, "read_only": False}}}
    clients = [runners["host-a"], *(runners[name] for name in NODES)]
    try:
        yield NomadCluster([runners["host-b"]], clients, settings)
    finally:
        for runner in runners.values():
            runner.remove()


@pytest.fixture(scope="module")
def jobs(lab: Lab, cluster: NomadCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The exported jobs of document 000 by name, which run."""
    path = lab.etc / "engines.yaml"
    document = yaml.safe_load((lab.etc / "sms.yaml").read_text())
    document["engines"] = {"nomad": {"address": "10.77.0.11"}}
    path.write_text(yaml.safe_dump(document))
    folder = tmp_path_factory.mktemp("export") / "jobs"
    export(open_cluster(path, None, Silent()), "nomad", folder)
    key = base64.b64encode((lab.etc / "keys/munge.key").read_bytes()).decode()
    items = json.dumps({"Items": {"munge_key": key}}).encode()
    cluster.nomad("var", "put", "-in", "json", "nomad/jobs/slurm-ctl", "-", input=items)
    jobs = {name: (folder / f"{name}.nomad.hcl").read_bytes() for name in ("munge", "slurm-ctl", "slurm-cn")}
    for name, text in jobs.items():
        # 1: it would create allocations.
        assert plan(cluster, text) == 1
        cluster.submit(text.decode())
        count = 1 if name == "slurm-ctl" else len(NODES)
        wait_until(lambda: len(cluster.running(name)) == count, f"{name} runs", 120)  # noqa: B023
    return jobs


def plan(cluster: NomadCluster, job: bytes) -> int:
    """The status of `nomad job plan`."""
    return cluster.nomad("job", "plan", "-", ok=None, input=job).status


@pytest.fixture(scope="module")
def node(lab: Lab, jobs: dict[str, bytes]) -> Netns:
    """A compute node; all are idle."""
    node = lab.host(NODES[0])
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: node.run(*idle, ok=None).text == str(len(NODES)), "the nodes are idle", 120, 0.5)
    return node


def as_alice(node: Netns, *argv: str) -> str:
    """What a command of a user prints."""
    return node.run("runuser", "-u", "alice", "--", *argv, timeout=120).text


def test_a_job_completes(node: Netns) -> None:
    assert sorted(as_alice(node, "srun", "-N2", "hostname").split()) == sorted(NODES)


def test_a_second_deployment_changes_nothing(cluster: NomadCluster, node: Netns, jobs: dict[str, bytes]) -> None:
    assert {name: plan(cluster, text) for name, text in jobs.items()} == dict.fromkeys(jobs, 0)


def test_jobs_complete_though_the_controller_is_restarted(cluster: NomadCluster, node: Netns) -> None:
    submit = ("sbatch", "--parsable", "-N2", "--exclusive", "-D", "/home/alice", "--wrap", "sleep 12; hostname")
    running, queued = as_alice(node, *submit), as_alice(node, *submit)

    def state(job: str) -> str:
        return node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text

    wait_until(lambda: state(running) == "RUNNING", "the first runs", 30)
    (before,) = cluster.running("slurm-ctl")
    cluster.nomad("alloc", "stop", "-detach", before["ID"])
    wait_until(
        lambda: [each["ID"] for each in cluster.running("slurm-ctl")] not in ([], [before["ID"]]), "another one", 150
    )
    for job in (running, queued):
        wait_until(lambda: state(job) == "COMPLETED", f"job {job} completes", 120, 0.5)  # noqa: B023


def test_slurmd_does_not_start_as_document_000_has_it(node: Netns) -> None:
    """X8: with -Z, where slurm.conf names the node."""
    dynamic = ("slurmd", "-D", "-Z", "--conf-server", "10.77.0.11:6817", "--conf", "Feature=compute")
    assert b"Duplicated NodeName" in node.run(*dynamic, ok=(1,), timeout=60).stderr
