"""Validation of a node's name, MAC and IP addresses, xname, controller and groups; selection of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any, TypeVar

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DHCP_WORD = re.compile(r"(?i:ignore|infinite|[0-9]+[smhdw]?)")
"""Names that dnsmasq would parse as a keyword or as a lease time: not allowed for nodes."""
GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
XNAME = re.compile(r"x[0-9]{1,4}c[0-9]s[0-9]{1,3}b[0-9]{1,2}n[0-9]{1,2}")
CONTROLLER = re.compile(r"https://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~/-]*)?")
Node = TypeVar("Node", bound=Mapping[str, Any])
_MAC = re.compile(r"[0-9a-f]{12}")


def clean_mac(value: Any) -> str:
    """Return a MAC address in lower case with colons; empty if it is not one of a machine.

    Controllers write it with dashes, dots or without separators, and all zeros or ones if it is unknown.
    """
    if not isinstance(value, str) or len(value) > 40:
        return ""
    digits = re.sub(r"[:.\- ]", "", value.strip().lower())
    # The lowest bit of the first byte marks multicast addresses.
    if not _MAC.fullmatch(digits) or digits == "0" * 12 or int(digits[:2], 16) & 1:
        return ""
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


def mac_problem(value: str) -> str:
    """Return why this is not a MAC address of a node; empty if it is one."""
    digits = re.sub(r"[:.\- ]", "", value.strip().lower())
    if clean_mac(value):
        return ""
    if not _MAC.fullmatch(digits):
        return f"{value[:60]!r} is not a MAC address: write six pairs of hexadecimal digits, such as 02:00:0a:4d:00:97"
    if digits == "0" * 12:
        return f"{value!r} is not a MAC address of a machine"
    return f"{value!r} is a multicast MAC address: its first byte is odd"


def address_problem(value: str, network: IPv4Network, taken: Mapping[str, str]) -> str:
    """Return why a node cannot have this address; empty if it can.

    Args:
        network: the provisioning network.
        taken: addresses in use, with their owners.
    """
    try:
        address = IPv4Address(value)
    except ValueError:
        return f"{value[:60]!r} is not an IPv4 address: write it as {network.network_address + 10}"
    if address not in network:
        return f"{address} is not in the provisioning network {network}"
    if address in (network.network_address, network.broadcast_address) and network.prefixlen < 31:
        return f"{address} is the first or the last of {network}: no machine can have it"
    return f"{address} is the address of {taken[str(address)]}" if str(address) in taken else ""


def find_problems(
    node: Mapping[str, Any], others: Iterable[Mapping[str, Any]], network: IPv4Network, reserved: Mapping[str, str]
) -> list[str]:
    """Return all problems of a node, including conflicts with the other nodes."""
    name, others = str(node.get("name") or ""), list(others)
    found = []
    if not NAME.fullmatch(name):
        found.append(f"{name[:60]!r} is not a node name: use letters, digits and dashes, such as node001")
    elif DHCP_WORD.fullmatch(name):
        found.append(f"{name!r} is not a valid node name: DHCP takes it for a keyword or a lease time")
    macs = list(node.get("macs") or ())
    found += [problem for mac in macs if (problem := mac_problem(mac))]
    cleaned = [clean_mac(mac) for mac in macs]
    found += [f"{mac} is listed twice" for mac in sorted({mac for mac in cleaned if mac and cleaned.count(mac) > 1})]
    has = {mac: one["name"] for one in others for mac in one.get("macs") or ()}
    found += [f"{mac} is a MAC address of {has[mac]}" for mac in cleaned if mac in has]
    if address := node.get("address"):
        taken = {**reserved, **{one["address"]: one["name"] for one in others if one.get("address")}}
        found += filter(None, [address_problem(address, network, taken)])
    xname = node.get("xname")
    if xname and not XNAME.fullmatch(xname):
        found.append(f"{xname[:60]!r} is not the xname of a node: write it as x1000c0s0b0n0")
    found += [f"{xname} is the xname of {one['name']}" for one in others if xname and one.get("xname") == xname]
    if (url := node.get("bmc")) and not CONTROLLER.fullmatch(url):
        found.append(f"{url[:60]!r} is not the URL of a controller: write https://bmc-1, or with /redfish/v1/Systems/1")
    found += [
        f"{group[:60]!r} is not a group name: use letters, digits, dots, dashes and underscores"
        for group in node.get("groups") or ()
        if not GROUP.fullmatch(group)
    ]
    return found


def choose_groups(current: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Apply changes to a node's groups: ``+gpu`` adds, ``-compute`` removes, names without sign replace all.

    Raises:
        ValueError: names with and without sign; its text is for users.
    """
    plain = [change for change in changes if change[:1] not in "+-"]
    if plain and len(plain) != len(changes):
        raise ValueError("give groups with + and - to change them, or without to set them, not both")
    groups = list(plain or current)
    for change in changes:
        if change.startswith("+") and change[1:] not in groups:
            groups.append(change[1:])
        elif change.startswith("-") and change[1:] in groups:
            groups.remove(change[1:])
    return list(dict.fromkeys(groups))


def choose_nodes(words: Sequence[str], nodes: Sequence[Node]) -> tuple[list[Node], list[str]]:
    """Return the nodes that match names, xnames, ``@group`` or ``@all``, each once, and the words without a match."""
    by_name = {node["name"]: node for node in nodes}
    chosen: dict[str, Node] = {}
    unknown = []
    for word in words:
        found = list(_matches(word, by_name))
        chosen.update((node["name"], node) for node in found)
        if not found:
            unknown.append(word)
    return list(chosen.values()), unknown


def _matches(word: str, by_name: Mapping[str, Node]) -> Iterator[Node]:
    if word.startswith("@"):
        yield from (node for node in by_name.values() if word == "@all" or word[1:] in (node.get("groups") or ()))
    elif word in by_name:
        yield by_name[word]
    else:
        yield from (node for node in by_name.values() if word and node.get("xname") == word)
