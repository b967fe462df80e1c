"""A lab with engines: its hosts and their end."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.lab import Extras, Lab
from appliance.lab.engines.members import cgroup
from appliance.operations.lab.lab import lab_down, lab_power, lab_status, lab_up
from appliance.progress import Silent
from tests.real.engines.conftest import need_engines
from tests.real.labs import assert_gone, remove_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-engines"
POD = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: holder}
spec:
  containers:
  - {name: c, image: "localhost/pause:sms", imagePullPolicy: Never, volumeMounts: [{name: v, mountPath: /v}]}
  volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab of one compute node with both engines; all of it is gone afterwards."""
    need_engines("nomad", "kubectl", "kubelet", "kube-proxy", "kube-apiserver")
    remove_lab(NAME)
    lab_up(NAME, 1, Silent(), Extras(engines=("nomad", "kubernetes")))
    lab = Lab.open(NAME)
    try:
        yield lab
    finally:
        names = {cgroup(lab.layout, host) for host in lab.layout.hosts_of("worker")}
        lab_down(NAME, False, Silent())
        assert_gone(NAME)
        assert not lab.layout.engines_disk.exists()
        assert not [path for name in names for path in Path("/sys/fs/cgroup").glob(f"**/{name}")]
        remove_lab(NAME)


def test_every_host_is_ready_and_a_second_up_changes_nothing(lab: Lab) -> None:
    assert {state.name: state.failing for state in lab_status(NAME) if state.failing} == {}
    assert lab_up(NAME, 1, Silent(), Extras(engines=("kubernetes", "nomad"))) is False


def test_admin_hosts_reach_both(lab: Lab) -> None:
    for name in ("admin", "host-a", "host-b"):
        host = lab.host(name)
        clients = json.loads(host.run("nomad", "node", "status", "-json").stdout)
        assert {(each["Name"], each["NodePool"], each["Status"]) for each in clients} == {
            ("host-a", "default", "ready"),
            ("node1", "compute", "ready"),
        }
        assert host.run("kubectl", "get", "nodes", "-o", "name").text.split() == ["node/worker1", "node/worker2"]
        assert host.run("ssh", "-o", "BatchMode=yes", "worker1", "hostname").text == "worker1"


@pytest.mark.full
def test_a_pod_gets_a_volume_and_is_there_again_when_its_host_was_off(lab: Lab) -> None:
    admin = lab.host("admin")
    admin.run("kubectl", "apply", "-f", "-", input=POD.encode())
    query = ("kubectl", "get", "pod", "holder", "-o", "jsonpath={.status.phase} {.spec.nodeName} {.status.podIP}")
    phase, node, address = wait_until(
        lambda: found if (found := admin.run(*query).text.split())[:1] == ["Running"] else [], "the pod runs", 60
    )
    assert phase == "Running" and list((lab.layout.engines_disk / "volumes").glob("default-data-*"))
    # Pods of the other cluster node reach it.
    (other,) = {"worker1", "worker2"} - {node}
    lab.host(other).run("ping", "-c1", "-W2", address)
    lab_power(NAME, node, "off", Silent())
    lab_power(NAME, node, "on", Silent())
    restarts = ("kubectl", "get", "pod", "holder", "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
    wait_until(lambda: admin.run(*restarts).text == "1", "its container was started again", 90)


@pytest.mark.full
@pytest.mark.parametrize("after_s", [1.0, 6.0])
def test_a_killed_up_leaves_nothing_after_down(after_s: float) -> None:
    name = "t-killed"
    argv = [str(Path(__file__).parents[3] / ".venv/bin/sms"), "lab", "up", "--name", name, "--nodes", "1"]
    process = subprocess.Popen([*argv, "--engine", "kubernetes"], stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    process.kill()
    process.wait()
    lab_down(name, False, Silent())
    assert_gone(name)
    assert not list(Path("/sys/fs/cgroup").glob(f"**/sms-lab-*{name}-worker*"))
    remove_lab(name)
