"""The engines themselves accept every export (`sms export`), of a usual site and of one with accounting."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from appliance.lab.engines.kubernetes import Kubernetes
from appliance.lab.engines.nomad import NomadCluster
from appliance.lab.engines.programs import find_program
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.engines.export import export
from appliance.progress import Silent
from tests.real.engines.conftest import need_engines

pytestmark = pytest.mark.real


@pytest.fixture(params=["sms", "full"])
def exported_site(site: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """A site, with what only engines need to know of it."""
    assert site.path
    path = site.path.with_name(f"{request.param}.yaml")
    document = yaml.safe_load(path.read_text())
    document["engines"] = {name: {"address": "10.77.0.11"} for name in ("nomad", "kubernetes", "podman")}
    changed = path.with_name(f"{request.param}-engines.yaml")
    changed.write_text(yaml.safe_dump(document))
    return open_cluster(changed, None, Silent())


def test_nomad_accepts_every_job(nomad: NomadCluster, exported_site: Cluster, tmp_path: Path) -> None:
    export(exported_site, "nomad", tmp_path / "jobs")
    nomad.nomad("node", "pool", "apply", "-", input=b'node_pool "compute" {\n}\n')
    jobs = sorted((tmp_path / "jobs").rglob("*.hcl"))
    assert len(jobs) >= 3
    found = {path.name: nomad.validate(path) for path in jobs}
    assert {name: done.stdout + done.stderr for name, done in found.items() if done.status} == {}


def test_the_api_server_accepts_every_object(control_plane: Kubernetes, exported_site: Cluster, tmp_path: Path) -> None:
    export(exported_site, "kubernetes", tmp_path / "k8s")
    # The server checks an object of a namespace only where that is there.
    control_plane.kubectl("apply", "-f", str(tmp_path / "k8s/site/namespace.yaml"))
    dry_run = ("apply", "--dry-run=server", "-k", str(tmp_path / "k8s/site"))
    done = control_plane.kubectl(*dry_run, ok=None)
    assert done.status == 0, done.stderr
    assert control_plane.get("-A", "statefulsets")["items"] == []
    for path in (tmp_path / "k8s/base").glob("*.yaml"):
        path.write_text(path.read_text().replace("replicas: 1", "replicas: -1"))
    assert control_plane.kubectl(*dry_run, ok=None).status != 0


DEFINITIONS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "network-attachment-definitions.k8s.cni.cncf.io"},
    "spec": {
        "group": "k8s.cni.cncf.io",
        "scope": "Namespaced",
        "names": {
            "plural": "network-attachment-definitions",
            "singular": "network-attachment-definition",
            "kind": "NetworkAttachmentDefinition",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "properties": {"config": {"type": "string"}}}},
                    }
                },
            }
        ],
    },
}
"""What Multus installs (the standard of the Network Plumbing Working Group, 3.1)."""


@pytest.fixture
def multus(control_plane: Kubernetes) -> Iterator[None]:
    """The definition of networks, without Multus itself."""
    name = str(DEFINITIONS["metadata"]["name"])  # type: ignore[index]
    control_plane.kubectl("apply", "-f", "-", input=json.dumps(DEFINITIONS).encode())
    control_plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", f"crd/{name}")
    yield
    control_plane.kubectl("delete", "crd", name)


@pytest.mark.usefixtures("multus")
def test_the_api_server_accepts_an_attached_pod(control_plane: Kubernetes, site: Cluster, tmp_path: Path) -> None:
    """Its network is an object with a schema, too."""
    assert site.path
    document = yaml.safe_load(site.path.read_text())
    document["services"] = ["slurmctld", "munge", "rsyslog"]
    document["engines"] = {"kubernetes": {"address": "10.77.0.11", "network": "attached", "interface": "br-prov"}}
    changed = site.path.with_name("attached.yaml")
    changed.write_text(yaml.safe_dump(document))
    export(open_cluster(changed, None, Silent()), "kubernetes", tmp_path / "k8s")
    control_plane.kubectl("apply", "-f", str(tmp_path / "k8s/site/namespace.yaml"))
    dry_run = ("apply", "--dry-run=server", "-k", str(tmp_path / "k8s/site"))
    done = control_plane.kubectl(*dry_run, ok=None)
    assert done.status == 0, done.stderr
    assert b"networkattachmentdefinition.k8s.cni.cncf.io/provisioning created" in done.stdout
    network = tmp_path / "k8s/site/networks.yaml"
    network.write_text(network.read_text().replace("config: |", "configuration: |"))
    assert control_plane.kubectl(*dry_run, ok=None).status != 0


def test_quadlet_accepts_every_unit(exported_site: Cluster, tmp_path: Path) -> None:
    need_engines("quadlet")
    export(exported_site, "quadlet", tmp_path / "units")
    folders = {path.parent for path in (tmp_path / "units").rglob("*.container")}
    environment = {**os.environ, "QUADLET_UNIT_DIRS": ":".join(map(str, folders))}
    argv = [str(find_program("quadlet")), "-dryrun", "-no-kmsg-log"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    units = [path for folder in folders for path in folder.glob("*.container")]
    assert len(units) >= 3
    for path in units:
        assert f"---{path.stem}.service---" in done.stdout
    (units[0].parent / "wrong.container").write_text("[Container]\nImage=localhost/x\nNoSuchKey=1\n")
    assert subprocess.run(argv, env=environment, capture_output=True).returncode != 0
