"""Bridges and other interfaces of a host to which instances are attached, queried with iproute2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.plan.services.links import Link as AnyLink
from appliance.plan.services.links import find_mtu, find_user, read_ip_links
from appliance.tools.ports import Link


def bridge_ports(host: Host, bridge: str) -> list[str] | None:
    """Return the ports of a bridge that are up; None if the bridge does not exist or is down."""
    shown = host.run("ip", "-json", "-details", "link", "show", "dev", bridge, ok=None)
    if shown.status:
        return None
    links = shown.parse(list[Link], empty=b"[]")
    if not links or links[0].get("linkinfo", {}).get("info_kind") != "bridge":
        return None
    if "UP" not in links[0].get("flags", []):
        return None
    ports = host.run("ip", "-json", "link", "show", "master", bridge).parse(list[Link], empty=b"[]")
    return [port["ifname"] for port in ports if "ifname" in port and "UP" in port.get("flags", [])]


def own_addresses(host: Host) -> dict[str, str]:
    """Return the interface of each IPv4 address of a host."""
    shown = host.run("ip", "-json", "-4", "address", "show").parse(list[dict[str, Any]], empty=b"[]")
    return {str(one.get("local")): str(link.get("ifname")) for link in shown for one in link.get("addr_info") or ()}


def query_mtus(host: Host, uplinks: Sequence[str]) -> dict[str, int]:
    """Return the MTU of bridges with their ports, and of parents of macvlan interfaces: ``find_mtu``.

    0 where it is not known: nothing that serves may depend on it.
    """
    show = ("ip", "-json", "-details", "link", "show")
    found = {}
    for uplink in uplinks:
        links: list[AnyLink] = []
        for words in (("dev", uplink), ("master", uplink)):
            try:
                shown = host.run(*show, *words, ok=None).parse(list[dict[str, Any]], empty=b"[]")
                links += read_ip_links(shown)
            except Unreachable:
                raise
            except (SmsError, KeyError, TypeError, AttributeError, ValueError):
                continue
        found[uplink] = find_mtu(links, uplink)
    return found


def parent_problem(host: Host, name: str) -> str:
    """Return why an interface cannot carry a macvlan interface; empty if it can."""
    shown = host.run("ip", "-json", "-details", "link", "show", "dev", name, ok=None)
    links = shown.parse(list[Link], empty=b"[]") if shown.status == 0 else []
    link = links[0] if links else {}
    if not link or "UP" not in link.get("flags", []):
        return "does not exist or is down"
    if master := link.get("master"):  # a bridge or bond receives its frames
        return f"is a port of {master}, and so cannot carry a macvlan interface"
    return ""


def taken(host: Host, addresses: dict[str, str], pool: Callable[[int], Executor]) -> dict[str, str]:
    """Return addresses that another machine on the network uses, with its MAC address (RFC 5227).

    Args:
        addresses: the interface on which each address is probed: a bridge, or the parent of a macvlan interface.

    Raises:
        SmsError: the probe failed.
    """

    def probe(address: str, bridge: str) -> str:
        argv = ("arping", "-D", "-c", "2", "-w", "1", "-I", bridge, address)
        result = host.run(*argv, ok=None)
        output = (result.stdout + result.stderr).decode(errors="replace").strip()
        if result.status not in (0, 1):
            why = output.rpartition("\n")[2]
            raise SmsError(f"arping failed on {bridge} of {host.name}: {why}", hint="is it up? `sms doctor`")
        return find_user(output) if result.status else ""

    # In parallel: a probe without a reply takes its full second.
    with pool(max(1, len(addresses))) as workers:
        macs = list(workers.map(probe, addresses.keys(), addresses.values()))
    return {address: mac for address, mac in zip(addresses, macs, strict=True) if mac}
