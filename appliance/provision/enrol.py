"""``POST /sms/v1/enrol``: a node that has just booted gets its certificate, or a new one before the old one ends."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.access import Caller, who
from appliance.provision.problem import HttpProblem, bad_request, forbidden
from appliance.provision.sync_tables import find_nodes
from appliance.provision.tokens import Bound, Tokens
from appliance.provision.world import World

DAYS = 30
RENEW_DAYS = 10
"""The age at which a node asks for a new one."""
log = logging.getLogger("sms-provd")

REFUSAL = "this is no token that is good, or not one of this address"
"""One answer to all that is wrong with a token: nobody learns which of it."""


def routes(world: World) -> list[Route]:
    tokens = Tokens(world.store, token_s=world.config.token_s)
    world.tokens = tokens
    bound = Bound()

    def enrol(request: Request) -> Response:
        caller = who(request)
        body: dict[str, Any] = request.state.body
        if not caller.secure:
            raise forbidden("a certificate is given over TLS only", hint="ask at port 8443")
        if wait := bound.wait_s(caller.address):
            log.warning("enrol: %s tries too often", caller.address)
            raise HttpProblem(429, "too many tries", retry_s=wait)
        _check_port(request, caller)
        public = read_request(body["csr"])
        name = _renewing(world, caller) if caller.role == "node" else tokens.use(body.get("token", ""), caller.address)
        if not name:
            log.warning("enrol: %s is refused", caller.address)
            raise forbidden(REFUSAL, hint="a boot of the node gives it a new one")
        chain = issue_node(world.config.tls, name, public)
        log.info("enrol: %s at %s has a certificate", name, caller.address)
        return JSONResponse({"name": name, "certificate": chain, "renew_s": RENEW_DAYS * 86400})

    return [Route("/sms/v1/enrol", enrol, methods=["POST"])]


def _renewing(world: World, caller: Caller) -> str:
    """The name of a node that shows a certificate and is where it should be; else empty."""
    with world.store.read() as connection:
        nodes = find_nodes(connection, caller.name)
    return caller.name if nodes and nodes[0].address == caller.address else ""


def _check_port(request: Request, caller: Caller) -> None:
    # The token stands on the kernel's command line, which all users of a node may read; a port below 1024 is root's.
    port = request.headers.get("x-real-port")
    if port is not None and (not port.isdigit() or int(port) >= 1024):
        log.warning("enrol: %s asks from port %s", caller.address, port[:8])
        raise forbidden("only root of a node may ask for its certificate", hint="ask from a port below 1024")


def read_request(text: str) -> Any:
    """The public key of a signing request; whatever else it asks for is passed over. 400 where it is none."""
    try:
        request = x509.load_pem_x509_csr(text.encode())
        valid = request.is_signature_valid
        public = request.public_key()
    except Exception as error:  # what a stranger's ASN.1 makes of a parser
        raise bad_request("csr: is no signing request in PEM") from error
    good = (
        (isinstance(public, ec.EllipticCurvePublicKey) and public.curve.key_size >= 256)
        or (isinstance(public, rsa.RSAPublicKey) and 2048 <= public.key_size <= 8192)
        or isinstance(public, ed25519.Ed25519PublicKey)
    )
    if not valid or not good:
        raise bad_request(
            "csr: is not signed with a key that is strong enough", hint="openssl ecparam -name prime256v1"
        )
    return public


def issue_node(tls: Path, name: str, public: Any, *, days: int = DAYS) -> str:
    """A node's certificate and the issuer's behind it, as PEM; HttpProblem 503 where the VM has no issuer."""
    try:
        issuer_pem = (tls / "issuer.pem").read_bytes()
        issuer = x509.load_pem_x509_certificate(issuer_pem)
        key: Any = serialization.load_pem_private_key((tls / "issuer.key").read_bytes(), password=None)
    except (OSError, ValueError) as error:
        log.error("enrol: the issuer cannot be read: %s", error)
        raise HttpProblem(503, "the VM can issue no certificates", hint="sms vm stop, sms vm start") from error
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - as old releases of the library have it, too
    subject = x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "node"), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    signed = builder.sign(key, hashes.SHA256())
    return (signed.public_bytes(serialization.Encoding.PEM) + issuer_pem).decode()
