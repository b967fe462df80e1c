"""Conversion of a State Manager's lists (SMD of CSM or OpenCHAMI) to a document for the inventory's import. Pure.

All values are validated; invalid entries are left out, with a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, ip_address
from typing import Any, Literal, TypeVar, cast

import yaml

from appliance.errors import SmsError
from appliance.provision import names, payloads
from appliance.text import one_line

LARGEST_NID = 2**31 - 1
LONGEST = 255
ListName = Literal["nodes", "groups", "components", "interfaces", "endpoints", "boot"]
Entry = TypeVar("Entry", payloads.Node, payloads.Group)


@dataclass
class Converted:
    """The document, and notes on what was left out."""

    document: payloads.Inventory
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Smd:
    """The collections of a State Manager, as it lists them."""

    components: Sequence[Mapping[str, Any]]
    interfaces: Sequence[Mapping[str, Any]] = ()
    endpoints: Sequence[Mapping[str, Any]] = ()
    component_endpoints: Sequence[Mapping[str, Any]] = ()
    groups: Sequence[Mapping[str, Any]] = ()


def from_smd(smd: Smd, *, pattern: str, network: IPv4Network, reserved: Mapping[str, str]) -> Converted:
    """Convert the collections of a State Manager to an import document.

    Args:
        pattern: node names by NID, such as ``nid%06d``; a node without NID is named by its xname.
        network: the provisioning network; a node boots with its address in it.
        reserved: addresses that no node may have, with their owners.
    """
    converter = _Converter(smd, pattern, network, reserved)
    document: payloads.Inventory = {
        "nodes": list(converter.nodes()),
        "components": list(converter.other_components()),
        "interfaces": list(converter.unattached()),
        "endpoints": list(converter.endpoints()),
        "groups": list(converter.groups()),
    }
    return Converted(document, converter.notes)


@dataclass
class _Interface:
    mac: str
    description: str
    addresses: list[payloads.Address]

    def as_dict(self) -> payloads.Interface:
        return {"mac": self.mac, "description": self.description, "addresses": self.addresses}


class _Converter:
    def __init__(self, smd: Smd, pattern: str, network: IPv4Network, reserved: Mapping[str, str]) -> None:
        self.smd, self.pattern, self.network = smd, pattern, network
        self.notes: list[str] = []
        self._left: Counter[str] = Counter()
        self._macs: set[str] = set()
        self._addresses: dict[str, str] = dict(reserved)
        self._nids: set[int] = set()
        self._names: set[str] = set()
        self._known: set[str] = set()
        self._components = self._find_components()
        self._interfaces = self._find_interfaces()
        self._controllers = self._find_controllers()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def _find_components(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Return type and entry by xname."""
        found: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for one in self.smd.components:
            xname = names.clean_xname(_text(one, "ID"))
            kind = names.type_of(xname)
            if not kind or xname in found:
                why = "is a duplicate" if kind else "is not a known xname"
                self.note(f"component {_text(one, 'ID')[:60]!r}: {why}")
                continue
            found[xname] = kind, one
        return found

    def _find_interfaces(self) -> dict[str, list[_Interface]]:
        """Return interfaces by component, sorted by MAC address."""
        found: dict[str, list[_Interface]] = {}
        for one in sorted(self.smd.interfaces, key=lambda each: _text(each, "MACAddress")):
            mac = names.clean_mac(_text(one, "MACAddress")) or names.clean_mac(_text(one, "ID"))
            if not mac or mac in self._macs:
                why = "is a duplicate" if mac else "is not a MAC address of a machine"
                self.note(f"interface {_text(one, 'MACAddress')[:60]!r}: {why}")
                continue
            self._macs.add(mac)
            owner = names.clean_id(_text(one, "ComponentID"))
            made = _Interface(mac, _text(one, "Description"), list(self._ips(one, mac)))
            found.setdefault(owner, []).append(made)
        return found

    def _ips(self, one: Mapping[str, Any], mac: str) -> Iterator[payloads.Address]:
        listed = one.get("IPAddresses")
        # SMD's first API version had a single address instead of a list.
        entries = listed if isinstance(listed, list) else [{"IPAddress": one.get("IPAddress")}]
        for entry in entries:
            text = _text(entry, "IPAddress") if isinstance(entry, Mapping) else ""
            if not text:
                continue
            address = names.clean_address(text)
            if not address or address in self._addresses:
                why = f"is the address of {self._addresses[address]}" if address else "is not an address of a machine"
                self.note(f"{mac}: {text[:60]} {why}: left out")
                continue
            self._addresses[address] = mac
            yield {"address": address, "network": _text(entry, "Network")[:63]}

    def _find_controllers(self) -> dict[str, str]:
        """Return the controller's URL by xname of the node, with the system's path if it is known."""
        found: dict[str, str] = {}
        hosts: dict[str, str] = {}
        for one in self.smd.endpoints:
            hosts[names.clean_xname(_text(one, "ID"))] = _host(one)
        for xname, (kind, _) in self._components.items():
            if kind == "Node" and (host := hosts.get(names.bmc_of(xname), "")):
                found[xname] = f"https://{host}"
        for one in self.smd.component_endpoints:
            xname, url = names.clean_xname(_text(one, "ID")), _text(one, "RedfishURL").removeprefix("https://")
            if xname in self._components and names.type_of(xname) == "Node" and names.BMC.fullmatch(url) and "/" in url:
                found[xname] = f"https://{url}"
        return found

    def nodes(self) -> Iterator[payloads.Node]:
        for xname, (kind, one) in self._components.items():
            if kind != "Node":
                continue
            interfaces = self._interfaces.pop(xname, [])
            address = self._boot_address(interfaces)
            if not interfaces:
                self.note(f"{xname}: has no interface: it cannot boot until it has a MAC address")
            self._known.add(xname)
            nid = self._nid(xname, one)
            found: payloads.Node = {
                "nid": nid,
                "role": _word(one, "Role"),
                "subrole": _word(one, "SubRole"),
                "address": address,
                "interfaces": [each.as_dict() for each in interfaces],
                "bmc": self._controllers.get(xname, ""),
                "state": names.pick(_text(one, "State"), names.STATES) or "",
                "arch": names.pick(_text(one, "Arch"), names.ARCHES) or "",
            }
            yield {
                "name": self._name(xname, nid),
                "xname": xname,
                **_non_empty(found),
                "enabled": one.get("Enabled") is not False,
            }

    def _boot_address(self, interfaces: list[_Interface]) -> str | None:
        """Return the address in the provisioning network; moves its interface to the front, as that one boots."""
        for number, one in enumerate(interfaces):
            for entry in one.addresses:
                if ip_address(entry["address"]) in self.network:
                    one.addresses.remove(entry)
                    interfaces.insert(0, interfaces.pop(number))
                    return entry["address"]
        return None

    def _nid(self, xname: str, one: Mapping[str, Any]) -> int | None:
        nid = one.get("NID")
        if not isinstance(nid, int) or isinstance(nid, bool) or not 0 < nid <= LARGEST_NID:
            return None
        if nid in self._nids:
            self.note(f"{xname}: NID {nid} is a duplicate: left out")
            return None
        self._nids.add(nid)
        return nid

    def _name(self, xname: str, nid: int | None) -> str:
        name = self.pattern % nid if nid is not None else xname
        name = xname if name in self._names or not names.NAME.fullmatch(name) else name
        self._names.add(name)
        return name

    def other_components(self) -> Iterator[payloads.OtherComponent]:
        for xname, (kind, one) in self._components.items():
            if kind == "Node":
                continue
            self._known.add(xname)
            state = names.pick(_text(one, "State"), names.STATES) or "Unknown"
            yield {"id": xname, "state": state, "enabled": one.get("Enabled") is not False}

    def unattached(self) -> Iterator[payloads.Interface]:
        for owner, interfaces in self._interfaces.items():
            for one in interfaces:
                yield {**one.as_dict(), "component": owner if owner in self._known else ""}

    def endpoints(self) -> Iterator[payloads.Endpoint]:
        """Yield Redfish endpoints without users and passwords."""
        seen: set[str] = set()
        for one in self.smd.endpoints:
            xname = names.clean_xname(_text(one, "ID"))
            if not names.type_of(xname) or xname in seen:
                why = "is a duplicate" if xname in seen else "is not an xname"
                self.note(f"endpoint {_text(one, 'ID')[:60]!r}: {why}")
                continue
            seen.add(xname)
            uuid = _text(one, "UUID")
            yield {
                "id": xname,
                "fqdn": _text(one, "FQDN") or _text(one, "Hostname"),
                "address": names.clean_address(_text(one, "IPAddress")),
                "mac": names.clean_mac(_text(one, "MACAddr")),
                "enabled": one.get("Enabled") is not False,
                "details": {"uuid": uuid} if uuid else {},
            }

    def groups(self) -> Iterator[payloads.Group]:
        seen: set[str] = set()
        for one in self.smd.groups:
            label = _text(one, "label")
            if not names.LABEL.fullmatch(label) or label in seen:
                self.note(f"group {label[:60]!r}: {'is a duplicate' if label in seen else 'is not a label'}")
                continue
            seen.add(label)
            exclusive = _text(one, "exclusiveGroup")
            found: payloads.Group = {
                "label": label,
                "description": _text(one, "description"),
                "exclusive": exclusive if names.LABEL.fullmatch(exclusive) else "",
                "tags": [tag for tag in _texts(one.get("tags")) if names.LABEL.fullmatch(tag)],
            }
            yield {**_non_empty(found), "members": list(self._members(label, one))}

    def _members(self, label: str, one: Mapping[str, Any]) -> Iterator[str]:
        listed = one.get("members")
        for member in dict.fromkeys(_texts(listed.get("ids") if isinstance(listed, Mapping) else None)):
            if (key := names.clean_id(member)) in self._known:
                yield key
            else:
                self.note(f"group {label}: {member[:60]!r} is not a component: left out")


def _text(of: Any, key: str) -> str:
    found = of.get(key) if isinstance(of, Mapping) else None
    return one_line(found, LONGEST) if isinstance(found, str) else ""


def _non_empty(found: Entry) -> Entry:
    """Return the non-empty values: a repeated import must not clear values that were set by hand."""
    return cast("Entry", {name: value for name, value in found.items() if value not in (None, "", [])})


def _texts(listed: Any) -> Iterable[str]:
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _word(of: Mapping[str, Any], key: str) -> str:
    found = _text(of, key)
    return found if names.WORD.fullmatch(found) else ""


def _host(one: Mapping[str, Any]) -> str:
    """Return the host name of an endpoint, else its address."""
    for key in ("FQDN", "Hostname", "IPAddress"):
        host = _text(one, key)
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,200}", host):
            return host
    return ""


LISTS: dict[ListName, Callable[[Mapping[str, Any]], Any]] = {
    "nodes": lambda one: one.get("name"),
    "groups": lambda one: one.get("label"),
    "components": lambda one: one.get("id"),
    "interfaces": lambda one: one.get("mac"),
    "endpoints": lambda one: one.get("id"),
    "boot": lambda one: (one.get("scope"), one.get("key")),
}
"""The lists of an export, and the key of an entry in each."""


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _SafeLoader(_Base):  # type: ignore[misc]
    """Loader that keeps text as text: YAML 1.1 reads dates, and the MAC address 10:20:30:40:50:10 as a number."""


_NUMBER = "tag:yaml.org,2002:int"
_OTHERS = (_NUMBER, "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_SafeLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _OTHERS] for first, pairs in _Base.yaml_implicit_resolvers.items()
}
_SafeLoader.add_implicit_resolver(_NUMBER, re.compile(r"-?(0|[1-9][0-9]{0,18})$"), list("-0123456789"))
_SafeLoader.add_implicit_resolver(_OTHERS[1], re.compile(r"-?[0-9]+\.[0-9]+([eE][-+]?[0-9]+)?$"), list("-0123456789"))


def read_document(text: str | bytes) -> payloads.Inventory:
    """Parse an export, YAML or JSON.

    Raises:
        SmsError: the text is not an export.
    """
    hint = "`sms node export` writes one"
    try:
        # A few lines of nested aliases can expand to more than fits into memory.
        if any(isinstance(event, yaml.events.AliasEvent) for event in yaml.parse(text, Loader=_SafeLoader)):
            raise SmsError("not an inventory: it has YAML aliases", hint=hint)
        found = yaml.load(text, Loader=_SafeLoader)  # noqa: S506 - a safe one
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SmsError(f"invalid YAML: {' '.join(str(error).split())[:300]}", hint=hint) from error
    if not isinstance(found, dict) or not found or not set(found) <= set(LISTS):
        raise SmsError(f"not an inventory: only the lists {', '.join(LISTS)} are allowed", hint=hint)
    for name, listed in found.items():
        if not isinstance(listed, list) or not all(isinstance(one, dict) and LISTS[name](one) for one in listed):
            raise SmsError(f"{name} is not a list of entries with keys", hint=hint)
    return cast("payloads.Inventory", found)
