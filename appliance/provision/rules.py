"""What must hold in an inventory: whose address and MAC is whose, where addresses lie, how things are written."""

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
    """One thing that is wrong; ``taken``: because somebody else has it."""

    text: str
    taken: bool = False


def find_problems(config: Config, old: Inventory, new: Inventory) -> list[Finding]:
    """What is wrong with what is new in an inventory. What was there before is not looked at again."""
    fresh = {key for key, each in new.components.items() if old.components.get(key) != each}
    macs = {mac for mac, each in new.interfaces.items() if old.interfaces.get(mac) != each}
    found: list[Finding] = []
    for key in sorted(fresh):
        found += _component(config, new.components[key])
    found += _twice(new, fresh)
    found += _addresses(config, new, fresh | {new.interfaces[mac].component for mac in macs}, macs)
    for place, boot in sorted(new.boot.items()):
        if old.boot.get(place) != boot:
            found += _boot(boot)
    for label, group in sorted(new.groups.items()):
        if old.groups.get(label) != group:
            found += _group(new, group)
    return found


def refuse(findings: list[Finding]) -> None:
    """400 or, where all of it is somebody else's, 409, with everything that is wrong; nothing where nothing is."""
    if findings:
        texts = [finding.text for finding in findings]
        more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
        status = 409 if all(finding.taken for finding in findings) else 400
        raise HttpProblem(status, "; ".join(texts[:3]) + more, problems=texts)


def _component(config: Config, one: Component) -> Iterator[Finding]:
    who = one.name or one.id
    if one.type == "Node":
        if one.name is None or not names.NAME.fullmatch(one.name):
            yield Finding(f"{who[:70]!r} is no name of a node: use letters, digits and dashes, such as node001")
        elif names.DHCP_WORD.fullmatch(one.name):
            yield Finding(f"{one.name!r} is no name for a node: DHCP takes it for a word or a time of its own")
        if one.xname is not None and names.type_of(one.xname) != "Node":
            yield Finding(f"{who}: {one.xname[:70]!r} is not the xname of a node: write it as x1000c0s0b0n0")
        if one.address is not None and (why := address_problem(config, one.address)):
            yield Finding(f"{who}: {why}")
    elif names.type_of(one.id) != one.type:
        yield Finding(f"{one.id[:70]!r} is not the xname of a {one.type}")
    if one.nid is not None and not 0 < one.nid <= LARGEST_NID:
        yield Finding(f"{who}: {one.nid} is no NID: from 1 to {LARGEST_NID}")
    for value, pattern, what in (
        (one.profile, names.PROFILE, "profile"),
        (one.bmc, names.BMC, "controller's address"),
        (one.role or "Compute", names.WORD, "role"),
        (one.subrole or "None", names.WORD, "subrole"),
    ):
        if not pattern.fullmatch(value):
            yield Finding(f"{who}: {value[:70]!r} is no {what}")


def address_problem(config: Config, text: str) -> str:
    """Why no node can boot with this address; empty where one can."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return f"{text[:60]!r} is no address: write it as {next(iter(config.network.hosts()))}"
    network = config.network
    if address not in network:
        return f"{address} is not in the provisioning network {network}"
    if address == network.network_address or (address.version == 4 and address == network.broadcast_address):
        return f"{address} is the first or the last of {network}, which no machine can have"
    if config.pool and address.version == ipaddress.ip_address(config.pool[0]).version:
        first, last = map(ipaddress.ip_address, config.pool)
        if int(first) <= int(address) <= int(last):
            return f"{address} is in the pool {first} to {last}, which is for nodes that nobody knows"
    return ""


def reserved(config: Config) -> dict[str, str]:
    """Addresses that no node can have, and whose they are."""
    found = {
        config.services_address: config.services_hostname or "the services container",
        config.gateway: "the gateway",
        config.address: f"this machine, {config.hostname}",
    }
    return {address: who for address, who in found.items() if address}


def _twice(new: Inventory, fresh: set[str]) -> Iterator[Finding]:
    """Names, xnames and NIDs that two have."""
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
    """Addresses that two have, or that are nobody's to give."""
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
    """They become lines of a script: one line each."""
    who = f"boot parameters of {boot.scope} {boot.key[:70]!r}"
    if boot.scope == "mac" and names.clean_mac(boot.key) != boot.key:
        yield Finding(f"{who}: this is not a MAC address")
    if boot.scope == "nid" and not (boot.key.isascii() and boot.key.isdigit()):
        yield Finding(f"{who}: this is no NID")
    for what, text, pattern in (
        ("key", boot.key, r"[^\x00-\x1f\x7f]+"),
        ("kernel", boot.kernel, r"[^\x00-\x20\x7f|&]*"),
        ("initrd", boot.initrd, r"[^\x00-\x20\x7f|&]*"),
        ("params", boot.params, r"[^\x00-\x1f\x7f]*"),
    ):
        if not re.fullmatch(pattern, text):
            yield Finding(f"{who}: the {what} has characters that no boot script can have")
        if what == "params" and re.search(r"(^|\s)(\|\||&&)(\s|$)", text):
            yield Finding(f"{who}: && and || would end the kernel's command line")


def _group(new: Inventory, group: Group) -> Iterator[Finding]:
    for word in (group.label, *group.tags, *([group.exclusive] if group.exclusive else [])):
        if not names.LABEL.fullmatch(word):
            yield Finding(f"{word[:70]!r} is no label of a group: use letters, digits, dots, dashes and underscores")
    for member in group.members:
        if member not in new.components:
            yield Finding(f"group {group.label}: there is no {member[:70]}")
    if group.exclusive:
        for other in new.groups.values():
            if other.label != group.label and other.exclusive == group.exclusive:
                for member in sorted(set(other.members) & set(group.members)):
                    yield Finding(f"group {group.label}: {member} is in {other.label}, which excludes it", taken=True)
