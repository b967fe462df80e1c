"""Terraform in front of the engines: the exported modules, with the real core and the real engines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.lab.engines.hosts import DISK
from appliance.lab.engines.kubernetes import Kubernetes
from appliance.lab.engines.nomad import NomadCluster
from appliance.lab.engines.programs import find_program
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.engines.bundles import find_engine, render_bundle
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.operations.image.build import build
from appliance.progress import Silent
from tests.engines.terraform import Terraform, make_mirror
from tests.real.engines.conftest import STATE, need_engines

pytestmark = pytest.mark.real

SERVICES = ["slurmctld", "munge", "slurmdbd"]
SPACE = "t-terraform"
JOBS = ["slurmdbd", "slurm-ctl", "munge", "slurm-cn"]
"""In the order of what they need."""


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the providers are."""
    need_engines("tofu")
    return make_mirror(tmp_path_factory.mktemp("providers"))


@pytest.fixture(scope="module")
def image(site: Cluster) -> Path:
    """The image with slurmdbd."""
    assert site.path
    full = site.path.with_name("full.yaml")
    return Path(build(open_cluster(full, None, Silent()), lock=full.with_name("full.lock")).image)


def make_modules(site: Cluster, folder: Path, engine: str, **settings: str) -> tuple[Cluster, Path]:
    """Export modules for an engine; return site and root module."""
    assert site.path
    document = yaml.safe_load(site.path.with_name("full.yaml").read_text())
    document |= {"services": SERVICES, "engines": {engine: settings}}
    path = site.path.with_name(f"terraform-{engine}.yaml")
    path.write_text(yaml.safe_dump(document))
    cluster = open_cluster(path, None, Silent())
    export(cluster, "terraform", folder)
    return cluster, folder / engine


def make_root(folder: Path, module: Path) -> Path:
    """Write a configuration that has an exported root module as one of its modules."""
    folder.mkdir()
    source = json.dumps(str(module))
    (folder / "main.tf").write_text(f'module "cluster" {{\n  source = {source}\n}}\n')
    return folder


@pytest.fixture(scope="module")
def on_nomad(
    nomad: NomadCluster, site: Cluster, image: Path, mirror: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terraform]:
    """All jobs of a cluster with accounting, applied."""
    folder = tmp_path_factory.mktemp("terraform")
    client = nomad.clients[0]
    settings = {"address": client.address, "host": client.name, "image": str(image), "state": str(STATE)}
    _, module = make_modules(site, folder / "modules", "nomad", **settings)
    nomad.nomad("node", "pool", "apply", "-", input=b'node_pool "compute" {\n}\n')
    key = base64.b64encode(Path(str(site.site.secrets.munge_key)).read_bytes()).decode()
    for job in ("slurmdbd", "slurm-ctl"):
        items = json.dumps({"Items": {"munge_key": key}}).encode()
        nomad.nomad("var", "put", "-in", "json", f"nomad/jobs/{job}", "-", input=items)
    server = nomad.servers[0]
    root = make_root(folder / "root", module)
    terraform = Terraform(server, root, mirror, {"NOMAD_ADDR": f"http://{server.address}:4646"})
    terraform.validate()
    terraform.apply()
    yield terraform
    for job in JOBS:
        nomad.nomad("job", "stop", "-purge", "-detach", job, ok=None)


def job_of(nomad: NomadCluster, name: str) -> dict[str, Any]:
    """A job as Nomad has it."""
    found: dict[str, Any] = nomad.get(f"job/{name}")
    return found


def test_jobs_are_created_when_what_they_need_is_ready(nomad: NomadCluster, on_nomad: Terraform) -> None:
    created = [job_of(nomad, name)["CreateIndex"] for name in JOBS]
    assert created == sorted(created)
    (deployment,) = nomad.get("job/slurmdbd/deployments")
    assert deployment["Status"] == "successful"
    assert deployment["ModifyIndex"] < created[JOBS.index("slurm-ctl")]


def test_a_second_plan_for_nomad_is_empty(on_nomad: Terraform) -> None:
    assert not on_nomad.has_changes()


def test_sms_sees_what_a_refresh_does_not_see(
    nomad: NomadCluster, site: Cluster, on_nomad: Terraform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X4: what `sms deploy status` and `sms deploy --dry-run` compare."""
    assert site.path
    cluster = open_cluster(site.path.with_name("terraform-nomad.yaml"), None, Silent())
    server = nomad.servers[0]
    monkeypatch.setenv("NOMAD_ADDR", "http://127.0.0.1:4646")
    # In the mounts of that host alone: its PATH is that of all hosts.
    server.run("mount", "--bind", str(find_program("nomad").parent), "/usr/local/sbin")

    def changed() -> list[str]:
        engine = find_engine(cluster, server.host, "nomad")
        found = engine.differences(render_bundle(cluster, "nomad"))
        assert {one.name for one in found} == set(JOBS)
        return [one.name for one in found if one.change != "unchanged"]

    assert changed() == []
    nomad.nomad("job", "scale", "-detach", "slurmdbd", "0")
    assert not on_nomad.has_changes()
    assert changed() == ["slurmdbd"]


def test_no_secret_is_in_the_state(site: Cluster, on_nomad: Terraform) -> None:
    key = Path(str(site.site.secrets.munge_key)).read_bytes()
    assert "nomad_job" in on_nomad.state
    assert base64.b64encode(key).decode() not in on_nomad.state
    assert key.hex() not in on_nomad.state


def test_jobs_are_stopped_in_the_reverse_order(nomad: NomadCluster, on_nomad: Terraform) -> None:
    on_nomad.destroy()
    jobs = [job_of(nomad, name) for name in JOBS]
    assert [job["Stop"] for job in jobs] == [True] * len(jobs)
    stopped = [job["JobModifyIndex"] for job in jobs]
    assert stopped == sorted(stopped, reverse=True)


SLEEP = """
job "{name}" {{
  type = "service"
  group "g" {{
    task "t" {{
      driver = "raw_exec"
      config {{
        command = "/bin/sleep"
        args    = ["{seconds}"]
      }}
    }}
    update {{
      min_healthy_time = "1s"
    }}
  }}
}}
"""


@pytest.mark.full
def test_what_a_refresh_does_not_see(nomad: NomadCluster, site: Cluster, mirror: Path, tmp_path: Path) -> None:
    """X4: of changes beside it, a plan sees what has another source; Nomad's own plan sees all of them."""
    address = nomad.clients[0].address
    _, module = make_modules(site, tmp_path / "modules", "nomad", address=address, host=nomad.clients[0].name)
    root = tmp_path / "root"
    root.mkdir()
    (root / "job.hcl").write_text(SLEEP.format(name="beside", seconds=600))
    source = json.dumps(str(module / "modules/slurmdbd"))
    text = f'module "it" {{\n  source = {source}\n  file   = "${{path.module}}/job.hcl"\n}}\n'
    (root / "main.tf").write_text(text)
    server = nomad.servers[0]
    terraform = Terraform(server, root, mirror, {"NOMAD_ADDR": f"http://{server.address}:4646"})
    terraform.apply()
    job = SLEEP.format(name="beside", seconds=600).encode()

    def drift() -> tuple[bool, int]:
        """Whether Terraform has changes, and the status of `nomad job plan`."""
        return terraform.has_changes(), nomad.nomad("job", "plan", "-", ok=None, input=job).status

    assert drift() == (False, 0)
    nomad.nomad("job", "scale", "-detach", "beside", "g", "2")
    assert drift() == (False, 1)
    nomad.nomad("job", "stop", "-detach", "beside")
    assert drift() == (False, 1)
    nomad.submit(SLEEP.format(name="beside", seconds=700))
    assert drift() == (True, 1)
    terraform.apply()
    assert drift() == (False, 0)
    nomad.purge("beside")
    assert drift() == (True, 1)


@pytest.fixture(scope="module")
def on_kubernetes(
    kubernetes: Kubernetes, site: Cluster, image: Path, mirror: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terraform]:
    """All objects of a cluster with accounting, applied; the namespace, the key and volumes were there."""
    host = kubernetes.host
    folder = tmp_path_factory.mktemp("terraform")
    settings = {"namespace": SPACE, "address": host.address, "network": "host", "node": host.name}
    layout = make_oci(site, image, DISK / "t-terraform.oci")
    kubernetes.load_image(Path(layout.path))
    _, module = make_modules(site, folder / "modules", "kubernetes", image=layout.name, **settings)
    kubernetes.kubectl("apply", "-f", str(module / "files/namespace.yaml"))
    key = f"--from-file=munge.key={site.site.secrets.munge_key}"
    kubernetes.kubectl("-n", SPACE, "create", "secret", "generic", "munge-key", key)
    for name in ("slurmdbd", "slurmctld"):
        kubernetes.provide_volume(SPACE, f"state-{name}-0", "4Gi")
    root = make_root(folder / "root", module)
    terraform = Terraform(host, root, mirror, {"KUBE_CONFIG_PATH": str(kubernetes.admin)})
    terraform.validate()
    terraform.apply()
    yield terraform
    kubernetes.kubectl("delete", "namespace", SPACE, "--wait=false", ok=None)


@pytest.mark.full
def test_objects_are_created_when_what_they_need_is_ready(kubernetes: Kubernetes, on_kubernetes: Terraform) -> None:
    conditions = kubernetes.get("-n", SPACE, "pod", "slurmdbd-0")["status"]["conditions"]
    (ready,) = [
        each["lastTransitionTime"] for each in conditions if each["type"] == "Ready" and each["status"] == "True"
    ]
    created = kubernetes.get("-n", SPACE, "statefulset", "slurmctld")["metadata"]["creationTimestamp"]
    assert ready <= created


@pytest.mark.full
def test_a_second_plan_for_kubernetes_is_empty(on_kubernetes: Terraform) -> None:
    assert not on_kubernetes.has_changes()


@pytest.mark.full
def test_a_scaled_stateful_set_is_seen(kubernetes: Kubernetes, on_kubernetes: Terraform) -> None:
    """Fields of the manifest are compared; labels of others are not."""
    kubernetes.kubectl("-n", SPACE, "label", "statefulset", "slurmctld", "someone=else")
    assert not on_kubernetes.has_changes()
    kubernetes.kubectl("-n", SPACE, "scale", "statefulset", "slurmctld", "--replicas=0")
    assert on_kubernetes.has_changes()
    kubernetes.kubectl("-n", SPACE, "scale", "statefulset", "slurmctld", "--replicas=1")


@pytest.mark.full
def test_objects_are_deleted_in_the_reverse_order(kubernetes: Kubernetes, on_kubernetes: Terraform) -> None:
    """The namespace, the key and the state stay."""
    host = kubernetes.host
    watch = ("--watch-only", "--output-watch-events", "-o", "custom-columns=:type,:object.metadata.name")
    watcher = host.start("watch-terraform", *kubernetes.words, "-n", SPACE, "get", "statefulsets", *watch)
    try:
        on_kubernetes.destroy()
    finally:
        watcher.end()
        host.daemons.remove(watcher)
    lines = [line.split() for line in watcher.log.read_text().splitlines()]
    assert [line[1] for line in lines if line[:1] == ["DELETED"]] == ["slurmctld", "slurmdbd"]
    assert len(kubernetes.get("-n", SPACE, "pvc")["items"]) == 2
    assert kubernetes.get("-n", SPACE, "secret", "munge-key")
