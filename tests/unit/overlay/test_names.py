"""Names of nodes that only a name service knows: which ones, from where, and that answers do not make restless."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.config.model import Site
from appliance.errors import ConfigError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.overlay import overlay
from appliance.operations.overlay.names import resolve_nodes
from appliance.operations.site import config
from appliance.operations.site.find import open_site
from appliance.plan.overlay.names import find_named, find_names, read_hosts, read_resolved
from appliance.plan.overlay.seed import node_addresses
from appliance.progress import Silent
from appliance.tools.resolver import resolve
from tests.places import DEBIAN_SITE
from tests.sites import open_debian
from tests.support.fake import Fake

NODES = [
    {"name": "n[1-2]", "cpus": 1, "memory_mb": 512},
    {"name": "m1", "address": "m1.example.org", "cpus": 1, "memory_mb": 512},
    {"name": "k1", "address": "10.20.0.9", "cpus": 1, "memory_mb": 512},
    {"name": "c[1-9]", "cpus": 1, "memory_mb": 512, "extra": "Feature=x state=CLOUD"},
]


def named(site: Site) -> Site:
    nodes = [type(site.slurm.nodes[0]).model_validate(one) for one in NODES]
    return site.model_copy(update={"slurm": site.slurm.model_copy(update={"nodes": tuple(nodes)})})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    opened = open_debian(tmp_path)
    return replace(opened, site=named(opened.site))


def test_only_what_the_site_file_has_no_address_of_is_resolved(cluster: Cluster) -> None:
    assert find_names(cluster.site) == ["n1", "n2", "m1.example.org"]
    site = open_site(DEBIAN_SITE).site
    assert not find_names(site), "the sample has addresses"
    peers = find_named(cluster.site)
    assert peers["slurm", "nodes", 0] == ["n1", "n2"] and ("slurm", "nodes", 2) not in peers


def test_lines_of_the_hosts_file(cluster: Cluster) -> None:
    found = {"n1": "10.0.0.1", "m1.example.org": "10.0.0.3", "x": "10.0.0.4"}
    assert node_addresses(cluster.site, found) == [
        ("10.0.0.1", "n1"),
        ("10.0.0.3", "m1.example.org m1"),
        ("10.20.0.9", "k1"),
    ]
    text = replace(cluster, names=found)
    (hosts,) = (one for one in overlay.seeds_for(text) if one.path == "/etc/hosts")
    assert b"10.0.0.3 m1.example.org m1\n" in hosts.data
    known = read_hosts(hosts.data.decode())
    assert (
        known.items() >= {"n1": "10.0.0.1", "m1.example.org": "10.0.0.3", "m1": "10.0.0.3"}.items() and "x" not in known
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1 n1 n1.x # n2\n::1 n2\n", {"n1": "10.0.0.1", "n1.x": "10.0.0.1"}),
        ("10.0.0.1 n1\n10.0.0.2 n1\n", {"n1": "10.0.0.1"}),
        ("", {}),
        ("# 10.0.0.1 n1\n\n10.0.0.1\nn1 n1\n", {}),
    ],
)
def test_a_hosts_file(text: str, found: dict[str, str]) -> None:
    assert read_hosts(text) == found


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("n1 10.0.0.1\n", {"n1": "10.0.0.1", "n2": "10.0.0.2"}),
        ("n2 10.0.0.3 10.0.0.2\n", {"n2": "10.0.0.2"}),
        ("n2 10.0.0.3\n", {"n2": "10.0.0.3"}),
        ("other 10.0.0.3\nn2 ; rm\nn2\n\n", {"n2": "10.0.0.2"}),
        ("n1 127.0.1.1 169.254.0.1 0.0.0.0\n", {"n2": "10.0.0.2"}),
        ("n1 192.0.2.9 10.20.0.5\n", {"n1": "10.20.0.5", "n2": "10.0.0.2"}),
        ("n1 192.0.2.9 198.51.100.5\n", {"n1": "192.0.2.9", "n2": "10.0.0.2"}),
        ("", {"n2": "10.0.0.2"}),
    ],
)
def test_answers(output: str, found: dict[str, str]) -> None:
    """What is not answered stays, and so does one of several addresses: name servers change their order."""
    networks = [IPv4Network("10.20.0.0/16")]
    assert read_resolved(output, ["n1", "n2"], {"n2": "10.0.0.2", "gone": "10.0.0.9"}, networks) == found


def test_what_cannot_be_resolved_is_named_and_what_was_known_stays(cluster: Cluster) -> None:
    said: list[str] = []

    class Heard(Silent):
        def report(self, line: str) -> None:
            said.append(line)

    host = Fake({("python3",): (0, "n1 10.0.0.1\n")}, name="host-a")
    found, changed = resolve_nodes(cluster.showing(Heard()), host, lambda: b"10.0.0.2 n2\n")
    assert found.names == {"n1": "10.0.0.1", "n2": "10.0.0.2"} and changed
    assert len(said) == 1 and "1 of 3 names of nodes in time: m1.example.org;" in said[0]
    again, changed = resolve_nodes(cluster, host, lambda: b"10.0.0.2 n2\n10.0.0.1 n1\n")
    assert again.names == found.names and not changed
    site = replace(cluster, site=open_site(DEBIAN_SITE).site)
    assert resolve_nodes(site, host, pytest.fail) == (site, False), "nothing is asked without such names"


def test_this_machine_resolves_its_own_name() -> None:
    assert "localhost 127.0.0.1" in resolve(Local(), ["localhost", "no-such-name.invalid"])
    assert "invalid" not in resolve(Local(), ["no-such-name.invalid", "x" * 300])


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda site: None, []),
        (lambda site: site.update(ntp=["no-such.invalid", "localhost"]), ["ntp[0]", "ntp[1]"]),
        (lambda site: site["slurm"]["nodes"].append(NODES[0]), ["slurm.nodes[2]"]),
        (lambda site: site.update(syslog_forward="no-such.invalid:514"), ["syslog_forward"]),
    ],
)
def test_config_check_names_what_is_not_resolved(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], places: list[str]
) -> None:
    site = yaml.safe_load(DEBIAN_SITE.read_text())
    site |= {"ntp": [], "syslog_forward": None, "mail": {"domain": "example.org"}}
    change(site)
    file = tmp_path / "sms.yaml"
    file.write_text(yaml.safe_dump(site))
    loaded = open_site(file)
    if not places:
        config.check_names(loaded)
        return
    with pytest.raises(ConfigError) as caught:
        config.check_names(loaded)
    assert [one.path for one in caught.value.problems] == places and all(one.line for one in caught.value.problems)
    assert json.dumps([one.message for one in caught.value.problems])
