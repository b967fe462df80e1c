"""Validation rules of the site file that involve more than one value."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator
from itertools import permutations
from pathlib import PurePath

from appliance.config.check_engines import check_engines
from appliance.config.check_provisioning import check_provisioning
from appliance.config.check_routes import check_routes
from appliance.config.check_slurm import check_slurm
from appliance.config.check_starter import documentation_problem, find_documentation
from appliance.config.document import Document, Place, first_problems
from appliance.config.finding import Finding, address_problem, mac_problem
from appliance.config.model import EVEN_MINUTES, Network, PublicNetwork, ServicesFrom, Site
from appliance.config.slurm_files import check_slurm_files
from appliance.config.types import INTERFACE_LENGTH
from appliance.errors import Problem
from appliance.text import nearest


def check_site(
    site: Site,
    document: Document,
    *,
    services: Collection[str],
    bases: Collection[str],
    selected: Collection[str] = (),
    controllers: Collection[str] = (),
) -> list[Problem]:
    """Return a problem for every rule that the site breaks.

    Args:
        services, bases: known names.
        selected: services from the site's classification, or the defaults, if the site lists none itself.
        controllers: those services that schedule jobs.
    """
    if isinstance(site.services, tuple):
        selected = site.services
    scheduled = any(name in controllers for name in selected)
    findings = [
        *_documentation(site),
        *_networks(site),
        *_gateway(site.networks.public),
        *check_routes(site),
        *_peers(site),
        *_macs(site),
        *_admin_hosts(site),
        *_snapshots(site),
        *check_provisioning(site),
        *check_engines(site, selected),
        *_services(site, services),
        *_base(site, bases),
        *check_slurm(site, scheduled=scheduled),
        *check_slurm_files(site, scheduled=scheduled),
    ]
    return first_problems([document.problem(found.place, found.message, found.hint) for found in findings])


def _documentation(site: Site) -> Iterator[Finding]:
    """Yield addresses that nobody has, of those that verbs connect to or configure."""
    places: list[tuple[Place, str]] = [
        (("admin_hosts", index, "address"), host.address) for index, host in enumerate(site.admin_hosts)
    ]
    for name, network in (("provisioning", site.networks.provisioning), ("public", site.networks.public)):
        places.append((("networks", name, "address"), str(network.address.ip)))
    for place, text in places:
        if address := find_documentation(text):
            yield Finding(place, *documentation_problem(address))


def _networks(site: Site) -> Iterator[Finding]:
    both = {"provisioning": site.networks.provisioning, "public": site.networks.public}
    for name, network in both.items():
        if problem := address_problem(network.address):
            yield Finding(("networks", name, "address"), *problem)
    provisioning, public = both.values()
    if provisioning.address.network.overlaps(public.address.network):
        yield Finding(
            ("networks", "public", "address"),
            f"{public.address.network} overlaps the provisioning network {provisioning.address.network}",
            "the two networks must not overlap; is a prefix too short?",
        )
    for name, network in both.items():
        yield from _port(site, ("networks", name), network)
    if provisioning.bridge and provisioning.bridge == public.bridge:
        yield Finding(
            ("networks", "public", "bridge"),
            f"{public.bridge} is already the bridge of the provisioning network",
            "the container is attached to two bridges; give each network its own, such as br-prov and br-pub",
        )
    if any(network.attach == "bridge" for network in both.values()):  # several macvlan interfaces can share a port
        for host in site.admin_hosts:
            port = public.port_on(host.name)
            if port and port == provisioning.port_on(host.name):
                yield Finding(
                    ("networks", "public", "port"),
                    f"{port} is already the port of the provisioning network",
                    "an interface can be in one bridge only; set `vlan` of the second, or `attach: macvlan` of both",
                )
                break


def _port(site: Site, place: Place, network: Network) -> Iterator[Finding]:
    """Check how hosts attach the container to a network."""
    macvlan, hosts = network.attach == "macvlan", [host.name for host in site.admin_hosts]
    if macvlan and network.bridge:
        yield Finding(
            (*place, "bridge"), "a macvlan interface needs no bridge", "remove it, or remove `attach: macvlan`"
        )
    if macvlan and network.vlan:
        yield Finding(
            (*place, "vlan"),
            "a VLAN is created below a bridge only",
            "set `port` to the host's own interface of that VLAN, such as eth0.20",
        )
    if isinstance(network.port, dict):
        for name in network.port:
            if name not in hosts:
                yield Finding((*place, "port", name), f"{name} is not an admin host", nearest(name, hosts))
    lacking = [name for name in hosts if not network.port_on(name)]
    if lacking and (macvlan or network.vlan):
        yield Finding(
            place if network.port is None else (*place, "port"),
            f"{'a macvlan interface' if macvlan else 'a VLAN'} needs the port of {', '.join(lacking)}",
            "set `port` to the interface that is in this network; {admin-1: eno1, admin-2: ens3} if they differ",
        )
    longest = max((network.port_on(name) or "" for name in hosts), key=len, default="")
    if len(longest) > INTERFACE_LENGTH:
        yield Finding(
            (*place, "vlan"),
            f"{longest} is too long for the name of an interface, which has at most {INTERFACE_LENGTH} characters",
            "create the VLAN interface yourself with a shorter name, and set `port` to it",
        )


def check_ports(site: Site) -> Iterator[Finding]:
    """Yield a finding for each port that cannot be one: the host's own loopback, or a bridge of the site."""
    both = {"provisioning": site.networks.provisioning, "public": site.networks.public}
    bridges = {network.bridge for network in both.values() if network.bridge}
    for name, network in both.items():
        ports = network.port.values() if isinstance(network.port, dict) else [network.port]
        for port in {*ports} & {"lo", *bridges}:
            what = "a bridge of the site" if port in bridges else "the loopback interface"
            hint = "use the interface of the network card, such as eth1"
            yield Finding(("networks", name, "port"), f"{port} is {what}", hint)


def _gateway(public: PublicNetwork) -> Iterator[Finding]:
    place: Place = ("networks", "public", "gateway")
    gateway, network = public.gateway, public.address.network
    if gateway == public.address.ip:
        yield Finding(place, f"{gateway} is the container's own address", "set it to the router towards the outside")
    elif gateway not in network:
        yield Finding(
            place,
            f"{gateway} is not in the public network {network}",
            "the container must reach it directly; is the prefix of networks.public.address right?",
        )
    elif network.prefixlen < 31 and gateway in (network.network_address, network.broadcast_address):
        yield Finding(
            place, f"{gateway} is the network or broadcast address of {network}", "use the address of the router"
        )
    if public.probe == public.address.ip:
        yield Finding(
            ("networks", "public", "probe"),
            f"{public.probe} is the container's own address",
            "use an address outside; only a reply from there shows that NAT works",
        )


def _peers(site: Site) -> Iterator[Finding]:
    """Yield the servers that the container would use and that are the container itself."""
    own = {site.hostname, *(str(one.address.ip) for one in (site.networks.provisioning, site.networks.public))}
    peers: list[tuple[Place, str]] = [(("ntp", index), peer) for index, peer in enumerate(site.ntp)]
    peers += [(("syslog_forward",), site.syslog_forward or ""), (("mail", "relay"), site.mail.relay or "")]
    for place, peer in peers:
        if peer.partition(":")[0] in own:
            yield Finding(place, f"{peer} is the container itself", "name a server outside of it, or none")


def _macs(site: Site) -> Iterator[Finding]:
    both = {"provisioning": site.networks.provisioning.mac, "public": site.networks.public.mac}
    for name, mac in both.items():
        place: Place = ("networks", name, "mac")
        if problem := mac_problem(mac):
            yield Finding(place, *problem)
    if both["provisioning"].lower() == both["public"].lower():
        yield Finding(
            ("networks", "public", "mac"),
            f"{both['public']} is used twice",
            "each network needs its own MAC address",
        )


def _admin_hosts(site: Site) -> Iterator[Finding]:
    names: set[str] = set()
    endpoints: set[tuple[str, int]] = set()
    own = {str(network.address.ip) for network in (site.networks.provisioning, site.networks.public)}
    for index, host in enumerate(site.admin_hosts):
        place: Place = ("admin_hosts", index)
        if host.name in names:
            yield Finding((*place, "name"), f"{host.name} is listed twice", "every admin host needs its own name")
        if host.name == site.hostname:
            yield Finding((*place, "name"), f"{host.name} is also the container's host name", "change `hostname`")
        if (host.address, host.port) in endpoints:
            yield Finding((*place, "address"), f"{host.address} is listed twice", "every admin host needs its own")
        if host.address in own:
            yield Finding(
                (*place, "address"),
                f"{host.address} is the container's address",
                "the container moves between hosts: its address must not be a host's",
            )
        folders = [PurePath(posixpath.normpath(folder)) for folder in host.mirror]
        if folders and (len(folders) != 2 or any(one.is_relative_to(other) for one, other in permutations(folders, 2))):
            yield Finding((*place, "mirror"), "must name two folders", "on two disks: mirror: [/disk1/sms, /disk2/sms]")
        names.add(host.name)
        endpoints.add((host.address, host.port))
        if host.fence and sum(map(bool, (host.fence.command, host.fence.redfish, host.fence.ipmi))) != 1:
            yield Finding(
                (*place, "fence"),
                "must have exactly one of command, redfish and ipmi",
                "fence: {redfish: {url: https://bmc-1.example.org, user: sms, password_file: /etc/sms/keys/bmc}}",
            )


def _snapshots(site: Site) -> Iterator[Finding]:
    every = site.snapshots.every_minutes
    if every not in EVEN_MINUTES:
        yield Finding(
            ("snapshots", "every_minutes"),
            f"an interval of {every} minutes must divide an hour, or be whole hours that divide a day",
            f"use {min(EVEN_MINUTES, key=lambda even: abs(even - every))}",
        )
    names = {host.name for host in site.admin_hosts}
    for at, name in enumerate(site.snapshots.standby):
        if name not in names:
            yield Finding(
                ("snapshots", "standby", at),
                f"{name} is not an admin host of the site",
                f"known: {', '.join(names)}",
            )


def _services(site: Site, known: Collection[str]) -> Iterator[Finding]:
    place: Place = ("services",)
    if isinstance(site.services, ServicesFrom):
        place, names = ("services", "also"), site.services.also
    else:
        names = site.services or ()
        if site.services == ():
            yield Finding(place, "the list of services is empty", f"choose from: {', '.join(sorted(known))}")
    for index, name in enumerate(names):
        if name not in known:
            yield Finding((*place, index), f"{name} is not a service that the container can run", nearest(name, known))
        elif name in names[:index]:
            yield Finding((*place, index), f"{name} is listed twice", "remove one of the two")


def _base(site: Site, known: Collection[str]) -> Iterator[Finding]:
    if site.base.os not in known:
        yield Finding(("base", "os"), f"{site.base.os} is not a base", nearest(site.base.os, known))
