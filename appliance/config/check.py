"""Rules of the site file that concern more than one value."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from appliance.config.check_provisioning import check_provisioning
from appliance.config.check_slurm import check_slurm
from appliance.config.document import Document, Place, first_problems
from appliance.config.finding import Finding, why_no_mac, why_unusable
from appliance.config.model import EVEN_MINUTES, PublicNetwork, ServicesFrom, Site
from appliance.config.wording import nearest
from appliance.errors import Problem


def check_site(
    site: Site,
    document: Document,
    *,
    services: Collection[str],
    bases: Collection[str],
    wanted: Collection[str] = (),
    controllers: Collection[str] = (),
) -> list[Problem]:
    """Every rule that the site breaks.

    Args:
        services, bases: the names that exist.
        wanted: the services that the site's classification stands for, or the usual ones, where it names none itself.
        controllers: those services that schedule jobs.
    """
    if isinstance(site.services, tuple):
        wanted = site.services
    findings = [
        *_networks(site),
        *_gateway(site.networks.public),
        *_macs(site),
        *_admin_hosts(site),
        *_snapshots(site),
        *check_provisioning(site),
        *_services(site, services),
        *_base(site, bases),
        *check_slurm(site, scheduled=any(name in controllers for name in wanted)),
    ]
    return first_problems([document.problem(found.place, found.message, found.hint) for found in findings])


def _networks(site: Site) -> Iterator[Finding]:
    both = {"provisioning": site.networks.provisioning, "public": site.networks.public}
    for name, network in both.items():
        if words := why_unusable(network.address):
            yield Finding(("networks", name, "address"), *words)
    provisioning, public = both.values()
    if provisioning.address.network.overlaps(public.address.network):
        yield Finding(
            ("networks", "public", "address"),
            f"{public.address.network} overlaps the provisioning network {provisioning.address.network}",
            "the two networks need address ranges of their own; is a prefix too short?",
        )
    if provisioning.bridge == public.bridge:
        yield Finding(
            ("networks", "public", "bridge"),
            f"{public.bridge} is the bridge of the provisioning network already",
            "the container joins two bridges; give each network its own, such as br-prov and br-pub",
        )
    if provisioning.port and provisioning.port == public.port:
        yield Finding(
            ("networks", "public", "port"),
            f"{public.port} is the port of the provisioning network already",
            "an interface can be in one bridge only; a VLAN interface such as eth0.20 can be the second",
        )


def _gateway(public: PublicNetwork) -> Iterator[Finding]:
    place: Place = ("networks", "public", "gateway")
    gateway, network = public.gateway, public.address.network
    if gateway == public.address.ip:
        yield Finding(
            place, f"{gateway} is the container's own address", "name the router that leads from there to the outside"
        )
    elif gateway not in network:
        yield Finding(
            place,
            f"{gateway} is not in the public network {network}",
            "the container must reach it directly; is the prefix of networks.public.address right?",
        )
    elif network.prefixlen < 31 and gateway in (network.network_address, network.broadcast_address):
        yield Finding(
            place, f"{gateway} is the network or broadcast address of {network}", "name the address of the router"
        )
    if public.probe == public.address.ip:
        yield Finding(
            ("networks", "public", "probe"),
            f"{public.probe} is the container's own address",
            "name an address outside; only an answer from there shows that NAT works",
        )


def _macs(site: Site) -> Iterator[Finding]:
    both = {"provisioning": site.networks.provisioning.mac, "public": site.networks.public.mac}
    for name, mac in both.items():
        place: Place = ("networks", name, "mac")
        if words := why_no_mac(mac):
            yield Finding(place, *words)
    if both["provisioning"].lower() == both["public"].lower():
        yield Finding(
            ("networks", "public", "mac"),
            f"{both['public']} is used twice",
            "each network needs a MAC address of its own",
        )


def _admin_hosts(site: Site) -> Iterator[Finding]:
    names: set[str] = set()
    ends: set[tuple[str, int]] = set()
    own = {str(network.address.ip) for network in (site.networks.provisioning, site.networks.public)}
    for index, host in enumerate(site.admin_hosts):
        place: Place = ("admin_hosts", index)
        if host.name in names:
            yield Finding((*place, "name"), f"{host.name} is there twice", "every admin host needs a name of its own")
        if host.name == site.hostname:
            yield Finding((*place, "name"), f"{host.name} is the container's host name too", "change `hostname`")
        if (host.address, host.port) in ends:
            yield Finding((*place, "address"), f"{host.address} is there twice", "every admin host needs its own")
        if host.address in own:
            yield Finding(
                (*place, "address"),
                f"{host.address} is the container's address",
                "the container moves between hosts: it needs an address that no host has",
            )
        names.add(host.name)
        ends.add((host.address, host.port))
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
            f"nothing can be run evenly every {every} minutes: they must divide an hour, or be hours that divide a day",
            f"take {min(EVEN_MINUTES, key=lambda even: abs(even - every))}",
        )
    names = {host.name for host in site.admin_hosts}
    for at, name in enumerate(site.snapshots.standby):
        if name not in names:
            yield Finding(
                ("snapshots", "standby", at), f"{name} is no admin host of the site", f"there are: {', '.join(names)}"
            )


def _services(site: Site, known: Collection[str]) -> Iterator[Finding]:
    place: Place = ("services",)
    if isinstance(site.services, ServicesFrom):
        place, names = ("services", "also"), site.services.also
    else:
        names = site.services or ()
        if site.services == ():
            yield Finding(place, "names no service", f"take some of: {', '.join(sorted(known))}")
    for index, name in enumerate(names):
        if name not in known:
            yield Finding(
                (*place, index), f"{name} is not a service that the container can carry", nearest(name, known)
            )
        elif name in names[:index]:
            yield Finding((*place, index), f"{name} is there twice", "remove one of the two")


def _base(site: Site, known: Collection[str]) -> Iterator[Finding]:
    if site.base.os not in known:
        yield Finding(("base", "os"), f"{site.base.os} is not a base", nearest(site.base.os, known))
