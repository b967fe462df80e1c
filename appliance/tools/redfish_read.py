"""What a management controller says of itself and its systems. Resources that are missing or broken become notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import SmsError
from appliance.plan.nodes.nodes import clean_mac
from appliance.text import one_line
from appliance.tools.redfish import ROOT, SYSTEMS, Conversation, NoRedfish, link_of, members

MOST_SYSTEMS = 64
MOST_PARTS = 32
"""Managers, chassis, interfaces, adapters, ports: of each kind, in one place."""
MOST_PAGES = 16
MOST_NOTES = 20
LONGEST = 120
"""Letters of a text of theirs."""


@dataclass(frozen=True)
class Nic:
    """An Ethernet interface of a system; ``up`` is None where nobody says."""

    mac: str
    name: str = ""
    up: bool | None = None


@dataclass(frozen=True)
class System:
    """A machine behind a controller; texts are empty and numbers 0 where it does not say."""

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
        """Those with a link first: of these is the one that boots."""
        return tuple(nic.mac for nic in sorted(self.nics, key=lambda nic: nic.up is not True))


@dataclass(frozen=True)
class Bmc:
    """A controller and all that is behind it; ``notes`` say what could not be read."""

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
    asked: Conversation
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.notes) < MOST_NOTES and text not in self.notes:
            self.notes.append(text)

    def look(self, path: str, what: str) -> Mapping[str, Any]:
        """A resource; an empty one and a note where it cannot be read."""
        if not path:
            return {}
        try:
            return self.asked.ask("GET", path)
        except SmsError as error:
            self.note(f"{what}: {error.message}")
            return {}

    def each(self, path: str, what: str, most: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The members of a collection that can be read, each once, ``most`` at most."""
        for link in self.links(path, what, most):
            if found := self.look(link, what):
                yield link, found

    def links(self, path: str, what: str, most: int, page: Mapping[str, Any] | None = None) -> list[str]:
        """Where the members of a collection are, page after page; ``page`` is the first, if it is known."""
        found: dict[str, None] = {}
        pages: set[str] = set()
        while path and path not in pages and len(pages) < MOST_PAGES and len(found) < most:
            pages.add(path)
            said = page or self.look(path, what)
            page = None
            found.update(dict.fromkeys(members(said)))
            path = link_of({"@odata.id": said.get("Members@odata.nextLink")})
        if len(found) > most:
            self.note(f"{what}: {len(found)} of them, the first {most} are read")
        return list(found)[:most]


def read_bmc(asked: Conversation) -> Bmc:
    """All that is wanted of a controller, in about ten questions a system.

    Raises:
        Denied, Untrusted, Silent: as they say.
        NoRedfish: what answers is none, or has no systems.
    """
    reader, url = _Reader(asked), asked.controller.url
    root = asked.ask("GET", f"{ROOT}/")
    if not isinstance(root.get("RedfishVersion"), str) and "Systems" not in root:
        raise NoRedfish(f"{asked.controller.name}: the answer is no Redfish", hint="is it the controller's address?")
    paths = _system_paths(reader, root, url)
    systems = [_system(reader, path, said) for path in paths if (said := reader.look(path, "system"))]
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
    """The one that the URL names, or all. What goes wrong here is the controller's answer, no note."""
    own = urlsplit(url).path.rstrip("/")
    if own.startswith(f"{SYSTEMS}/"):
        return [own]
    collection = link_of(root.get("Systems")) or SYSTEMS
    first = reader.asked.ask("GET", collection)
    paths = reader.links(collection, "systems", MOST_SYSTEMS, first)
    if not paths:
        reader.note("it has no systems")
    return paths


def _manager(reader: _Reader, path: str) -> Mapping[str, Any]:
    """The controller as it describes itself: of several, the one that says that it is the BMC."""
    found = [said for _, said in reader.each(path, "managers", MOST_PARTS)]
    own = [said for said in found if said.get("ManagerType") == "BMC"]
    return (own or found or [{}])[0]


def _manager_mac(reader: _Reader, manager: Mapping[str, Any]) -> str:
    for _, said in reader.each(link_of(manager.get("EthernetInterfaces")), "the controller's interfaces", MOST_PARTS):
        if mac := _mac_of(said):
            return mac
    return ""


def _system(reader: _Reader, path: str, said: Mapping[str, Any]) -> System:
    memory, processors = _part(said, "MemorySummary"), _part(said, "ProcessorSummary")
    count = _number(processors.get("Count"))
    model = _text(processors, "Model")
    if not count:
        found = _processors(reader, said)
        count, model = len(found), model or next((_text(one, "Model") for one in found), "")
    boot, reset = _part(said, "Boot"), _part(_part(said, "Actions"), "#ComputerSystem.Reset")
    return System(
        path=path,
        id=_text(said, "Id"),
        name=_text(said, "HostName") or _text(said, "Name"),
        uuid=_text(said, "UUID").lower(),
        power=_text(said, "PowerState"),
        manufacturer=_text(said, "Manufacturer"),
        model=_text(said, "Model"),
        serial=_text(said, "SerialNumber") or _text(said, "SKU"),
        bios=_text(said, "BiosVersion"),
        memory_gib=round(_number(memory.get("TotalSystemMemoryGiB")), 1),
        processors=int(count),
        processor_model=model,
        nics=_nics(reader, said),
        resets=_texts(reset.get("ResetType@Redfish.AllowableValues")),
        boots=_texts(boot.get("BootSourceOverrideTarget@Redfish.AllowableValues")),
    )


def _processors(reader: _Reader, said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = reader.each(link_of(said.get("Processors")), "processors", MOST_PARTS)
    return [one for _, one in found if one.get("ProcessorType") in (None, "CPU")]


def _nics(reader: _Reader, said: Mapping[str, Any]) -> tuple[Nic, ...]:
    """The system's own list; where that is empty, the ports of its chassis' adapters."""
    found: dict[str, Nic] = {}
    for path, one in reader.each(link_of(said.get("EthernetInterfaces")), "interfaces", MOST_PARTS):
        if mac := _mac_of(one):
            found.setdefault(mac, Nic(mac, _text(one, "Id") or path.rpartition("/")[2][:LONGEST], _is_up(one)))
    if not found:
        for nic in _adapter_nics(reader, said):
            found.setdefault(nic.mac, nic)
    if not found:
        reader.note(f"system {_text(said, 'Id') or '?'}: no MAC address")
    return tuple(found.values())


def _adapter_nics(reader: _Reader, said: Mapping[str, Any]) -> Iterator[Nic]:
    chassis = _part(said, "Links").get("Chassis")
    for place in chassis[:4] if isinstance(chassis, list) else []:
        adapters = link_of(reader.look(link_of(place), "chassis").get("NetworkAdapters"))
        for _, adapter in reader.each(adapters, "network adapters", MOST_PARTS):
            ports = link_of(adapter.get("Ports")) or link_of(adapter.get("NetworkPorts"))
            for _, port in reader.each(ports, "network ports", MOST_PARTS):
                listed = port.get("AssociatedNetworkAddresses") or _part(port, "Ethernet").get("AssociatedMACAddresses")
                for one in listed[:1] if isinstance(listed, list) else []:
                    if mac := clean_mac(one):
                        yield Nic(mac, _text(port, "Id"), _is_up(port))


def _mac_of(said: Mapping[str, Any]) -> str:
    return clean_mac(said.get("MACAddress")) or clean_mac(said.get("PermanentMACAddress"))


def _is_up(said: Mapping[str, Any]) -> bool | None:
    status = said.get("LinkStatus")
    return status in ("LinkUp", "Up") if isinstance(status, str) else None


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(of: Mapping[str, Any], name: str) -> str:
    found = of.get(name)
    return one_line(found, LONGEST) if isinstance(found, str) else ""


def _texts(listed: Any) -> tuple[str, ...]:
    found = listed if isinstance(listed, list) else []
    return tuple(one[:LONGEST] for one in found[:MOST_PARTS] if isinstance(one, str) and one.isprintable())


def _number(found: Any) -> float:
    """A number that can be one of a machine: JSON knows NaN, infinities and the age of the universe."""
    return found if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1e7 else 0
