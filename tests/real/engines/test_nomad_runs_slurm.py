"""The exported jobs on Nomad, in a lab: the controller on an admin host, munge and slurmd on its compute nodes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.lab import Lab
from appliance.operations.context import open_cluster
from appliance.operations.engines.export import export
from appliance.operations.image.build import Built
from appliance.progress import Silent
from tests.copies import give
from tests.engines.hosts import LabRunner
from tests.engines.nomad import NomadCluster
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


def test_a_job_completes(lab: Lab, cluster: NomadCluster, tmp_path: Path) -> None:
    path = lab.etc / "engines.yaml"
    document = yaml.safe_load((lab.etc / "sms.yaml").read_text())
    document["engines"] = {"nomad": {"address": "10.77.0.11"}}
    path.write_text(yaml.safe_dump(document))
    export(open_cluster(path, None, Silent()), "nomad", tmp_path / "jobs")
    key = base64.b64encode((lab.etc / "keys/munge.key").read_bytes()).decode()
    cluster.nomad(
        "var", "put", "-in", "json", "nomad/jobs/slurm-ctl", "-", input=b'{"Items": {"munge_key": "%s"}}' % key.encode()
    )
    for name in ("munge", "slurm-ctl", "slurm-cn"):
        text = (tmp_path / "jobs" / f"{name}.nomad.hcl").read_text()
        # 1: it would create allocations; 0 would be that there is nothing to do.
        assert cluster.nomad("job", "plan", "-", ok=None, input=text.encode()).status == 1
        cluster.submit(text)
    node = lab.host("node1")
    # X8: document 000 starts it with -Z.
    wait_until(lambda: node.run("munge", "-n", ok=None).status == 0, "munge answers", 60)
    dynamic = ("slurmd", "-D", "-Z", "--conf-server", "10.77.0.11:6817", "--conf", "Feature=compute")
    wait_until(lambda: cluster.running("slurm-ctl"), "the controller runs", 60)
    wait_until(lambda: b"Duplicated NodeName" in node.run(*dynamic, ok=(1,), timeout=60).stderr, "slurmd refuses", 60)
    for name, count in (("munge", 2), ("slurm-ctl", 1), ("slurm-cn", 2)):
        wait_until(lambda: len(cluster.running(name)) == count, f"{name} runs", 120)  # noqa: B023
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: node.run(*idle, ok=None).text == "2", "both nodes are idle", 120, 0.5)
    done = node.run("runuser", "-u", "alice", "--", "srun", "-N2", "hostname", timeout=60)
    assert sorted(done.text.split()) == sorted(NODES)
