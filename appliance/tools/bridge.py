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


TAKEN = """\
# Both networks at once: each question takes its full second when nobody answers.
while [ $# -gt 0 ]; do
    (arping -D -c 2 -w 1 -I "$1" "$2" 2>&1 | sed -n "s/^Unicast reply from .*\\[\\(.*\\)\\].*/$2 \\1/p" | head -n 1) &
    shift 2
done
wait
"""


def taken(host: Host, addresses: dict[str, str]) -> dict[str, str]:
    """Addresses that a machine on the network has already, with its MAC address (RFC 5227).

    Args:
        addresses: the address to ask for, by bridge.
    """
    words = [word for pair in addresses.items() for word in pair]
    said = host.run("sh", "-c", TAKEN, "taken", *words)
    return dict(line.split() for line in said.text.splitlines())
