"""Node tables of provisioning systems: Warewulf 3 and 4, xCAT, Cobbler; marks of others."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from appliance.plan.adopt.frames import Frames
from appliance.plan.adopt.model import Node, Provisioner
from appliance.text import printable

WAREWULF = ("/etc/warewulf", "/usr/local/etc/warewulf")
COBBLER = ("/var/lib/cobbler/collections/systems", "/var/lib/cobbler/config/systems.d")
MARKS = {
    "/opt/clmgr": "HPCM",
    "/opt/sgi": "HPCM",
    "/etc/opt/sgi": "HPCM",
    "/etc/cray": "HPE Cray EX (CSM)",
    "/opt/cray/csm": "HPE Cray EX (CSM)",
    "/opt/rocks": "Rocks",
    "/cm/local": "Bright Cluster Manager",
    "/opt/confluent": "Confluent",
}
DHCP = ("/etc/dhcp/dhcpd.conf", "/etc/dhcpd.conf")
MOST = 20_000


def read_provisioners(frames: Frames) -> tuple[tuple[Provisioner, ...], tuple[str, ...]]:
    """Return the provisioning systems with their node tables, and the files that could not be read as one."""
    broken: list[str] = []
    found = [*_warewulf(frames, broken), *_xcat(frames), *_cobbler(frames, broken), *_leases(frames)]
    marks: dict[str, list[str]] = {}
    for path, name in MARKS.items():
        if path in frames.files:
            marks.setdefault(name, []).append(path)
    found += [Provisioner(name=name, sources=tuple(paths)) for name, paths in marks.items()]
    return tuple(found), tuple(broken)


class NoAliases(yaml.SafeLoader):
    """A loader that refuses aliases: some lines of them expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _text(value: Any, limit: int = 200) -> str:
    return printable(str(value), limit) if isinstance(value, str | int) else ""


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _warewulf(frames: Frames, broken: list[str]) -> Iterable[Provisioner]:
    for folder in WAREWULF:
        path = f"{folder}/nodes.conf"
        if path not in frames.files:
            continue
        try:
            if frames.files[path].status != "read":
                raise ValueError("not read")
            table = _mapping(_mapping(NoAliases(frames.files[path].text).get_single_data()).get("nodes"))
        except (yaml.YAMLError, ValueError, RecursionError):
            broken.append(path)
            table = {}
        yield Provisioner(
            name="Warewulf 4", sources=(path,), nodes=tuple(_warewulf_node(*one) for one in list(table.items())[:MOST])
        )
    if "/etc/warewulf/provision.conf" in frames.files or "/etc/warewulf/vnfs.conf" in frames.files:
        rows = [line.split() for line in frames.output("wwsh")]
        nodes = [
            Node(name=printable(row[0], 64), group=printable(row[1], 64), address=row[2] if _is_address(row[2]) else "")
            for row in rows[:MOST]
            if len(row) >= 3 and row[0] != "NAME" and not row[0].startswith("=")
        ]
        yield Provisioner(name="Warewulf 3", sources=("/etc/warewulf",), nodes=tuple(nodes))


def _warewulf_node(name: Any, value: Any) -> Node:
    node = _mapping(value)
    devices = [_mapping(one) for one in _mapping(node.get("network devices")).values()]
    first = next((one for one in devices if one.get("ipaddr")), devices[0] if devices else {})
    profiles = node.get("profiles")
    return Node(
        name=_text(name, 64),
        address=_address(first.get("ipaddr")),
        mac=_mac(first.get("hwaddr")),
        bmc=_address(_mapping(node.get("ipmi")).get("ipaddr")),
        group=",".join(_text(one, 64) for one in profiles[:20]) if isinstance(profiles, list) else "",
    )


def _is_address(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){3}", text))


def _address(value: Any) -> str:
    text = _text(value, 40).partition("/")[0]
    return text if _is_address(text) else ""


def _mac(value: Any) -> str:
    text = _text(value, 40).lower().replace("-", ":")
    return text if re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", text) else ""


def _rows(frames: Frames, table: str) -> dict[str, dict[str, str]]:
    """Return the rows of a table of xCAT by their first column; its head is a comment."""
    lines = frames.output(f"xcat-{table}")
    if not lines or not lines[0].startswith("#"):
        return {}
    names = lines[0].lstrip("#").split(",")
    found = {}
    try:
        for row in csv.reader(lines[1 : MOST + 1]):
            if row:
                found[row[0]] = dict(zip(names, row, strict=False))
    except csv.Error:
        return found
    return found


def _xcat(frames: Frames) -> Iterable[Provisioner]:
    marks = [path for path in ("/opt/xcat", "/etc/xcat") if path in frames.files]
    listed = _rows(frames, "nodelist")
    if not marks and not listed:
        return
    hosts, macs, bmcs = _rows(frames, "hosts"), _rows(frames, "mac"), _rows(frames, "ipmi")

    def node(name: str, row: Mapping[str, str]) -> Node:
        mac = macs.get(name, {}).get("mac", "")
        return Node(
            name=printable(name, 64),
            address=_address(hosts.get(name, {}).get("ip", "")),
            mac=_mac(re.split(r"[|!]", mac)[0]),
            bmc=printable(bmcs.get(name, {}).get("bmc", ""), 64),
            group=printable(row.get("groups", ""), 200),
        )

    nodes = tuple(node(name, row) for name, row in listed.items() if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name))
    yield Provisioner(name="xCAT", sources=tuple(marks), nodes=nodes)


def _leases(frames: Frames) -> Iterable[Provisioner]:
    """Yield the reservations of DHCP servers."""
    for path in DHCP:
        text = re.sub(r"#.*", "", frames.text(path))
        nodes = [
            Node(name=printable(name, 64), address=_address(_first(r"fixed-address\s+([0-9.]+)", body)), mac=_mac(mac))
            for name, body in re.findall(r"\bhost\s+([A-Za-z0-9._-]{1,64})\s*\{([^{}]{0,4000})\}", text)
            if (mac := _first(r"hardware\s+ethernet\s+([0-9A-Fa-f:]+)", body))
        ]
        if nodes:
            yield Provisioner(name="dhcpd", sources=(path,), nodes=tuple(nodes[:MOST]))
    nodes, sources = [], []
    for section in frames.below("/etc", "/etc/dnsmasq.d"):
        given = re.findall(r"^dhcp-host\s*=\s*(\S+)", section.text, re.MULTILINE) if "dnsmasq" in section.name else []
        sources += [section.name] if given else []
        for line in given[: MOST - len(nodes)]:
            words = line.split(",")
            mac = next((_mac(word) for word in words if _mac(word)), "")
            address = next((word for word in words if _is_address(word)), "")
            name = next((word for word in words if re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", word)), mac)
            nodes.append(Node(name=printable(name, 64), address=address, mac=mac))
    if nodes:
        yield Provisioner(name="dnsmasq", sources=tuple(sources), nodes=tuple(nodes))


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _cobbler(frames: Frames, broken: list[str]) -> Iterable[Provisioner]:
    files = [one for one in frames.below(*COBBLER) if one.name.endswith(".json")]
    if not files and "/var/lib/cobbler" not in frames.files:
        return
    nodes = []
    for one in files:
        try:
            system = _mapping(json.loads(one.text))
        except (ValueError, RecursionError):
            broken.append(one.name)
            continue
        devices = [_mapping(each) for each in _mapping(system.get("interfaces")).values()]
        first = next((each for each in devices if each.get("ip_address")), devices[0] if devices else {})
        nodes.append(
            Node(
                name=_text(system.get("name"), 64),
                address=_address(first.get("ip_address")),
                mac=_mac(first.get("mac_address")),
                bmc=_text(system.get("power_address"), 64),
                group=_text(system.get("profile"), 64),
            )
        )
    yield Provisioner(name="Cobbler", sources=("/var/lib/cobbler",), nodes=tuple(nodes))
