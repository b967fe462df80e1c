"""Connection to the provisioning VM's HTTP interface, for the verbs that use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from appliance.config.provisioning import Provisioning
from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.plan.vm.vm import HTTPS, need_vm
from appliance.shared.records import RecordError, check_value
from appliance.tools.provision import Api

CERTIFICATES = "/sms/v1/certificates"

Answer = TypeVar("Answer")


def tls_folder(cluster: Cluster) -> Path:
    """Return the folder of the site's CA and its certificates: `sms init` creates it next to the site file."""
    return (cluster.path.parent if cluster.path else Path("/etc/sms")) / "tls"


def open_api(cluster: Cluster) -> Api:
    """Return a client of the VM's interface, at the address that this machine reaches directly.

    Raises:
        ConfigError: the site has no VM.
    """
    vm = need_vm(cluster.site)
    folder = tls_folder(cluster)
    address = _reachable(vm)
    return Api(f"https://{address}:{HTTPS}", folder / "ca.pem", folder / "admin.pem", folder / "admin.key")


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
    return read_answer(CertificateLog, api.request("GET", f"{CERTIFICATES}?node={quote(node, safe='')}"))


def read_answer(kind: type[Answer], answer: Any) -> Answer:
    """Return a response of the VM, which may be compromised, as this type.

    Raises:
        SmsError: it is not of this type.
    """
    try:
        found: Answer = check_value(kind, answer)
    except RecordError as error:
        raise SmsError(f"the provisioning VM: its response is invalid: {error}", hint="sms vm status") from None
    return found


def read_list(kind: type[Answer], answer: Any, key: str) -> list[Answer]:
    """Return the list in a key of a response, as ``read_answer``."""
    listed = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise SmsError(f"the provisioning VM: its response is invalid: {key} is missing", hint="sms vm status")
    return [read_answer(kind, each) for each in listed]


def _reachable(vm: Provisioning) -> str:
    """Return the VM's provisioning address if this machine is in that network, else its public address."""
    if vm.public is None:
        return str(vm.address.ip)
    from appliance.host.local import Local

    routed = Local().run("ip", "route", "get", str(vm.address.ip), ok=None).text
    # A route with a gateway leads through the container's NAT, or is not usable at all.
    return str(vm.address.ip) if routed and " via " not in routed else str(vm.public.address.ip)
