"""The container's two networks as CNI knows them (CNI specification 1.0.0)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network

from appliance.catalog import Service
from appliance.config.model import Network, ProvisioningNetwork, PublicNetwork, Site
from appliance.shared.migration import MacvlanRequest
from appliance.shared.ports import ATTACHED

CNI_FOLDER = "/etc/apptainer/network"


INTERFACES = ("eth0", "eth1")
"""Interfaces of the container on the provisioning and on the public network."""
VM_TAP = "smsvm-"
"""Prefix of the interfaces through which provisioning VMs are on the same bridges."""


def network_names(site: Site, *, isolated: bool = False) -> tuple[str, str]:
    """Return the CNI names of the provisioning and the public network, in the order of eth0 and eth1.

    Args:
        isolated: names of the networks without an uplink.
    """
    tail = "-held" if isolated else ""
    return f"sms-{site.cluster}-prov{tail}", f"sms-{site.cluster}-pub{tail}"


def isolated_bridges(site: Site) -> tuple[str, str]:
    """Return the bridges that an instance is started on; CNI creates them without an uplink port.

    Its plugin sets ``accept_ra`` of a bridge to 0, by which hosts lose their IPv6, and the bridge may take the address
    of its port. It gets none of the host: ``attach_started`` of ``tools/ports.py`` attaches the ports.
    """
    # The name of an interface has at most 15 characters; that of a cluster may have more.
    short = f"{zlib.crc32(site.cluster.encode()):08x}"
    return f"sms{short}h0", f"sms{short}h1"


def attached_bridges(site: Site) -> dict[str, str]:
    """Return the bridge of the hosts for each of ``isolated_bridges`` that a start replaces by one."""
    networks = (site.networks.provisioning, site.networks.public)
    pairs = zip(isolated_bridges(site), networks, strict=True)
    return {own: network.bridge for own, network in pairs if network.attach == "bridge"}


def conflists(
    site: Site,
    services: Sequence[Service],
    host: str,
    *,
    isolated: bool = False,
    ipv6: bool = True,
    mtus: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Return the CNI configuration files of an admin host: path to text, one per network.

    Args:
        services: their ``sysctl`` is set with the first network.
        isolated: of an instance without macvlan interfaces; bridges are ``isolated_bridges`` in any case.
        ipv6: whether the host's kernel has it.
        mtus: of the bridges that the container is to be on, also later. A port with a smaller one makes that of the
            bridge smaller, for all who use it.
    """
    names = network_names(site, isolated=isolated)
    networks: tuple[Network, Network] = (site.networks.provisioning, site.networks.public)
    uplinks = tuple(network.uplink(host) for network in networks)
    own = {name: value for service in services for name, value in service.sysctl.items()}
    sysctls = {one: deaf(one, ipv6=ipv6) for one in INTERFACES}
    sysctls[INTERFACES[0]][0] |= own
    return {
        f"{CNI_FOLDER}/50_{name}.conflist": _conflist(
            name,
            network,
            {"type": "macvlan", "master": uplink, "mode": ATTACHED}
            if network.attach == "macvlan" and not isolated
            else {
                "type": "bridge",
                "bridge": own_bridge,
                "isGateway": False,
                "ipMasq": False,
                **_mtu(mtus, uplink),
            },
            sysctls[one],
        )
        for name, network, uplink, own_bridge, one in zip(
            names, networks, uplinks, isolated_bridges(site), INTERFACES, strict=True
        )
    }


def container_addresses(site: Site) -> dict[str, str]:
    """Return the address of each interface of the container."""
    networks = (site.networks.provisioning, site.networks.public)
    return {name: str(network.address.ip) for name, network in zip(INTERFACES, networks, strict=True)}


def _mtu(mtus: Mapping[str, int] | None, bridge: str) -> dict[str, int]:
    value = (mtus or {}).get(bridge)
    return {"mtu": value} if value else {}


def deaf(interface: str, *, ipv6: bool = True) -> list[dict[str, str]]:
    """Return kernel parameters, to be set in turn, by which other machines of a network cannot configure an interface.

    What they announced since it was created is forgotten with all of its IPv6 addresses. ``default`` is of interfaces
    that the container gets later.
    """
    found = {f"net.ipv4.conf.{one}.accept_redirects": "0" for one in ("all", "default", interface)}
    if not ipv6:
        return [found]
    for one in ("default", interface):
        found |= {f"net.ipv6.conf.{one}.{what}": "0" for what in ("accept_ra", "autoconf", "accept_redirects")}
    again = f"net.ipv6.conf.{interface}.disable_ipv6"
    return [{**found, again: "1"}, {again: "0"}]


def _conflist(name: str, network: Network, plugin: dict[str, object], sysctls: list[dict[str, str]]) -> str:
    address: dict[str, str] = {"address": str(network.address)}
    ipam: dict[str, object] = {"type": "static", "addresses": [address]}
    if isinstance(network, PublicNetwork):
        address["gateway"] = str(network.gateway)
        ipam["routes"] = [{"dst": "0.0.0.0/0"}]
    if isinstance(network, ProvisioningNetwork) and network.routes:
        ipam["routes"] = [{"dst": str(route.network), "gw": str(route.gateway)} for route in network.routes]
    # No firewall and portmap plugins, no masquerading on the host: the container is a separate machine
    # on both networks.
    plugins: list[dict[str, object]] = [{**plugin, "ipam": ipam}]
    # By a plugin on the host: the container itself has no writable /proc/sys.
    plugins += [{"type": "tuning", "sysctl": sysctl} for sysctl in sysctls]
    return json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": plugins}, indent=2) + "\n"


def macvlan_requests(site: Site, host: str) -> tuple[MacvlanRequest, ...]:
    """Return the macvlan interfaces of the container on an admin host, which replace those of an isolated instance."""
    provisioning, public = site.networks.provisioning, site.networks.public
    return tuple(
        MacvlanRequest(
            name,
            network.uplink(host),
            network.mac,
            str(network.address),
            (f"default via {network.gateway}",)
            if isinstance(network, PublicNetwork)
            else tuple(f"{route.network} via {route.gateway}" for route in provisioning.routes),
        )
        for name, network in zip(INTERFACES, (provisioning, public), strict=True)
        if network.attach == "macvlan"
    )


def network_options(site: Site, *, isolated: bool = False) -> list[str]:
    """Return the network options of `instance start`; the MAC addresses are the same on every host."""
    names = network_names(site, isolated=isolated)
    macs = (site.networks.provisioning.mac, site.networks.public.mac)
    options = ["--net", "--network", ",".join(names)]
    for name, mac in zip(names, macs, strict=True):  # Apptainer assigns all of a `;` list to the first network
        options += ["--network-args", f"{name}:MAC={mac}"]
    return options


def running_network(site: Site) -> dict[str, str]:
    """Return what ``definitions/scripts/running-network`` prints in a container started from this site file."""
    networks = dict(zip(INTERFACES, (site.networks.provisioning, site.networks.public), strict=True))
    # ip(8) prints no prefix of a single address.
    routes = [
        f"{str(route.network).removesuffix('/32')} via {route.gateway}" for route in site.networks.provisioning.routes
    ]
    return {
        "hostname": site.hostname,
        "dns": " ".join(str(server) for server in site.networks.dns) or "127.0.0.1",
        **{name: f"{network.mac} {network.address}".lower() for name, network in networks.items()},
        "gateway": str(site.networks.public.gateway),
        "routes": " ".join(sorted(routes)),
    }


def find_cut_off(running: Mapping[str, str], site: Site, addresses: Mapping[str, str]) -> set[str]:
    """Return the nodes that a container reaches by its network or routes, and one of this site file would not.

    Args:
        running: of ``read_network``.
        addresses: IPv4 addresses by name.
    """
    words = [*running.get(INTERFACES[0], "").split()[1:2], *running.get("routes", "").split()[::3]]
    before = [ip_network(one, strict=False) for one in words]
    found = set()
    for name, text in addresses.items():
        address = ip_address(text)
        if any(address in one for one in before) and not any(address in one for one in site.node_networks):
            found.add(name)
    return found


def read_network(text: str) -> dict[str, str]:
    """Return the values by name that ``definitions/scripts/running-network`` has printed."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        found[name] = f"{found[name]} {value}" if name in found else value
    return found
