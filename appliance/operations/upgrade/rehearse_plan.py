"""A rehearsal as a lab: production's own addresses, names and bridges, in networks that lead nowhere. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from appliance.config.hostlist import expand
from appliance.config.model import AdminHost, Site, Snapshots
from appliance.errors import ConfigError, Refused
from appliance.lab.layout import PROVISIONING, PUBLIC, LabHost, Plan

OUTSIDE, CARRIER = "rehearsal-outside", "rehearsal-host"
MOST_NODES = 16
SYSLOG, SMTP = 514, 25
Resolve = Callable[[str], str]
"""The address of a name, empty where it has none."""


@dataclass(frozen=True)
class Peer:
    """Somebody beyond the container whom its services talk to; ``address`` is None where the site file has a name."""

    name: str
    address: IPv4Address | None
    port: int = 0


def find_peers(site: Site, *, vm: bool = False) -> list[Peer]:
    """Time servers, the syslog server, the mail relay, name servers and whom the NAT probe pings.

    Args:
        vm: the provisioning VM, too: its address is there, and nobody answers at it.
    """
    words = [*site.ntp, *(word for word in (site.syslog_forward, site.mail.relay) if word)]
    words += [str(address) for address in (*site.networks.dns, site.networks.public.probe) if address]
    words += [str(site.provisioning.address.ip)] if vm and site.provisioning else []
    return [read_peer(word) for word in words]


def read_peer(word: str) -> Peer:
    """A peer as the site file writes it: a name or an address, with or without a port."""
    name, _, port = word.partition(":")
    address = ipaddress.IPv4Address(name) if is_address(name) else None
    return Peer(name, address, int(port or 0))


def is_address(word: str) -> bool:
    """Whether a word is an IPv4 address."""
    try:
        ipaddress.IPv4Address(word)
    except ValueError:
        return False
    return True


def choose_nodes(
    site: Site, count: int, hosts: Mapping[str, str], resolve: Resolve
) -> tuple[list[tuple[str, str]], list[str]]:
    """Name and address of the first ``count`` nodes that can be there, and why others before them cannot.

    Args:
        hosts: addresses by name, as the container's own hosts file has them.
        resolve: what else knows names.

    Raises:
        ConfigError: so many cannot be asked for.
        Refused: none can be there, though some are wanted.
    """
    if not 0 <= count <= MOST_NODES:
        raise ConfigError(f"a rehearsal of {count} nodes cannot be made", hint=f"ask for 0 to {MOST_NODES}")
    chosen: list[tuple[str, str]] = []
    skipped: list[str] = []
    taken = {str(site.networks.provisioning.address.ip), *(str(peer.address) for peer in find_peers(site, vm=True))}
    for name, given in _named_nodes(site):
        if len(chosen) == count:
            break
        address = given if is_address(given) else hosts.get(given or name) or resolve(given or name)
        why = _why_not(site, name, address, taken)
        if why:
            skipped.append(f"{name}: {why}")
            continue
        taken.add(address)
        chosen.append((name, address))
    if count and not chosen:
        raise Refused(
            f"no compute node can be rehearsed: {'; '.join(skipped[:3]) or 'the site file names none'}",
            hint="give slurm.nodes their addresses in the site file, or rehearse without nodes: --nodes 0",
        )
    return chosen, skipped


def _named_nodes(site: Site) -> Iterable[tuple[str, str]]:
    """Every node's name and NodeAddr, which is empty where the site file gives none."""
    for node in site.slurm.nodes:
        names = expand(node.name)
        addresses = expand(node.address) if node.address else [""] * len(names)
        yield from zip(names, addresses, strict=False)


def _why_not(site: Site, name: str, address: str, taken: set[str]) -> str:
    if name in (OUTSIDE, CARRIER, "switch", site.hostname):
        return "its name is taken in a rehearsal"
    if not address:
        return "its name does not resolve"
    if IPv4Address(address) not in site.provisioning_network:
        return f"{address} is not in the provisioning network {site.provisioning_network}"
    return f"{address} is somebody else's already" if address in taken else ""


def make_plan(
    site: Site, nodes: Iterable[tuple[str, str]], *, folder: Path, user: tuple[str, str], without_vm: bool = False
) -> Plan:
    """The rehearsal's networks and hosts.

    Args:
        folder: where all of it lies.
        user: the lines of passwd and group of who runs its job; empty for root.
        without_vm: somebody has the provisioning VM's address.
    """
    networks = site.networks
    peers = find_peers(site, vm=without_vm)
    known = dict(nodes)
    hosts = (
        _outside(site, peers),
        LabHost(CARRIER, "carrier", {PROVISIONING: "", PUBLIC: ""}, tag="host"),
        *(
            LabHost(name, "node", {PROVISIONING: address}, f"n{i}")
            for i, (name, address) in enumerate(known.items(), 1)
        ),
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


def _ports(word: str | None, usual: int) -> tuple[int, ...]:
    port = read_peer(word).port if word else 0
    return (port,) if port not in (0, usual) else ()


def _outside(site: Site, peers: Iterable[Peer]) -> LabHost:
    """One host that is the gateway and everybody beyond it."""
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
    """The site as the rehearsal has it: all it writes below ``folder``, one admin host, nobody to pull files from.

    What the container itself is told stays as it is, but for the server of file synchronisation; with ``without_vm``
    that stays as well: it is what is looked at.
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
    return site.model_copy(update=changes)


def key_copy(folder: Path, number: int, key: Path) -> Path:
    """Where a public key of the site's lies in the rehearsal's folder."""
    return folder / "keys" / str(number) / key.name


def user_lines(passwd: str, group: str, name: str) -> tuple[str, str]:
    """The lines of passwd and group of a user.

    Raises:
        ConfigError: there is none of this name.
    """
    lines = [line for line in passwd.splitlines() if line.partition(":")[0] == name and line.count(":") == 6]
    if not lines:
        raise ConfigError(
            f"the site's passwd file has no user {name}", hint="accounts.passwd names it; without --user root does it"
        )
    gid = lines[0].split(":")[3]
    groups = [line for line in group.splitlines() if line.split(":")[2:3] == [gid]]
    return lines[0], groups[0] if groups else f"{name}:x:{gid}:"


def read_hosts(text: str) -> dict[str, str]:
    """Addresses by name out of a hosts file; the first line that has a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words and is_address(words[0]):
            for name in words[1:]:
                found.setdefault(name, words[0])
    return found
