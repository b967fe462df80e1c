"""Client of the VM's inventory, with a local cache for the time when the VM is off."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.config.hostlist import HostListError, expand
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.nodes.controllers import confirm_controllers, local_path
from appliance.operations.vm.client import open_api, read_answer, read_list
from appliance.plan.nodes.nodes import NAME, choose_nodes
from appliance.plan.overlay.seed import named_nodes
from appliance.plan.vm.vm import need_vm
from appliance.provision import payloads
from appliance.provision.payloads import Node
from appliance.shared.records import RecordError, check_value
from appliance.tools.provision import Api, VmUnreachable
from appliance.units import format_age

NODES, IMPORT, EXPORT, UNKNOWN = "/sms/v1/nodes", "/sms/v1/import", "/sms/v1/export", "/sms/v1/unknown"
REPORTS = "/sms/v1/sync/reports"
LONG_S = 300
LARGEST_B = 64 << 20
OLD_S = 7 * 86400
"""Age in seconds from which on the note on a cached answer warns that it may be outdated."""


@dataclass
class Inventory:
    """The inventory of a cluster; ``nodes`` are requested once.

    Controllers that this machine writes are confirmed by that.
    """

    cluster: Cluster
    api: Api
    _nodes: list[Node] | None = field(default=None)

    def nodes(self) -> list[Node]:
        """Return all nodes, sorted by name, and update the cache.

        Raises:
            VmUnreachable: the VM does not answer.
        """
        if self._nodes is None:
            self._nodes = clean_nodes(self.api.request("GET", NODES))
            cache_nodes(self.cluster, self._nodes)
        return self._nodes

    def put(self, name: str, node: Mapping[str, Any]) -> None:
        """Create a node."""
        self.api.request("PUT", f"{NODES}/{quote(name, safe='')}", dict(node))
        self._confirm([{**node, "name": name}])
        self._nodes = None

    def patch(self, name: str, change: Mapping[str, Any]) -> None:
        """Change the given keys of a node."""
        self.api.request("PATCH", f"{NODES}/{quote(name, safe='')}", dict(change))
        self._confirm([{**change, "name": name}])
        self._nodes = None

    def delete(self, name: str) -> None:
        """Remove a node."""
        self.api.request("DELETE", f"{NODES}/{quote(name, safe='')}")
        self._confirm([{"name": name, "bmc": ""}])
        self._nodes = None

    def import_document(self, document: Mapping[str, Any], *, replace: bool = False) -> int:
        """Import an export's document in one transaction. Returns the number of its nodes."""
        mode = "?mode=replace" if replace else ""
        answer = self.api.request("POST", f"{IMPORT}{mode}", dict(document), timeout_s=LONG_S)
        self._confirm(document.get("nodes") or ())
        self._nodes = None
        count = answer.get("nodes") if isinstance(answer, Mapping) else None
        return count if isinstance(count, int) else 0

    def _confirm(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        written = {str(node["name"]): str(node["bmc"] or "") for node in nodes if "bmc" in node}
        if written:
            confirm_controllers(self.cluster, written)

    def export(self) -> payloads.Inventory:
        """Return the whole inventory."""
        return read_answer(payloads.Inventory, self.api.request("GET", EXPORT, timeout_s=LONG_S))

    def unknown(self) -> list[payloads.UnknownMachine]:
        """Return the unknown machines that have requested a boot script."""
        return read_list(payloads.UnknownMachine, self.api.request("GET", UNKNOWN), "unknown")

    def reports(self) -> list[payloads.ClientState]:
        """Return the last report of each client of the master files."""
        return read_list(payloads.ClientState, self.api.request("GET", REPORTS), "clients")

    def refresh(self) -> None:
        """Request the nodes again after changes, and update the cache."""
        self._nodes = None
        self.nodes()


def open_inventory(cluster: Cluster) -> Inventory:
    """Return the inventory of the site's VM.

    Raises:
        ConfigError: the site has no VM.
    """
    return Inventory(cluster, open_api(cluster))


def clean_nodes(data: Any) -> list[Node]:
    """Return the nodes of an answer of the API or of the cache, sorted by name; invalid entries are skipped.

    A name is part of commands that hints show: one that is not a node's may be a command.
    """
    listed = data.get("nodes") if isinstance(data, Mapping) else data
    found = []
    for one in listed if isinstance(listed, list) else ():
        with suppress(RecordError):
            node = check_value(Node, one)
            if NAME.fullmatch(node.get("name", "")):
                found.append(node)
    return sorted(found, key=lambda node: str(node["name"]))


def cache_path(cluster: Cluster) -> Path:
    """Return the path of the cache on this machine."""
    return local_path(cluster, ".json")


def cache_nodes(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Write the cache for the time when the VM is off; does nothing without write permission."""
    text = json.dumps({"at": int(cluster.env.clock.time()), "nodes": nodes})
    try:
        Local().write(str(cache_path(cluster)), text.encode(), mode=0o600)
    except (SmsError, OSError):
        return


def read_cache(cluster: Cluster) -> tuple[list[Node], float]:
    """Return the cached nodes, and their age in seconds.

    Raises:
        Refused: there is no readable cache.
    """
    path = cache_path(cluster)
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST_B))
        return clean_nodes(found["nodes"]), max(0.0, cluster.env.clock.time() - float(found["at"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            f"the provisioning VM does not answer, and this machine has no cached inventory ({path})",
            hint="sms vm start; or use an admin host on which the inventory was used before",
        ) from error


def known_nodes(cluster: Cluster) -> list[Node]:
    """Return the inventory's nodes; if the VM is off, the cached ones, with a note on their age.

    Raises:
        ConfigError: the site has no VM.
        Refused: it is off and there is no cache.
    """
    try:
        return open_inventory(cluster).nodes()
    except VmUnreachable:
        nodes, age_s = read_cache(cluster)
        old = "; nodes may have changed since" if age_s > OLD_S else ""
        cluster.env.progress.report(
            f"note: the provisioning VM does not answer: using the inventory of {format_age(age_s)} ago{old}"
        )
        return nodes


def pick(nodes: Sequence[Node], words: Sequence[str]) -> list[Node]:
    """Return the nodes that match ``words``: host lists, ``@group``, ``@all``, xnames.

    Raises:
        ConfigError: a word is not a host list.
        Refused: a word matches no node.
    """
    names: list[str] = []
    for word in words:
        try:
            names += [word] if word.startswith("@") else expand(word)
        except HostListError as error:
            raise ConfigError(f"{word[:100]!r} {error}", hint="write node[001-450], @GROUP or @all") from error
    chosen, unknown = choose_nodes(names, nodes)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise Refused(
            f"the inventory has no {', '.join(unknown[:5])}{more}", hint="`sms node list` shows all nodes and groups"
        )
    return [node.copy() for node in chosen]


def find_node(nodes: Sequence[Node], word: str) -> Node:
    """Return the one node that a word matches.

    Raises:
        Refused: it matches none, or several.
    """
    found = pick(nodes, [word])
    if len(found) != 1:
        raise Refused(f"{word} matches {len(found)} nodes", hint="name a single node")
    return found[0]


def reserved_addresses(cluster: Cluster) -> dict[str, str]:
    """Return the addresses that no node may have, with their owners."""
    site, vm = cluster.site, need_vm(cluster.site)
    pool: dict[str, str] = {}
    if vm.pool:
        numbers = range(int(vm.pool.first), min(int(vm.pool.last), int(vm.pool.first) + 65535) + 1)
        pool = {str(IPv4Address(number)): "the pool for unknown machines" for number in numbers}
    hosts: dict[str, str] = {}
    for admin in site.admin_hosts:
        hosts |= dict.fromkeys(_addresses(admin.address), f"the admin host {admin.name}")
    return {
        **pool,
        **hosts,
        str(site.networks.provisioning.address.ip): "the services container",
        str(vm.address.ip): "the provisioning VM",
    }


def _addresses(host: str) -> list[str]:
    """Return the IPv4 addresses of a host name or address; empty if it cannot be resolved."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def node_network(cluster: Cluster) -> IPv4Network:
    """Return the network that nodes boot in."""
    return need_vm(cluster.site).address.network


def site_addresses(cluster: Cluster) -> dict[str, str]:
    """Return the addresses that ``slurm.nodes`` of the site file assigns, by node name."""
    return {name: address for name, address in named_nodes(cluster.site) if address}
