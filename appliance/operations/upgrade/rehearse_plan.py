"""The plan of a rehearsal as a lab: production's addresses, names and bridges, in isolated networks. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from appliance.config.model import AdminHost, Site, Snapshots
from appliance.config.types import is_ipv4
from appliance.errors import ConfigError, Refused
from appliance.lab.layout import PROVISIONING, PUBLIC, ROUTED, LabHost, Plan
from appliance.plan.overlay.seed import named_nodes

OUTSIDE, CARRIER, ROUTER = "rehearsal-outside", "rehearsal-host", "rehearsal-router"
MOST_NODES = 16
SYSLOG, SMTP = 514, 25
SMALLEST = 30
"""Longest prefix of a network that has room for a node and a router."""
Resolve = Callable[[str], str]
"""Returns the address of a name, empty if it has none."""


@dataclass(frozen=True)
class Peer:
    """A server outside that the container's services use; ``address`` is None if the site file has a host name."""

    name: str
    address: IPv4Address | None
    port: int = 0


def find_peers(site: Site, *, vm: bool = False) -> list[Peer]:
    """Return time servers, syslog server, mail relay, name servers and the target of the NAT probe.

    Args:
        vm: include the provisioning VM's address, at which nothing answers.
    """
    words = [*site.ntp, *(word for word in (site.syslog_forward, site.mail.relay) if word)]
    words += [str(address) for address in (*site.networks.dns, site.networks.public.probe) if address]
    words += [str(site.provisioning.address.ip)] if vm and site.provisioning else []
    return [read_peer(word) for word in words]


def read_peer(word: str) -> Peer:
    """Parse a peer of the site file: a name or an address, with an optional port."""
    name, _, port = word.partition(":")
    address = ipaddress.IPv4Address(name) if is_ipv4(name) else None
    return Peer(name, address, int(port or 0))


def choose_nodes(
    site: Site, count: int, hosts: Mapping[str, str], resolve: Resolve
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return name and address of the first ``count`` usable nodes, and why others before them are not usable.

    Args:
        hosts: addresses by name in the container's hosts file.
        resolve: resolver for other names.

    Raises:
        ConfigError: ``count`` is out of range.
        Refused: no node is usable.
    """
    if not 0 <= count <= MOST_NODES:
        raise ConfigError(f"invalid number of nodes {count}", hint=f"use 0 to {MOST_NODES}")
    chosen: list[tuple[str, str]] = []
    skipped: list[str] = []
    taken = {str(site.networks.provisioning.address.ip), *(str(peer.address) for peer in find_peers(site, vm=True))}
    taken |= {str(route.gateway) for route in site.networks.provisioning.routes}
    for name, given in named_nodes(site):
        if len(chosen) == count:
            break
        address = given if is_ipv4(given) else hosts.get(given or name) or resolve(given or name)
        why = _why_not(site, name, address, taken)
        if why:
            skipped.append(f"{name}: {why}")
            continue
        taken.add(address)
        chosen.append((name, address))
    if count and not chosen:
        raise Refused(
            f"no compute node can be rehearsed: {'; '.join(skipped[:3]) or 'the site file has none'}",
            hint="set addresses in slurm.nodes of the site file, or rehearse without nodes: --nodes 0",
        )
    return chosen, skipped


def _why_not(site: Site, name: str, address: str, taken: set[str]) -> str:
    if name in (OUTSIDE, CARRIER, ROUTER, "switch", site.hostname):
        return "its name is reserved in a rehearsal"
    if not address:
        return "its name does not resolve"
    network = next((each for each in site.node_networks if IPv4Address(address) in each), None)
    if network is None:
        return f"{address} is not in the provisioning network {site.provisioning_network}"
    if network.prefixlen > SMALLEST:
        return f"{network} has no room for a router"
    return f"{address} is already used" if address in taken else ""


def make_plan(
    site: Site, nodes: Iterable[tuple[str, str]], *, folder: Path, user: tuple[str, str], without_vm: bool = False
) -> Plan:
    """Return the rehearsal's networks and hosts.

    Args:
        folder: the rehearsal's folder.
        user: passwd and group lines of the user of its job; empty for root.
        without_vm: add the provisioning VM's address to the outside host.
    """
    networks = _on_bridges(site).networks
    peers = find_peers(site, vm=without_vm)
    known = dict(nodes)
    routed = _routed(site, known.values())
    hosts = (
        _outside(site, peers),
        LabHost(CARRIER, "carrier", {PROVISIONING: "", PUBLIC: ""}, tag="host"),
        *(
            LabHost(name, "node", {_side(routed, address): address}, f"n{i}")
            for i, (name, address) in enumerate(known.items(), 1)
        ),
        *_routers(site, routed),
    )
    keyring = site.signing.pgp_keyring
    return Plan(
        container=site.hostname,
        addresses={
            PROVISIONING: str(networks.provisioning.address.ip),
            PUBLIC: str(networks.public.address.ip),
        },
        gateways={PROVISIONING: str(networks.provisioning.address.ip), PUBLIC: str(networks.public.gateway)},
        bridges={PROVISIONING: networks.provisioning.bridge, PUBLIC: networks.public.bridge},
        prefixes={
            PROVISIONING: networks.provisioning.address.network.prefixlen,
            PUBLIC: networks.public.address.network.prefixlen,
        },
        hosts=hosts,
        routed=routed,
        held=True,
        disk=str(folder),
        ssh=False,
        user=user,
        answers={name.lower(): address for name, address in known.items()} if networks.dns else None,
        ports={
            "syslog": _ports(site.syslog_forward, SYSLOG),
            "mail": _ports(site.mail.relay, SMTP),
        },
        binds=(str(folder), *([str(keyring)] if keyring and site.signing.pgp_fingerprint else [])),
    )


def _routed(site: Site, nodes: Iterable[str]) -> dict[str, str]:
    """Return the networks behind routers, each with an address for the router that no node has: the last free one."""
    taken, found = {IPv4Address(each) for each in nodes}, {}
    for route in site.networks.provisioning.routes:
        if route.network.prefixlen <= SMALLEST:
            address = route.network.broadcast_address - 1
            while address in taken:
                address -= 1
            found[str(route.network)] = str(address)
    return found


def _side(routed: Iterable[str], address: str) -> str:
    """Return on which of the switch's networks an address is."""
    return ROUTED if any(IPv4Address(address) in IPv4Network(each) for each in routed) else PROVISIONING


def _routers(site: Site, routed: Mapping[str, str]) -> Iterator[LabHost]:
    """Yield one host that is every router of the provisioning network, if the site has any."""
    if not routed:
        return
    network = site.provisioning_network
    first, *gateways = dict.fromkeys(str(route.gateway) for route in site.networks.provisioning.routes)
    inside = [(ROUTED, f"{address}/{IPv4Network(each).prefixlen}") for each, address in routed.items()]
    yield LabHost(
        ROUTER,
        "router",
        {PROVISIONING: first, ROUTED: next(iter(routed.values()))},
        "router",
        (*((PROVISIONING, f"{address}/{network.prefixlen}") for address in gateways), *inside[1:]),
    )


def _ports(word: str | None, usual: int) -> tuple[int, ...]:
    port = read_peer(word).port if word else 0
    return (port,) if port not in (0, usual) else ()


def _outside(site: Site, peers: Iterable[Peer]) -> LabHost:
    """Return the host that is the gateway and all servers outside."""
    networks = site.networks
    own = {str(networks.public.gateway), str(networks.public.address.ip), str(networks.provisioning.address.ip)}
    addresses = {PUBLIC: str(networks.public.gateway)}
    more: list[tuple[str, str]] = []
    for address in dict.fromkeys(peer.address for peer in peers if peer.address and str(peer.address) not in own):
        if address in networks.provisioning.address.network:
            prefix = networks.provisioning.address.network.prefixlen
            if PROVISIONING in addresses:
                more.append((PROVISIONING, f"{address}/{prefix}"))
            else:
                addresses[PROVISIONING] = str(address)
        elif address in networks.public.address.network:
            more.append((PUBLIC, f"{address}/{networks.public.address.network.prefixlen}"))
        else:
            more.append(("lo", f"{address}/32"))
    return LabHost(OUTSIDE, "outside", addresses, "out", tuple(more))


def rehearsal_site(site: Site, folder: Path, *, without_vm: bool = False) -> Site:
    """Return the site of the rehearsal: all state below ``folder``, one admin host, no file synchronisation, bridges.

    The container's other settings are unchanged; with ``without_vm`` file synchronisation, too, because it is tested.
    """
    keys = tuple(key_copy(folder, number, key) for number, key in enumerate(site.signing.public_keys))
    changes = {
        "admin_hosts": (AdminHost(name=CARRIER, address="127.0.0.1"),),
        "state": folder / "state",
        "overlay": site.overlay.model_copy(update={"directory": None}),
        "snapshots": Snapshots(),
        "filesync": site.filesync.model_copy(update={} if without_vm else {"server": None}),
        "signing": site.signing.model_copy(update={"public_keys": keys}),
    }
    return _on_bridges(site).model_copy(update=changes)


def _on_bridges(site: Site) -> Site:
    """Return the site with a bridge for each network: a rehearsal has no network cards for macvlan interfaces."""
    changes = {
        name: network.model_copy(update={"attach": "bridge", "bridge": bridge, "port": None})
        for name, network, bridge in (
            (PROVISIONING, site.networks.provisioning, "br-prov"),
            (PUBLIC, site.networks.public, "br-pub"),
        )
        if network.attach == "macvlan"
    }
    return site.model_copy(update={"networks": site.networks.model_copy(update=changes)})


def key_copy(folder: Path, number: int, key: Path) -> Path:
    """Return the path of a copy of a public key in the rehearsal's folder."""
    return folder / "keys" / str(number) / key.name


def user_lines(passwd: str, group: str, name: str) -> tuple[str, str]:
    """Return the passwd and group lines of a user.

    Raises:
        ConfigError: the user is unknown.
    """
    lines = [line for line in passwd.splitlines() if line.partition(":")[0] == name and line.count(":") == 6]
    if not lines:
        raise ConfigError(
            f"the site's passwd file has no user {name}",
            hint="add it to accounts.passwd, or run the job as root: omit --user",
        )
    gid = lines[0].split(":")[3]
    groups = [line for line in group.splitlines() if line.split(":")[2:3] == [gid]]
    return lines[0], groups[0] if groups else f"{name}:x:{gid}:"
