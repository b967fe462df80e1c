"""Validation rules of the section ``provisioning`` of the site file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Interface

from appliance.config.document import Place
from appliance.config.finding import Finding, address_problem, mac_problem
from appliance.config.hostlist import HostListError, expand
from appliance.config.model import Network, Site
from appliance.config.provisioning import Provisioning

SECTION = "provisioning"
OWN_PATHS = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/munge/munge.key", "/etc/slurm/slurm.conf")
"""Files that are configured elsewhere in the site file."""


def check_provisioning(site: Site) -> Iterator[Finding]:
    """Yield a finding for every rule about the provisioning VM that the site breaks."""
    vm = site.provisioning
    if vm is None:
        return
    yield from _place(site, "provisioning", (), vm.address, vm.mac)
    if vm.public:
        yield from _place(site, "public", ("public",), vm.public.address, vm.public.mac)
    if vm.hostname in (site.hostname, *(host.name for host in site.admin_hosts)):
        yield Finding((SECTION, "hostname"), f"{vm.hostname} is already another machine's name", "choose another name")
    yield from _pool(site, vm)
    yield from _profiles(vm)
    yield from _files(vm)


def _place(site: Site, name: str, below: Place, address: IPv4Interface, mac: str) -> Iterator[Finding]:
    """Check the VM's address and MAC in one of the two networks."""
    network: Network = getattr(site.networks, name)
    at: Place = (SECTION, *below, "address")
    if network.attach == "macvlan":
        yield Finding(
            (SECTION, *below), f"the VM is attached to bridges, but the {name} network has none", "set its bridge"
        )
    if problem := address_problem(address):
        yield Finding(at, *problem)
    elif address.network != network.address.network:
        yield Finding(
            at, f"{address} is not in the {name} network {network.address.network}", "use an address of that network"
        )
    elif owner := _owner(site, address.ip):
        yield Finding(at, f"{address.ip} is {owner}", "the VM needs its own address")
    if problem := mac_problem(mac):
        yield Finding((SECTION, *below, "mac"), *problem)
    taken = {network.mac.lower() for network in (site.networks.provisioning, site.networks.public)}
    if below and site.provisioning:
        taken.add(site.provisioning.mac.lower())
    if mac.lower() in taken:
        yield Finding((SECTION, *below, "mac"), f"{mac} is used twice", "each network card needs its own")


def _owner(site: Site, address: IPv4Address) -> str:
    """Describe who already has an address; empty if nobody."""
    if address in (site.networks.provisioning.address.ip, site.networks.public.address.ip):
        return "the container's address"
    if address == site.networks.public.gateway:
        return "the address of the public gateway"
    return next((f"the address of {host.name}" for host in site.admin_hosts if host.address == str(address)), "")


def _pool(site: Site, vm: Provisioning) -> Iterator[Finding]:
    if vm.unknown == "discover" and vm.pool is None:
        yield Finding(
            (SECTION, "unknown"),
            "discovery of unknown machines needs a pool of addresses",
            "set a range as provisioning.pool",
        )
    if vm.pool is None:
        return
    network = site.provisioning_network
    for key, address in (("first", vm.pool.first), ("last", vm.pool.last)):
        if address not in network or address in (network.network_address, network.broadcast_address):
            yield Finding(
                (SECTION, "pool", key),
                f"{address} is not an address of the provisioning network {network}",
                "use addresses of that network",
            )
    if vm.pool.last < vm.pool.first:
        yield Finding((SECTION, "pool", "last"), f"{vm.pool.last} comes before {vm.pool.first}", "swap the two")
    for address in sorted({vm.address.ip, site.networks.provisioning.address.ip, *_addresses(site)}):
        if vm.pool.first <= address <= vm.pool.last:
            owner = "the VM's address" if address == vm.address.ip else _owner(site, address) or "a node's address"
            yield Finding(
                (SECTION, "pool"), f"it contains {address}, {owner}", "DHCP leases these addresses: use a free range"
            )
            return


def _addresses(site: Site) -> Iterator[IPv4Address]:
    """Yield the addresses of admin hosts and of the nodes in slurm.conf."""
    texts = [host.address for host in site.admin_hosts]
    for node in site.slurm.nodes:
        with suppress(HostListError):  # check_slurm reports it
            texts += expand(node.address) if node.address else []
    for text in texts:
        try:
            yield IPv4Address(text)
        except ValueError:
            continue


def _profiles(vm: Provisioning) -> Iterator[Finding]:
    owner: dict[str, str] = {}
    for name, profile in vm.profiles.items():
        for group in profile.groups or ("",):
            other = owner.setdefault(group, name)
            if other != name:
                what = f"group {group} already boots {other}" if group else f"{other} is already for all other nodes"
                yield Finding((SECTION, "profiles", name, "groups"), what, "a node can only boot one image")


def _files(vm: Provisioning) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, file in enumerate(vm.files):
        at: Place = (SECTION, "files", index, "path")
        if file.path in OWN_PATHS:
            yield Finding(at, f"{file.path} is pushed from accounts, secrets and slurm", "configure it there")
        if file.path in seen:
            yield Finding(at, f"{file.path} is listed twice", "use one template that distinguishes groups")
        seen.add(file.path)
