"""Validation rules of the routes to networks of nodes behind routers."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from appliance.config.document import Place
from appliance.config.finding import Finding
from appliance.config.model import Route, Site

PROBE_NETWORK = IPv4Network("169.254.77.0/30")
"""The network of the NAT probe inside the container (definitions/services/nat.yaml)."""


def check_routes(site: Site) -> Iterator[Finding]:
    """Yield a finding for every rule that a route of the provisioning network breaks."""
    known = {
        site.provisioning_network: "the provisioning network",
        site.networks.public.address.network: "the public network",
        PROBE_NETWORK: "the network of the NAT probe inside the container",
    }
    for index, route in enumerate(site.networks.provisioning.routes):
        place: Place = ("networks", "provisioning", "routes", index)
        if problem := _gateway_problem(site, route):
            yield Finding((*place, "gateway"), *problem)
        if problem := _network_problem(route.network, known):
            yield Finding((*place, "network"), *problem)
        elif (probe := site.networks.public.probe) and probe in route.network:
            words = f"{route.network} contains networks.public.probe, {probe}"
            yield Finding(
                (*place, "network"), words, "only a reply from outside, over the gateway, shows that NAT works"
            )
        known.setdefault(route.network, "another route")


def _gateway_problem(site: Site, route: Route) -> tuple[str, str] | None:
    gateway, network = route.gateway, site.provisioning_network
    if gateway not in network:
        return (
            f"{gateway} is not in the provisioning network {network}",
            "the container must reach the router directly; is the prefix of networks.provisioning.address right?",
        )
    if gateway == site.networks.provisioning.address.ip:
        return f"{gateway} is the container's own address", "use the address of the router to that network"
    if gateway in (network.network_address, network.broadcast_address):
        return f"{gateway} is the network or broadcast address of {network}", "use the address of the router"
    if site.provisioning and gateway == site.provisioning.address.ip:
        return f"{gateway} is the address of the provisioning VM", "the VM forwards nothing: use that of the router"
    return None


def _network_problem(network: IPv4Network, known: dict[IPv4Network, str]) -> tuple[str, str] | None:
    if not network.prefixlen:
        return (
            f"{network} is a second default route",
            "networks.public.gateway is the default route; name the networks of the nodes",
        )
    if network.is_multicast or network.is_loopback or int(network.network_address) >= 0xF0000000:
        return f"{network} is not a network of hosts", "use the network of the nodes"
    other = next((one for one in known if one.overlaps(network)), None)
    if other:
        return f"{network} overlaps {known[other]}, {other}", "networks must not overlap; is a prefix too short?"
    return None
