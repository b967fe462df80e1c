"""Rules of the site file's ``provisioning`` part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Interface

from appliance.config.document import Place
from appliance.config.finding import Finding, why_no_mac, why_unusable
from appliance.config.hostlist import HostListError, expand
from appliance.config.model import Network, Site
from appliance.config.provisioning import Provisioning

SECTION = "provisioning"
OWN_PATHS = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/munge/munge.key", "/etc/slurm/slurm.conf")
"""Files that have a place of their own in the site file."""


def check_provisioning(site: Site) -> Iterator[Finding]:
    """Every rule about the provisioning VM that the site breaks."""
    vm = site.provisioning
    if vm is None:
        return
    yield from _place(site, "provisioning", (), vm.address, vm.mac)
    if vm.public:
        yield from _place(site, "public", ("public",), vm.public.address, vm.public.mac)
    if vm.hostname in (site.hostname, *(host.name for host in site.admin_hosts)):
        yield Finding((SECTION, "hostname"), f"{vm.hostname} is another machine's name already", "give it its own")
    yield from _pool(site, vm)
    yield from _profiles(vm)
    yield from _files(vm)


def _place(site: Site, name: str, below: Place, address: IPv4Interface, mac: str) -> Iterator[Finding]:
    """The VM's address and MAC in one of the two networks."""
    network: Network = getattr(site.networks, name)
    at: Place = (SECTION, *below, "address")
    if words := why_unusable(address):
        yield Finding(at, *words)
    elif address.network != network.address.network:
        yield Finding(
            at, f"{address} is not in the {name} network {network.address.network}", "take one of that network's"
        )
    elif owner := _owner(site, address.ip):
        yield Finding(at, f"{address.ip} is {owner}", "the VM needs an address of its own")
    if words := why_no_mac(mac):
        yield Finding((SECTION, *below, "mac"), *words)
    taken = {network.mac.lower() for network in (site.networks.provisioning, site.networks.public)}
    if below and site.provisioning:
        taken.add(site.provisioning.mac.lower())
    if mac.lower() in taken:
        yield Finding((SECTION, *below, "mac"), f"{mac} is used twice", "each network card needs its own")


def _owner(site: Site, address: IPv4Address) -> str:
    """Whose an address is already, in words."""
    if address in (site.networks.provisioning.address.ip, site.networks.public.address.ip):
        return "the container's address"
    if address == site.networks.public.gateway:
        return "the address of the public gateway"
    return next((f"the address of {host.name}" for host in site.admin_hosts if host.address == str(address)), "")


def _pool(site: Site, vm: Provisioning) -> Iterator[Finding]:
    if vm.unknown == "discover" and vm.pool is None:
        yield Finding(
            (SECTION, "unknown"),
            "machines that are to be looked at need addresses",
            "name a range as provisioning.pool",
        )
    if vm.pool is None:
        return
    network = site.provisioning_network
    for key, address in (("first", vm.pool.first), ("last", vm.pool.last)):
        if address not in network or address in (network.network_address, network.broadcast_address):
            yield Finding(
                (SECTION, "pool", key),
                f"{address} is not an address of the provisioning network {network}",
                "see there",
            )
    if vm.pool.last < vm.pool.first:
        yield Finding((SECTION, "pool", "last"), f"{vm.pool.last} comes before {vm.pool.first}", "swap the two")
    for address in sorted({vm.address.ip, site.networks.provisioning.address.ip, *_addresses(site)}):
        if vm.pool.first <= address <= vm.pool.last:
            whose = "the VM's address" if address == vm.address.ip else _owner(site, address) or "a node's address"
            yield Finding(
                (SECTION, "pool"), f"{address} in it is {whose}", "DHCP hands these out: take a range that is free"
            )
            return


def _addresses(site: Site) -> Iterator[IPv4Address]:
    """Addresses of admin hosts and of nodes that slurm.conf knows."""
    words = [host.address for host in site.admin_hosts]
    for node in site.slurm.nodes:
        with suppress(HostListError):  # told by the rules of its own part
            words += expand(node.address) if node.address else []
    for word in words:
        try:
            yield IPv4Address(word)
        except ValueError:
            continue


def _profiles(vm: Provisioning) -> Iterator[Finding]:
    owner: dict[str, str] = {}
    for name, profile in vm.profiles.items():
        for group in profile.groups or ("",):
            other = owner.setdefault(group, name)
            if other != name:
                what = f"group {group} boots {other} already" if group else f"{other} is for all other nodes already"
                yield Finding((SECTION, "profiles", name, "groups"), what, "a node boots one image")


def _files(vm: Provisioning) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, file in enumerate(vm.files):
        at: Place = (SECTION, "files", index, "path")
        if file.path in OWN_PATHS:
            yield Finding(at, f"{file.path} is pushed from accounts, secrets and slurm", "name it there")
        if file.path in seen:
            yield Finding(at, f"{file.path} is there twice", "a path has one master: a template can tell groups apart")
        seen.add(file.path)
