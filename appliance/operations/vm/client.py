"""Connection to the provisioning VM's HTTP interface, for the verbs that use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from appliance.config.provisioning import Provisioning
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.context import Cluster
from appliance.plan.vm.vm import need_vm
from appliance.shared.records import RecordError, from_value
from appliance.tools.provision import Api

CERTIFICATES = "/sms/v1/certificates"
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


@dataclass(frozen=True)
class NodeCertificate:
    """A certificate that the VM has issued to a node. Times are Unix times; ``renewed``: not for a boot's token."""

    node: str
    serial: str
    address: str
    mac: str
    issued: float
    ends: float
    renewed: bool
    accepted: bool


@dataclass(frozen=True)
class RefusedRequests:
    """Requests with a certificate that the VM does not accept; ``last``: Unix time."""

    node: str
    address: str
    reason: str
    count: int
    last: float


@dataclass(frozen=True)
class CertificateLog:
    """Certificates issued to nodes and refused requests, latest first; ``now``: the VM's clock."""

    certificates: list[NodeCertificate]
    refused: list[RefusedRequests]
    now: float


def read_certificates(api: Api, node: str = "") -> CertificateLog:
    """Return the VM's log of certificates; of one node if it is named.

    Raises:
        VmUnreachable: the VM does not answer.
        SmsError: its answer is invalid.
    """
    try:
        return from_value(CertificateLog, api.request("GET", f"{CERTIFICATES}?node={quote(node, safe='')}"))
    except RecordError as error:
        raise SmsError(
            f"the provisioning VM: its log of certificates is invalid: {error}", hint="sms vm status"
        ) from None


def _reachable(vm: Provisioning) -> str:
    """Return the VM's provisioning address if this machine is in that network, else its public address."""
    if vm.public is None:
        return str(vm.address.ip)
    from appliance.host.local import Local

    routed = Local().run("ip", "route", "get", str(vm.address.ip), ok=None).text
    # A route with a gateway leads through the container's NAT, or is not usable at all.
    return str(vm.address.ip) if routed and " via " not in routed else str(vm.public.address.ip)
