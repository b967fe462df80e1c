"""What may be said of a node: its name, MAC and IP addresses, place and controller, held against what they must be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DHCP_WORD = re.compile(r"(?i:ignore|infinite|[0-9]+[smhdw]?)")
"""What dnsmasq takes for an order or for a lease's time where a name stands: no node is called so."""
GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
XNAME = re.compile(r"x[0-9]{1,4}c[0-9]s[0-9]{1,3}b[0-9]{1,2}n[0-9]{1,2}")
CONTROLLER = re.compile(r"https://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~/-]*)?")
_MAC = re.compile(r"[0-9a-f]{12}")


def clean_mac(value: Any) -> str:
    """A MAC address as six pairs with colons, in lower case; empty where it is none that a machine can have.

    Controllers write it with dashes, dots or nothing between, and zeros or ones where they do not know.
    """
    if not isinstance(value, str) or len(value) > 40:
        return ""
    digits = re.sub(r"[:.\- ]", "", value.strip().lower())
    # The lowest bit of the first byte is that of groups.
    if not _MAC.fullmatch(digits) or digits == "0" * 12 or int(digits[:2], 16) & 1:
        return ""
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


def mac_problem(value: str) -> str:
    """Why this is no MAC address of a node; empty where it is one."""
    digits = re.sub(r"[:.\- ]", "", value.strip().lower())
    if clean_mac(value):
        return ""
    if not _MAC.fullmatch(digits):
        return f"{value[:60]!r} is not a MAC address: write six pairs of hexadecimal digits, such as 02:00:0a:4d:00:97"
    if digits == "0" * 12:
        return f"{value!r} is no machine's MAC address"
    return f"{value!r} is a MAC address of a group of machines: its first byte is odd"


def address_problem(value: str, network: IPv4Network, taken: Mapping[str, str]) -> str:
    """Why a node cannot have this address; empty where it can.

    Args:
        network: the provisioning network.
        taken: address, and who has it.
    """
    try:
        address = IPv4Address(value)
    except ValueError:
        return f"{value[:60]!r} is not an IPv4 address: write it as {network.network_address + 10}"
    if address not in network:
        return f"{address} is not in the provisioning network {network}"
    if address in (network.network_address, network.broadcast_address) and network.prefixlen < 31:
        return f"{address} is the first or the last of {network}, which no machine can have"
    return f"{address} is the address of {taken[str(address)]}" if str(address) in taken else ""


def find_problems(
    node: Mapping[str, Any], others: Iterable[Mapping[str, Any]], network: IPv4Network, reserved: Mapping[str, str]
) -> list[str]:
    """All that is wrong with a node, beside the others that there are."""
    name, others = str(node.get("name") or ""), list(others)
    found = []
    if not NAME.fullmatch(name):
        found.append(f"{name[:60]!r} is not a name of a node: use letters, digits and dashes, such as node001")
    elif DHCP_WORD.fullmatch(name):
        found.append(f"{name!r} is no name for a node: DHCP takes it for a word or a time of its own; such as node001")
    macs = list(node.get("macs") or ())
    found += [problem for mac in macs if (problem := mac_problem(mac))]
    cleaned = [clean_mac(mac) for mac in macs]
    found += [f"{mac} is there twice" for mac in sorted({mac for mac in cleaned if mac and cleaned.count(mac) > 1})]
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
        f"{group[:60]!r} is not a name of a group: use letters, digits, dots, dashes and underscores"
        for group in node.get("groups") or ()
        if not GROUP.fullmatch(group)
    ]
    return found


def choose_groups(has: Sequence[str], wishes: Sequence[str]) -> list[str]:
    """The groups after wishes such as ``+gpu``, ``-compute``, or ``compute`` alone, which are all it then has.

    Raises:
        ValueError: wishes of both kinds, with the words for a person.
    """
    plain = [wish for wish in wishes if wish[:1] not in "+-"]
    if plain and len(plain) != len(wishes):
        raise ValueError("give groups with + and - to change them, or without to set them, not both")
    groups = list(plain or has)
    for wish in wishes:
        if wish.startswith("+") and wish[1:] not in groups:
            groups.append(wish[1:])
        elif wish.startswith("-") and wish[1:] in groups:
            groups.remove(wish[1:])
    return list(dict.fromkeys(groups))


def choose_nodes(words: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Nodes that words stand for, each once: names, ``@group``, ``@all``; and the words that stand for none."""
    by_name = {node["name"]: node for node in nodes}
    chosen: dict[str, Mapping[str, Any]] = {}
    unknown = []
    for word in words:
        found = list(_meant(word, by_name))
        chosen.update((node["name"], node) for node in found)
        if not found:
            unknown.append(word)
    return list(chosen.values()), unknown


def _meant(word: str, by_name: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    if word.startswith("@"):
        yield from (node for node in by_name.values() if word == "@all" or word[1:] in (node.get("groups") or ()))
    elif word in by_name:
        yield by_name[word]
    else:
        yield from (node for node in by_name.values() if word and node.get("xname") == word)
