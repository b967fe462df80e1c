"""Read the data of a management controller and its systems. Missing or broken resources become notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import SmsError
from appliance.plan.nodes.nodes import clean_mac
from appliance.text import one_line
from appliance.tools.redfish import (
    ADDRESS_HINT,
    ROOT,
    SYSTEMS,
    NoRedfish,
    RedfishClient,
    link_of,
    members,
    part_of,
)

MAX_SYSTEMS = 64
MAX_PARTS = 32
"""Maximum number of managers, chassis, interfaces, adapters and ports, in each collection."""
MAX_PAGES = 16
MAX_NOTES = 20
MAX_LENGTH = 120
"""Maximum length of a text from a controller."""


@dataclass(frozen=True)
class Nic:
    """An Ethernet interface of a system; ``up`` is None if unknown."""

    mac: str
    name: str = ""
    up: bool | None = None


@dataclass(frozen=True)
class System:
    """A machine behind a controller; unknown texts are empty, unknown numbers 0."""

    path: str
    id: str = ""
    name: str = ""
    uuid: str = ""
    power: str = ""
    manufacturer: str = ""
    model: str = ""
    serial: str = ""
    bios: str = ""
    memory_gib: float = 0
    processors: int = 0
    processor_model: str = ""
    nics: tuple[Nic, ...] = ()
    resets: tuple[str, ...] = ()
    boots: tuple[str, ...] = ()

    @property
    def macs(self) -> tuple[str, ...]:
        """MAC addresses, those with a link first: one of these boots."""
        return tuple(nic.mac for nic in sorted(self.nics, key=lambda nic: nic.up is not True))


@dataclass(frozen=True)
class Bmc:
    """A controller and its systems; ``notes`` list what could not be read."""

    url: str
    redfish: str = ""
    uuid: str = ""
    manufacturer: str = ""
    model: str = ""
    firmware: str = ""
    mac: str = ""
    systems: tuple[System, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Reader:
    client: RedfishClient
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES and text not in self.notes:
            self.notes.append(text)

    def fetch(self, path: str, what: str) -> Mapping[str, Any]:
        """Return a resource; if it cannot be read, an empty one, and add a note."""
        if not path:
            return {}
        try:
            return self.client.request("GET", path)
        except SmsError as error:
            self.note(f"{what}: {error.message}")
            return {}

    def each(self, path: str, what: str, limit: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the readable members of a collection, each once, at most ``limit``."""
        for link in self.links(path, what, limit):
            if found := self.fetch(link, what):
                yield link, found

    def links(self, path: str, what: str, limit: int, page: Mapping[str, Any] | None = None) -> list[str]:
        """Return the links to the members of a collection, from all its pages; ``page`` is the first, if known."""
        found: dict[str, None] = {}
        pages: set[str] = set()
        while path and path not in pages and len(pages) < MAX_PAGES and len(found) < limit:
            pages.add(path)
            data = page or self.fetch(path, what)
            page = None
            found.update(dict.fromkeys(members(data)))
            path = link_of({"@odata.id": data.get("Members@odata.nextLink")})
        if len(found) > limit:
            self.note(f"{what}: {len(found)} members, only the first {limit} are read")
        return list(found)[:limit]


def read_bmc(client: RedfishClient) -> Bmc:
    """Read a controller and its systems, with about ten requests per system.

    Raises:
        Denied, Untrusted, Silent: see there.
        NoRedfish: the peer is not a Redfish service.
    """
    reader, url = _Reader(client), client.controller.url
    root = client.request("GET", f"{ROOT}/")
    if not isinstance(root.get("RedfishVersion"), str) and "Systems" not in root:
        raise NoRedfish(f"{client.controller.name}: not a Redfish response", hint=ADDRESS_HINT)
    paths = _system_paths(reader, root, url)
    systems = [_system(reader, path, data) for path in paths if (data := reader.fetch(path, "system"))]
    manager = _manager(reader, link_of(root.get("Managers")))
    return Bmc(
        url=url,
        redfish=_text(root, "RedfishVersion"),
        uuid=_text(root, "UUID") or _text(manager, "UUID"),
        manufacturer=_text(manager, "Manufacturer") or _text(root, "Vendor"),
        model=_text(manager, "Model"),
        firmware=_text(manager, "FirmwareVersion"),
        mac=_manager_mac(reader, manager),
        systems=tuple(systems),
        notes=tuple(reader.notes),
    )


def _system_paths(reader: _Reader, root: Mapping[str, Any], url: str) -> list[str]:
    """Return the path of the system in the URL, or of all systems. Errors are raised, not noted."""
    own = urlsplit(url).path.rstrip("/")
    if own.startswith(f"{SYSTEMS}/"):
        return [own]
    collection = link_of(root.get("Systems")) or SYSTEMS
    first = reader.client.request("GET", collection)
    paths = reader.links(collection, "systems", MAX_SYSTEMS, first)
    if not paths:
        reader.note("it has no systems")
    return paths


def _manager(reader: _Reader, path: str) -> Mapping[str, Any]:
    """Return the manager resource of the controller; of several, the one of type BMC."""
    found = [data for _, data in reader.each(path, "managers", MAX_PARTS)]
    own = [data for data in found if data.get("ManagerType") == "BMC"]
    return (own or found or [{}])[0]


def _manager_mac(reader: _Reader, manager: Mapping[str, Any]) -> str:
    for _, data in reader.each(link_of(manager.get("EthernetInterfaces")), "the controller's interfaces", MAX_PARTS):
        if mac := _mac_of(data):
            return mac
    return ""


def _system(reader: _Reader, path: str, data: Mapping[str, Any]) -> System:
    memory, processors = part_of(data, "MemorySummary"), part_of(data, "ProcessorSummary")
    count = _number(processors.get("Count"))
    model = _text(processors, "Model")
    if not count:
        found = _processors(reader, data)
        count, model = len(found), model or next((_text(one, "Model") for one in found), "")
    boot, reset = part_of(data, "Boot"), part_of(part_of(data, "Actions"), "#ComputerSystem.Reset")
    return System(
        path=path,
        id=_text(data, "Id"),
        name=_text(data, "HostName") or _text(data, "Name"),
        uuid=_text(data, "UUID").lower(),
        power=_text(data, "PowerState"),
        manufacturer=_text(data, "Manufacturer"),
        model=_text(data, "Model"),
        serial=_text(data, "SerialNumber") or _text(data, "SKU"),
        bios=_text(data, "BiosVersion"),
        memory_gib=round(_number(memory.get("TotalSystemMemoryGiB")), 1),
        processors=int(count),
        processor_model=model,
        nics=_nics(reader, data),
        resets=_texts(reset.get("ResetType@Redfish.AllowableValues")),
        boots=_texts(boot.get("BootSourceOverrideTarget@Redfish.AllowableValues")),
    )


def _processors(reader: _Reader, data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = reader.each(link_of(data.get("Processors")), "processors", MAX_PARTS)
    return [one for _, one in found if one.get("ProcessorType") in (None, "CPU")]


def _nics(reader: _Reader, data: Mapping[str, Any]) -> tuple[Nic, ...]:
    """Return the system's interfaces; without any, the ports of its chassis' adapters."""
    found: dict[str, Nic] = {}
    for path, one in reader.each(link_of(data.get("EthernetInterfaces")), "interfaces", MAX_PARTS):
        if mac := _mac_of(one):
            found.setdefault(mac, Nic(mac, _text(one, "Id") or path.rpartition("/")[2][:MAX_LENGTH], _is_up(one)))
    if not found:
        for nic in _adapter_nics(reader, data):
            found.setdefault(nic.mac, nic)
    if not found:
        reader.note(f"system {_text(data, 'Id') or '?'}: no MAC address")
    return tuple(found.values())


def _adapter_nics(reader: _Reader, data: Mapping[str, Any]) -> Iterator[Nic]:
    chassis = part_of(data, "Links").get("Chassis")
    for place in chassis[:4] if isinstance(chassis, list) else []:
        adapters = link_of(reader.fetch(link_of(place), "chassis").get("NetworkAdapters"))
        for _, adapter in reader.each(adapters, "network adapters", MAX_PARTS):
            ports = link_of(adapter.get("Ports")) or link_of(adapter.get("NetworkPorts"))
            for _, port in reader.each(ports, "network ports", MAX_PARTS):
                ethernet = part_of(port, "Ethernet")
                listed = port.get("AssociatedNetworkAddresses") or ethernet.get("AssociatedMACAddresses")
                for one in listed[:1] if isinstance(listed, list) else []:
                    if mac := clean_mac(one):
                        yield Nic(mac, _text(port, "Id"), _is_up(port))


def _mac_of(data: Mapping[str, Any]) -> str:
    return clean_mac(data.get("MACAddress")) or clean_mac(data.get("PermanentMACAddress"))


def _is_up(data: Mapping[str, Any]) -> bool | None:
    status = data.get("LinkStatus")
    return status in ("LinkUp", "Up") if isinstance(status, str) else None


def _text(of: Mapping[str, Any], name: str) -> str:
    found = of.get(name)
    return one_line(found, MAX_LENGTH) if isinstance(found, str) else ""


def _texts(listed: Any) -> tuple[str, ...]:
    found = listed if isinstance(listed, list) else []
    return tuple(one[:MAX_LENGTH] for one in found[:MAX_PARTS] if isinstance(one, str) and one.isprintable())


def _number(found: Any) -> float:
    """Return a plausible number, otherwise 0: JSON parsers accept NaN, infinities and huge values."""
    return found if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1e7 else 0
