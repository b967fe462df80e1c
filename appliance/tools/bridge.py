"""Bridges of a host, asked with iproute2."""

from __future__ import annotations

import json

from appliance.host.base import Host


def bridge_ports(host: Host, bridge: str) -> list[str] | None:
    """Ports of a bridge that are up; None where there is no such bridge."""
    shown = host.run("ip", "-json", "-details", "link", "show", "dev", bridge, ok=None)
    if shown.status:
        return None
    links = json.loads(shown.stdout)
    if not links or links[0].get("linkinfo", {}).get("info_kind") != "bridge":
        return None
    ports = json.loads(host.run("ip", "-json", "link", "show", "master", bridge).stdout or b"[]")
    return [port["ifname"] for port in ports if "UP" in port.get("flags", [])]


def answers_to(host: Host, bridge: str, address: str) -> str | None:
    """The MAC address of a machine that has ``address`` already, asked for by ARP (RFC 5227); None if none has."""
    asked = host.run("arping", "-D", "-q", "-c", "2", "-w", "1", "-I", bridge, address, ok=(0, 1))
    if asked.status == 0:
        return None
    said = host.run("arping", "-D", "-c", "1", "-w", "1", "-I", bridge, address, ok=None).text
    start, end = said.find("["), said.find("]")
    return said[start + 1 : end] if 0 <= start < end else "unknown"
