"""Who asks, as nginx found out by the certificate, and what that one may.

Only nginx reaches the socket, so its headers are the truth there; on a TCP port only with ``--trust-headers``.
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
    """One who asks: ``name`` is the certificate's CN, ``address`` the peer's, as nginx saw it."""

    role: str
    name: str
    address: str
    secure: bool = False


def read_subject(subject: str) -> tuple[str, str]:
    """CN and OU of a subject in RFC 2253's form; empty where there is not exactly one of each."""
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


def who(request: HTTPConnection) -> Caller:
    """Who asks. Whoever shows no certificate of ours is nobody."""
    peer = request.client.host if request.client else ""
    if not getattr(request.app.state, "trust", False):
        return Caller("nobody", "", peer)
    headers = request.headers
    address = headers.get("x-real-ip", peer)
    secure = headers.get("x-sms-scheme") == "https"
    if secure and headers.get("x-sms-verify") == "SUCCESS":
        name, unit = read_subject(headers.get("x-sms-subject", ""))
        # The authority in the VM vouches for nodes, and for nobody else.
        if unit != "node" and read_subject(headers.get("x-sms-issuer", "") + ",OU=issuer")[0] == NODE_ISSUER:
            unit = ""
        if name and unit in ("admin", "services", "node"):
            return Caller(unit, name, address, secure)
    return Caller("nobody", "", address, secure)


def need(request: HTTPConnection, *roles: str) -> Caller:
    """The caller, if it is one of these roles; else 401 (no certificate) or 403."""
    caller = who(request)
    if caller.role in roles or "nobody" in roles:
        return caller
    if caller.role == "nobody":
        raise HttpProblem(401, f"this asks for a certificate of {_either(roles)}", hint="ask at port 8443, with one")
    raise HttpProblem(403, f"{caller.name} is {caller.role}; this is for {_either(roles)}")


def _either(roles: tuple[str, ...]) -> str:
    return " or ".join(roles)
