"""The pod of slurmctld with the container's address (`network: attached`): what is exported, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pytest
import yaml

from appliance.engines.render import Export, make_bundle, render
from appliance.errors import ConfigError, Refused
from appliance.operations.engines.kubernetes import OnKubernetes
from appliance.operations.site.find import open_site
from appliance.plan.services.controllers import find_controllers, other_controllers
from appliance.tools.engine import BOUNDED
from appliance.tools.kubectl import Kubectl
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.unit.engines.attachments import ANNOTATION, KIND, check_attachments, check_definition, check_selection
from tests.unit.engines.cases import ATTACHED, FULL, NOMAD, SITES, SMALL, case_input, make_input
from tests.unit.engines.deployments import BUNDLE

MACVLAN = {**ATTACHED, "attach": "macvlan", "interface": "eno1.100"}
SERVICES = ["slurmctld", "munge", "slurmdbd", "mariadb", "rsyslog"]


def make(folder: Path, given: dict[str, Any], **changes: Any) -> Export:
    site = {"services": SERVICES, **changes, "engines": {"kubernetes": given}}
    return render("kubernetes", make_input(folder, "debian-12", site))


def objects(made: Export) -> list[dict[str, Any]]:
    texts = [text for name, text in made.files.items() if not name.endswith("kustomization.yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def test_the_pod_of_slurmctld_alone_has_the_address(tmp_path: Path) -> None:
    """Nodes notice nothing: the address, the MAC address and the port are the container's."""
    made = render(*case_input(tmp_path, "kubernetes-attached"))
    found = objects(made)
    wanted = {"name": "provisioning", "interface": "provisioning", "ips": ["10.20.0.1/16"], "mac": "02:00:0a:14:00:01"}
    assert check_attachments(found) == {"slurmctld": [wanted]}
    services = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "Service"}
    assert "slurmctld-nodes" not in services
    assert services["slurmctld"]["ports"][0]["port"] == 6817
    assert services["slurmdbd-nodes"]["ports"][0]["nodePort"] == 30819
    (config,) = [one["data"] for one in found if one["metadata"]["name"] == "slurmctld-config"]
    lines = config["slurm.slurm.conf"].splitlines()
    assert "SlurmctldHost=slurmctld-0(10.20.0.1)" in lines
    assert {"AccountingStorageHost=10.20.0.9", "AccountingStoragePort=30819"} <= set(lines)
    assert not [line for line in lines if line.startswith("SlurmctldPort=") and line != "SlurmctldPort=6817"]
    policies = {one["metadata"]["name"]: one["spec"]["ingress"][0] for one in found if one["kind"] == "NetworkPolicy"}
    assert not [one for one in policies["slurmctld"]["from"] if "ipBlock" in one], "nodes come by the other network"
    assert [one for one in policies["slurmdbd"]["from"] if "ipBlock" in one]


def test_what_is_deployed_has_the_network_before_the_pod(tmp_path: Path) -> None:
    bundle = make_bundle(*case_input(tmp_path, "kubernetes-attached"))
    kinds = {one.name: [each["kind"] for each in yaml.safe_load_all(one.text)] for one in bundle.items}
    assert KIND in kinds["slurmctld"]
    assert not [name for name, listed in kinds.items() if name != "slurmctld" and KIND in listed]
    placed = [each for each in yaml.safe_load_all(bundle.find("slurmctld").text) if each["kind"] == KIND]  # type: ignore[union-attr]
    assert [one["metadata"]["namespace"] for one in placed] == ["sample"]
    check_definition(placed[0])


def test_only_slurm_needs_no_other_address(tmp_path: Path) -> None:
    made = make(tmp_path, {key: value for key, value in ATTACHED.items() if key != "address"}, services=list(SMALL))
    assert "site/services.yaml" not in made.files
    assert list(check_attachments(objects(made))) == ["slurmctld"]


@pytest.mark.parametrize(("given", "link"), [(ATTACHED, {"bridge": "br-prov"}), (MACVLAN, {"master": "eno1.100"})])
def test_networks_behind_routers(tmp_path: Path, given: dict[str, Any], link: dict[str, str]) -> None:
    networks = yaml.safe_load((SITES / "debian-12.yaml").read_text())["networks"]
    networks["provisioning"]["routes"] = [{"network": "10.100.0.0/17", "gateway": "10.20.0.254"}]
    made = make(tmp_path, given, networks=networks)
    ((plugin,),) = [check_definition(one)["plugins"] for one in objects(made) if one["kind"] == KIND]
    assert plugin["ipam"] == {"type": "static", "routes": [{"dst": "10.100.0.0/17", "gw": "10.20.0.254"}]}
    assert link.items() <= plugin.items()


def test_another_interface_is_another_pod(tmp_path: Path) -> None:
    def digests(given: dict[str, Any]) -> dict[str, str]:
        found = [one for one in objects(make(tmp_path, given)) if one["kind"] == "StatefulSet"]
        pods = {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["annotations"] for one in found}
        return {name: each["checksum/config"] for name, each in pods.items()}

    before, after = digests(ATTACHED), digests({**ATTACHED, "interface": "br-new"})
    assert {name for name in before if before[name] != after[name]} == {"slurmctld"}


def test_what_macvlan_cuts_off_runs_elsewhere(tmp_path: Path) -> None:
    """A macvlan interface and its host do not reach each other; a bridge and its host do."""
    for given, expected in ((MACVLAN, {"slurmdbd", "slurmrestd", "login"}), (ATTACHED, set())):
        full = {**FULL, "services": [*FULL["services"], "rsyslog"]}
        full["services"] = [one for one in full["services"] if one != "nat"]
        found = [one for one in objects(make(tmp_path, given, **full)) if one["kind"] == "StatefulSet"]
        apart = {one["metadata"]["name"] for one in found if "affinity" in one["spec"]["template"]["spec"]}
        assert apart == expected


@pytest.mark.parametrize(
    ("given", "changes", "word"),
    [
        (ATTACHED, {"services": ["rsyslog"]}, "slurmctld, which this site does not run"),
        (ATTACHED, {"services": [*SERVICES, "nat", "chrony"]}, "chrony, nat would run in the container"),
        (ATTACHED, {"services": [*SERVICES, "slurmrestd"]}, "slurmrestd would run in the container"),
        ({**ATTACHED, "address": None}, {}, "kubernetes.address.* is missing: .* reach rsyslog, slurmdbd"),
        ({**MACVLAN, "node": "control-1"}, {}, "do not reach each other, so slurmdbd cannot run there"),
    ],
)
def test_what_cannot_work(given: dict[str, Any], changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        make(tmp_path, given, **changes)
    assert caught.value.hint


def test_one_cluster_node_is_enough_with_a_bridge(tmp_path: Path) -> None:
    assert make(tmp_path, {**ATTACHED, "node": "control-1"}).files
    assert make(tmp_path, {**MACVLAN, "node": "control-1"}, services=list(SMALL)).files


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-4", "eth0 up", "eth0\n", "a/b", 'x","type":"host-device', "eth0:1", "e" * 16, "{{x}}", None],
)
def test_hostile_interfaces_are_refused(name: str | None, tmp_path: Path) -> None:
    document = yaml.safe_load((SITES / "debian-12.yaml").read_text())
    document["engines"] = {"kubernetes": {**ATTACHED, "interface": name}}
    path = tmp_path / "sms.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        open_site(path)
    (problem,) = [one for one in caught.value.problems if one.path.startswith("engines")]
    assert problem.line
    assert "interface" in problem.message
    assert problem.hint


def test_running_jobs_reach_it_at_the_same_address(tmp_path: Path) -> None:
    """The container names it once only, and a move there is possible."""
    given = make_input(tmp_path, "debian-12", {"engines": {"kubernetes": ATTACHED, "nomad": NOMAD}})
    assert find_controllers(given.site, given.services)["kubernetes"] == "slurmctld-0(10.20.0.1)"
    assert other_controllers(given.site, given.services, "container") == ["admin-1(10.20.0.8)"]
    assert other_controllers(given.site, given.services, "kubernetes") == ["admin-1(10.20.0.8)"]
    assert other_controllers(given.site, given.services, "nomad") == ["sms-services(10.20.0.1)"]


@pytest.mark.parametrize("installed", [True, False])
def test_a_cluster_without_multus_is_refused(installed: bool) -> None:
    limited = (*BOUNDED, "kubectl", "--namespace=lab", "--request-timeout=30s")
    fake = Fake(
        {
            (*limited, "version"): (0, '{"serverVersion": {"major": "1", "minor": "34"}}'),
            (*limited, "get", "customresourcedefinition"): (0, '{"kind": "CustomResourceDefinition"}' * installed),
        }
    )
    found = OnKubernetes(Kubectl(fake, "lab"), {}, fake_env(), attached=True)
    if installed:
        found.check(MagicMock(), BUNDLE)
        return
    with pytest.raises(Refused, match="network-attachment-definitions") as caught:
        found.check(MagicMock(), BUNDLE)
    assert "Multus" in caught.value.hint


DEFINITION: dict[str, Any] = {
    "apiVersion": "k8s.cni.cncf.io/v1",
    "kind": KIND,
    "metadata": {"name": "provisioning"},
    "spec": {
        "config": json.dumps(
            {
                "cniVersion": "0.3.1",
                "name": "provisioning",
                "plugins": [{"type": "macvlan", "master": "eno1", "mode": "bridge", "ipam": {"type": "static"}}],
            }
        )
    },
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"master"', '"parent"'),
        ('"mode": "bridge"', '"mode": "l2"'),
        ('"eno1"', '".."'),
        ('"eno1"', '"a name of an interface"'),
        ('"static"', '"dhcp"'),
        ('"name": "provisioning"', '"name": "other"'),
        ('"cniVersion": "0.3.1", ', ""),
        ('"plugins": [', '"plugins": ['),
    ],
)
def test_the_check_of_definitions(old: str, new: str) -> None:
    wrong = copy.deepcopy(DEFINITION)
    wrong["spec"]["config"] = wrong["spec"]["config"].replace(old, new)
    if old == new:
        assert check_definition(wrong)
        return
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        check_definition(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '[{"ips": ["10.0.0.1/16"]}]',
        '[{"name": "a", "ips": []}]',
        '[{"name": "a", "ips": "10.0.0.1"}]',
        '[{"name": "a", "ips": ["10.0.0.1/33"]}]',
        '[{"name": "a", "mac": "02:00:0a:14:00"}]',
        '[{"name": "a", "interface": "an/interface"}]',
        '[{"name": "A_b"}]',
        '[{"name": "a", "address": "10.0.0.1"}]',
    ],
)
def test_the_check_of_selections(text: str) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        check_selection(text)
    assert check_selection('[{"name": "a", "ips": ["10.0.0.1/16", "10.0.0.2"], "org.example.key": 1}]')
    annotations = {ANNOTATION: '[{"name": "provisioning", "mac": "02:00:0a:14:00:01"}]'}
    spec = {"template": {"metadata": {"annotations": annotations}}}
    pod = {"kind": "StatefulSet", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(ValueError, match="accepts mac"):
        check_attachments([pod, DEFINITION])
