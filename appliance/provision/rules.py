"""Validation rules of an inventory: uniqueness, address ranges and syntax."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.provision import names
from appliance.provision.config import Config
from appliance.provision.model import Boot, Component, Group, Inventory
from appliance.provision.problem import HttpProblem

LARGEST_NID = 2**31 - 1


@dataclass(frozen=True)
class Finding:
    """One violated rule; ``taken``: the value belongs to another entry."""

    text: str
    taken: bool = False


def find_problems(config: Config, old: Inventory, new: Inventory) -> list[Finding]:
    """Return the rules that new or changed entries of an inventory violate. Unchanged entries are not checked again."""
    fresh = {key for key, each in new.components.items() if old.components.get(key) != each}
    macs = {mac for mac, each in new.interfaces.items() if old.interfaces.get(mac) != each}
    found: list[Finding] = []
    for key in sorted(fresh):
        found += _component(config, new.components[key])
    found += _duplicates(new, fresh)
    found += _addresses(config, new, fresh | {new.interfaces[mac].component for mac in macs}, macs)
    for place, boot in sorted(new.boot.items()):
        if old.boot.get(place) != boot:
            found += _boot(boot)
    for label, group in sorted(new.groups.items()):
        if old.groups.get(label) != group:
            found += _group(new, group)
    return found


def refuse(findings: list[Finding]) -> None:
    """Raise 400 with all findings, or 409 if all are about taken values; nothing without findings."""
    if findings:
        texts = [finding.text for finding in findings]
        more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
        status = 409 if all(finding.taken for finding in findings) else 400
        raise HttpProblem(status, "; ".join(texts[:3]) + more, problems=texts)


def _component(config: Config, one: Component) -> Iterator[Finding]:
    who = one.name or one.id
    if one.type == "Node":
        if one.name is None or not names.NAME.fullmatch(one.name):
            yield Finding(f"{who[:70]!r} is not a valid node name: use letters, digits and dashes, such as node001")
        elif names.DHCP_WORD.fullmatch(one.name):
            yield Finding(f"{one.name!r} is not a valid node name: DHCP takes it for a keyword or a lease time")
        if one.xname is not None and names.type_of(one.xname) != "Node":
            yield Finding(f"{who}: {one.xname[:70]!r} is not the xname of a node: write it as x1000c0s0b0n0")
        if one.address is not None and (why := address_problem(config, one.address)):
            yield Finding(f"{who}: {why}")
    elif names.type_of(one.id) != one.type:
        yield Finding(f"{one.id[:70]!r} is not the xname of a {one.type}")
    if one.nid is not None and not 0 < one.nid <= LARGEST_NID:
        yield Finding(f"{who}: {one.nid} is not a NID: use 1 to {LARGEST_NID}")
    for value, pattern, what in (
        (one.profile, names.PROFILE, "profile"),
        (one.bmc, names.BMC, "controller's address"),
        (one.role or "Compute", names.WORD, "role"),
        (one.subrole or "None", names.WORD, "subrole"),
    ):
        if not pattern.fullmatch(value):
            yield Finding(f"{who}: {value[:70]!r} is not a valid {what}")


def address_problem(config: Config, text: str) -> str:
    """Return why no node can boot with this address; empty if one can."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return f"{text[:60]!r} is not an address: write it as {next(iter(config.network.hosts()))}"
    network = config.network
    if address not in network:
        return f"{address} is not in the provisioning network {network}"
    if address == network.network_address or (address.version == 4 and address == network.broadcast_address):
        return f"{address} is the network or broadcast address of {network}"
    if config.pool and address.version == ipaddress.ip_address(config.pool[0]).version:
        first, last = map(ipaddress.ip_address, config.pool)
        if int(first) <= int(address) <= int(last):
            return f"{address} is in the pool {first} to {last}, which is for unknown machines"
    return ""


def reserved(config: Config) -> dict[str, str]:
    """Return the addresses that no node can have, and their owners."""
    found = {
        config.services_address: config.services_hostname or "the services container",
        config.gateway: "the gateway",
        config.address: f"this machine, {config.hostname}",
    }
    return {address: who for address, who in found.items() if address}


def _duplicates(new: Inventory, fresh: set[str]) -> Iterator[Finding]:
    """Yield names, xnames and NIDs that two components have."""
    for what in ("name", "xname", "nid"):
        has: dict[str | int, Component] = {}
        for one in sorted(new.components.values(), key=lambda each: (each.id in fresh, each.id)):
            value = getattr(one, what)
            if value is None:
                continue
            value = value.lower() if isinstance(value, str) else value
            if value in has and one.id in fresh:
                yield Finding(f"{what} {value} of {one.id}: {has[value].name or has[value].id} has it", taken=True)
            has.setdefault(value, one)


def _addresses(config: Config, new: Inventory, fresh: set[str], macs: set[str]) -> Iterator[Finding]:
    """Yield addresses that are assigned twice or reserved."""
    has = dict(reserved(config))
    entries = [(one.id in fresh, one.address, one.name or one.id) for one in new.components.values() if one.address]
    for each in new.interfaces.values():
        owner = new.components.get(each.component)
        who = (owner.name or owner.id) if owner else each.component or each.mac
        entries += [(each.mac in macs, address, who) for address, _ in each.addresses]
    for is_fresh, address, who in sorted(entries):
        if address in has and is_fresh:
            yield Finding(f"address {address} of {who}: {has[address]} has it", taken=True)
        has.setdefault(address, who)


def _boot(boot: Boot) -> Iterator[Finding]:
    """Check boot parameters: they become lines of a script, so control characters are not allowed."""
    who = f"boot parameters of {boot.scope} {boot.key[:70]!r}"
    if boot.scope == "mac" and names.clean_mac(boot.key) != boot.key:
        yield Finding(f"{who}: the key is not a MAC address")
    if boot.scope == "nid" and not (boot.key.isascii() and boot.key.isdigit()):
        yield Finding(f"{who}: the key is not a NID")
    for what, text, pattern in (
        ("key", boot.key, r"[^\x00-\x1f\x7f]+"),
        ("kernel", boot.kernel, r"[^\x00-\x20\x7f|&]*"),
        ("initrd", boot.initrd, r"[^\x00-\x20\x7f|&]*"),
        ("params", boot.params, r"[^\x00-\x1f\x7f]*"),
    ):
        if not re.fullmatch(pattern, text):
            yield Finding(f"{who}: the {what} has characters not allowed in a boot script")
        if what == "params" and re.search(r"(^|\s)(\|\||&&)(\s|$)", text):
            yield Finding(f"{who}: && and || would end the kernel's command line")


def _group(new: Inventory, group: Group) -> Iterator[Finding]:
    for word in (group.label, *group.tags, *([group.exclusive] if group.exclusive else [])):
        if not names.LABEL.fullmatch(word):
            yield Finding(
                f"{word[:70]!r} is not a valid group label: use letters, digits, dots, dashes and underscores"
            )
    for member in group.members:
        if member not in new.components:
            yield Finding(f"group {group.label}: there is no {member[:70]}")
    if group.exclusive:
        for other in new.groups.values():
            if other.label != group.label and other.exclusive == group.exclusive:
                for member in sorted(set(other.members) & set(group.members)):
                    yield Finding(f"group {group.label}: {member} is in {other.label}, which excludes it", taken=True)
