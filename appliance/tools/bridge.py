"""Bridges of a host, queried with iproute2."""

from __future__ import annotations

import json

from appliance.errors import SmsError
from appliance.host.base import Host


def bridge_ports(host: Host, bridge: str) -> list[str] | None:
    """Return the ports of a bridge that are up; None if the bridge does not exist or is down."""
    shown = host.run("ip", "-json", "-details", "link", "show", "dev", bridge, ok=None)
    if shown.status:
        return None
    links = json.loads(shown.stdout)
    if not links or links[0].get("linkinfo", {}).get("info_kind") != "bridge":
        return None
    if "UP" not in links[0].get("flags", []):
        return None
    ports = json.loads(host.run("ip", "-json", "link", "show", "master", bridge).stdout or b"[]")
    return [port["ifname"] for port in ports if "UP" in port.get("flags", [])]


TAKEN = """\
# Both networks in parallel: a probe without a reply takes its full second.
while [ $# -gt 0 ]; do
    (
        output=$(arping -D -c 2 -w 1 -I "$1" "$2" 2>&1)
        case $? in
            0) ;;
            1) mac=$(echo "$output" | sed -n 's/^Unicast reply from .*\\[\\(.*\\)\\].*/\\1/p' | head -n 1)
               echo "taken $2 ${mac:-unknown}" ;;
            *) echo "failed $1 $(echo "$output" | tail -n 1)" ;;
        esac
    ) &
    shift 2
done
wait
"""


def taken(host: Host, addresses: dict[str, str]) -> dict[str, str]:
    """Return addresses that another machine on the network uses, with its MAC address (RFC 5227).

    Args:
        addresses: the address to probe, by bridge.

    Raises:
        SmsError: the probe failed.
    """
    arguments = [value for pair in addresses.items() for value in pair]
    found: dict[str, str] = {}
    for line in host.run("sh", "-c", TAKEN, "taken", *arguments).text.splitlines():
        verdict, what, rest = line.split(" ", 2)
        if verdict == "failed":
            raise SmsError(f"arping failed on {what} of {host.name}: {rest}", hint="is the bridge up? `sms doctor`")
        found[what] = rest
    return found
