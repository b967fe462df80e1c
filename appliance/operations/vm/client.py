"""The provisioning VM, as verbs that speak to it find it."""

from __future__ import annotations

from pathlib import Path

from appliance.config.provisioning import Provisioning
from appliance.errors import Refused
from appliance.operations.context import Cluster
from appliance.tools.provision import Api

PORT = 8443
"""Where its server listens with TLS."""


def need_vm(cluster: Cluster) -> Provisioning:
    """What the site says of its provisioning VM.

    Raises:
        Refused: it has none.
    """
    if cluster.site.provisioning is None:
        raise Refused(
            "the site has no provisioning VM", hint="add a section `provisioning` to the site file: docs/vm.md"
        )
    return cluster.site.provisioning


def tls_folder(cluster: Cluster) -> Path:
    """Where the site's CA and the certificates that it issued lie: `sms init` makes them beside the site file."""
    return (cluster.path.parent if cluster.path else Path("/etc/sms")) / "tls"


def open_api(cluster: Cluster) -> Api:
    """The VM's interface, at the address that this machine reaches directly.

    Raises:
        Refused: the site has no VM.
    """
    vm = need_vm(cluster)
    folder = tls_folder(cluster)
    address = _reachable(vm)
    return Api(f"https://{address}:{PORT}", folder / "ca.pem", folder / "admin.pem", folder / "admin.key")


def _reachable(vm: Provisioning) -> str:
    """The address that this machine reaches best: in the provisioning network if it is in there, else the public."""
    if vm.public is None:
        return str(vm.address.ip)
    from appliance.host.local import Local

    routed = Local().run("ip", "route", "get", str(vm.address.ip), ok=None).text
    # What goes by a router goes through the container's NAT, or nowhere.
    return str(vm.address.ip) if routed and " via " not in routed else str(vm.public.address.ip)
