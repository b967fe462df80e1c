"""``POST /sms/v1/enrol``: issue a certificate to a node that booted, or renew it before it expires."""

from __future__ import annotations

import datetime
import logging
import time
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.access import Caller, identify
from appliance.provision.certificates import Certificate
from appliance.provision.model import Component
from appliance.provision.payloads import CertificateLog, EnrolRequest
from appliance.provision.peers import neighbour_mac
from appliance.provision.problem import HttpProblem, bad_request, forbidden
from appliance.provision.tokens import RateLimit
from appliance.provision.world import World

DAYS = 7
RENEW_DAYS = 2
"""The age in days at which a node renews its certificate."""
log = logging.getLogger("sms-provd")

REFUSAL = "the token is invalid, or was not issued to this address"
"""One message for all token errors, so that it does not reveal which check failed."""


def routes(world: World) -> list[Route]:
    rate_limit = RateLimit()

    def enrol(request: Request) -> Response:
        caller = identify(request)
        body: EnrolRequest = request.state.body
        if not caller.secure:
            raise forbidden("certificates are issued over TLS only", hint="use port 8443")
        if wait := rate_limit.wait_s(caller.address):
            log.warning("enrol: %s exceeds the rate limit", caller.address)
            raise HttpProblem(429, "too many attempts", retry_s=wait)
        _check_port(request, caller)
        public = read_request(body["csr"])
        name = caller.name if caller.role == "node" else world.tokens.use(body.get("token", ""), caller.address)
        node = world.inventory().find_node(name) if name else None
        if node is None or not node.enabled:
            log.warning("enrol: %s refused", caller.address)
            raise forbidden(REFUSAL, hint="reboot the node to get a new token")
        if not node.uuid:
            node = world.add_uuid(node)
        chain = _issue(world, caller, node, public)
        return JSONResponse({"name": name, "certificate": chain, "renew_s": RENEW_DAYS * 86400})

    def issued(request: Request) -> Response:
        node, known = request.query_params.get("node", ""), world.certificates
        shown: CertificateLog = {
            "certificates": known.log(node),
            "refused": known.refused(node),
            "now": time.time(),
        }
        return JSONResponse(shown)

    return [Route("/sms/v1/enrol", enrol, methods=["POST"]), Route("/sms/v1/certificates", issued)]


def _issue(world: World, caller: Caller, node: Component, public: Any) -> str:
    """Issue and record a certificate, which from now on is the only one of its node; return it as PEM."""
    name = node.name or node.id
    chain = issue_node(world.config.tls, name, public, node.uuid)
    made = x509.load_pem_x509_certificate(chain.encode())
    now, mac = time.time(), neighbour_mac(caller.address, world.config.neighbours)
    serial = f"{made.serial_number:X}"
    new = Certificate(
        # Not for security alone: nobody can make another certificate with the fingerprint of an existing one.
        fingerprint=made.fingerprint(hashes.SHA1()).hex(),  # noqa: S303
        serial=serial if len(serial) % 2 == 0 else f"0{serial}",
        uuid=node.uuid,
        node=name,
        address=caller.address,
        mac=mac,
        issued=now,
        ends=now + DAYS * 86400,
        replaces=caller.fingerprint if caller.role == "node" else "",
    )
    before = world.certificates.add(new)
    how = f"renewed the certificate of {name}" if new.replaces else f"issued a certificate to {name}"
    log.info("enrol: %s at %s (%s): %s", how, caller.address, mac or "MAC unknown", new.serial)
    if before and not new.replaces:
        log.warning("enrol: %s enrolled again: its certificate %s is no longer accepted", name, before.serial)
    return chain


def _check_port(request: Request, caller: Caller) -> None:
    # All users of a node can read the token on the kernel's command line; only root can use a port below 1024.
    port = request.headers.get("x-real-port")
    if port is not None and (not port.isdigit() or int(port) >= 1024):
        log.warning("enrol: request from %s has source port %s", caller.address, port[:8])
        raise forbidden("only root of a node may request its certificate", hint="use a source port below 1024")


def read_request(text: str) -> Any:
    """Return the public key of a signing request and ignore its other fields; 400 if it is invalid."""
    try:
        request = x509.load_pem_x509_csr(text.encode())
        valid = request.is_signature_valid
        public = request.public_key()
    except Exception as error:  # parsers raise anything on untrusted ASN.1
        raise bad_request("csr: is not a signing request in PEM format") from error
    good = (
        (isinstance(public, ec.EllipticCurvePublicKey) and public.curve.key_size >= 256)
        or (isinstance(public, rsa.RSAPublicKey) and 2048 <= public.key_size <= 8192)
        or isinstance(public, ed25519.Ed25519PublicKey)
    )
    if not valid or not good:
        raise bad_request(
            "csr: the signature is invalid or the key is too weak", hint="openssl ecparam -name prime256v1"
        )
    return public


def issue_node(tls: Path, name: str, public: Any, uuid: str) -> str:
    """Issue a node's certificate; return it with the issuer's, as PEM. HttpProblem 503 if the VM has no issuer.

    Args:
        uuid: of the node's entry in the inventory.
    """
    try:
        issuer_pem = (tls / "issuer.pem").read_bytes()
        issuer = x509.load_pem_x509_certificate(issuer_pem)
        key: Any = serialization.load_pem_private_key((tls / "issuer.key").read_bytes(), password=None)
    except (OSError, ValueError) as error:
        log.error("enrol: cannot read the issuer: %s", error)
        raise HttpProblem(503, "the VM cannot issue certificates", hint="sms vm stop, then sms vm start") from error
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - required by old releases of the library
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "node"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            *([x509.NameAttribute(NameOID.SERIAL_NUMBER, uuid)] if uuid else []),
        ]
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    signed = builder.sign(key, hashes.SHA256())
    return (signed.public_bytes(serialization.Encoding.PEM) + issuer_pem).decode()
