"""The container's two networks as CNI knows them (CNI specification 1.0.0)."""

from __future__ import annotations

import json

from appliance.config.model import Network, PublicNetwork, Site

CNI_FOLDER = "/etc/apptainer/network"


def network_names(site: Site) -> tuple[str, str]:
    """CNI names of the provisioning and the public network, in the order of eth0 and eth1."""
    return f"sms-{site.cluster}-prov", f"sms-{site.cluster}-pub"


def conflists(site: Site) -> dict[str, str]:
    """File path to text, one a network."""
    names = network_names(site)
    networks: tuple[Network, Network] = (site.networks.provisioning, site.networks.public)
    return {f"{CNI_FOLDER}/50_{name}.conflist": _conflist(name, net) for name, net in zip(names, networks, strict=True)}


def _conflist(name: str, network: Network) -> str:
    address: dict[str, str] = {"address": str(network.address)}
    ipam: dict[str, object] = {"type": "static", "addresses": [address]}
    if isinstance(network, PublicNetwork):
        address["gateway"] = str(network.gateway)
        ipam["routes"] = [{"dst": "0.0.0.0/0"}]
    # No firewall and portmap plugins, no masquerade of the host's: the container is a machine of
    # its own on both networks.
    bridge = {"type": "bridge", "bridge": network.bridge, "isGateway": False, "ipMasq": False, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": [bridge]}, indent=2) + "\n"


def network_options(site: Site) -> list[str]:
    """Options of `instance start`; the MAC addresses stay the same on every host."""
    names = network_names(site)
    macs = (site.networks.provisioning.mac, site.networks.public.mac)
    options = ["--net", "--network", ",".join(names)]
    for name, mac in zip(names, macs, strict=True):  # one option each: a `;` would still be the first network's
        options += ["--network-args", f"{name}:MAC={mac}"]
    return options
