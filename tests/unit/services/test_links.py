"""Whether the container is connected, from the JSON of iproute2."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Any

import pytest

from appliance.config.model import ProvisioningNetwork, Site
from appliance.plan.services.links import judge_networks, read_links
from tests.sites import open_debian

UP = ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"]
Parts = dict[str, Any]


@pytest.fixture(scope="module")
def site() -> Site:
    return open_debian().site


def link(index: int, name: str, kind: str = "veth", *, master: str = "", peer: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"ifindex": index, "ifname": name, "flags": list(UP), "linkinfo": {"info_kind": kind}}
    if peer:
        found["link_index"] = peer
    if master:
        found["master"] = master
        found["linkinfo"] |= {"info_slave_kind": "bridge", "info_slave_data": {"state": "forwarding"}}
    return found


def connected(site: Site) -> Parts:
    """What a host prints where all is well; a VM's tap is on the bridge, too."""
    prov, pub = site.networks.provisioning, site.networks.public
    inside = [link(2, "eth0", peer=20), link(3, "eth1", peer=21)]
    for one, network in zip(inside, (prov, pub), strict=True):
        one["addr_info"] = [{"local": str(network.address.ip)}, {"local": "fe80::1"}]
    return {
        "host": [
            {},
            link(1, "lo", ""),
            link(10, prov.bridge, "bridge"),
            link(11, pub.bridge, "bridge"),
            link(12, "ens1", "", master=prov.bridge),
            link(13, "ens2", "", master=pub.bridge),
            link(14, "smsvm-p0a1b2c", "tun", master=prov.bridge),
            link(20, "veth20", master=prov.bridge, peer=2),
            link(21, "veth21", master=pub.bridge, peer=3),
        ],
        "inside": inside,
        "neighbours": [
            {"dst": "10.0.0.101", "dev": "eth0", "lladdr": "02:00:00:00:00:01", "state": ["REACHABLE"]},
            {"dst": "10.0.0.102", "dev": "eth0", "state": ["FAILED"]},
        ],
        "routes": [{"dst": "default", "gateway": "192.0.2.1", "dev": "eth1"}, {"dst": "10.0.0.0/16", "dev": "eth0"}],
    }


def printed(parts: Parts) -> str:
    return "".join(f"{name} {json.dumps(value)}\n" for name, value in parts.items())


def find(parts: Parts, name: str, where: str = "host") -> dict[str, Any]:
    return next(one for one in parts[where] if one.get("ifname") == name)


def problems(site: Site, parts: Parts, *, unreachable: bool = True) -> list[str]:
    networks = [str(site.networks.provisioning.address.network)] * unreachable
    return [
        problem
        for one in judge_networks(site, "host-a", read_links(printed(parts)), networks)
        for problem in one.problems
    ]


def test_connected(site: Site) -> None:
    links = read_links(printed(connected(site)))
    prov, pub = judge_networks(site, "host-a", links)
    assert (prov.port, prov.uplinks, prov.answering, prov.silent) == ("veth20", ("ens1",), 1, ("10.0.0.102",))
    assert (pub.port, pub.uplinks, pub.answering, pub.silent) == ("veth21", ("ens2",), 0, ())
    assert prov.problems == pub.problems == ()
    assert links.routes == (IPv4Network("0.0.0.0/0"), IPv4Network("10.0.0.0/16"))


def off_the_bridge(parts: Parts, name: str) -> None:
    find(parts, name).pop("master")


def without(parts: Parts, name: str, where: str = "host") -> None:
    parts[where].remove(find(parts, name, where))


def delete_bridge(parts: Parts) -> None:
    bridge = parts["host"][2]["ifname"]
    parts["host"] = [one for one in parts["host"] if one.get("ifname") != bridge]
    for one in parts["host"]:
        if one.get("master") == bridge:
            one.pop("master")


def flags(parts: Parts, name: str, value: list[str], where: str = "host") -> None:
    find(parts, name, where)["flags"] = value


def block(parts: Parts, name: str) -> None:
    find(parts, name)["linkinfo"]["info_slave_data"]["state"] = "listening"


def silence(parts: Parts) -> None:
    parts["neighbours"][0]["state"] = ["FAILED"]


def gateway(parts: Parts) -> None:
    parts["neighbours"] += [{"dst": GATEWAY, "dev": "eth1", "state": ["FAILED"]}]
    parts["neighbours"] += [{"dst": "192.0.2.77", "dev": "eth1", "state": ["REACHABLE"]}]


GATEWAY = str(open_debian().site.networks.public.gateway)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: off_the_bridge(parts, "veth20"), ["veth20, the port of the container's eth0, is not on bridge"]),
        (lambda parts: off_the_bridge(parts, "ens1"), ["has no uplink: none of its ports leads out of the host"]),
        (delete_bridge, ["does not exist", "veth20, the port of the container's eth0, is not on bridge"]),
        (lambda parts: flags(parts, "ens1", ["UP"]), ["has no uplink: ens1 has no carrier"]),
        (lambda parts: flags(parts, "ens2", []), ["has no uplink: ens2 is down"]),
        (lambda parts: block(parts, "ens1"), ["ens1 does not forward: its spanning tree state is listening"]),
        (lambda parts: flags(parts, "veth21", []), ["veth21, the port of the container's eth1, is down"]),
        (lambda parts: without(parts, "veth20"), ["eth0 of the container leads to no port of this host"]),
        (lambda parts: without(parts, "eth0", "inside"), ["the container has no interface eth0"]),
        (lambda parts: flags(parts, "eth0", [], "inside"), ["eth0 of the container is down"]),
        (lambda parts: find(parts, "eth1", "inside").pop("addr_info"), ["eth1 of the container has lost its address"]),
        (lambda parts: parts["host"][2]["flags"].remove("UP"), ["is down"]),
        (lambda parts: parts["host"][2]["linkinfo"].clear(), ["is not a bridge"]),
        (silence, ["no neighbour of the container's eth0 answers"]),
        (gateway, ["the gateway"]),
    ],
)
def test_each_fault_is_named(site: Site, change: Callable[[Parts], object], words: list[str]) -> None:
    parts = connected(site)
    change(parts)
    found = problems(site, parts)
    assert len(found) == len(words), found
    for problem, part in zip(found, words, strict=True):
        assert part in problem


CABINET, ROUTER = "10.100.0.0/17", "10.0.0.254"


def routed(site: Site) -> tuple[Site, Parts]:
    """A site with nodes behind a router, which is the container's only neighbour on that network."""
    document = site.networks.provisioning.model_dump() | {"routes": [{"network": CABINET, "gateway": ROUTER}]}
    network = ProvisioningNetwork.model_validate(document)
    parts = connected(site)
    parts["neighbours"] = [{"dst": ROUTER, "dev": "eth0", "lladdr": "02:00:00:00:00:fe", "state": ["REACHABLE"]}]
    parts["routes"] += [{"dst": CABINET, "gateway": ROUTER, "dev": "eth0"}]
    return site.model_copy(update={"networks": site.networks.model_copy(update={"provisioning": network})}), parts


def test_nodes_behind_a_router(site: Site) -> None:
    """A router that does not answer is a fault if none of its nodes can be reached, whatever else is on its network."""
    with_route, parts = routed(site)
    assert problems(with_route, parts) == []
    parts["neighbours"][0]["state"] = ["FAILED"]
    bridge = site.networks.provisioning.bridge
    for more in ([], [{"dst": "10.0.0.101", "dev": "eth0", "state": ["REACHABLE"]}]):
        parts["neighbours"] += more
        found = judge_networks(with_route, "host-a", read_links(printed(parts)), [CABINET])
        assert found[0].problems == (f"the router {ROUTER} to {CABINET} does not answer on {bridge}",)
        assert judge_networks(with_route, "host-a", read_links(printed(parts)))[0].problems == ()


def test_a_route_that_the_container_lacks(site: Site) -> None:
    with_route, parts = routed(site)
    parts["routes"].pop()
    (found,) = problems(with_route, parts)
    assert f"no route to {CABINET}" in found
    parts["inside"].clear()
    assert not any("no route" in problem for problem in problems(with_route, parts)), "the interface lacks, too"


def test_neighbours_that_were_switched_off_are_no_fault(site: Site) -> None:
    """The kernel keeps them as FAILED, for days if there are fewer than gc_thresh1."""
    parts = connected(site)
    silence(parts)
    assert problems(site, parts, unreachable=False) == []
    assert judge_networks(site, "host-a", read_links(printed(parts)))[0].silent == ("10.0.0.101", "10.0.0.102")


def test_a_neighbour_that_may_yet_answer_is_not_silent(site: Site) -> None:
    parts = connected(site)
    parts["neighbours"][0]["state"] = ["INCOMPLETE"]
    gateway(parts)
    parts["neighbours"][2]["state"] = ["INCOMPLETE"]
    assert problems(site, parts) == []


@pytest.mark.parametrize(
    "output",
    [
        "",
        "host []\n",
        "host {\ninside []\nneighbours []\nroutes []\n",
        'host ["x"]\ninside []\nneighbours []\nroutes []\n',
        'host []\ninside []\nneighbours []\nroutes [{"dst": "1.2.3.4/99"}]\n',
        "host " + "[" * 100_000 + "\ninside []\nneighbours []\nroutes []\n",
    ],
)
def test_other_output_is_an_error(output: str) -> None:
    with pytest.raises(ValueError):
        read_links(output)


def mtus(parts: Parts, **values: int) -> None:
    for where in ("host", "inside"):
        for one in parts[where]:
            if one:
                one["mtu"] = values.get(one["ifname"], 1500)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        ({"br-prov": 9000, "ens1": 9000, "veth20": 9000, "eth0": 9000}, []),
        (
            {"br-prov": 9000, "ens1": 9000, "smsvm-p0a1b2c": 1500},
            ["eth0 is 1500 (container) and 1500 (port), and"],
        ),
        ({"br-prov": 9000, "ens1": 9000, "veth20": 9000}, ["eth0 is 1500 (container), and that of br-prov 9000"]),
        ({"br-prov": 9000, "ens1": 1450, "veth20": 9000, "eth0": 9000}, ["that of br-prov 1450"]),
        # The bridge is made for more than its card.
        ({"br-prov": 9000}, []),
        ({"br-pub": 1400}, ["eth1 is 1500 (container) and 1500 (port), and that of br-pub 1400"]),
    ],
)
def test_an_mtu_that_loses_frames(site: Site, values: dict[str, int], words: list[str]) -> None:
    parts = connected(site)
    mtus(parts, **values)
    found = problems(site, parts)
    assert len(found) == len(words) and all(part in one for part, one in zip(words, found, strict=True)), found


def test_the_mtu_of_a_card(site: Site) -> None:
    macvlan, parts = on_cards(site)
    mtus(parts, ens1=9000, eth0=9000)
    assert problems(macvlan, parts) == []
    mtus(parts, ens1=9000)
    (found,) = problems(macvlan, parts)
    assert "eth0 is 1500 (container), and that of ens1 9000" in found


ANSWER = "ARPING 10.20.0.1 from 0.0.0.0 eth0 Unicast reply from 10.20.0.1 [02:00:00:00:00:99] 0.6ms Sent 1 probes"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("arping 10.20.0.1 0 ARPING 10.20.0.1 from 0.0.0.0 eth0 Sent 1 probes", []),
        (f"arping 10.20.0.1 1 {ANSWER}", ["another machine, 02:00:00:00:00:99, answers for the container's address"]),
        ("arping 10.20.0.1 1 garbled \x1b]0;x\x07", ["another machine, unknown, answers"]),
        ("arping 10.20.0.1 127 sh: 1: arping: not found", ["whether another machine has 10.20.0.1 is not known"]),
        ("arping 10.20.0.1 2 arping: Interface eth0 is down", []),
        (f"arping 10.20.0.77 1 {ANSWER}", []),
        (f"arping 10.20.0.1 999999 {ANSWER}", []),
    ],
)
def test_another_machine_with_the_address(site: Site, line: str, words: list[str]) -> None:
    found = judge_networks(site, "host-a", read_links(f"{line}\n{printed(connected(site))}"))
    seen = [problem for one in found for problem in one.problems]
    assert len(seen) == len(words) and all(part in one for part, one in zip(words, seen, strict=True)), seen


def test_names_are_printable(site: Site) -> None:
    parts = connected(site)
    find(parts, "ens1")["ifname"] = "\x1b]0;x\x07"
    prov, _ = judge_networks(site, "host-a", read_links(printed(parts)))
    assert "".join(prov.uplinks).isprintable()


def on_cards(site: Site) -> tuple[Site, Parts]:
    """A site whose provisioning network is attached with macvlan, and what a host prints where all is well."""
    provisioning = site.networks.provisioning.model_copy(update={"attach": "macvlan", "bridge": "", "port": "ens1"})
    parts = connected(site)
    parts["host"] = [
        one for one in parts["host"] if one.get("ifname") not in (site.networks.provisioning.bridge, "veth20")
    ]
    for name in ("ens1", "smsvm-p0a1b2c"):
        find(parts, name).pop("master")
    eth0 = find(parts, "eth0", "inside")
    eth0 |= {
        "link_index": 12,
        "linkinfo": {"info_kind": "macvlan", "info_data": {"mode": "bridge"}},
        "qdisc": "noqueue",
    }
    return site.model_copy(update={"networks": site.networks.model_copy(update={"provisioning": provisioning})}), parts


def test_connected_to_a_card(site: Site) -> None:
    macvlan, parts = on_cards(site)
    prov, pub = judge_networks(macvlan, "host-a", read_links(printed(parts)))
    assert (prov.attach, prov.bridge, prov.port, prov.uplinks) == ("macvlan", "ens1", "ens1", ("ens1",))
    assert prov.problems == pub.problems == () and pub.attach == "bridge"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: flags(parts, "ens1", ["UP"]), ["ens1, which carries the container's eth0, has no carrier"]),
        (lambda parts: flags(parts, "ens1", []), ["ens1, which carries the container's eth0, is down"]),
        (lambda parts: without(parts, "ens1"), ["does not exist", "eth0 of the container is not a macvlan interface"]),
        (lambda parts: find(parts, "eth0", "inside").update(link_index=13), ["not a macvlan interface on ens1"]),
        (lambda parts: find(parts, "eth0", "inside").update(qdisc="blackhole"), ["eth0 of the container is detached"]),
        (lambda parts: find(parts, "eth0", "inside")["linkinfo"]["info_data"].update(mode="source"), ["is detached"]),
        (lambda parts: flags(parts, "eth0", [], "inside"), ["eth0 of the container is down"]),
        (lambda parts: without(parts, "eth0", "inside"), ["the container has no interface eth0"]),
        (lambda parts: find(parts, "eth0", "inside").pop("addr_info"), ["eth0 of the container has lost its address"]),
    ],
)
def test_each_fault_on_a_card_is_named(site: Site, change: Callable[[Parts], object], words: list[str]) -> None:
    macvlan, parts = on_cards(site)
    change(parts)
    found = problems(macvlan, parts)
    assert len(found) == len(words), found
    for problem, part in zip(found, words, strict=True):
        assert part in problem
