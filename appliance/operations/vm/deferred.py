"""Tasks that wait while the provisioning VM is off, and a probe of whether it is up."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.machine import inside_argv
from appliance.plan.vm.vm import HTTPS
from appliance.tools.ports import probe_argv

DEFERRED = ("nodes that boot", "changes of files and users", "node images", "the inventory")
"""Tasks that need the VM; everything else works without it."""


@dataclass(frozen=True)
class Deferred:
    """The provisioning VM as seen from the services container. ``up``: its server accepts connections; ``waits``: the
    tasks that wait if not."""

    hostname: str
    address: str
    up: bool
    waits: tuple[str, ...] = ()


def probe_vm(cluster: Cluster, host: Host) -> Deferred | None:
    """Probe the VM from the running container; None if the site has no VM."""
    vm = cluster.site.provisioning
    if vm is None:
        return None
    address = str(vm.address.ip)
    up = host.works(*inside_argv(cluster.site, cluster.services, *probe_argv(address, HTTPS)))
    return Deferred(vm.hostname, address, up, () if up else DEFERRED)
