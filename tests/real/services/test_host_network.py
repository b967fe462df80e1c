"""The network of an admin host is the site's: verbs that start or stop something change nothing of it but links of sms.

The host is as sites have it: jumbo frames, a bridge that takes MTU and MAC address from its ports, and an address and a
default route by router advertisements.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from appliance.host.netns import Netns
from appliance.operations.lab import demo
from tests.hostnet import read_network, unchanged
from tests.real.conftest import NODES, Playground
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.real.services.test_apply import applied
from tests.real.services.test_apply_switch import assert_one_instance, other_dns
from tests.waiting import wait_until

pytestmark = pytest.mark.real

MAC = "fc:34:97:00:00:0a"
"""Of a network card: higher than nearly all addresses that the kernel draws for a virtual cable."""
ADDRESS, PREFIX, JUMBO = "10.77.0.1", "fd00:77:1::", 9000
ROUTER = "net.ipv6.conf.eth0.forwarding="
ADVERTISE = """
import ipaddress, socket, struct, sys
to, prefix = sys.argv[1:]
option = struct.pack("!BBBBIII16s", 3, 4, 64, 0xc0, 86400, 86400, 0, ipaddress.IPv6Address(prefix).packed)
with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as one:
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
    there = (to, 0, 0, socket.if_nametoindex("eth0"))
    one.sendto(struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 9000, 0, 0) + option, there)
"""
"""A router advertisement (RFC 4861) to one host: a prefix for addresses, and a default route."""


def batch(host: Netns, *lines: str) -> None:
    host.run("ip", "-batch", "-", input="".join(f"{line}\n" for line in lines).encode())


def set_mtu(playground: Playground, value: int) -> None:
    """Of the way from host-a to node1: the switch's ports, and the node."""
    switch = ("ip", "-n", playground.lab.layout.namespace("switch"), "link", "set")
    for port in ("p-host-a", "p-host-b", "p-node1"):
        subprocess.run([*switch, port, "mtu", str(value)], check=True)
    batch(playground.host("node1"), f"link set eth0 mtu {value}")


def link_of(host: Netns, name: str) -> dict[str, object]:
    shown: list[dict[str, object]] = json.loads(host.run("ip", "-json", "address", "show", "dev", name).stdout)
    return shown[0]


def addresses(host: Netns, name: str) -> list[dict[str, object]]:
    found = link_of(host, name)["addr_info"]
    assert isinstance(found, list)
    return found


def make_bridge(host: Netns, mac: str, mtu: int, fixed: str, address: dict[str, object]) -> None:
    """Make br-prov again on its card."""
    batch(
        host,
        "link set prov0 nomaster",
        "link delete br-prov",
        f"link set prov0 address {mac} mtu {mtu}",
        f"link add br-prov {fixed} type bridge stp_state 0 forward_delay 0",
        "link set prov0 master br-prov up",
        "link set br-prov up",
        f"address add {address['local']}/{address['prefixlen']} dev br-prov",
    )


@pytest.fixture
def site_host(stopped: Playground) -> Iterator[Playground]:
    """host-a with a provisioning network as sites have it; nothing runs there."""
    host, node = stopped.host("host-a"), stopped.host("node1")
    (address,) = [one for one in addresses(host, "br-prov") if one["family"] == "inet"]
    bridge, card = link_of(host, "br-prov"), link_of(host, "prov0")
    set_mtu(stopped, JUMBO)
    make_bridge(host, MAC, JUMBO, "", address)
    try:
        assert (link_of(host, "br-prov")["address"], link_of(host, "br-prov")["mtu"]) == (MAC, JUMBO)
        wait_until(lambda: local_of(host) != "", "its link-local address")
        node.run("sysctl", "-w", ROUTER + "1")  # else it says that it is none, when it is asked for its MAC address
        node.run("python3", "-c", ADVERTISE, local_of(host), PREFIX)
        wait_until(lambda: any(str(one["local"]).startswith("fd00:77:1:") for one in settled(host)), "its address")
        assert "default via fe80:" in host.run("ip", "-6", "route").text
        yield stopped
    finally:
        stopped.sms("-q", "stop", ok=None)
        make_bridge(host, str(card["address"]), 1500, f"address {bridge['address']}", address)
        set_mtu(stopped, 1500)
        node.run("sysctl", "-w", ROUTER + "0")


def settled(host: Netns) -> list[dict[str, object]]:
    return [one for one in addresses(host, "br-prov") if not one.get("tentative")]


def local_of(host: Netns) -> str:
    """The link-local address of its bridge."""
    return next((str(one["local"]) for one in settled(host) if str(one["local"]).startswith("fe80:")), "")


def test_a_start_that_is_killed_a_start_and_a_stop(site_host: Playground) -> None:
    """Frames of 9000 bytes pass between a node and the container."""
    host, node = site_host.host("host-a"), site_host.host("node1")
    with unchanged(host):
        with unchanged(host, own=True):
            process = begin(site_host, "start")
            wait_for_step(process, "start the instance")
            kill_sms(process.pid)
            process.wait()
        with unchanged(host, own=True):
            site_host.sms("-q", "start")
        wait_until(lambda: node.works("ping", "-M", "do", "-s", "8900", "-c", "1", "-W", "2", ADDRESS), "a large frame")
        assert link_of(host, "br-prov")["mtu"] == JUMBO
        site_host.sms("-q", "stop")


def test_an_address_that_the_host_has_is_refused(stopped: Playground) -> None:
    """On any interface: the host does not answer its own probes."""
    host = stopped.host("host-a")
    host.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    try:
        with unchanged(host):
            error = json.loads(stopped.sms("-q", "start", "--json", ok=(3,)).stdout)["error"]
            assert f"{ADDRESS}, an address of the container, is the host's own on lo" in error["message"]
            checks = json.loads(stopped.sms("doctor", "--json", ok=(4,)).stdout)["checks"]
        assert [one["state"] for one in checks if one["what"] == f"address {ADDRESS}"] == ["missing"]
    finally:
        host.run("ip", "address", "del", f"{ADDRESS}/32", "dev", "lo")


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
def test_a_start_that_is_killed_at_any_moment(site_host: Playground, delay_s: float) -> None:
    host = site_host.host("host-a")
    with unchanged(host):
        with unchanged(host, own=True):
            process = begin(site_host, "start")
            wait_for_step(process, "check the host")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay_s)
            kill_sms(process.pid)
            process.wait()
        with unchanged(host, own=True):
            site_host.sms("-q", "start")
            wait_until(lambda: site_host.host("node1").works("ping", "-c", "1", "-W", "2", ADDRESS), "the container")
        site_host.sms("-q", "stop")
        site_host.assert_nothing_runs()


@pytest.mark.full
def test_a_migration_there_and_back_and_a_second_instance(site_host: Playground) -> None:
    hosts = [site_host.host(name) for name in ("host-a", "host-b")]
    with unchanged(*hosts):
        with unchanged(*hosts, own=True):
            site_host.sms("-q", "start")
            demo.wait_idle(site_host.host("node1"), NODES)
            assert applied(site_host, site_host.variant("switched.yaml", other_dns))["switched"]
            assert applied(site_host, "/etc/sms/sms.yaml")["switched"]
        assert_one_instance(site_host)
        with unchanged(*hosts, own=True):
            site_host.sms("-q", "migrate", "host-b", "--force", on="admin")
            site_host.sms("-q", "migrate", "host-a", "--force", on="admin")
        site_host.sms("-q", "stop")


@pytest.mark.full
def test_what_is_there_of_the_host_is_compared(site_host: Playground) -> None:
    """The comparison finds each kind of change, so that the others cannot pass by seeing nothing."""
    host = site_host.host("host-a")
    before = read_network(host)
    kinds = {name.partition(" ")[0] for name in before}
    assert {"sysctl", "link", "address", "route", "rule", "nftables"} <= kinds
