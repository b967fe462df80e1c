"""Authentication and authorization of requests, from the client certificate that nginx verified.

Only nginx can connect to the socket, so its headers are trusted there; on a TCP port only with ``--trust-headers``.
The certificate of a node counts only as long as the inventory has that node, enabled, with the address of the request,
and the certificate is the newest that was issued for this entry of the inventory.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection

from appliance.provision.model import Inventory
from appliance.provision.problem import HttpProblem
from appliance.provision.world import World

NODE_ISSUER = "sms node issuer"
log = logging.getLogger("sms-provd")

_PAIR = re.compile(r"(?:^|,)\s*([A-Za-z]+)=((?:\\.|[^,\\+])*)(?=,|$)")


@dataclass(frozen=True)
class Caller:
    """The client of a request.

    ``name`` is the certificate's CN, ``address`` the peer address that nginx reports, ``uuid`` and ``fingerprint`` are
    those of a node's certificate; ``refusal``: why a valid certificate does not count.
    """

    role: str
    name: str
    address: str
    secure: bool = False
    uuid: str = ""
    fingerprint: str = ""
    refusal: str = ""


def read_subject(subject: str) -> tuple[str, str, str]:
    """Return CN, OU and serialNumber of a subject in RFC 2253 form.

    All are empty unless there is exactly one CN and one OU; without a serialNumber only that is empty.
    """
    found: dict[str, list[str]] = {"CN": [], "OU": [], "SERIALNUMBER": []}
    at = 0
    for match in _PAIR.finditer(subject):
        if match.start() != at:
            return "", "", ""
        at = match.end()
        found.setdefault(match[1].upper(), []).append(re.sub(r"\\(.)", r"\1", match[2]))
    if at != len(subject) or len(found["CN"]) != 1 or len(found["OU"]) != 1 or len(found["SERIALNUMBER"]) > 1:
        return "", "", ""
    return found["CN"][0], found["OU"][0], "".join(found["SERIALNUMBER"])


def identify(request: HTTPConnection) -> Caller:
    """Return the caller of a request, as the middleware found it by ``authenticate``."""
    found = request.scope.get("state", {}).get("caller")
    return found if isinstance(found, Caller) else Caller("nobody", "", "")


async def authenticate(request: HTTPConnection, world: World) -> Caller:
    """Return the caller of a request. Its role is "nobody" without a certificate of this site that counts."""
    caller = _read_caller(request)
    refusal = ""
    if caller.role != "nobody" and request.headers.get("x-sms-serial", "").upper() in world.revoked.serials():
        refusal = "it was revoked"
    elif caller.role == "node":
        inventory = world.cached_inventory()
        if inventory is None:
            inventory = await run_in_threadpool(world.inventory)
        refusal = _check_node(world, inventory, caller)
    if refusal:
        if world.certificates.refuse(caller.name, caller.address, refusal):
            log.warning("refused a certificate of %s from %s: %s", caller.name, caller.address, refusal)
        return replace(caller, role="nobody", refusal=refusal)
    if caller.role == "node":
        certificate = world.certificates.find(caller.uuid, caller.fingerprint)
        if certificate and world.certificates.is_first_use(certificate):
            await run_in_threadpool(world.certificates.record_use, certificate)
    return caller


def _check_node(world: World, inventory: Inventory, caller: Caller) -> str:
    """Return why a node's certificate does not count for this request; empty if it does."""
    node = inventory.find_node(caller.name)
    if node is None or (node.name or node.id) != caller.name:
        return f"the inventory has no node {caller.name[:70]}"
    if not node.enabled:
        return f"{caller.name} is disabled"
    if not node.address or caller.address != node.address:
        return f"the address of {caller.name} is {node.address or 'not set'}"
    if caller.uuid != node.uuid:
        return f"another machine had the name {caller.name} when it was issued"
    # Neither has a UUID: both are older than UUIDs. From the next enrolment on the node has one.
    if caller.uuid and world.certificates.find(caller.uuid, caller.fingerprint) is None:
        return f"{caller.name} has a newer certificate, or this one was not issued here"
    return ""


def _read_caller(request: HTTPConnection) -> Caller:
    """Return the caller by the headers that nginx sets."""
    peer = request.client.host if request.client else ""
    if not getattr(request.app.state, "trust", False):
        return Caller("nobody", "", peer)
    headers = request.headers
    address = headers.get("x-real-ip", peer)
    secure = headers.get("x-sms-scheme") == "https"
    if secure and headers.get("x-sms-verify") == "SUCCESS":
        name, unit, uuid = read_subject(headers.get("x-sms-subject", ""))
        # The CA in the VM may issue certificates for nodes only.
        if unit != "node" and read_subject(headers.get("x-sms-issuer", "") + ",OU=issuer")[0] == NODE_ISSUER:
            unit = ""
        if name and unit == "node":
            return Caller(unit, name, address, secure, uuid, headers.get("x-sms-fingerprint", "").lower())
        if name and unit in ("admin", "services"):
            return Caller(unit, name, address, secure)
    return Caller("nobody", "", address, secure)


def require_role(request: HTTPConnection, *roles: str) -> Caller:
    """Return the caller if it has one of these roles; otherwise 401 (no certificate) or 403."""
    caller = identify(request)
    if caller.role in roles or "nobody" in roles:
        return caller
    either = " or ".join(roles)
    if caller.refusal:
        raise HttpProblem(403, f"this certificate is not accepted: {caller.refusal}", hint="sms node show")
    if caller.role == "nobody":
        raise HttpProblem(
            401, f"this requires a certificate with role {either}", hint="use port 8443 with a certificate"
        )
    raise HttpProblem(403, f"{caller.name} has role {caller.role}; this requires {either}")
