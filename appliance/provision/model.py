"""An immutable inventory: components, interfaces, groups, endpoints, boot parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Component:
    """A component of SMD: node, controller or chassis. ``id`` is its xname, or the name of a node without one.

    ``uuid`` is that of a node's entry, and in the certificate of its machine; World.edit assigns it. Empty: the entry
    is older than UUIDs, and no machine has enrolled since.
    """

    id: str
    type: str = "Node"
    name: str | None = None
    xname: str | None = None
    nid: int | None = None
    address: str | None = None
    role: str = "Compute"
    subrole: str = ""
    state: str = "Unknown"
    flag: str = "OK"
    enabled: bool = True
    software: str = ""
    net_type: str = "Ethernet"
    arch: str = "X86"
    klass: str = "River"
    bmc: str = ""
    profile: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    uuid: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface. ``addresses`` excludes its node's boot address: other networks, or a controller's."""

    mac: str
    component: str = ""
    position: int = 0
    description: str = ""
    addresses: tuple[tuple[str, str], ...] = ()
    """Pairs of address and network name."""
    changed: float = 0.0


@dataclass(frozen=True)
class Group:
    """A set of nodes with a label; a node may be in only one of the groups with the same ``exclusive``."""

    label: str
    description: str = ""
    exclusive: str = ""
    tags: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A Redfish service. Its password is not stored."""

    id: str
    type: str = "NodeBMC"
    fqdn: str = ""
    address: str = ""
    mac: str = ""
    enabled: bool = True
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Boot:
    """Boot parameters of one key: a host, a MAC address, a NID, a group, or a kernel's or initrd's path."""

    scope: str
    key: str
    kernel: str = ""
    initrd: str = ""
    params: str = ""
    cloud_init: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Inventory:
    """The whole inventory."""

    components: Mapping[str, Component] = field(default_factory=dict)
    interfaces: Mapping[str, Interface] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    boot: Mapping[tuple[str, str], Boot] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Component]:
        """Nodes by their names in lower case."""
        return {each.name.lower(): each for each in self.components.values() if each.name and each.type == "Node"}

    @cached_property
    def by_nid(self) -> dict[int, Component]:
        return {each.nid: each for each in self.components.values() if each.nid is not None}

    @cached_property
    def by_address(self) -> dict[str, Component]:
        """Nodes by their boot address."""
        return {each.address: each for each in self.components.values() if each.address}

    @cached_property
    def _interfaces(self) -> dict[str, list[Interface]]:
        found: dict[str, list[Interface]] = {}
        for each in sorted(self.interfaces.values(), key=lambda one: (one.position, one.mac)):
            found.setdefault(each.component, []).append(each)
        return found

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for group in self.groups.values():
            for member in group.members:
                found.setdefault(member, []).append(group.label)
        return {member: sorted(labels) for member, labels in found.items()}

    def interfaces_of(self, component: str) -> list[Interface]:
        """Return a component's interfaces; a node boots from the first."""
        return self._interfaces.get(component, [])

    def groups_of(self, component: str) -> list[str]:
        return self._groups.get(component, [])

    def find_node(self, name: str) -> Component | None:
        """Return a node by name or xname."""
        found = self.by_name.get(name.lower()) or self.components.get(name) or self.components.get(name.lower())
        return found if found and found.type == "Node" else None

    def nodes(self) -> list[Component]:
        """Return all nodes, sorted by ID."""
        return sorted((each for each in self.components.values() if each.type == "Node"), key=lambda one: one.id)
