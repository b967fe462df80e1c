"""Names of Slurm's nodes that only a name service knows, and their addresses in the container's hosts file.

slurmctld resolves the name of every node when it starts. An isolated instance reaches no name server, and one that is
away makes each name take many seconds: so names are resolved when files are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

from appliance.config.document import Place
from appliance.config.hostlist import expand
from appliance.config.model import Site
from appliance.config.types import is_ipv4

HOSTS = "/etc/hosts"
ABSENT = re.compile(r"(?i)\bstate=(cloud|future)\b")
"""Nodes that slurmctld does not look for when it starts (slurm.conf(5)): they may have no address yet."""


def find_names(site: Site) -> list[str]:
    """Return what slurmctld has to resolve: nodes' addresses that are names, and names of nodes without an address."""
    return list(dict.fromkeys(name for _, name in find_named_nodes(site)))


def find_named_nodes(site: Site) -> list[tuple[str, str]]:
    """Return (node, name of its address) of every node with such a name, in the order of the site file."""
    found: list[tuple[str, str]] = []
    for node in site.slurm.nodes:
        if not ABSENT.search(node.extra or ""):
            names = expand(node.name)
            found += zip(names, expand(node.address) if node.address else names, strict=False)
    return [(node, name) for node, name in found if not is_ipv4(name)]


def find_named(site: Site) -> dict[Place, list[str]]:
    """Return all names of the site file that its services resolve, by their places in the file."""
    servers: dict[Place, str] = {("ntp", number): name for number, name in enumerate(site.ntp)}
    servers |= {("syslog_forward",): site.syslog_forward or "", ("mail", "relay"): site.mail.relay or ""}
    found = {place: [peer.partition(":")[0]] for place, peer in servers.items() if peer}
    for number, node in enumerate(site.slurm.nodes):
        found["slurm", "nodes", number] = [] if ABSENT.search(node.extra or "") else expand(node.address or node.name)
    kept = {place: [name for name in names if not is_ipv4(name)] for place, names in found.items()}
    return {place: names for place, names in kept.items() if names}


def _parse(address: str) -> IPv4Address | None:
    """Return an address at which other machines can be; None for any other text."""
    if not is_ipv4(address):
        return None
    found = IPv4Address(address)
    useless = found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast
    return None if useless else found


def read_hosts(text: str) -> dict[str, str]:
    """Return the IPv4 addresses by name of a hosts file (hosts(5)); the first line of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if is_ipv4(address):
            for name in names:
                found.setdefault(name, address)
    return found


def read_resolved(
    output: str, names: Iterable[str], known: Mapping[str, str], networks: Sequence[IPv4Network] = ()
) -> dict[str, str]:
    """Return an address for each name from the output of ``definitions/scripts/resolve-names``.

    A name that is not there keeps its address, and so does one of several addresses: name servers change their order.
    Of several, one in a network of nodes is preferred; those of the host itself and of a link alone are none.

    Args:
        known: addresses until now.
        networks: of nodes.
    """
    wanted = set(names)
    found = {name: address for name, address in known.items() if name in wanted}
    for line in output.splitlines():
        name, *addresses = line.split() or [""]
        valid = [parsed for parsed in map(_parse, addresses) if parsed]
        best = [one for one in valid if any(one in network for network in networks)] or valid
        texts = [str(one) for one in best]
        if name in wanted and texts and found.get(name) not in texts:
            found[name] = texts[0]
    return found
