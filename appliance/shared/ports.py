"""Ports of an instance: how its interfaces are connected to the networks of the host.

A port is either the host's end of a veth pair, which is attached to a bridge, or a macvlan interface inside the
instance, which has an interface of the host as its parent for as long as it exists. The latter is written ``eth0@PID``,
with a process of the instance.

A detached macvlan interface neither sends (its queueing discipline is a blackhole) nor receives (in mode source it
takes frames from listed senders only, and the list is empty). It stays up: set down, it would lose its routes and the
translated connections. It stays detached when the parent gets its carrier back.
"""

from __future__ import annotations

import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from appliance.shared.migration import MacvlanRequest

ATTACHED = "bridge"
"""Mode of a macvlan interface that is attached. Those of one parent reach each other, the host does not reach them."""
DETACHED = "source"

Link = Mapping[str, Any]
"""An interface as ``ip -json -details link show`` prints it."""


def split_macvlan(port: str) -> Optional[Tuple[str, str]]:
    """Return interface and process of a port that is a macvlan interface; None for a veth pair."""
    name, at, pid = port.partition("@")
    return (name, pid) if at else None


def enter(pid: object) -> Tuple[str, ...]:
    """Return the words before a command that runs in the network namespace of a process."""
    return ("nsenter", "--net=/proc/%s/ns/net" % pid)


def match_ports(inside: Iterable[Link], outside: Iterable[Link], pid: int) -> Dict[str, str]:
    """Return the port of each interface of an instance that leads to this host.

    Args:
        inside, outside: the interfaces of the instance and of the host.
        pid: a process of the instance.
    """
    # Both ends of a pair must refer to each other: an index alone may be that of an interface in another namespace.
    links = list(outside)
    ends = {(link["ifindex"], link.get("link_index")): str(link["ifname"]) for link in links}
    known = {link["ifindex"] for link in links}
    found = {}
    for link in inside:
        if _kind(link) == "macvlan" and link.get("link_index") in known:
            found[str(link["ifname"])] = "%s@%d" % (link["ifname"], pid)
        elif (link.get("link_index"), link["ifindex"]) in ends:
            found[str(link["ifname"])] = ends[link.get("link_index"), link["ifindex"]]
    return found


def is_macvlan_attached(link: Link, parent: int) -> bool:
    """Return whether a macvlan interface sends and receives on the parent of that index."""
    mode = (link.get("linkinfo") or {}).get("info_data", {}).get("mode")
    up = "UP" in link.get("flags", ())
    return up and link.get("link_index") == parent and mode == ATTACHED and link.get("qdisc") != "blackhole"


def _kind(link: Link) -> str:
    return str((link.get("linkinfo") or {}).get("info_kind", ""))


def port_address(port: str) -> str:
    """Return the MAC address of the host's end of a port.

    A bridge without an address of its own takes the lowest one of its ports, and with it the host that of the bridge:
    this is higher than that of any uplink.
    """
    return "fe:73:" + ":".join("%02x" % one for one in zlib.crc32(port.encode()).to_bytes(4, "big"))


def change_commands(ports: Mapping[str, Optional[str]], *, down: bool = False) -> List[Tuple[Tuple[str, ...], str]]:
    """Return the commands that attach ports, each with its standard input.

    Args:
        ports: by port: the bridge or parent to attach it to; None detaches it.
        down: set the links that are detached down as well.
    """
    pairs: List[str] = []
    filters: Dict[str, List[str]] = {}
    modes: Dict[str, List[str]] = {}
    for port, one in sorted(ports.items()):
        macvlan = split_macvlan(port)
        off = " down" if down and not one else ""
        if not macvlan:
            change = "address %s master %s up" % (port_address(port), one) if one else "nomaster" + off
            pairs.append("link set dev %s %s" % (port, change))
            continue
        name, pid = macvlan
        mode = "type macvlan mode " + (ATTACHED if one else DETACHED)
        # `replace` succeeds in any state, unlike `del`.
        filters.setdefault(pid, []).append("qdisc replace dev %s root %s" % (name, "noqueue" if one else "blackhole"))
        modes.setdefault(pid, []).append("link set dev %s%s %s" % (name, " up" if one else off, mode))
    commands: List[Tuple[Tuple[str, ...], str]] = []
    if pairs:
        commands.append((("ip", "-force", "-batch", "-"), "\n".join(pairs) + "\n"))
    for pid in filters:
        commands.append(((*enter(pid), "tc", "-force", "-batch", "-"), "\n".join(filters[pid]) + "\n"))
        commands.append(((*enter(pid), "ip", "-force", "-batch", "-"), "\n".join(modes[pid]) + "\n"))
    return commands


def replace_commands(interface: MacvlanRequest, pid: int) -> List[Tuple[Tuple[str, ...], str]]:
    """Return the commands that replace an interface of an instance by a detached macvlan interface of the same name.

    The instance has the address throughout: services may be binding to it.
    """
    name, new = interface.name, interface.name + "m"
    add = "link add link %s name %s address %s netns %d type macvlan mode %s"
    lines = [
        "addr add %s brd + dev %s" % (interface.address, new),
        "link delete dev %s" % name,
        "link set dev %s name %s" % (new, name),
        "link set dev %s up" % name,
        *("route add %s dev %s" % (route, name) for route in interface.routes),
    ]
    return [
        (("ip", "-batch", "-"), add % (interface.parent, new, interface.mac, pid, DETACHED) + "\n"),
        ((*enter(pid), "tc", "-batch", "-"), "qdisc replace dev %s root blackhole\n" % new),
        ((*enter(pid), "ip", "-batch", "-"), "\n".join(lines) + "\n"),
    ]
