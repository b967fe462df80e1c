"""The container's address and MAC address on the pod of slurmctld: a second network interface, by Multus.

Object and annotation are those of the Network Plumbing Working Group's standard (Kubernetes Network Custom Resource
Definition De-facto Standard, version 1.3); the configuration in it is that of the reference plugins of CNI.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from appliance.config.model import Site
from appliance.engines.model import Deployment, Workload
from appliance.errors import ConfigError

DEFINITIONS = "network-attachment-definitions.k8s.cni.cncf.io"
"""The custom resource definition that Multus needs."""
ANNOTATION = "k8s.v1.cni.cncf.io/networks"
NAME = "provisioning"
"""The NetworkAttachmentDefinition, the network of CNI, and the interface in the pod."""
CNI = "0.3.1"
"""The oldest version of the configuration that has all of it: Multus and plugins in use read it."""
OTHER = "set `network: service`, or `network: host`"


@dataclass(frozen=True)
class Attachment:
    """A pod's interface in the provisioning network.

    Attributes:
        kind: the plugin: ``bridge``, or ``macvlan``.
        interface: of the cluster node: the bridge, or what carries the macvlan interface.
        address: the container's, with prefix.
        routes: destination and gateway of networks behind routers.
    """

    kind: Literal["bridge", "macvlan"]
    interface: str
    address: str
    mac: str
    routes: tuple[tuple[str, str], ...] = ()

    @property
    def ip(self) -> str:
        """The address without its prefix."""
        return self.address.partition("/")[0]


def read_attachment(site: Site) -> Attachment | None:
    """Return the interface of a site whose network mode is ``attached``; None with another mode."""
    given, network = site.engines.kubernetes, site.networks.provisioning
    if given.network != "attached":
        return None
    routes = tuple((str(route.network), str(route.gateway)) for route in network.routes)
    return Attachment(given.attach, given.interface or "", str(network.address), network.mac, routes)


def has_address(one: Workload, attachment: Attachment | None) -> bool:
    """Return whether a workload's pod has the container's address: the controller's, which nodes and jobs address."""
    return attachment is not None and one.main.service.role == "controller"


def plugin_json(attachment: Attachment) -> str:
    """Return the configuration of the plugin; address and MAC address are those of the annotation."""
    bridge = attachment.kind == "bridge"
    link = {"bridge": attachment.interface} if bridge else {"master": attachment.interface, "mode": "bridge"}
    ipam: dict[str, object] = {"type": "static"}
    if attachment.routes:
        ipam["routes"] = [{"dst": network, "gw": gateway} for network, gateway in attachment.routes]
    plugin = {"type": attachment.kind, **link, "capabilities": {"ips": True, "mac": True}, "ipam": ipam}
    return json.dumps({"cniVersion": CNI, "name": NAME, "plugins": [plugin]}, indent=1) + "\n"


def selection_json(attachment: Attachment) -> str:
    """Return the value of the pod's annotation. The definition is one of its own namespace."""
    return json.dumps([{"name": NAME, "interface": NAME, "ips": [attachment.address], "mac": attachment.mac}])


def check_attachment(deployment: Deployment, attachment: Attachment, address: str, node: str) -> None:
    """Check that one pod, and nothing else, needs the container's address.

    Args:
        address: at which nodes reach the other workloads; empty: none is set.
        node: cluster node that runs all pods; empty for any.

    Raises:
        ConfigError: it cannot work; the message says why.
    """
    if deployment.find("controller") is None:
        raise ConfigError(
            "`network: attached` gives the container's address to the pod of slurmctld, which this site does not run",
            hint=f"add slurmctld to `services`, or {OTHER}",
        )
    if stay := [each.service for each in deployment.placements if each.place == "gateway"]:
        raise ConfigError(
            f"`network: attached` gives the container's address to the pod of slurmctld, but {', '.join(stay)} "
            "would run in the container, with the same address",
            hint=f"remove them from `services`, name the secret files of those that lack them, or {OTHER}",
        )
    others = [one.name for one in deployment.workloads if one.ports and not has_address(one, attachment)]
    if others and not address:
        raise ConfigError(
            f"`engines.kubernetes.address` is missing: the address at which nodes reach {', '.join(others)}",
            hint="of a cluster node or a load balancer; the container's is that of slurmctld's pod alone",
        )
    if (apart := [one.name for one in deployment.workloads if keeps_away(deployment, one, attachment)]) and node:
        raise ConfigError(
            f"with `attach: macvlan` the pod of slurmctld and its cluster node {node} do not reach each other, "
            f"so {', '.join(apart)} cannot run there",
            hint="set `attach: bridge`, or remove `node`: they run on other cluster nodes then",
        )


def keeps_away(deployment: Deployment, one: Workload, attachment: Attachment | None) -> bool:
    """Return whether a workload must not run on the cluster node of slurmctld's pod, with which it communicates.

    A macvlan interface and the host that carries it do not reach each other.
    """
    controller = deployment.find("controller")
    if attachment is None or attachment.kind != "macvlan" or controller is None or one.name == controller.name:
        return False
    return any(controller.name in unit.service.engines.reads for unit in one.units)
