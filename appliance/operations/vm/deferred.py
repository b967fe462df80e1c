"""What waits while the provisioning VM is off, and whether it is."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.vm.client import PORT
from appliance.plan.machine import inside_argv

DEFERRED = ("nodes that boot", "changes of files and users", "node images", "the inventory")
"""What only the VM does; all else goes on."""
KNOCK = 'exec timeout 2 bash -c \'exec 3<>"/dev/tcp/$1/$2"\' knock "$1" "$2"'
"""Shell, inside the container: whether somebody takes connections at address $1, port $2."""


@dataclass(frozen=True)
class Deferred:
    """The provisioning VM as the services container sees it: ``up`` if its server takes connections, else ``waits``
    says what has to."""

    hostname: str
    address: str
    up: bool
    waits: tuple[str, ...] = ()


def look_at_vm(cluster: Cluster, host: Host) -> Deferred | None:
    """Ask from inside the running container; None where the site has no VM."""
    vm = cluster.site.provisioning
    if vm is None:
        return None
    up = host.works(*inside_argv(cluster.site, "sh", "-c", KNOCK, "knock", str(vm.address.ip), str(PORT)))
    return Deferred(vm.hostname, str(vm.address.ip), up, () if up else DEFERRED)
