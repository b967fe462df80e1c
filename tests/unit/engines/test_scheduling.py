"""Where pods may run, and the Secrets of the site: settings with the names of slurm-operator's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.config.engines import SecretRef
from appliance.engines.deploy import Bundle, Item
from appliance.engines.render import render
from appliance.errors import ConfigError
from appliance.operations.engines.kubernetes import OnKubernetes
from appliance.operations.engines.kubernetes_owner import _pod
from appliance.operations.site.find import open_site
from appliance.tools.engine import BOUNDED
from appliance.tools.kubectl import Kubectl
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.unit.engines.cases import KUBERNETES, SITES, case_input, make_input


def pods(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    made = render(*case_input(folder, name))
    found = [each for text in made.files.values() for each in yaml.safe_load_all(text)]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found if one["kind"] == "StatefulSet"}


def test_every_pod_runs_where_the_site_file_says(tmp_path: Path) -> None:
    """So does the pod that mounts their volumes during a move: it would not reach them elsewhere."""
    found = pods(tmp_path, "kubernetes-balanced")
    assert found.keys() == {"slurmctld", "slurmdbd"}
    moving = _pod("sms-move", "image", found["slurmctld"], ["slurmctld"])["spec"]
    for spec in (*found.values(), moving):
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "services"}
        taint = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}
        assert spec["tolerations"] == [taint]
        assert spec["priorityClassName"] == "slurm-system-critical"


def test_a_secret_of_the_site_has_its_own_key(tmp_path: Path) -> None:
    """The file in the pod is the same; `kubectl create secret` of the notes has the key, too."""
    volumes = {each["name"]: each for each in pods(tmp_path, "kubernetes-balanced")["slurmctld"]["volumes"]}
    assert volumes["munge-key"]["secret"]["secretName"] == "slurm.munge"
    assert volumes["munge-key"]["secret"]["items"] == [{"key": "munge", "path": "munge.key"}]
    (note,) = render(*case_input(tmp_path, "kubernetes-balanced")).notes
    assert "create secret generic slurm.munge --from-file=munge=" in note


def test_a_deployment_reads_and_writes_that_key() -> None:
    limited = (*BOUNDED, "kubectl", "--namespace=lab", "--request-timeout=30s")
    fake = Fake({(*limited, "get", "secret", "slurm.munge"): (0, '{"data": {"munge": "a2V5", "munge.key": "bm8="}}')})
    found = OnKubernetes(Kubectl(fake, "lab"), {"munge_key": SecretRef(name="slurm.munge", key="munge")}, fake_env())
    items = (Item("slurmctld", "service", "", secrets=("munge_key",)),)
    (state,) = found.secrets(Bundle("kubernetes", "sample", "lab", "image", "slurmctld", items))
    assert (state.where, state.value) == ("secret slurm.munge", b"key")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"munge_secret": "munge-key"}, "munge_secret"),
        ({"munge_secret": {"name": "munge-key"}}, "key"),
        ({"munge_secret": {"name": "a/b", "key": "munge.key"}}, "a/b"),
        ({"munge_secret": {"name": "a", "key": "../x"}}, "../x"),
        ({"jwt_secret": {"name": "munge-key", "key": "jwt"}}, "used twice"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "no value"),
        ({"tolerations": [{"value": "b"}]}, "`key`"),
        ({"tolerations": [{"key": "a", "effect": "Evict"}]}, "effect"),
        ({"node_selector": {"a b": "c"}}, "a b"),
        ({"node_selector": {"pool": "c\nd"}}, "name"),
        ({"node": "n1", "node_selector": {"kubernetes.io/hostname": "n2"}}, "another cluster node"),
        ({"priority_class": "High"}, "High"),
    ],
)
def test_what_an_api_server_would_refuse(given: dict[str, Any], word: str, tmp_path: Path) -> None:
    document = yaml.safe_load((SITES / "debian-12.yaml").read_text())
    document["engines"] = {"kubernetes": {**KUBERNETES, **given}}
    path = tmp_path / "sms.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        open_site(path)
    found = [one for one in caught.value.problems if one.path.startswith("engines.kubernetes")]
    assert [one for one in found if word in f"{one.path} {one.message} {one.hint}" and one.line]


def test_a_cluster_node_of_its_own_comes_first(tmp_path: Path) -> None:
    engines = {"kubernetes": {**KUBERNETES, "node": "n1", "node_selector": {"pool": "services"}}}
    made = render("kubernetes", make_input(tmp_path, "debian-12", {"engines": engines}))
    text = made.files["base/slurmctld.yaml"]
    assert "nodeSelector:\n        pool: services\n        kubernetes.io/hostname: n1\n" in text
