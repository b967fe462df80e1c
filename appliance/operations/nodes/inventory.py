"""The VM's inventory as `sms node` asks for it, and the last answer, kept for the time when the VM is off."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.config.hostlist import HostListError, expand
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.vm.client import need_vm, open_api, tls_folder
from appliance.plan.nodes.nodes import choose_nodes
from appliance.progress import Progress
from appliance.tools.provision import Api, Away
from appliance.units import format_age

Node = dict[str, Any]

NODES, IMPORT, EXPORT, UNKNOWN = "/sms/v1/nodes", "/sms/v1/import", "/sms/v1/export", "/sms/v1/unknown"
REPORTS = "/sms/v1/sync/reports"
LONG_S = 300
LARGEST_B = 64 << 20
OLD_S = 7 * 86400
"""Age of the kept answer from which on its note says more than its age."""


@dataclass
class Inventory:
    """The inventory of a cluster; ``nodes`` are read once."""

    cluster: Cluster
    api: Api
    _nodes: list[Node] | None = field(default=None)

    def nodes(self) -> list[Node]:
        """All nodes, by name; kept for the time when the VM is off.

        Raises:
            Away: the VM does not answer.
        """
        if self._nodes is None:
            self._nodes = clean_nodes(self.api.ask("GET", NODES))
            keep_nodes(self.cluster, self._nodes)
        return self._nodes

    def put(self, name: str, node: Mapping[str, Any]) -> None:
        """Make a node."""
        self.api.ask("PUT", f"{NODES}/{quote(name, safe='')}", dict(node))
        self._nodes = None

    def patch(self, name: str, change: Mapping[str, Any]) -> None:
        """Change what is named of a node."""
        self.api.ask("PATCH", f"{NODES}/{quote(name, safe='')}", dict(change))
        self._nodes = None

    def delete(self, name: str) -> None:
        """Forget a node."""
        self.api.ask("DELETE", f"{NODES}/{quote(name, safe='')}")
        self._nodes = None

    def bring(self, document: Mapping[str, Any], *, replace: bool = False) -> int:
        """An export's document into the inventory: all of it, or nothing. Gives how many nodes it has."""
        mode = "?mode=replace" if replace else ""
        said = self.api.ask("POST", f"{IMPORT}{mode}", dict(document), timeout_s=LONG_S)
        self._nodes = None
        return int(said.get("nodes", 0)) if isinstance(said, Mapping) else 0

    def export(self) -> dict[str, Any]:
        """The whole inventory."""
        said = self.api.ask("GET", EXPORT, timeout_s=LONG_S)
        if not isinstance(said, dict):
            raise SmsError("the inventory cannot be read: its export is no object", hint="sms vm status")
        return said

    def unknown(self) -> list[Node]:
        """Machines that have asked for a boot script, and that the inventory does not know."""
        return _entries(self.api.ask("GET", UNKNOWN), "unknown")

    def reports(self) -> list[Node]:
        """What each client of the master files has told, and when."""
        return _entries(self.api.ask("GET", REPORTS), "clients")

    def refresh(self) -> None:
        """Keep what is there after changes."""
        self._nodes = None
        self.nodes()


def open_inventory(cluster: Cluster) -> Inventory:
    """The inventory of the site's VM.

    Raises:
        Refused: the site has no VM.
    """
    return Inventory(cluster, open_api(cluster))


def clean_nodes(said: Any) -> list[Node]:
    """Nodes as the API or the kept file lists them; what is none is passed over."""
    listed = said.get("nodes") if isinstance(said, Mapping) else said
    found = [dict(one) for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return sorted((one for one in found if isinstance(one.get("name"), str)), key=lambda one: one["name"])


def _entries(said: Any, key: str) -> list[Node]:
    listed = said.get(key) if isinstance(said, Mapping) else None
    return [dict(one) for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def kept_path(cluster: Cluster) -> Path:
    """Where the last answer is kept on this machine: by the site's CA, as two sites may have one cluster's name."""
    try:
        whose = (tls_folder(cluster) / "ca.pem").read_bytes()
    except OSError:
        whose = str(need_vm(cluster).address).encode()
    return cluster.site.state / "nodes" / f"{cluster.site.cluster}-{hashlib.sha256(whose).hexdigest()[:12]}.json"


def keep_nodes(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Keep them for the time when the VM is off; where this machine may not write, nothing is kept."""
    text = json.dumps({"at": int(time.time()), "nodes": nodes})
    try:
        Local().write(str(kept_path(cluster)), text.encode(), mode=0o600)
    except (SmsError, OSError):
        return


def read_kept(cluster: Cluster) -> tuple[list[Node], float]:
    """The nodes of the last answer, and its age in seconds.

    Raises:
        Refused: there is none that can be read.
    """
    path = kept_path(cluster)
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST_B))
        return clean_nodes(found["nodes"]), max(0.0, time.time() - float(found["at"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            f"the provisioning VM does not answer, and this machine has kept no inventory ({path})",
            hint="sms vm start; or ask on the admin host that has asked before",
        ) from error


def known_nodes(cluster: Cluster, progress: Progress) -> list[Node]:
    """The inventory's nodes; those of the last answer, with a note on their age, where the VM is off.

    Raises:
        Refused: the site has no VM, or it is off and nothing has been kept.
    """
    try:
        return open_inventory(cluster).nodes()
    except Away:
        nodes, age_s = read_kept(cluster)
        old = "; nodes may have changed since" if age_s > OLD_S else ""
        progress.say(
            f"note: the provisioning VM does not answer: the inventory is that of {format_age(age_s)} ago{old}"
        )
        return nodes


def pick(nodes: Sequence[Node], words: Sequence[str]) -> list[Node]:
    """The nodes that words stand for: host lists, ``@group``, ``@all``, xnames.

    Raises:
        ConfigError: a word is no host list.
        Refused: a word stands for no node.
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
    return [dict(node) for node in chosen]


def find_node(nodes: Sequence[Node], word: str) -> Node:
    """The one node that a word stands for.

    Raises:
        Refused: none, or several.
    """
    found = pick(nodes, [word])
    if len(found) != 1:
        raise Refused(f"{word} stands for {len(found)} nodes", hint="name one")
    return found[0]


def reserved_addresses(cluster: Cluster) -> dict[str, str]:
    """Addresses that no node can have, and whose they are."""
    site, vm = cluster.site, need_vm(cluster)
    pool: dict[str, str] = {}
    if vm.pool:
        numbers = range(int(vm.pool.first), min(int(vm.pool.last), int(vm.pool.first) + 65535) + 1)
        pool = {str(IPv4Address(number)): "the pool for machines that nobody knows" for number in numbers}
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
    """The IPv4 addresses of a host by its name or address; none where nobody knows it here."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def node_network(cluster: Cluster) -> IPv4Network:
    """The network that nodes boot in."""
    return need_vm(cluster).address.network


def site_addresses(cluster: Cluster) -> dict[str, str]:
    """Addresses that the site file gives to nodes by name: ``slurm.nodes``."""
    found: dict[str, str] = {}
    for line in cluster.site.slurm.nodes:
        if line.address:
            found |= dict(zip(expand(line.name), expand(line.address), strict=False))
    return found
