"""Roles of hosts, with hand-made hosts and links of every kind of capture."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.addresses import is_local, network
from analysis.errors import CaptureError
from analysis.host_index import is_group
from analysis.nodes import find_nodes
from analysis.observed import Host, Link, Role, Sample
from analysis.roles import find_roles, no_hosts_error
from analysis.servers import find_servers
from analysis.signatures import ICMP, TCP, UDP, Signature
from tests.unit.classify_cases import GATEWAY_MAC, PUBLIC_MAC, SMS_MAC

N, S, O, G, U = Role.NODE, Role.SMS, Role.OUTSIDE, Role.GROUP, Role.UNKNOWN  # noqa: E741


def mac(number: int) -> str:
    return f"52:54:00:01:00:{number:02x}"


@dataclass
class Net:
    """Hosts by address with their expected roles, and the links between them."""

    hosts: list[Host] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    expected: dict[str, Role] = field(default_factory=dict)

    def host(self, address: str, role: Role, *macs: str, via: str = "", claimed: str = "", out: bool = False) -> Net:
        sent = 0 if role == G or (via and not macs) else 10
        self.hosts.append(Host(len(self.hosts), address, macs, via, claimed, sent, 10, out))
        self.expected[address] = role
        return self

    def link(self, client: str, server: str, port: int, packets: int = 10, protocol: int = TCP) -> Net:
        index = {host.address: host.index for host in self.hosts}
        self.links.append(Link(index[client], index[server], protocol, port, packets, 100 * packets))
        return self


def offer(server: str) -> bytes:
    options = (
        b"\x35\x01\x02\x36\x04" + bytes(map(int, server.split("."))) + b"\x33\x04" + struct.pack("!I", 600) + b"\xff"
    )
    return struct.pack("!BBBBIHH", 2, 1, 6, 0, 1, 0, 0) + bytes(16 + 16 + 192) + b"\x63\x82\x53\x63" + options


def provisioning() -> Net:
    """On the management node's interface: every frame is to or from it."""
    net = Net().host("10.1.0.1", S, SMS_MAC, via=SMS_MAC, claimed=SMS_MAC)
    for number in (1, 2, 3):
        net.host(f"10.1.1.{number}", N, mac(number), via=mac(number), claimed=mac(number))
        net.link(f"10.1.1.{number}", "10.1.0.1", 6817)
    net.host("198.51.100.10", O, SMS_MAC, via=SMS_MAC).link("10.1.1.1", "198.51.100.10", 443, 50)
    net.host("203.0.113.7", O, via=SMS_MAC).link("10.1.1.2", "203.0.113.7", 443)
    net.host("255.255.255.255", G, via="ff:ff:ff:ff:ff:ff").host("10.1.255.255", G, via="ff:ff:ff:ff:ff:ff")
    net.host("224.0.0.251", G, via="01:00:5e:00:00:fb").host("0.0.0.0", N, mac(1), mac(2))
    return net.link("0.0.0.0", "255.255.255.255", 67, protocol=UDP).link("10.1.1.1", "224.0.0.251", 5353, protocol=UDP)


def two_addresses() -> Net:
    """An alias in its own network, IPv6, a public address that nodes use; a node with IPv6."""
    net = provisioning().host("10.1.0.2", S, SMS_MAC, via=SMS_MAC).link("10.1.1.1", "10.1.0.2", 80)
    net.host("fe80::1", S, SMS_MAC, via=SMS_MAC).host("192.0.2.10", S, SMS_MAC, via=SMS_MAC, claimed=SMS_MAC)
    net.host("fe80::5054:ff:fe01:1", N, mac(1), via=mac(1)).link("fe80::5054:ff:fe01:1", "fe80::1", 123, protocol=UDP)
    net.host("fd00:5::1", N, mac(1), via=mac(1)).host("ff02::1", G, via="33:33:00:00:00:01").host("::", N, mac(3))
    return net.link("10.1.1.2", "192.0.2.10", 22).link("fd00:5::1", "ff02::1", 0, protocol=58)


def cooked() -> Net:
    """`-i any` on the management node: only source link addresses, both sides of the NAT."""
    net = Net().host("10.1.0.1", S, SMS_MAC, out=True).host("192.0.2.10", S, PUBLIC_MAC, out=True)
    net.host("127.0.0.1", S, "00:00:00:00:00:00", out=True).link("127.0.0.1", "127.0.0.1", 6819, 900)
    for number in (1, 2):
        net.host(f"10.1.1.{number}", N, mac(number)).link(f"10.1.1.{number}", "10.1.0.1", 6817)
    net.host("198.51.100.10", O, GATEWAY_MAC, SMS_MAC, out=True)
    net.link("10.1.1.1", "198.51.100.10", 443, 50).link("192.0.2.10", "198.51.100.10", 443, 50)
    for number in range(5):
        net.host(f"203.{number}.113.7", O, GATEWAY_MAC).link("192.0.2.10", f"203.{number}.113.7", 123, protocol=UDP)
    net.host("192.0.2.77", O, mac(99)).link("192.0.2.77", "192.0.2.10", 22)
    return net.host("10.1.1.9", N).link("10.1.0.1", "10.1.1.9", 22)


def cooked_private() -> Net:
    """The same with a private network outside, as in the lab, and its only host directly attached."""
    net = Net().host("10.77.0.1", S, SMS_MAC, out=True).host("10.78.0.2", S, PUBLIC_MAC, out=True)
    net.host("10.77.1.1", N, mac(1)).link("10.77.1.1", "10.77.0.1", 6817)
    net.host("10.78.0.254", O, mac(77), SMS_MAC, out=True).link("10.77.1.1", "10.78.0.254", 80)
    net.link("10.78.0.2", "10.78.0.254", 80).link("10.78.0.2", "10.78.0.254", 123, protocol=UDP)
    return net.host("10.78.0.9", O, mac(78)).link("10.78.0.9", "10.78.0.2", 22)


def both_sides() -> Net:
    """Two Ethernet captures, one of each side: the link address of the public address is otherwise unknown."""
    net = provisioning()
    net.hosts[4] = Host(4, "198.51.100.10", (GATEWAY_MAC, SMS_MAC), SMS_MAC, "", 50, 50)
    net.host("192.0.2.10", S, PUBLIC_MAC, via=PUBLIC_MAC)
    return net.link("192.0.2.10", "198.51.100.10", 443, 40)


def mirror() -> Net:
    """A switch's mirror port: most packets are between nodes."""
    net = provisioning()
    for one, other in ((1, 2), (2, 3), (1, 3)):
        net.link(f"10.1.1.{one}", f"10.1.1.{other}", 22, 5000)
    for number in range(6):
        net.host(f"203.{number}.113.9", O, GATEWAY_MAC, via=GATEWAY_MAC).link("10.1.1.1", f"203.{number}.113.9", 443, 9)
    return net


def raw() -> Net:
    """A tunnel: no link addresses."""
    net = Net().host("10.1.0.1", S)
    for number in (1, 2, 3):
        net.host(f"10.1.1.{number}", N).link(f"10.1.1.{number}", "10.1.0.1", 514, 100, UDP)
    return net.host("198.51.100.1", O).link("10.1.1.1", "198.51.100.1", 443, 2)


def raw_public() -> Net:
    """A cluster with public addresses."""
    net = Net().host("192.0.2.1", S)
    for number in (2, 3, 4):
        net.host(f"192.0.2.{number}", N).link(f"192.0.2.{number}", "192.0.2.1", 6817)
    return net.host("203.0.113.5", O).link("203.0.113.5", "192.0.2.1", 22, 1)


def one_node() -> Net:
    """All packets are to or from both; one of them offers more services."""
    net = Net().host("10.1.0.1", S, SMS_MAC, via=SMS_MAC).host("10.1.1.1", N, mac(1), via=mac(1))
    return net.link("10.1.1.1", "10.1.0.1", 6817).link("10.1.0.1", "10.1.1.1", 22, 900)


NETS = {
    "provisioning": (provisioning, "100 % of all packets are to or from its link address"),
    "two addresses": (two_addresses, "100 % of all packets are to or from its link address"),
    "cooked": (cooked, "it is the capturing machine"),
    "cooked, private": (cooked_private, "it is the capturing machine"),
    "both sides": (both_sides, "of all packets are to or from its link address"),
    "mirror": (mirror, "it is the only candidate with a scheduler"),
    "raw": (raw, "99.3 % of all packets are to or from its address"),
    "raw, public": (raw_public, "100 % of all packets are to or from its address"),
    "one node": (one_node, "it serves more machines than any other: 1"),
}


def named(roles: bytes, hosts: list[Host]) -> dict[str, Role]:
    return {host.address: Role(roles[host.index]) for host in hosts}


@pytest.mark.parametrize("name", NETS)
def test_roles(name: str) -> None:
    make, why = NETS[name]
    net = make()
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected
    assert why in found.sms.found
    assert set(found.sms.addresses) == {address for address, role in net.expected.items() if role == S}


@pytest.mark.parametrize("name", NETS)
def test_given_is_the_same_as_detected(name: str) -> None:
    net = NETS[name][0]()
    first = find_roles(net.hosts, net.links, ())
    for sms in (first.sms.addresses[0], first.sms.mac.upper().replace(":", "-")):
        if sms:
            again = find_roles(net.hosts, net.links, (), sms=sms)
            assert named(again.by_index, net.hosts) == net.expected
            assert again.sms.found == "given"
            assert again.sms.addresses[0] == first.sms.addresses[0]


def test_the_address_that_nodes_use_comes_first() -> None:
    net = two_addresses()
    assert find_roles(net.hosts, net.links, ()).sms.addresses[0] == "10.1.0.1"
    assert find_roles(net.hosts, net.links, (), sms="192.0.2.10").sms.addresses[0] == "192.0.2.10"
    assert find_roles(net.hosts, net.links, ()).sms.mac == SMS_MAC


@pytest.mark.parametrize("port", [67, 68])
def test_dhcp_identifies_the_server(port: int) -> None:
    """Two machines, one connection: nothing else can."""
    net = Net().host("10.1.0.1", S, SMS_MAC, via=SMS_MAC).host("10.1.1.1", N, mac(1), via=mac(1))
    net.link("10.1.0.1", "10.1.1.1", 22)
    samples = [Sample(UDP, port, False, 0, 0, 1, offer("10.1.0.1"))]
    found = find_roles(net.hosts, net.links, samples)
    assert found.sms.found == "it answers the nodes' DHCP requests"
    assert named(found.by_index, net.hosts) == net.expected
    with pytest.raises(CaptureError) as caught:
        find_roles(net.hosts, net.links, ())
    assert "10.1.0.1 (52:54:00:00:00:01)" in caught.value.hint and "--sms" in caught.value.hint


def test_the_node_of_the_option_is_not_the_management_node() -> None:
    """--node restricts the capture to it: all packets are to or from it."""
    net = Net().host("10.1.1.1", N, mac(1), via=mac(1)).host("10.1.0.1", S, SMS_MAC, via=SMS_MAC)
    net.host("10.1.1.2", N, mac(2), via=mac(2)).link("10.1.1.2", "10.1.1.1", 4000, 500).link(
        "10.1.1.1", "10.1.0.1", 6817
    )
    for name in ("10.1.1.1", mac(1)):
        found = find_roles(net.hosts, net.links, (), node=name)
        assert named(found.by_index, net.hosts) == net.expected


def test_a_router_is_not_a_node() -> None:
    net = provisioning()
    for number in range(4):
        net.host(f"172.{16 + number}.0.5", O, GATEWAY_MAC, via=GATEWAY_MAC).link(
            f"172.{16 + number}.0.5", "10.1.0.1", 22
        )
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected


def test_a_router_of_two_addresses_of_the_internet_is_not_a_server() -> None:
    """A firewall beside the nodes; a login node has one such address."""
    net = provisioning().host("10.1.0.254", O, GATEWAY_MAC, via=GATEWAY_MAC, claimed=GATEWAY_MAC)
    for address in ("192.88.99.1", "198.18.0.9"):
        net.host(address, O, GATEWAY_MAC, via=GATEWAY_MAC)
        for node in ("10.1.1.1", "10.1.1.2", "10.1.1.3"):
            net.link(node, address, 443, 40)
    net.host("192.0.2.9", N, mac(1), via=mac(1)).link("192.0.2.9", "10.1.0.1", 22)
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected
    https = Signature("https", ports=((TCP, 443),), critical=True)
    assert find_servers(found, net.hosts, net.links, [https]).servers == ()


@pytest.mark.parametrize(
    ("sms", "message"),
    [
        ("10.9.9.9", "10.9.9.9 is not in the capture"),
        ("52:54:00:aa:aa:aa", "52:54:00:aa:aa:aa is not in the capture"),
        ("255.255.255.255", "is not a unicast address"),
        ("master", "neither an IP address nor a link address"),
        ("525400000001", "neither an IP address nor a link address"),
    ],
)
def test_given_wrongly(sms: str, message: str) -> None:
    net = provisioning()
    with pytest.raises(CaptureError) as caught:
        find_roles(net.hosts, net.links, (), sms=sms)
    assert message in caught.value.message
    assert "10.1.0.1" in caught.value.hint


def test_nothing_there() -> None:
    assert no_hosts_error("", {}).hint
    net = Net().host("224.0.0.1", G)
    with pytest.raises(CaptureError):
        find_roles(net.hosts, net.links, ())
    net = Net().host("127.0.0.1", S).link("127.0.0.1", "127.0.0.1", 6817)
    with pytest.raises(CaptureError, match="no compute node is in the capture") as caught:
        find_roles(net.hosts, net.links, ())
    assert "--nodes" in caught.value.hint


@pytest.mark.parametrize(
    ("address", "local", "net"),
    [
        ("10.1.2.3", True, "10.1"),
        ("172.15.0.1", False, "172.15"),
        ("172.31.0.1", True, "172.31"),
        ("100.64.0.1", True, "100.64"),
        ("100.128.0.1", False, "100.128"),
        ("8.8.8.8", False, "8.8"),
        ("fe80::1", True, "fe80:0000:0000:0000"),
        ("fd12::1", True, "fd12:0000:0000:0000"),
        ("2001:db8::1", False, "2001:0db8:0000:0000"),
        ("", False, ""),
    ],
)
def test_networks(address: str, local: bool, net: str) -> None:
    assert (is_local(address), network(address)) == (local, net)


def test_a_broadcast_with_a_machines_address_is_not_a_group() -> None:
    assert not is_group(Host(0, "10.1.1.5", (mac(1),), "ff:ff:ff:ff:ff:ff", "", 5, 5))
    assert is_group(Host(0, "10.1.255.255", (), "", "", 0, 5))


MACS = st.sampled_from(["", SMS_MAC, GATEWAY_MAC, mac(1), "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"])
ADDRESSES = st.one_of(
    st.just(""), st.ip_addresses().map(str), st.sampled_from(["0.0.0.0", "::", "10.1.0.1", "10.1.0.255"])
)


@given(st.data())
def test_no_capture_breaks_it(data: st.DataObject) -> None:
    names = data.draw(st.lists(ADDRESSES, max_size=8, unique=True))
    hosts = [
        Host(
            index,
            name,
            tuple(one for one in data.draw(st.lists(MACS, max_size=2, unique=True)) if one),
            data.draw(MACS),
            data.draw(MACS),
            data.draw(st.integers(0, 9)),
            data.draw(st.integers(0, 9)),
            data.draw(st.booleans()),
        )
        for index, name in enumerate(names)
    ]
    some = st.integers(0, max(len(hosts) - 1, 0))
    link = st.builds(
        Link, some, some, st.sampled_from([TCP, UDP, ICMP]), st.integers(0, 65535), st.integers(0, 99), st.just(1)
    )
    links = data.draw(st.lists(link, max_size=8)) if hosts else []
    sms = data.draw(st.sampled_from(["", *names]))
    try:
        found = find_roles(hosts, links, (), sms=sms)
    except CaptureError as error:
        assert error.hint
        return
    assert len(found.by_index) == len(hosts)
    assert set(found.sms.addresses) == {host.address for host in hosts if found.by_index[host.index] == S}


def test_a_link_address_that_only_forwards_is_not_the_management_node() -> None:
    """All packets are to or from it, but it has no address of its own."""
    net = Net().host("10.0.0.4", N, mac(1)).host("10.0.0.5", N, mac(2)).host("198.51.100.1", O, GATEWAY_MAC, PUBLIC_MAC)
    net.link("10.0.0.4", "198.51.100.1", 53).link("10.0.0.5", "198.51.100.1", 53)
    with pytest.raises(CaptureError, match="cannot be identified in the capture"):
        find_roles(net.hosts, net.links, ())


@pytest.mark.parametrize(
    "address, received, counted",
    [
        ("fe80::1", 0, False),  # a bridge, a switch: router solicitations, MLD reports
        ("fe80::1", 1, True),  # it is used
        ("10.1.1.9", 0, True),  # syslog over UDP: no answers
        ("2001:db8::9", 0, True),
    ],
)
def test_a_machine_that_only_announces_itself_is_not_a_node(address: str, received: int, counted: bool) -> None:
    node = Host(0, "10.1.1.1", (mac(1),), received=5)
    own = Host(1, "fe80::a", (mac(1),))  # a machine counts if any of its addresses is used
    machine = Host(2, address, (mac(2),), sent=3, received=received)
    found, apart = find_nodes((node, own, machine), bytes([N, N, N]))
    assert found[mac(1)] == ["10.1.1.1", "fe80::a"]
    assert (mac(2) in found) == counted
    assert (mac(2) in apart) != counted


def test_further_addresses_behind_a_router_have_no_name() -> None:
    """The core's host for all of them has the address "", as a missing --node has."""
    net = provisioning()
    net.hosts.append(Host(len(net.hosts), "", (SMS_MAC,), "", "", 50, 50))
    net.links.append(Link(1, len(net.hosts) - 1, TCP, 443, 1, 60))
    found = find_roles(net.hosts, net.links, ())
    assert found.sms.addresses == ("10.1.0.1",)
    assert found.sms.found == "100 % of all packets are to or from its link address"


def test_the_peer_of_the_node_of_the_option() -> None:
    net = Net().host("10.1.1.1", N, mac(1), via=mac(1)).host("10.1.0.1", S, SMS_MAC, via=SMS_MAC)
    found = find_roles(net.link("10.1.1.1", "10.1.0.1", 6817).hosts, net.links, (), node="10.1.1.1")
    assert found.sms.found == "it is the only machine that the node talks to"
    for number in range(4):
        net.host(f"203.{number}.113.9", O, GATEWAY_MAC, via=GATEWAY_MAC).link("10.1.1.1", f"203.{number}.113.9", 443)
    found = find_roles(net.hosts, net.links, (), node="10.1.1.1")
    assert named(found.by_index, net.hosts) == net.expected
    assert found.sms.found == "it is the only candidate that is not a router to outside addresses"


def behind_a_router(nodes: int) -> Net:
    """Nodes in another network, a router with an address in each; also a file server and a workstation there."""
    net = Net().host("10.1.0.1", S, SMS_MAC, via=SMS_MAC, claimed=SMS_MAC)
    for number in range(nodes):
        address = f"10.2.{number // 200}.{1 + number % 200}"
        net.host(address, N, GATEWAY_MAC, via=GATEWAY_MAC).link(address, "10.1.0.1", 514, protocol=UDP)
    net.host("10.2.9.9", N, GATEWAY_MAC, via=GATEWAY_MAC).link("10.1.0.1", "10.2.9.9", 22)
    net.host("172.16.3.3", O, GATEWAY_MAC, via=GATEWAY_MAC).link("172.16.3.3", "10.1.0.1", 443)
    net.host("172.17.3.3", O, GATEWAY_MAC, via=GATEWAY_MAC).link("172.17.3.3", "10.1.0.1", 22)
    net.host("198.51.100.7", O, GATEWAY_MAC, via=GATEWAY_MAC).link("198.51.100.7", "10.1.0.1", 514, protocol=UDP)
    return net.host("203.0.113.7", O, GATEWAY_MAC, via=GATEWAY_MAC).link("10.1.0.1", "203.0.113.7", 123, protocol=UDP)


@pytest.mark.parametrize("nodes", [5, 40, 450])
@pytest.mark.parametrize("sms", ["", "10.1.0.1", SMS_MAC])
def test_nodes_behind_a_router(nodes: int, sms: str) -> None:
    net = behind_a_router(nodes)
    found = find_roles(net.hosts, net.links, (), sms=sms)
    assert named(found.by_index, net.hosts) == net.expected
    assert len(find_nodes(net.hosts, found.by_index, net.links)[0]) == nodes + 1


@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_nodes_behind_a_router_are_counted_by_address(nodes: int) -> None:
    """The router itself, its link-local address too, is none of them; a node that the site names is not a router."""
    net = provisioning().host("fe80::1", O, GATEWAY_MAC, via=GATEWAY_MAC)
    for number in range(1, nodes + 1):
        address = f"10.100.0.{number}"
        net.host(address, N, GATEWAY_MAC, via=GATEWAY_MAC).link(address, "10.1.0.1", 6817)
    found = find_roles(net.hosts, net.links, (), nodes=["10.100.0.0/17"])
    assert named(found.by_index, net.hosts) == net.expected
    before = len(find_nodes(provisioning().hosts, found.by_index)[0])
    assert len(find_nodes(net.hosts, found.by_index, net.links, routed=found.routed)[0]) == before + nodes
    assert len(found.routed) == nodes
    assert not find_roles(provisioning().hosts, provisioning().links, (), nodes=["10.1.0.0/16"]).routed


def test_an_ipv6_network_behind_a_router_is_not_attached() -> None:
    """One of two resolvers answered over the gateway, the other not at all: both are outside, though in one /64."""
    net = both_sides()
    net.host("2001:4860:4860::8888", O, GATEWAY_MAC, SMS_MAC, via=GATEWAY_MAC)
    net.host("2001:4860:4860::8844", O, via=SMS_MAC)
    net.host("2606:4700:4700::1111", O, GATEWAY_MAC, SMS_MAC, via=GATEWAY_MAC)
    for address in ("2001:4860:4860::8888", "2001:4860:4860::8844", "2606:4700:4700::1111"):
        net.link("10.1.1.1", address, 53, protocol=UDP)
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_ipv6_network_of_other_machines_is_attached(nodes: int) -> None:
    net = provisioning().host("2001:db8:1:1::1", S, SMS_MAC, via=SMS_MAC)
    for number in range(1, nodes + 1):
        address = f"2001:db8:1:1::{number + 1:x}"
        net.host(address, N, mac(number), via=mac(number)).link(address, "2001:db8:1:1::1", 2049)
    net.host("2001:db8:2::7", O, SMS_MAC, via=SMS_MAC).link("2001:db8:1:1::2", "2001:db8:2::7", 443)
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected


def test_nodes_that_the_site_names() -> None:
    net = behind_a_router(3)
    net.expected["172.16.3.3"] = net.expected["172.17.3.3"] = N
    found = find_roles(net.hosts, net.links, (), nodes=["172.16.0.0/15", "10.2.0.0/16"])
    assert named(found.by_index, net.hosts) == net.expected
    for wrong in ("10.2.0.0/33", "n[1-8]", ""):
        with pytest.raises(CaptureError, match="is not a network"):
            find_roles(net.hosts, net.links, (), nodes=[wrong])
    with pytest.raises(CaptureError, match=r"no address of 10\.7\.0\.0/16 is in the capture") as caught:
        find_roles(net.hosts, net.links, (), nodes=["10.7.0.0/16"])
    assert "10.1.0.1" in caught.value.hint
    # The management node is in one of them.
    found = find_roles(net.hosts, net.links, (), nodes=["10.0.0.0/8"])
    assert found.sms.addresses == ("10.1.0.1",)


def bmc(net: Net) -> None:
    net.link("10.1.0.1", "10.1.1.9", 623, protocol=UDP).link("10.1.1.9", "10.1.0.1", 123, protocol=UDP)


def switch(net: Net) -> None:
    net.link("10.1.0.1", "10.1.1.9", 161, protocol=UDP).link("10.1.0.1", "10.1.1.9", 0, protocol=ICMP)


def trap(net: Net) -> None:
    net.link("10.1.1.9", "10.1.0.1", 162, protocol=UDP)


def monitored(net: Net) -> None:
    net.link("10.1.0.1", "10.1.1.9", 161, protocol=UDP).link("10.1.0.1", "10.1.1.9", 22)


def pinged(net: Net) -> None:
    net.link("10.1.0.1", "10.1.1.9", 0, protocol=ICMP)


def shared(net: Net) -> None:
    """A BMC with the node's own link address."""
    net.link("10.1.0.1", "10.1.1.9", 623, protocol=UDP).link("10.1.1.9", "10.1.0.1", 6817)


@pytest.mark.parametrize(
    ("make", "counted"), [(bmc, 3), (switch, 3), (trap, 3), (monitored, 4), (pinged, 4), (shared, 4)]
)
def test_hardware_is_not_a_node(make: Callable[[Net], None], counted: int) -> None:
    net = provisioning().host("10.1.1.9", N, mac(9), via=mac(9))
    make(net)
    found = find_roles(net.hosts, net.links, ())
    assert named(found.by_index, net.hosts) == net.expected  # its traffic still belongs to services
    nodes, apart = find_nodes(net.hosts, found.by_index, net.links)
    assert (len(nodes), mac(9) in apart) == (counted, counted == 3)


def test_hardware_is_counted_if_there_is_nothing_else() -> None:
    net = Net().host("10.1.0.1", S, SMS_MAC, via=SMS_MAC).host("10.1.1.9", N, mac(9), via=mac(9))
    bmc(net)
    assert len(find_nodes(net.hosts, bytes([S, N]), net.links)[0]) == 1


def test_a_relay_is_not_a_node() -> None:
    net = provisioning().host("10.1.0.254", N, GATEWAY_MAC, via=GATEWAY_MAC)
    net.link("10.1.0.254", "10.1.0.1", 67, protocol=UDP)
    request = bytes([1, 1, 6, 1]) + bytes(20) + bytes([10, 1, 0, 254]) + bytes(208)
    samples = [Sample(UDP, 67, True, 0, len(net.hosts) - 1, 0, request)]
    found = find_roles(net.hosts, net.links, samples)
    assert named(found.by_index, net.hosts) == net.expected
    assert GATEWAY_MAC in find_nodes(net.hosts, found.by_index, net.links, samples)[1]
    assert GATEWAY_MAC in find_nodes(net.hosts, found.by_index, net.links)[0]


def test_addresses_of_one_node() -> None:
    """One IPv4 and some IPv6 addresses are one node; many behind one link address are several nodes."""
    six = [Host(number, f"2001:db8::{number:x}", (mac(1),), received=1) for number in range(9)]
    assert len(find_nodes([*six, Host(9, "10.1.1.1", (mac(1),))], bytes([N] * 10))[0]) == 1
    both = [
        Host(number, f"10.2.0.{number}" if number < 8 else f"fd00:2::{number:x}", (mac(1),), received=1)
        for number in range(16)
    ]
    found, _ = find_nodes(both, bytes([N] * 16))
    assert len(found) == 8
    assert {len(addresses) for addresses in found.values()} == {2}


@pytest.mark.parametrize("sms", ["10.1.1.1", mac(2), "198.51.100.10"])
def test_a_given_management_node_that_clearly_is_wrong(sms: str) -> None:
    net = provisioning()
    found = find_roles(net.hosts, net.links, (), sms=sms)
    reason = "10.1.0.1 seems to be it: 100 % of all packets are to or from its link address"
    assert found.remarks[0] == f"{sms} was given as the management node, but {reason}"
    assert all("pass another router" in one for one in found.remarks[1:])


@pytest.mark.parametrize("sms", ["", "10.1.0.1", "10.1.0.2", SMS_MAC, "192.0.2.10", "fe80::1"])
def test_no_doubt_where_there_is_no_reason(sms: str) -> None:
    net = two_addresses()
    assert find_roles(net.hosts, net.links, (), sms=sms).remarks == ()


def test_no_doubt_of_a_mirror_port() -> None:
    """No machine has nearly all packets: the given one is trusted."""
    net = mirror()
    (router,) = find_roles(net.hosts, net.links, (), sms="10.1.1.1").remarks
    assert "pass another router" in router


@pytest.mark.parametrize(
    ("totals", "node", "message"),
    [
        ({"packets": 0, "other": {}, "skipped": {}}, "", "the capture holds no packet"),
        ({"packets": 0, "other": {}, "skipped": {}}, "10.9.9.9", "10.9.9.9 is not in the capture"),
        (
            {"packets": 0, "other": {}, "skipped": {"corrupt record": 7}},
            "",
            "the capture is unreadable: 7 corrupt record",
        ),
        ({"packets": 5, "other": {"frames of link type 105": (5, 99)}, "skipped": {}}, "", "5 frames of link type 105"),
        (
            {"packets": 5, "other": {"ARP": (5, 99)}, "skipped": {"corrupt record": 7}},
            "",
            "no IP packet was read: 5 ARP",
        ),
    ],
)
def test_why_there_is_nothing(totals: dict[str, Any], node: str, message: str) -> None:
    error = no_hosts_error(node, totals)
    assert message in error.message
    assert error.hint


def test_many_sources_take_linear_time() -> None:
    """Half of the core's address table; the limit is generous."""
    hosts = [Host(0, "10.1.0.1", (SMS_MAC,), SMS_MAC, SMS_MAC, 9, 9), Host(1, "10.1.1.1", (mac(1),), mac(1))]
    hosts += [
        Host(n, f"{20 + n // 65536}.{n // 256 % 256}.{n % 256}.7", (SMS_MAC,), "", SMS_MAC, 1) for n in range(2, 50000)
    ]
    links = [Link(1, 0, TCP, 6817, 9, 900), *(Link(n, 1, TCP, 22, 1, 60) for n in range(2, 50000))]
    begin = time.process_time()
    find_roles(hosts, links, (), sms="10.1.0.1")
    assert time.process_time() - begin < 5
