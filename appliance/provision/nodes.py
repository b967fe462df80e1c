"""Nodes in the form that ``sms`` reads and writes; export and import of the whole inventory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.provision import names, payloads
from appliance.provision.draft import Draft, read_interface
from appliance.provision.model import Boot, Component, Endpoint, Group, Interface, Inventory
from appliance.provision.rules import Finding


def show_node(inventory: Inventory, node: Component) -> payloads.Node:
    """Return a node; ``macs`` lists only the MAC addresses, ``interfaces`` has all their fields."""
    interfaces = inventory.interfaces_of(node.id)
    return {
        "name": node.name,  # type: ignore[typeddict-item]  # only other components have none
        "xname": node.xname,
        "nid": node.nid,
        "role": node.role,
        "subrole": node.subrole,
        "address": node.address,
        "macs": [each.mac for each in interfaces],
        "interfaces": [show_interface(each) for each in interfaces],
        "groups": inventory.groups_of(node.id),
        "bmc": node.bmc,
        "profile": node.profile,
        "enabled": node.enabled,
        "state": node.state,
        "arch": node.arch,
        "details": node.details,
    }


def show_interface(each: Interface) -> payloads.Interface:
    addresses: list[str | payloads.Address] = [
        {"address": address, "network": network} for address, network in each.addresses
    ]
    return {"mac": each.mac, "description": each.description, "addresses": addresses}


def put_node(draft: Draft, name: str, given: payloads.Node) -> None:
    """Create or replace a node; fields not given get their defaults."""
    there = draft.find_node(name)
    _write(draft, name, {**names.DEFAULTS, **given}, there)


def patch_node(draft: Draft, node: Component, given: payloads.Node) -> None:
    """Change the given fields of a node."""
    _patch(draft, node, given, draft.inventory())


def _patch(draft: Draft, node: Component, given: payloads.Node, before: Inventory) -> None:
    """Change the given fields of a node; the others are those of ``before``."""
    shown = show_node(before, node)
    if "macs" not in given:
        given = {"interfaces": shown["interfaces"], **given}
    elif "interfaces" not in given:
        shown.pop("interfaces")
        given = {**given, "macs": _described(given["macs"], before)}
    _write(draft, shown["name"], {**shown, **given}, node)


def _described(macs: Sequence[str | payloads.Interface], inventory: Inventory) -> list[str | payloads.Interface]:
    """Return MAC addresses with the fields of existing interfaces."""
    found: list[str | payloads.Interface] = []
    for mac in macs:
        known = inventory.interfaces.get(names.clean_mac(mac)) if isinstance(mac, str) else None
        found.append(show_interface(known) if known else mac)
    return found


def _write(draft: Draft, name: str, given: payloads.Node, there: Component | None) -> None:
    new_name = given.get("name") or (there.name if there else None) or name
    xname = given["xname"] and names.clean_xname(given["xname"])
    address = given["address"] and (names.clean_address(given["address"]) or given["address"])
    state, arch = names.pick(given["state"], names.STATES), names.pick(given["arch"], names.ARCHES)
    for field, value, text in (("state", state, given["state"]), ("architecture", arch, given["arch"])):
        if value is None:
            draft.findings.append(Finding(f"{new_name}: {text!r} is not a valid {field}"))
    base = there or Component("")
    node = replace(
        base,
        id=xname or new_name,
        name=new_name,
        xname=xname or None,
        nid=given["nid"],
        address=address or None,
        role=given["role"],
        subrole=given["subrole"],
        state=state or "Unknown",
        arch=arch or "X86",
        bmc=given["bmc"],
        profile=given["profile"],
        enabled=given["enabled"],
        details=given.get("details", base.details),
    )
    if there is None and node.id in draft.components:
        draft.findings.append(Finding(f"{new_name}: {node.id} exists already", taken=True))
        return
    draft.put_component(node, before=there.id if there else None)
    interfaces = given.get("interfaces")
    listed: Sequence[str | payloads.Interface] = interfaces if interfaces is not None else given["macs"]
    found = [read_interface(each, new_name, draft.findings) for each in listed]
    draft.put_interfaces(node.id, [_without_own(each, node.address) for each in found if each])
    draft.put_members(node.id, given["groups"])


def _without_own(each: Interface, address: str | None) -> Interface:
    return replace(each, addresses=tuple(pair for pair in each.addresses if pair[0] != address))


def export(inventory: Inventory) -> payloads.Inventory:
    """Return the whole inventory in the form that ``import_document`` reads."""
    others = [each for each in inventory.components.values() if each.type != "Node"]
    owned = {each.id for each in inventory.components.values() if each.type == "Node"}
    unowned = sorted(
        (each for each in inventory.interfaces.values() if each.component not in owned), key=lambda x: x.mac
    )
    return {
        "nodes": [show_node(inventory, node) for node in inventory.nodes()],
        "groups": [
            {
                "label": each.label,
                "description": each.description,
                "exclusive": each.exclusive,
                "tags": list(each.tags),
                "members": list(each.members),
            }
            for _, each in sorted(inventory.groups.items())
        ],
        "components": [show_other(each) for each in sorted(others, key=lambda each: each.id)],
        "interfaces": [{**show_interface(each), "component": each.component} for each in unowned],
        "endpoints": [show_endpoint(each) for _, each in sorted(inventory.endpoints.items())],
        "boot": [show_boot(each) for _, each in sorted(inventory.boot.items())],
    }


def show_other(each: Component) -> payloads.OtherComponent:
    """Return a component that is not a node."""
    return {"id": each.id, "state": each.state, "flag": each.flag, "enabled": each.enabled, "class": each.klass}


def show_endpoint(each: Endpoint) -> payloads.Endpoint:
    return {
        "id": each.id,
        "fqdn": each.fqdn,
        "address": each.address,
        "mac": each.mac,
        "enabled": each.enabled,
        "details": each.details,
    }


def show_boot(each: Boot) -> payloads.Boot:
    return {
        "scope": each.scope,
        "key": each.key,
        "kernel": each.kernel,
        "initrd": each.initrd,
        "params": each.params,
        "cloud-init": each.cloud_init,
    }


def import_document(draft: Draft, document: payloads.Inventory, *, replace_all: bool = False) -> int:
    """Import an exported document into a draft; return the number of its nodes.

    Existing entries keep the fields that the document does not contain. With ``replace_all`` entries and fields that
    it does not contain are removed.
    """
    given = document.get("nodes") or []
    if replace_all:
        _clear_unlisted(draft, {each["name"].lower() for each in given})
    _report_duplicates(draft, given)
    for each in given:
        there = draft.find_node(each["name"])
        # Two nodes of one document may swap MAC addresses.
        if there:
            draft.put_interfaces(there.id, [])
    for other in document.get("components") or ():
        _import_other(draft, other)
    for each in given:
        there = draft.find_node(each["name"])
        if there and there.id in draft.old.components and not replace_all:
            _patch(draft, there, each, draft.old)
        else:
            put_node(draft, each["name"], each)
    for group in document.get("groups") or ():
        _import_group(draft, group)
    for interface in document.get("interfaces") or ():
        _import_interface(draft, interface)
    for endpoint in document.get("endpoints") or ():
        _import_endpoint(draft, endpoint)
    for boot in document.get("boot") or ():
        _import_boot(draft, boot)
    return len(given)


def _clear_unlisted(draft: Draft, kept: set[str]) -> None:
    for each in list(draft.components.values()):
        if each.type != "Node" or (each.name or "").lower() not in kept:
            draft.remove_component(each.id)
    draft.interfaces = {mac: each for mac, each in draft.interfaces.items() if each.component in draft.components}
    draft.groups, draft.endpoints, draft.boot = {}, {}, {}


def _report_duplicates(draft: Draft, given: Sequence[payloads.Node]) -> None:
    """Add a finding for each duplicate."""
    seen = set()
    for each in given:
        if (low := each["name"].lower()) in seen:
            draft.findings.append(Finding(f"{each['name'][:70]} is listed twice"))
        seen.add(low)


def _import_other(draft: Draft, each: payloads.OtherComponent) -> None:
    key = names.clean_xname(each["id"])
    kind = names.type_of(key)
    if not kind or kind == "Node":
        draft.findings.append(Finding(f"{each['id'][:70]!r} is not the xname of a component other than a node"))
        return
    there = draft.components.get(key) or Component(key, type=kind, role="", arch="Other")
    state = names.pick(each.get("state", there.state), names.STATES) or there.state
    draft.put_component(replace(there, state=state, enabled=each.get("enabled", there.enabled)))


def _import_group(draft: Draft, each: payloads.Group) -> None:
    label = each["label"]
    there = draft.groups.get(label) or Group(label)
    members = list(there.members)
    for member in each.get("members") or ():
        found = draft.find_node(member)
        members.append(found.id if found else names.clean_id(member))
    draft.put_group(
        replace(
            there,
            description=each.get("description", there.description),
            exclusive=each.get("exclusive", there.exclusive),
            tags=tuple(each.get("tags", there.tags)),
            members=tuple(members),
        )
    )


def _import_interface(draft: Draft, each: payloads.Interface) -> None:
    found = read_interface(each, each["mac"], draft.findings)
    if found is None:
        return
    there = draft.interfaces.get(found.mac) or Interface(found.mac)
    owner = names.clean_id(each["component"]) if "component" in each else there.component
    draft.put_interface(
        replace(
            found,
            component=owner,
            position=there.position if owner == there.component else 0,
            description=each.get("description", there.description),
            addresses=found.addresses if "addresses" in each else there.addresses,
        )
    )


def _import_boot(draft: Draft, each: payloads.Boot) -> None:
    there = draft.boot.get((each["scope"], each["key"])) or Boot(each["scope"], each["key"])
    draft.put_boot(
        replace(
            there,
            kernel=each.get("kernel", there.kernel),
            initrd=each.get("initrd", there.initrd),
            params=each.get("params", there.params),
            cloud_init=(each["cloud-init"] or {}) if "cloud-init" in each else there.cloud_init,
        )
    )


def _import_endpoint(draft: Draft, each: payloads.Endpoint) -> None:
    key = names.clean_xname(each["id"])
    if not names.type_of(key):
        draft.findings.append(Finding(f"endpoint {each['id'][:70]!r} is not an xname"))
        return
    there = draft.endpoints.get(key) or Endpoint(key, type=names.type_of(key))
    draft.put_endpoint(
        replace(
            there,
            fqdn=each.get("fqdn", there.fqdn),
            address=each.get("address", there.address),
            mac=each.get("mac", there.mac),
            enabled=each.get("enabled", there.enabled),
            details=(each["details"] or {}) if "details" in each else there.details,
        )
    )
