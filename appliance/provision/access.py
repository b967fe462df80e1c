"""Authentication and authorization of requests, from the client certificate that nginx verified.

Only nginx can connect to the socket, so its headers are trusted there; on a TCP port only with ``--trust-headers``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from appliance.provision.problem import HttpProblem

NODE_ISSUER = "sms node issuer"

_PAIR = re.compile(r"(?:^|,)\s*([A-Za-z]+)=((?:\\.|[^,\\+])*)(?=,|$)")


@dataclass(frozen=True)
class Caller:
    """The client of a request: ``name`` is the certificate's CN, ``address`` the peer address that nginx reports."""

    role: str
    name: str
    address: str
    secure: bool = False


def read_subject(subject: str) -> tuple[str, str]:
    """Return CN and OU of a subject in RFC 2253 form; empty unless there is exactly one of each."""
    found: dict[str, list[str]] = {"CN": [], "OU": []}
    at = 0
    for match in _PAIR.finditer(subject):
        if match.start() != at:
            return "", ""
        at = match.end()
        found.setdefault(match[1].upper(), []).append(re.sub(r"\\(.)", r"\1", match[2]))
    if at != len(subject) or len(found["CN"]) != 1 or len(found["OU"]) != 1:
        return "", ""
    return found["CN"][0], found["OU"][0]


def identify(request: HTTPConnection) -> Caller:
    """Return the caller of a request. Its role is "nobody" without a certificate of this site."""
    peer = request.client.host if request.client else ""
    if not getattr(request.app.state, "trust", False):
        return Caller("nobody", "", peer)
    headers = request.headers
    address = headers.get("x-real-ip", peer)
    secure = headers.get("x-sms-scheme") == "https"
    if secure and headers.get("x-sms-verify") == "SUCCESS":
        name, unit = read_subject(headers.get("x-sms-subject", ""))
        # The CA in the VM may issue certificates for nodes only.
        if unit != "node" and read_subject(headers.get("x-sms-issuer", "") + ",OU=issuer")[0] == NODE_ISSUER:
            unit = ""
        if name and unit in ("admin", "services", "node"):
            return Caller(unit, name, address, secure)
    return Caller("nobody", "", address, secure)


def require_role(request: HTTPConnection, *roles: str) -> Caller:
    """Return the caller if it has one of these roles; otherwise 401 (no certificate) or 403."""
    caller = identify(request)
    if caller.role in roles or "nobody" in roles:
        return caller
    either = " or ".join(roles)
    if caller.role == "nobody":
        raise HttpProblem(
            401, f"this requires a certificate with role {either}", hint="use port 8443 with a certificate"
        )
    raise HttpProblem(403, f"{caller.name} has role {caller.role}; this requires {either}")
