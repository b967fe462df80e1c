"""A broken rule of the site file, and checks that several rules share."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Interface

from appliance.config.document import Place


@dataclass(frozen=True)
class Finding:
    """A broken rule at a place in the document; the line is resolved later."""

    place: Place
    message: str
    hint: str


def address_problem(interface: IPv4Interface) -> tuple[str, str] | None:
    """Return message and hint if a machine cannot have this address."""
    address, network = interface.ip, interface.network
    if address.is_multicast or address.is_loopback or address.is_unspecified or int(address) >= 0xF0000000:
        return f"{address} is not a unicast host address", "use an address of the network"
    if network.prefixlen > 30:
        return f"{network} has no room for other hosts", "use the prefix of the whole network, 30 or less"
    if address == network.network_address:
        return f"{address} is the address of the network {network} itself", f"use another, such as {address + 1}"
    if address == network.broadcast_address:
        return f"{address} is the broadcast address of {network}", f"use another, such as {address - 1}"
    return None


def mac_problem(mac: str) -> tuple[str, str] | None:
    """Return message and hint if a machine cannot have this MAC address."""
    if not int(mac.replace(":", ""), 16):
        return f"{mac} is all zeros", "use one such as 02:00:0a:4d:00:01; 02 marks it as locally administered"
    if int(mac[:2], 16) & 1:
        first = f"{int(mac[:2], 16) & 0xFE | 2:02x}"
        return f"{mac} is a multicast address", f"the first pair must be even, such as {first}"
    return None
