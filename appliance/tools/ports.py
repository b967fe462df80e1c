"""The network ports of an instance: the host ends of its veth pairs, attached to bridges or not. iproute2."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypedDict

from appliance.host.base import Host


class LinkInfo(TypedDict, total=False):
    """Details of an interface; ``info_kind``: veth, bridge, ..."""

    info_kind: str


class Link(TypedDict, total=False):
    """A network interface, as iproute2 prints it. ``link_index``: index of a veth pair's other end."""

    ifname: str
    ifindex: int
    link_index: int
    link_type: str
    flags: list[str]
    linkinfo: LinkInfo


def find_ports(host: Host, pid: int) -> dict[str, str]:
    """Return the host end of each interface of the instance: ``{"eth0": "veth1a2b", "eth1": "veth3c4d"}``.

    Args:
        pid: a process of the instance.

    Raises:
        CommandError: the process does not exist any more.
    """
    inside = list_links(host, "nsenter", f"--net=/proc/{pid}/ns/net")
    # Both ends must refer to each other: one index may belong to a peer in another namespace.
    outside = {(link["ifindex"], link.get("link_index")): link["ifname"] for link in list_links(host)}
    ends = ((link["ifname"], (link.get("link_index"), link["ifindex"])) for link in inside)
    return {name: outside[end] for name, end in ends if end in outside}


def list_links(host: Host, *prefix: str, details: bool = False) -> list[Link]:
    """Return the interfaces of a network namespace, which ``prefix`` enters; ``linkinfo`` with ``details`` only."""
    options = ("-json", "-details") if details else ("-json",)
    found: list[Link] = json.loads(host.run(*prefix, "ip", *options, "link").stdout or b"[]")
    return found


def detach(host: Host, ports: Iterable[str], *, down: bool = False) -> None:
    """Detach ports from their bridges, continuing after errors; ``down`` also sets the links down.

    Raises:
        CommandError: a port does not exist.
    """
    _change(host, [f"link set dev {port} nomaster{' down' * down}" for port in ports])


def attach(host: Host, ports: Mapping[str, str]) -> None:
    """Attach each port to its bridge and set it up.

    Raises:
        CommandError: a port or bridge does not exist.
    """
    _change(host, [f"link set dev {port} master {bridge} up" for port, bridge in ports.items()])


def _change(host: Host, lines: list[str]) -> None:
    if lines:
        host.run("ip", "-force", "-batch", "-", input="".join(f"{line}\n" for line in lines).encode())


def probe_argv(address: str, port: int) -> tuple[str, ...]:
    """Return the command that succeeds if an address accepts connections on a TCP port."""
    return ("timeout", "2", "bash", "-c", 'exec 3<>"/dev/tcp/$1/$2"', "probe", address, str(port))
