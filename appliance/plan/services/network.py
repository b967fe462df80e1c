"""The container's two networks as CNI knows them (CNI specification 1.0.0)."""

from __future__ import annotations

import json
import zlib

from appliance.config.model import Network, PublicNetwork, Site

CNI_FOLDER = "/etc/apptainer/network"


INTERFACES = ("eth0", "eth1")
"""The container's, on the provisioning and on the public network."""


def network_names(site: Site, *, held: bool = False) -> tuple[str, str]:
    """CNI names of the provisioning and the public network, in the order of eth0 and eth1.

    Args:
        held: of those that lead nowhere.
    """
    tail = "-held" if held else ""
    return f"sms-{site.cluster}-prov{tail}", f"sms-{site.cluster}-pub{tail}"


def hold_bridges(site: Site) -> tuple[str, str]:
    """Bridges that an instance is started on before its addresses may be seen; CNI makes them, without a port."""
    # An interface has 15 characters; a cluster's name may have more.
    short = f"{zlib.crc32(site.cluster.encode()):08x}"
    return f"sms{short}h0", f"sms{short}h1"


def conflists(site: Site, *, held: bool = False) -> dict[str, str]:
    """File path to text, one a network.

    Args:
        held: the container's ports are put on ``hold_bridges``.
    """
    names = network_names(site, held=held)
    networks: tuple[Network, Network] = (site.networks.provisioning, site.networks.public)
    bridges = hold_bridges(site) if held else tuple(network.bridge for network in networks)
    return {
        f"{CNI_FOLDER}/50_{name}.conflist": _conflist(name, network, bridge)
        for name, network, bridge in zip(names, networks, bridges, strict=True)
    }


def _conflist(name: str, network: Network, to: str) -> str:
    address: dict[str, str] = {"address": str(network.address)}
    ipam: dict[str, object] = {"type": "static", "addresses": [address]}
    if isinstance(network, PublicNetwork):
        address["gateway"] = str(network.gateway)
        ipam["routes"] = [{"dst": "0.0.0.0/0"}]
    # No firewall and portmap plugins, no masquerade of the host's: the container is a machine of
    # its own on both networks.
    bridge = {"type": "bridge", "bridge": to, "isGateway": False, "ipMasq": False, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": [bridge]}, indent=2) + "\n"


def network_options(site: Site, *, held: bool = False) -> list[str]:
    """Options of `instance start`; the MAC addresses stay the same on every host."""
    names = network_names(site, held=held)
    macs = (site.networks.provisioning.mac, site.networks.public.mac)
    options = ["--net", "--network", ",".join(names)]
    for name, mac in zip(names, macs, strict=True):  # one option each: a `;` would still be the first network's
        options += ["--network-args", f"{name}:MAC={mac}"]
    return options
