"""The CNI configuration of the two networks, and the commands that use it."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import read_catalog, select
from appliance.config.model import Route
from appliance.operations.site.find import open_site
from appliance.plan.machine import Places, instance_name, seed_argv, start_argv, stop_argv
from appliance.plan.services.confinement import Confinement, capabilities_for
from appliance.plan.services.network import (
    CNI_FOLDER,
    attached_bridges,
    conflists,
    deaf,
    isolated_bridges,
    macvlan_requests,
    network_names,
    network_options,
    running_network,
)
from appliance.share import share
from tests.places import DEBIAN_SITE, GOLDEN

SITE = open_site(DEBIAN_SITE).site
SERVICES = select(read_catalog(share("definitions", "services")), SITE.service_names)
CONFINED = Confinement(capabilities_for(SERVICES), "/s/seccomp.json", "/s/empty")


@pytest.fixture
def lists() -> dict[str, Any]:
    return {name: json.loads(text) for name, text in conflists(SITE, SERVICES, "host-a").items()}


def test_one_conflist_per_network(lists: dict[str, Any]) -> None:
    assert list(lists) == [f"{CNI_FOLDER}/50_{name}.conflist" for name in network_names(SITE)]
    assert [each["name"] for each in lists.values()] == list(network_names(SITE))


def test_container_is_a_separate_machine(lists: dict[str, Any]) -> None:
    for each in lists.values():
        plugin = each["plugins"][0]
        assert plugin["type"] == "bridge", "no firewall, no portmap"
        assert (plugin["isGateway"], plugin["ipMasq"]) == (False, False)


def test_the_host_sets_kernel_parameters_of_the_containers_network(lists: dict[str, Any]) -> None:
    provisioning, public = (each["plugins"][1:] for each in lists.values())
    sysctl = {"net.ipv4.ip_forward": "1", "net.netfilter.nf_conntrack_tcp_be_liberal": "1"}
    for name, plugins, own in (("eth0", provisioning, sysctl), ("eth1", public, {})):
        first, second = deaf(name)
        assert plugins == [{"type": "tuning", "sysctl": {**first, **own}}, {"type": "tuning", "sysctl": second}]
    without = [service for service in SERVICES if service.name != "nat"]
    assert all("ip_forward" not in text for text in conflists(SITE, without, "host-a").values())


def test_other_machines_do_not_configure_the_containers_interfaces() -> None:
    (ipv4,) = deaf("eth1", ipv6=False)
    assert set(ipv4) == {f"net.ipv4.conf.{one}.accept_redirects" for one in ("all", "default", "eth1")}
    first, second = deaf("eth1")
    assert (first["net.ipv6.conf.eth1.accept_ra"], first["net.ipv6.conf.default.accept_ra"]) == ("0", "0")
    assert (first["net.ipv6.conf.eth1.disable_ipv6"], second) == ("1", {"net.ipv6.conf.eth1.disable_ipv6": "0"})
    assert all("ipv6" not in text for text in conflists(SITE, SERVICES, "host-a", ipv6=False).values())


@pytest.mark.parametrize("isolated", [False, True])
def test_routes_to_nodes_behind_routers(isolated: bool) -> None:
    """The instance that a migration starts isolated has them, too, before its addresses switch."""
    site = open_site(GOLDEN / "sites" / "sles-15.yaml").site
    found = [json.loads(text)["plugins"][0] for text in conflists(site, SERVICES, "host-a", isolated=isolated).values()]
    assert found[0]["ipam"]["routes"] == [
        {"dst": "10.100.0.0/17", "gw": "10.20.0.254"},
        {"dst": "10.100.128.0/17", "gw": "10.20.0.253"},
    ]
    assert found[1]["ipam"]["routes"] == [{"dst": "0.0.0.0/0"}]
    assert running_network(site)["routes"] == "10.100.0.0/17 via 10.20.0.254 10.100.128.0/17 via 10.20.0.253"
    assert running_network(SITE)["routes"] == ""


def test_static_addresses_and_default_route(lists: dict[str, Any]) -> None:
    provisioning, public = (each["plugins"][0] for each in lists.values())
    assert (provisioning["bridge"], public["bridge"]) == isolated_bridges(SITE), (
        "the plugin changes the one it is given"
    )
    assert attached_bridges(SITE) == dict(zip(isolated_bridges(SITE), ("br-prov", "br-pub"), strict=True))
    assert provisioning["ipam"] == {"type": "static", "addresses": [{"address": "10.20.0.1/16"}]}
    assert public["ipam"] == {
        "type": "static",
        "addresses": [{"address": "172.30.2.10/24", "gateway": "172.30.2.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }


def test_macvlan_interfaces_on_the_card_of_each_host() -> None:
    behind = Route(network=IPv4Network("10.100.0.0/17"), gateway=IPv4Address("10.20.0.254"))
    update = {"attach": "macvlan", "bridge": "", "port": {"host-a": "eno1", "host-b": "ens3"}, "routes": (behind,)}
    provisioning = SITE.networks.provisioning.model_copy(update=update)
    site = SITE.model_copy(
        update={"networks": SITE.networks.model_copy(update={"provisioning": provisioning})},
    )
    for host, parent in (("host-a", "eno1"), ("host-b", "ens3")):
        found = [json.loads(text)["plugins"][0] for text in conflists(site, SERVICES, host).values()]
        assert [one["type"] for one in found] == ["macvlan", "bridge"]
        assert (found[0]["master"], found[0]["mode"]) == (parent, "bridge")
        assert found[0]["ipam"]["addresses"] == [{"address": "10.20.0.1/16"}]
        (one,) = macvlan_requests(site, host)
        assert (one.name, one.parent, one.address) == ("eth0", parent, "10.20.0.1/16")
        assert one.routes == ("10.100.0.0/17 via 10.20.0.254",)
    isolated = [json.loads(text)["plugins"][0] for text in conflists(site, SERVICES, "host-a", isolated=True).values()]
    assert [one["bridge"] for one in isolated] == list(isolated_bridges(site)), "the plugin would announce the address"


@pytest.mark.parametrize("isolated", [False, True])
def test_ports_have_the_mtu_of_the_bridge_that_they_are_to_be_on(isolated: bool) -> None:
    """A port with a smaller one makes that of the bridge smaller, also one that comes from an isolated instance."""
    texts = conflists(SITE, SERVICES, "host-a", isolated=isolated, mtus={"br-prov": 9000, "br-pub": 0})
    assert [json.loads(text)["plugins"][0].get("mtu") for text in texts.values()] == [9000, None]


def test_mac_addresses_of_networks() -> None:
    assert network_options(SITE) == [
        *("--net", "--network", "sms-sample-prov,sms-sample-pub"),
        *("--network-args", "sms-sample-prov:MAC=02:00:0a:14:00:01"),
        *("--network-args", "sms-sample-pub:MAC=02:00:c0:00:02:0a"),
    ]


def test_two_clusters_on_one_host() -> None:
    other = SITE.model_copy(update={"cluster": "other"})
    assert not set(conflists(SITE, SERVICES, "host-a")) & set(conflists(other, SERVICES, "host-a"))
    assert instance_name(SITE) != instance_name(other)
    mine, theirs = Places(SITE), Places(other)
    assert not {mine.overlay, mine.lease, mine.current, mine.lock} & {theirs.overlay, theirs.lease, theirs.current}


def test_start_isolates_from_the_host() -> None:
    argv = start_argv(SITE, CONFINED, "x.sif")
    assert {"--contain", "--cleanenv", "--no-home", "--net"} <= set(argv)
    assert argv[argv.index("--network") + 1] == "sms-sample-prov,sms-sample-pub", "eth0, eth1 in this order"
    assert argv[argv.index("--hostname") + 1] == "sms-services"
    assert argv[-2:] == ("x.sif", "sms-sample")


def test_no_name_servers() -> None:
    networks = SITE.networks.model_copy(update={"dns": ()})
    argv = start_argv(SITE.model_copy(update={"networks": networks}), CONFINED, "x.sif")
    assert argv[argv.index("--dns") + 1] == "127.0.0.1"


def test_seed_needs_no_network() -> None:
    argv = seed_argv(SITE, CONFINED, "x.sif", "o.img", "mark")
    assert argv[argv.index("--network") + 1] == "none" and "--network-args" not in argv


def test_stop_is_clean() -> None:
    argv = stop_argv(SITE, 150)
    assert argv[argv.index("--signal") + 1] == "SIGTERM"
    assert int(argv[argv.index("--timeout") + 1]) == 150


def test_lease_is_beside_the_overlay() -> None:
    """Hosts that share the overlay share the lease."""
    shared = SITE.overlay.model_copy(update={"directory": Path("/shared/overlays")})
    found = Places(SITE.model_copy(update={"overlay": shared}))
    assert found.lease.parent == found.overlay.parent
    assert str(found.overlay.parent) == "/shared/overlays"
