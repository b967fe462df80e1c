"""Connection to the provisioning VM's HTTP interface, for the verbs that use it."""

from __future__ import annotations

from pathlib import Path

from appliance.config.provisioning import Provisioning
from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster
from appliance.plan.vm.vm import need_vm
from appliance.tools.provision import Api

PORT = 8443
"""TCP port of its HTTPS server."""


def tls_folder(cluster: Cluster) -> Path:
    """Return the folder of the site's CA and its certificates: `sms init` creates it next to the site file."""
    return (cluster.path.parent if cluster.path else Path("/etc/sms")) / "tls"


def open_api(cluster: Cluster) -> Api:
    """Return a client of the VM's interface, at the address that this machine reaches directly.

    Raises:
        Refused: the site has no VM.
    """
    try:
        vm = need_vm(cluster.site)
    except ConfigError as error:
        raise Refused(error.message, hint=error.hint) from None
    folder = tls_folder(cluster)
    address = _reachable(vm)
    return Api(f"https://{address}:{PORT}", folder / "ca.pem", folder / "admin.pem", folder / "admin.key")


def _reachable(vm: Provisioning) -> str:
    """Return the VM's provisioning address if this machine is in that network, else its public address."""
    if vm.public is None:
        return str(vm.address.ip)
    from appliance.host.local import Local

    routed = Local().run("ip", "route", "get", str(vm.address.ip), ok=None).text
    # A route with a gateway leads through the container's NAT, or is not usable at all.
    return str(vm.address.ip) if routed and " via " not in routed else str(vm.public.address.ip)
