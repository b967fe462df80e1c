"""The CNI configuration files of an admin host, for the services container and for an isolated instance."""

from __future__ import annotations

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.services.network import conflists
from appliance.tools.bridge import query_mtus


def write_networks(cluster: Cluster, host: Host, *, isolated: bool = False) -> None:
    """Write those of the container's networks, or of the isolated ones."""
    ipv6 = host.works("test", "-d", "/proc/sys/net/ipv6")
    networks = cluster.site.networks
    mtus = query_mtus(host, [one.uplink(host.name) for one in (networks.provisioning, networks.public)])
    texts = conflists(cluster.site, cluster.services, host.name, isolated=isolated, ipv6=ipv6, mtus=mtus)
    for path, text in texts.items():
        host.write(path, text.encode())


def remove_isolated(cluster: Cluster, host: Host) -> None:
    """Remove those of the isolated networks."""
    for path in conflists(cluster.site, cluster.services, host.name, isolated=True):
        host.remove(path)
