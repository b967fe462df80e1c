"""The network ports of an instance (``appliance.shared.ports``), attached to bridges or not. iproute2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from appliance.host.base import CommandError, Host
from appliance.shared.ports import change_commands, enter, is_macvlan_attached, match_ports, split_macvlan


class LinkInfo(TypedDict, total=False):
    """Details of an interface; ``info_kind``: veth, bridge, ...; ``info_data``: those of its kind."""

    info_kind: str
    info_data: dict[str, object]


class Link(TypedDict, total=False):
    """A network interface, as iproute2 prints it. ``link_index``: of a veth pair's other end, or of a parent."""

    ifname: str
    ifindex: int
    link_index: int
    link_type: str
    flags: list[str]
    master: str
    qdisc: str
    linkinfo: LinkInfo


def find_ports(host: Host, pid: int) -> dict[str, str]:
    """Return the port of each interface of the instance: ``{"eth0": "veth1a2b", "eth1": "eth1@4711"}``.

    Args:
        pid: a process of the instance.

    Raises:
        CommandError: the process does not exist any more.
    """
    return match_ports(list_links(host, *enter(pid), details=True), list_links(host), pid)


def find_uplink(host: Host, port: str) -> str:
    """Return the bridge that a port is attached to, or the parent of a macvlan interface; empty without any."""
    macvlan, links = split_macvlan(port), list_links(host)
    if not macvlan:
        return next((link.get("master", "") for link in links if link["ifname"] == port), "")
    name, pid = macvlan
    index = next((link.get("link_index") for link in list_links(host, *enter(pid)) if link["ifname"] == name), None)
    return next((link["ifname"] for link in links if link["ifindex"] == index), "")


def is_attached(host: Host, port: str, parent: str) -> bool:
    """Return whether a port that is a macvlan interface is attached to the parent of that name; False if it is gone."""
    name, _, pid = port.partition("@")
    try:
        inside = list_links(host, *enter(pid), details=True)
    except CommandError:
        return False
    index = next((link["ifindex"] for link in list_links(host) if link["ifname"] == parent), 0)
    return any(link["ifname"] == name and is_macvlan_attached(link, index) for link in inside)


def list_links(host: Host, *prefix: str, details: bool = False) -> list[Link]:
    """Return the interfaces of a network namespace, which ``prefix`` enters; ``linkinfo`` with ``details`` only."""
    options = ("-json", "-details") if details else ("-json",)
    found: list[Link] = host.run(*prefix, "ip", *options, "link").parse(list[Link], empty=b"[]")
    return [one for one in found if "ifname" in one and "ifindex" in one]


def detach(host: Host, ports: Iterable[str], *, down: bool = False) -> None:
    """Detach ports, continuing after errors; ``down`` also sets the links down.

    Raises:
        CommandError: a port does not exist.
    """
    _change(host, dict.fromkeys(ports), down=down)


def attach(host: Host, ports: Mapping[str, str]) -> None:
    """Attach each port to its bridge or parent and set it up, continuing after errors.

    Raises:
        CommandError: a port or bridge does not exist.
    """
    _change(host, ports)


def attach_started(host: Host, bridges: Mapping[str, str]) -> None:
    """Attach the ports of an instance that has just started, and remove the bridges that it was started on.

    Args:
        bridges: the host's bridge for each of those.

    Raises:
        CommandError: a port or bridge does not exist.
    """
    started = {link["ifname"]: link["master"] for link in list_links(host) if link.get("master") in bridges}
    attach(host, {port: bridges[master] for port, master in started.items()})
    remove_bridges(host, bridges)


def remove_bridges(host: Host, bridges: Iterable[str]) -> None:
    """Remove bridges, which may not exist."""
    for bridge in bridges:
        host.run("ip", "link", "delete", "dev", bridge, ok=None)


def _change(host: Host, ports: Mapping[str, str | None], *, down: bool = False) -> None:
    failed = []
    for argv, text in change_commands(ports, down=down):
        try:
            host.run(*argv, input=text.encode())
        except CommandError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def probe_argv(address: str, port: int) -> tuple[str, ...]:
    """Return the command that succeeds if an address accepts connections on a TCP port."""
    return ("timeout", "2", "bash", "-c", 'exec 3<>"/dev/tcp/$1/$2"', "probe", address, str(port))
