"""Kubernetes itself, and a pod of the image's slurmctld and munged."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.engines.image import OciFolder
from tests.engines.kubernetes import Kubernetes
from tests.waiting import wait_until

pytestmark = pytest.mark.real

SLURM_CONF = """\
ClusterName=pod
SlurmctldHost=slurmctld-0
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmctldPidFile=/run/slurmctld/slurmctld.pid
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
NodeName=node1 State=UNKNOWN
PartitionName=main Nodes=node1 Default=YES
"""
PREPARE = """\
install -o munge -g munge -m 0400 /secret/munge.key /etc/munge/munge.key
chown munge:munge /etc/munge /run/munge
chown slurm:slurm /run/slurmctld /var/spool/slurmctld
"""


def slurm_objects(image: str, key: bytes) -> list[dict[str, Any]]:
    """A key, a configuration, and a pod of two containers that share munged's socket."""
    folders = ("etc-munge", "run-munge", "run-slurmctld", "spool")
    paths = ("/etc/munge", "/run/munge", "/run/slurmctld", "/var/spool/slurmctld")
    mounts = [{"name": name, "mountPath": path} for name, path in zip(folders, paths, strict=True)]
    mounts.append({"name": "conf", "mountPath": "/etc/slurm"})
    volumes: list[dict[str, Any]] = [{"name": name, "emptyDir": {}} for name in folders]
    volumes += [{"name": "conf", "configMap": {"name": "slurm"}}, {"name": "secret", "secret": {"secretName": "munge"}}]
    usual = {"image": image, "imagePullPolicy": "Never", "volumeMounts": mounts}
    confined = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

    def container(name: str, user: int, command: list[str], probe: list[str]) -> dict[str, Any]:
        ready = {"exec": {"command": ["sh", "-c", *probe]}, "periodSeconds": 2, "timeoutSeconds": 10}
        context = {**confined, "runAsUser": user, "runAsGroup": user}
        return {"name": name, "command": command, "readinessProbe": ready, "securityContext": context, **usual}

    munge = container("munge", 351, ["munged", "--foreground"], ["munge -n | unmunge"])
    slurmctld = container("slurmctld", 64030, ["slurmctld", "-D"], ["scontrol ping | grep -q 'is UP'"])
    prepare = {
        **usual,
        "name": "prepare",
        "command": ["sh", "-ec", PREPARE],
        "volumeMounts": [*mounts, {"name": "secret", "mountPath": "/secret"}],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "slurmctld-0"},
        "spec": {
            "hostname": "slurmctld-0",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "initContainers": [prepare],
            "containers": [munge, slurmctld],
            "volumes": volumes,
        },
    }
    secret = {"munge.key": base64.b64encode(key).decode()}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "munge"}, "data": secret},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "slurm"}, "data": {"slurm.conf": SLURM_CONF}},
        pod,
    ]


def as_list(objects: list[dict[str, Any]]) -> bytes:
    """Objects as `kubectl` reads them."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}).encode()


def test_the_server_checks_objects_and_creates_none(control_plane: Kubernetes) -> None:
    objects = slurm_objects("localhost/sms/lab:x", os.urandom(1024))
    with control_plane.namespace("dry-run") as space:
        assert control_plane.dry_run(as_list(objects), "-n", space).status == 0
        assert control_plane.get("-n", space, "pods")["items"] == []
        objects[2]["spec"]["containers"][0]["image"] = ""
        assert control_plane.dry_run(as_list(objects), "-n", space).status == 1


def test_slurmctld_and_munged_run_in_a_pod_of_the_image(kubernetes: Kubernetes, oci: OciFolder) -> None:
    kubernetes.load_image(Path(oci.path))
    image = oci.name
    with kubernetes.namespace("pod") as space:

        def states() -> dict[str, bool]:
            found = kubernetes.get("-n", space, "pod", "slurmctld-0")["status"].get("containerStatuses", ())
            return {each["name"]: each["ready"] for each in found}

        kubernetes.kubectl("-n", space, "apply", "-f", "-", input=as_list(slurm_objects(image, os.urandom(1024))))
        wait_until(lambda: states() == {"munge": True, "slurmctld": True}, "both are ready", 120, 0.5)
        inside = ("-n", space, "exec", "slurmctld-0", "-c", "slurmctld", "--")
        assert "ClusterName             = pod" in kubernetes.kubectl(*inside, "scontrol", "show", "config").text
        assert "node1" in kubernetes.kubectl(*inside, "sinfo", "-h", "-o", "%N").text
        # The digest that runs is that of the signed SIF's OCI form.
        (status, _) = kubernetes.get("-n", space, "pod", "slurmctld-0")["status"]["containerStatuses"]
        images = kubernetes.host.run("ctr", "-n", "k8s.io", "images", "ls").text
        assert oci.digest in next(line for line in images.splitlines() if line.startswith(image))
        assert status["image"] == image
