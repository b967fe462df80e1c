"""Whether the container is connected: bridge, port, uplink and neighbours of each of its two networks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from appliance.config.model import Network, ProvisioningNetwork, PublicNetwork, Site
from appliance.plan.services.network import INTERFACES, VM_TAP
from appliance.shared.ports import is_macvlan_attached
from appliance.text import one_line

SILENT = "FAILED"
"""State of a neighbour that did not answer ARP requests; INCOMPLETE is one that may still do."""
GUESTS = ("veth", VM_TAP)
"""How ports are named that lead to containers (CNI's plugins, Docker, LXC) and to virtual machines of this program."""
NAME_LENGTH = 15
"""Characters of an interface's name."""
ARPING = re.compile(r"arping ([0-9.]{7,15}) ([0-9]{1,3}) (.*)")
TAKEN, NO_PROGRAM = 1, 127
"""Exit status of ``arping -D``: somebody has answered; that of a shell that does not find it.

Others are of an interface that is down, which is shown as such.
"""


@dataclass(frozen=True)
class Link:
    """A network interface. ``peer``: index of a veth pair's other end or a parent, or 0; ``master``: its bridge.

    ``attached``: it is not a macvlan interface that was detached (``appliance.shared.ports``). ``fault``: why it
    transports no frames, empty if it is up, has a carrier and its bridge forwards.
    """

    name: str
    index: int
    peer: int
    kind: str
    master: str
    up: bool
    fault: str
    addresses: frozenset[str] = frozenset()
    attached: bool = True
    mtu: int = 0


@dataclass(frozen=True)
class Links:
    """Interfaces of the host, and of the instance with its neighbours (address to state) and routes."""

    host: tuple[Link, ...] = ()
    inside: tuple[Link, ...] = ()
    neighbours: tuple[tuple[str, str, str], ...] = ()
    """Interface, address and state of each neighbour of the instance."""
    routes: tuple[IPv4Network, ...] = ()
    answers: tuple[tuple[str, int, str], ...] = ()
    """Address of the instance, exit status of arping(8) on it, and its output."""


@dataclass(frozen=True)
class NetworkState:
    """How the container is connected to one of its networks.

    ``bridge``: the parent, if ``attach`` is macvlan. ``port``: the host's end of its interface; ``uplinks``: the usable
    other ports of the bridge, except for those of the provisioning VM; a parent is both. ``answering``: number of its
    neighbours that are not ``silent``, addresses that did not answer ARP requests. ``problems``: why it is not
    connected. ``mtu``: what the container's interface and its port should get; 0 if they have it.
    """

    name: str
    attach: str
    bridge: str
    port: str
    uplinks: tuple[str, ...]
    answering: int
    silent: tuple[str, ...]
    problems: tuple[str, ...]
    mtu: int = 0


def read_links(output: str) -> Links:
    """Parse the output of ``definitions/scripts/collect-links``.

    Raises:
        ValueError: it lacks a part, or one is not the JSON that iproute2 prints.
    """
    lines = output.splitlines()
    parts = dict(line.split(" ", 1) for line in lines if " " in line)
    try:
        found = {name: json.loads(parts[name] or "[]") for name in ("host", "inside", "neighbours", "routes")}
        return Links(
            read_ip_links(found["host"]),
            read_ip_links(found["inside"]),
            tuple((str(one["dev"]), str(one["dst"]), _state(one)) for one in found["neighbours"] if one),
            tuple(_read_route(str(one["dst"])) for one in found["routes"] if one),
            tuple((one[1], int(one[2]), one[3]) for line in lines if (one := ARPING.fullmatch(line))),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the output of ip: {type(error).__name__} {error}") from error


def read_ip_links(found: Sequence[dict[str, Any]]) -> tuple[Link, ...]:
    """Return interfaces as ``ip -json -details link show`` prints them.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: they do not have that form.
    """
    return tuple(_read_link(one) for one in found if one)


def find_mtu(links: Sequence[Link], uplink: str) -> int:
    """Return the largest MTU whose frames pass a bridge and its ports, or a parent of macvlan interfaces.

    Ports of containers and of virtual machines do not count: theirs should follow it.

    Args:
        links: those of the host; without the uplink it is 0.
    """
    own = {one.name for one in links if one.name == uplink}
    ports = {one.name for one in links if one.master == uplink and not is_guest(one.name, one.kind)}
    return min((one.mtu for one in links if own and one.name in own | ports), default=0)


def is_guest(name: str, kind: str) -> bool:
    """Return whether a port leads to a container or a virtual machine: ``kind`` of taps is tun."""
    return name.startswith(GUESTS) or kind == "tun"


def find_user(output: str) -> str:
    """Return the MAC address in arping's output that uses the address: it replied, or just announced or asked."""
    found = re.search(r"(?:Unicast|Broadcast) (?:reply|request) from \S+ \[([0-9A-Fa-f:]{17})\]", output)
    return found.group(1).lower() if found else "unknown"


def _read_link(one: dict[str, Any]) -> Link:
    flags, info = one["flags"], one.get("linkinfo", {})
    slave = info.get("info_slave_data", {}) if info.get("info_slave_kind") == "bridge" else {}
    fault = ""
    if "UP" not in flags:
        fault = "is down"
    elif "LOWER_UP" not in flags:
        fault = "has no carrier"
    elif slave.get("state", "forwarding") != "forwarding":
        fault = f"does not forward: its spanning tree state is {_name(slave['state'])}"
    return Link(
        _name(one["ifname"]),
        int(one["ifindex"]),
        int(one.get("link_index") or 0),
        str(info.get("info_kind", "")),
        _name(one.get("master", "")),
        "UP" in flags,
        fault,
        frozenset(str(entry.get("local")) for entry in one.get("addr_info", ())),
        info.get("info_kind") != "macvlan" or is_macvlan_attached(one, int(one.get("link_index") or 0)),
        int(one.get("mtu") or 0),
    )


def _name(value: object) -> str:
    return one_line(str(value), NAME_LENGTH)


def _state(neighbour: dict[str, Any]) -> str:
    return str((neighbour.get("state") or [""])[0])


def _read_route(destination: str) -> IPv4Network:
    return IPv4Network("0.0.0.0/0" if destination == "default" else destination, strict=False)


def judge_networks(site: Site, host: str, links: Links, unreachable: Collection[str] = ()) -> tuple[NetworkState, ...]:
    """Judge both networks of the container on an admin host.

    Args:
        unreachable: networks of which no node can be reached. Neighbours alone prove nothing: those that were switched
            off stay in the table as FAILED.
    """
    names = ("provisioning", "public")
    networks = (site.networks.provisioning, site.networks.public)
    return tuple(
        _judge(name, network, _Attachment(interface, network.uplink(host)), links, unreachable)
        for name, network, interface in zip(names, networks, INTERFACES, strict=True)
    )


@dataclass(frozen=True)
class _Attachment:
    """An interface of the container, and the bridge or parent of the host that it belongs to."""

    interface: str
    uplink: str


def _judge(name: str, network: Network, at: _Attachment, links: Links, unreachable: Collection[str]) -> NetworkState:
    interface, uplink = at.interface, at.uplink
    inside = next((link for link in links.inside if link.name == interface), None)
    judge = _judge_macvlan if network.attach == "macvlan" else _judge_bridge
    port, usable, problems = judge(network, at, inside, links)
    neighbours = {address: state for device, address, state in links.neighbours if device == interface}
    silent = tuple(sorted(address for address, state in neighbours.items() if state == SILENT))
    routes = network.routes if isinstance(network, ProvisioningNetwork) else ()
    mtu, wrong = _judge_mtu(at, inside, port, links.host)
    problems += wrong
    problems += _answer_problems(str(network.address.ip), links)
    problems += [
        f"the container has no route to {route.network}: `sms apply` sets it"
        for route in routes
        if inside and route.network not in links.routes
    ]
    if isinstance(network, PublicNetwork) and str(network.gateway) in silent:
        problems.append(f"the gateway {network.gateway} does not answer on {uplink}")
    # A router that was off stays in the table as FAILED, too, until something is sent to it again.
    elif lost := [one for one in routes if str(one.gateway) in silent and str(one.network) in unreachable]:
        problems += [f"the router {one.gateway} to {one.network} does not answer on {uplink}" for one in lost]
    elif silent and len(silent) == len(neighbours) and str(network.address.network) in unreachable:
        problems.append(f"no neighbour of the container's {interface} answers on {uplink} ({len(silent)} known)")
    return NetworkState(
        name,
        network.attach,
        uplink,
        port,
        usable,
        len(neighbours) - len(silent),
        tuple(one_line(address, 45) for address in silent),
        tuple(problems),
        mtu,
    )


def _judge_mtu(at: _Attachment, inside: Link | None, port: str, host: Sequence[Link]) -> tuple[int, list[str]]:
    """Return the MTU that an interface of the container or its port should get, and why; 0 if both have it.

    A frame that is larger than that of one of them vanishes there.
    """
    wanted = find_mtu(host, at.uplink)
    ends = {"container": inside, "port": next((one for one in host if one.name == port != at.uplink), None)}
    different = {where: one.mtu for where, one in ends.items() if one and one.mtu not in (0, wanted)}
    if not wanted or not different:
        return 0, []
    ours = " and ".join(f"{mtu} ({where})" for where, mtu in different.items())
    return wanted, [
        f"the MTU of the container's {at.interface} is {ours}, and that of {at.uplink} {wanted}: larger packets are "
        "lost; `sms apply` sets it"
    ]


def _answer_problems(address: str, links: Links) -> list[str]:
    """Return which other machine has an address of the container, or why that is not known."""
    for probed, status, output in links.answers:
        if probed == address and status == TAKEN:
            return [
                f"another machine, {find_user(output)}, answers for the container's address {address}: "
                "some nodes reach it instead; find it by that MAC address in the tables of the switches"
            ]
        if probed == address and status == NO_PROGRAM:
            return [f"whether another machine has {address} is not known: {one_line(output, 120)}"]
    return []


def _judge_macvlan(
    network: Network, at: _Attachment, inside: Link | None, links: Links
) -> tuple[str, tuple[str, ...], list[str]]:
    """Return port, usable uplinks and problems of a macvlan interface."""
    parent = next((link for link in links.host if link.name == at.uplink), None)
    problems: list[str] = []
    if parent is None:
        problems.append(f"{at.uplink}, which carries the container's {at.interface}, does not exist")
    elif parent.fault:
        problems.append(f"{at.uplink}, which carries the container's {at.interface}, {parent.fault}")
    if inside is None:
        problems.append(f"the container has no interface {at.interface}")
    elif inside.kind != "macvlan" or parent is None or inside.peer != parent.index:
        problems.append(f"{at.interface} of the container is not a macvlan interface on {at.uplink}")
    elif not inside.attached and inside.up:
        problems.append(f"{at.interface} of the container is detached from {at.uplink}")
    problems += _inside_problems(network, at.interface, inside)
    usable = (at.uplink,) if parent and not parent.fault else ()
    return at.uplink if parent else "", usable, problems


def _judge_bridge(
    network: Network, at: _Attachment, inside: Link | None, links: Links
) -> tuple[str, tuple[str, ...], list[str]]:
    """Return port, usable uplinks and problems of a veth pair on a bridge."""
    interface = at.interface
    # Both ends must refer to each other: one index may belong to a peer in another namespace.
    port = next(
        (link for link in links.host if inside and (link.index, link.peer) == (inside.peer, inside.index)), None
    )
    problems = [*_bridge_problems(network.bridge, links.host), *_port_problems(network, interface, inside, port)]
    ports = [link for link in links.host if link.master == network.bridge and link != port]
    uplinks = [link for link in ports if not link.name.startswith(VM_TAP)]
    usable = tuple(link.name for link in uplinks if not link.fault)
    if not usable and any(link.name == network.bridge for link in links.host):
        faults = "; ".join(f"{link.name} {link.fault}" for link in uplinks) or "none of its ports leads out of the host"
        problems.append(f"bridge {network.bridge} has no uplink: {faults}")
    return port.name if port else "", usable, problems


def _bridge_problems(bridge: str, links: Sequence[Link]) -> list[str]:
    found = next((link for link in links if link.name == bridge), None)
    if found is None:
        return [f"bridge {bridge} does not exist"]
    if found.kind != "bridge":
        return [f"{bridge} is not a bridge"]
    return [] if found.up else [f"bridge {bridge} is down"]


def _port_problems(network: Network, interface: str, inside: Link | None, port: Link | None) -> list[str]:
    if inside is None:
        return [f"the container has no interface {interface}"]
    if port is None:
        return [f"{interface} of the container leads to no port of this host"]
    problems = []
    if port.master != network.bridge:
        problems.append(f"{port.name}, the port of the container's {interface}, is not on bridge {network.bridge}")
    elif port.fault:
        problems.append(f"{port.name}, the port of the container's {interface}, {port.fault}")
    return problems + _inside_problems(network, interface, inside)


def _inside_problems(network: Network, interface: str, inside: Link | None) -> list[str]:
    problems: list[str] = []
    if inside is None:
        return problems
    if not inside.up:
        problems.append(f"{interface} of the container is down")
    if str(network.address.ip) not in inside.addresses:
        problems.append(f"{interface} of the container has lost its address {network.address.ip}")
    return problems
