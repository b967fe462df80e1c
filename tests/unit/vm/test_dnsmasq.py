"""DHCP's configuration and host lines, checked with dnsmasq itself."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.plan.vm.vm import unique_local as planned_address
from appliance.provision import dnsmasq
from appliance.provision.config import Config, parse_config
from appliance.provision.dnsmasq import ConfigWriter, check_range, render_configuration, render_hosts
from appliance.provision.model import Component, Interface, Inventory
from appliance.provision.world import World
from tests.waiting import soon

Need = Callable[[str], str]
FOLDER = Path("/run/sms-provision")
USUAL = {
    "address": "10.77.0.2",
    "prefix": 24,
    "gateway": "10.77.0.1",
    "dns": ["10.78.0.254"],
    "services": {"address": "10.77.0.1", "hostname": "sms-services"},
}


def configured(**what: Any) -> Config:
    return parse_config({**USUAL, **what})


def inventory(*nodes: tuple[str, str, str]) -> Inventory:
    """Return an inventory of nodes, given as name, address, MAC address."""
    return Inventory(
        {name: Component(name, name=name, address=address) for name, address, _ in nodes},
        {mac: Interface(mac, component=name) for name, _, mac in nodes},
    )


def check(need: Need, folder: Path, text: str) -> None:
    """Check that dnsmasq accepts the configuration."""
    (folder / "dnsmasq.conf").write_text(text)
    done = subprocess.run(
        [need("dnsmasq"), "--test", f"--conf-file={folder / 'dnsmasq.conf'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("what", "has", "has_not"),
    [
        ({}, ["dhcp-ignore=tag:!known", "dhcp-option=option:router,10.77.0.1", "enable-ra"], ["tag:!known,10"]),
        ({"pool": ["10.77.0.200", "10.77.0.220"]}, ["dhcp-range=tag:!known,10.77.0.200,10.77.0.220"], ["dhcp-ignore"]),
        ({"gateway": "10.77.0.9"}, ["router,10.77.0.9", "log-server,10.77.0.1", "ntp-server,10.77.0.1"], []),
        ({"dns": [], "services": None, "gateway": ""}, ["option:router\n", "option:dns-server\n"], []),
        (
            {"address": "10.20.0.2", "prefix": 16},
            ["10.20.0.0,static,255.255.0.0,infinite", "//10.20.0.2/boot.ipxe"],
            [],
        ),
    ],
)
def test_configuration(what: dict[str, Any], has: list[str], has_not: list[str], need: Need, tmp_path: Path) -> None:
    text = render_configuration(configured(**what), "eth0", tmp_path)
    assert [word for word in has if word not in text] == []
    assert [word for word in has_not if word in text] == []
    check(need, tmp_path, text)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"pool": ["10.78.0.200", "10.78.0.220"]}, r"10\.78\.0\.200 is not an address of the provisioning network"),
        ({"pool": ["10.77.0.200", "10.77.0.255"]}, r"10\.77\.0\.255 is not an address"),
        ({"pool": ["10.77.0.220", "10.77.0.200"]}, "comes before"),
        ({"pool": ["10.77.0.1", "10.77.0.20"]}, "which is in use"),
    ],
)
def test_invalid_pools(what: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_range(configured(**what))


@pytest.mark.parametrize("port", ["eth0\ndhcp-script=/bin/sh", "", "a" * 16])
def test_no_interface_name_injects_configuration(port: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        render_configuration(configured(), port, FOLDER)


def test_one_line_per_node(need: Need, tmp_path: Path) -> None:
    known = inventory(
        ("node2", "10.77.0.102", "02:00:0a:4d:00:66"),
        ("node1", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("nowhere", "", "02:00:0a:4d:00:01"),
    )
    text = render_hosts(known, configured())
    assert text.splitlines() == [
        "02:00:0a:4d:00:65,10.77.0.101,node1,infinite",
        "02:00:0a:4d:00:66,10.77.0.102,node2,infinite",
    ]
    (tmp_path / "dnsmasq.hosts").write_text(text)
    check(need, tmp_path, render_configuration(configured(), "eth0", tmp_path))


@pytest.mark.parametrize(
    "node",
    [
        ("node1\ndhcp-script=/tmp/x", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("node1,set:known", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("node1", "10.77.0.101\n", "02:00:0a:4d:00:65"),
        ("node1", "10.77.0.101", "02:00:0a:4d:00:65,ignore"),
        ("node1", "10.99.0.101", "02:00:0a:4d:00:65"),
        ("-n", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("ignore", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("infinite", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("45", "10.77.0.101", "02:00:0a:4d:00:65"),
        ("1h", "10.77.0.101", "02:00:0a:4d:00:65"),
    ],
)
def test_no_node_injects_a_line(node: tuple[str, str, str], caplog: pytest.LogCaptureFixture) -> None:
    """The inventory rejects such names; if it ever accepted one, it would not get to dnsmasq."""
    with caplog.at_level(logging.WARNING):
        assert render_hosts(inventory(node), configured()) == ""
    assert "invalid name or address" in caplog.text


@pytest.mark.parametrize(("address", "prefix"), [("10.77.0.2", 24), ("10.20.0.2", 16), ("192.0.2.130", 25)])
def test_the_vm_has_the_address_that_is_announced(address: str, prefix: int) -> None:
    network, own = dnsmasq.unique_local(address, prefix)
    assert own == planned_address(address, prefix)
    assert own.startswith(network.removesuffix(":"))


def test_files_follow_the_inventory(tmp_path: Path) -> None:
    document = {
        "address": "127.0.0.1",
        "prefix": 8,
        "database": f"sqlite:///{tmp_path}/inventory.db",
        "state": str(tmp_path),
    }
    world = World(parse_config(document))
    (tmp_path / dnsmasq.PID).write_text(str(2**22 + 1))
    ConfigWriter(world, tmp_path).start()
    try:
        assert "interface=lo\n" in (tmp_path / dnsmasq.CONFIGURATION).read_text()
        assert (tmp_path / dnsmasq.HOSTS).read_text() == ""
        with world.edit() as draft:
            from appliance.provision.nodes import put_node

            put_node(draft, "node1", {"macs": ["02:00:0a:4d:00:65"], "address": "127.0.0.9"})
        assert soon((tmp_path / dnsmasq.HOSTS).read_text) == "02:00:0a:4d:00:65,127.0.0.9,node1,infinite\n"
    finally:
        world.store.close()
