"""Pending changes to an inventory: they are validated and committed together, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from appliance.provision import names, payloads
from appliance.provision.model import Boot, Component, Endpoint, Group, Interface, Inventory
from appliance.provision.rules import Finding


class Draft:
    """An inventory being changed. ``findings``: changes that failed, in addition to those that the rules reject."""

    def __init__(self, old: Inventory) -> None:
        self.old = old
        self.components = dict(old.components)
        self.interfaces = dict(old.interfaces)
        self.groups = dict(old.groups)
        self.endpoints = dict(old.endpoints)
        self.boot = dict(old.boot)
        self.findings: list[Finding] = []
        self._names = {name: each.id for name, each in old.by_name.items()}

    def inventory(self) -> Inventory:
        """Return the changed inventory."""
        return Inventory(self.components, self.interfaces, self.groups, self.endpoints, self.boot)

    def find_node(self, name: str) -> Component | None:
        """Return a node by name or xname."""
        low = name.lower()
        for key in (self._names.get(low, ""), name, low):
            each = self.components.get(key)
            # The index may be stale after a rename.
            if each and each.type == "Node" and low in ((each.name or "").lower(), each.id.lower()):
                return each
        return None

    def put_component(self, new: Component, *, before: str | None = None) -> None:
        """Add or replace a component; ``before`` is its old ID if that changes."""
        if before is not None and before != new.id:
            if new.id in self.components:
                self.findings.append(Finding(f"{new.id} exists already", taken=True))
                return
            self.components.pop(before, None)
            self._rename(before, new.id)
        self.components[new.id] = new
        if new.name:
            self._names[new.name.lower()] = new.id

    def _rename(self, old: str, new: str) -> None:
        for mac, each in self.interfaces.items():
            if each.component == old:
                self.interfaces[mac] = replace(each, component=new)
        for label, group in self.groups.items():
            if old in group.members:
                members = tuple(sorted({new if member == old else member for member in group.members}))
                self.groups[label] = replace(group, members=members)
        for scope, key in [each for each in self.boot if each == ("host", old)]:
            self.boot[scope, new] = replace(self.boot.pop((scope, key)), key=new)

    def remove_component(self, key: str) -> None:
        """Remove a component with its interfaces, memberships and boot parameters."""
        removed = self.components.pop(key)
        for mac in [mac for mac, each in self.interfaces.items() if each.component == key]:
            del self.interfaces[mac]
            self.boot.pop(("mac", mac), None)
        for label, group in self.groups.items():
            if key in group.members:
                self.groups[label] = replace(group, members=tuple(each for each in group.members if each != key))
        for own in ("host", key), ("host", removed.name or key), ("nid", str(removed.nid)):
            self.boot.pop(own, None)

    def put_interfaces(self, component: str, found: list[Interface]) -> None:
        """Replace the interfaces of a component, in order."""
        kept = {each.mac for each in found}
        for mac in [mac for mac, each in self.interfaces.items() if each.component == component and mac not in kept]:
            del self.interfaces[mac]
        seen: set[str] = set()
        for position, each in enumerate(found):
            if each.mac in seen:
                self.findings.append(Finding(f"{self._owner_name(component)}: {each.mac} is listed twice"))
                continue
            seen.add(each.mac)
            self.put_interface(replace(each, component=component, position=position))

    def put_interface(self, new: Interface) -> None:
        """Add or replace an interface; a finding if another component has its MAC address."""
        there = self.interfaces.get(new.mac)
        if there and there.component and there.component != new.component:
            self.findings.append(
                Finding(
                    f"MAC {new.mac} of {self._owner_name(new.component)}: {self._owner_name(there.component)} has it",
                    taken=True,
                )
            )
            return
        if there and replace(there, changed=0) == replace(new, changed=0):
            return
        self.interfaces[new.mac] = replace(new, changed=there.changed if there else 0.0)

    def _owner_name(self, component: str) -> str:
        there = self.components.get(component)
        return (there.name if there else None) or component or "nobody"

    def put_members(self, component: str, labels: list[str]) -> None:
        """Set the groups of a component; missing groups are created."""
        for label, group in self.groups.items():
            if component in group.members and label not in labels:
                self.groups[label] = replace(group, members=tuple(each for each in group.members if each != component))
        for label in labels:
            group = self.groups.get(label) or Group(label)
            if component not in group.members:
                self.groups[label] = replace(group, members=tuple(sorted({*group.members, component})))

    def put_group(self, group: Group) -> None:
        self.groups[group.label] = replace(group, members=tuple(sorted(set(group.members))))

    def put_endpoint(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.id] = endpoint

    def put_boot(self, boot: Boot) -> None:
        self.boot[boot.scope, boot.key] = boot


def read_interface(given: str | payloads.Interface, component: str, findings: list[Finding]) -> Interface | None:
    """Read an interface: a MAC address, or an object with more fields. A finding and None if it is invalid."""
    one: payloads.Interface = {"mac": given} if isinstance(given, str) else given
    mac = names.clean_mac(one["mac"])
    if not mac:
        findings.append(
            Finding(f"{component}: {one['mac'][:60]!r} is not a MAC address: write it as 02:00:0a:4d:00:97")
        )
        return None
    return Interface(
        mac=mac,
        description=one.get("description", ""),
        addresses=read_addresses(one.get("addresses", ()), component, findings),
    )


def read_addresses(
    given: Iterable[str | payloads.Address], owner: str, findings: list[Finding]
) -> tuple[tuple[str, str], ...]:
    """Return addresses with their networks' names; a finding for each that is invalid or listed twice."""
    found: dict[str, str] = {}
    for each in given:
        text, network = (each, "") if isinstance(each, str) else (each["address"], each.get("network", ""))
        address = names.clean_address(text)
        if not address or address in found:
            why = "is listed twice" if address else "is not an address"
            findings.append(Finding(f"{owner}: {text[:60]!r} {why}"))
            continue
        found[address] = network
    return tuple(sorted(found.items()))
