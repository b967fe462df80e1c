"""``sms key ca revoke`` and ``log``: certificates that this authority and its VM have issued, and refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster
from appliance.operations.site.ca import CLIENTS
from appliance.operations.site.ca import rehearse_revoke as rehearse_here
from appliance.operations.site.ca import revoke as revoke_here
from appliance.operations.site.issued import SERIAL, Revocation, add_revoked, read_issued, read_revoked
from appliance.operations.vm.certificates import Installed, install_certificates
from appliance.operations.vm.client import open_api, read_certificates, tls_folder


@dataclass(frozen=True)
class LogEntry:
    """A certificate that was issued. Times are Unix times; ``revoked``: 0 if it was not."""

    at: float
    serial: str
    subject: str
    purpose: str
    ends: float
    by: str
    revoked: float


@dataclass(frozen=True)
class RevokeResult:
    """What was revoked, and where that is in effect."""

    revoked: list[Revocation]
    installed: Installed


def read_log(cluster: Cluster, *, nodes: bool = True) -> list[LogEntry]:
    """Return the certificates that were issued, the oldest first: by the authority, and by the VM to nodes.

    Raises:
        VmUnreachable: the VM does not answer; ``nodes=False`` leaves its certificates out.
    """
    folder = tls_folder(cluster)
    revoked = {each.serial: each.at for each in read_revoked(folder)}
    found = [
        LogEntry(each.at, each.serial, each.subject, each.purpose, each.ends, each.by, revoked.get(each.serial, 0))
        for each in read_issued(folder)
    ]
    if nodes and cluster.site.provisioning:
        for one in read_certificates(open_api(cluster)).certificates:
            what = "renewed" if one.renewed else "token"
            how = f"the VM, to {one.address} ({one.mac or 'MAC unknown'}), {what}"
            subject, at = f"CN={one.node},OU=node", revoked.get(one.serial, 0)
            found.append(LogEntry(one.issued, one.serial, subject, "client", one.ends, how, at))
    return sorted(found, key=lambda each: each.at)


def rehearse_revoke(cluster: Cluster, words: Sequence[str]) -> list[Revocation]:
    """Return what ``revoke`` would revoke.

    Raises:
        Refused, VmUnreachable: as ``revoke``.
    """
    names, others = _split(words)
    folder = tls_folder(cluster)
    known = {each.serial for each in read_revoked(folder)}
    of_nodes = [each for name in names for each in _of_node(cluster, name) if each.serial not in known]
    return rehearse_here(folder, others) + of_nodes


def revoke(cluster: Cluster, words: Sequence[str]) -> RevokeResult:
    """Revoke certificates of clients, of nodes, or by their serial numbers, and install the list in the VM.

    A client gets another certificate. So does a node, automatically, as long as its machine has its addresses and it is
    enabled.

    Raises:
        Refused: a name is that of no node with a certificate.
        VmUnreachable: nodes are named, and the VM does not answer; nothing was changed.
    """
    folder = tls_folder(cluster)
    names, others = _split(words)
    of_nodes = [each for name in names for each in _of_node(cluster, name)]
    with cluster.env.progress.step("revoke certificates"):
        done = revoke_here(folder, others)
        done += add_revoked(folder, of_nodes)
    if not cluster.site.provisioning:
        return RevokeResult(done, Installed())
    with cluster.env.progress.step("install the list in the VM and on admin hosts"):
        return RevokeResult(done, install_certificates(cluster))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of nodes among ``words``, and the others: clients and serial numbers."""
    others = [word for word in words if word in CLIENTS or SERIAL.fullmatch(word.replace(":", "").upper())]
    return [word for word in words if word not in others], others


def _of_node(cluster: Cluster, name: str) -> list[Revocation]:
    if not cluster.site.provisioning:
        raise ConfigError(
            f"{name[:70]!r} is neither {' nor '.join(CLIENTS)} nor a serial number", hint="sms key ca log"
        )
    log = read_certificates(open_api(cluster), name)
    found = [
        Revocation(one.serial, f"CN={name},OU=node", cluster.env.clock.time(), one.ends)
        for one in log.certificates
        if one.ends > log.now and SERIAL.fullmatch(one.serial)
    ]
    if not found:
        raise Refused(f"{name[:70]} has no certificate", hint="`sms key ca log` lists them")
    return found
