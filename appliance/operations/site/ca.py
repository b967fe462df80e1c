"""The site's certificate authority: authenticates the provisioning VM and its clients to each other.

Stored in the folder ``tls/`` beside the site file. Its key never leaves the admin host: the VM gets an
intermediate CA certificate, which can only sign client certificates of nodes.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.site.keys import write_new
from appliance.shared.files import make_folder, sync_folder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Unit = Literal["admin", "services"]

FOLDER = "tls"
"""Folder of the CA, relative to the site file."""
CLIENTS: dict[str, Unit] = {"admin": "admin", "services": "services"}
"""Names of the client certificates created with the CA, and their OU."""
ROOT_DAYS, ISSUER_DAYS, SERVER_DAYS, CLIENT_DAYS = 7300, 90, 825, 1825
"""The intermediate CA is reissued at each start of the VM, so a stolen key is valid for little longer than a node's
certificate (30 days)."""
ISSUER_SOON_DAYS = 35
"""With fewer days left, the intermediate CA must be renewed: a node's certificate must not outlive it."""
SOON_DAYS = 60
"""A certificate that expires within this many days is due for renewal."""
HINT = "`sms key ca create` creates one beside the site file"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key as PEM; the repr omits the key."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Pair({len(self.certificate)} bytes)"


@dataclass(frozen=True)
class CertificateInfo:
    """A certificate of the CA folder, as listed."""

    file: Path
    subject: str
    ends: datetime.datetime
    sha256: str

    @property
    def days_left(self) -> int:
        """Whole days until it expires; negative once it has."""
        return (self.ends - _now()).days

    def as_dict(self) -> dict[str, object]:
        """Return the fields for ``--json``."""
        return {
            "file": str(self.file),
            "subject": self.subject,
            "ends": self.ends.isoformat(),
            "days_left": self.days_left,
            "sha256": self.sha256,
        }


def ca_folder(site: Path) -> Path:
    """Return the CA folder of a site file."""
    return site.absolute().parent / FOLDER


def make_ca(folder: Path) -> tuple[Path, ...]:
    """Create a CA and its first client certificates; return the files, the root certificate first.

    The root certificate is written last: if it exists, the CA is complete.

    Raises:
        Refused: a CA already exists; replacing it would invalidate every certificate it signed.
    """
    names = [*(f"{client}.{end}" for client in CLIENTS for end in ("key", "pem")), "ca.key", "ca.pem"]
    for each in names:
        if os.path.lexists(folder / each):
            raise Refused(f"{folder / each} already exists", hint="`sms key ca show` lists the certificates")
    make_folder(str(folder), 0o700)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        beside = Path(new)  # mode 0700
        _write_pair(beside / "ca.pem", beside / "ca.key", _self_signed("sms site CA"))
        for client, unit in CLIENTS.items():
            _write_pair(beside / f"{client}.pem", beside / f"{client}.key", issue_client(beside, client, unit))
        for each in names:
            (beside / each).rename(folder / each)
        sync_folder(str(folder))
    return tuple(folder / each for each in reversed(names))


def issue_server(folder: Path, *, hostname: str, addresses: Sequence[str]) -> Pair:
    """Issue a certificate for the VM's web server with its host name and addresses.

    Raises:
        SmsError: the CA is missing or cannot be read.
    """
    from cryptography import x509

    names: list[Any] = [x509.DNSName(hostname)]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    return _issue(
        folder, _name(hostname, None), SERVER_DAYS, "SERVER_AUTH", (x509.SubjectAlternativeName(names), False)
    )


def issue_client(folder: Path, name: str, ou: Unit) -> Pair:
    """Issue a client certificate with CN=``name`` and OU=``ou``.

    Raises:
        SmsError: the CA is missing or cannot be read.
    """
    return _issue(folder, _name(name, ou), CLIENT_DAYS, "CLIENT_AUTH")


def issue_issuer(folder: Path) -> Pair:
    """Issue the VM's intermediate CA, which can sign client certificates but no servers and no further CAs.

    Raises:
        SmsError: the site's CA is missing or cannot be read.
    """
    return _issue(folder, _name("sms node issuer", None), ISSUER_DAYS, "CLIENT_AUTH", signs=True)


def show_ca(folder: Path) -> tuple[CertificateInfo, ...]:
    """Return every certificate of the CA folder, the root first.

    Raises:
        ConfigError: there is no CA, or one of its files is not a certificate.
    """
    if not (folder / "ca.pem").exists():
        raise ConfigError(f"there is no certificate authority in {folder}", hint=HINT)
    others = sorted(path for path in folder.glob("*.pem") if path.name != "ca.pem")
    return tuple(_show(path) for path in (folder / "ca.pem", *others))


def renew_clients(folder: Path) -> tuple[Path, ...]:
    """Replace the client certificates and their keys; return the files. The root is not changed."""
    done: list[Path] = []
    for client, unit in CLIENTS.items():
        pair = issue_client(folder, client, unit)
        # Both files are complete before either is replaced, so that key and certificate always match.
        for path, data, mode in (
            (folder / f"{client}.key", pair.key, 0o600),
            (folder / f"{client}.pem", pair.certificate, 0o644),
        ):
            beside = path.with_name(f".{path.name}.new")
            beside.unlink(missing_ok=True)
            write_new(beside, data, mode)
            done.append(path)
        for path in done[-2:]:
            path.with_name(f".{path.name}.new").replace(path)
        sync_folder(str(folder))
    return tuple(done)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(common: str, unit: str | None) -> x509.Name:
    from cryptography import x509

    parts = [x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    return x509.Name([*parts, x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _constraints(*, signs: bool, path_length: int | None = None) -> list[tuple[Any, bool]]:
    """Return the critical extensions with what the key may do: sign certificates, or data."""
    from cryptography import x509

    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    allowed = ("key_cert_sign", "crl_sign") if signs else ("digital_signature",)
    usage = x509.KeyUsage(**{name: name in allowed for name in every.split()})
    return [(x509.BasicConstraints(ca=signs, path_length=path_length), True), (usage, True)]


def _self_signed(name: str) -> Pair:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject, extensions = _name(name, None), _constraints(signs=True, path_length=1)
    return Pair(_sign(subject, subject, key.public_key(), key, extensions, ROOT_DAYS), _pem(key))


def _issue(
    folder: Path, subject: x509.Name, days: int, purpose: str, *more: tuple[Any, bool], signs: bool = False
) -> Pair:
    """Issue a certificate.

    Args:
        purpose: name of its extended key usage.
        more: further extensions, each with whether it is critical.
        signs: it can sign certificates, but no further CAs.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    certificate, authority = _read_root(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    extensions = [
        *more,
        *_constraints(signs=signs, path_length=0 if signs else None),
        (x509.ExtendedKeyUsage([getattr(ExtendedKeyUsageOID, purpose)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    ends = certificate.not_valid_after_utc
    days = min(days, (ends - _now()).days)
    if days < 1:
        raise SmsError(f"the site's certificate authority expired on {ends:%Y-%m-%d}", hint=HINT)
    signed = _sign(subject, certificate.subject, key.public_key(), authority, extensions, days)
    return Pair(signed, _pem(key))


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    public: Any,
    authority: EllipticCurvePrivateKey,
    extensions: list[tuple[Any, bool]],
    days: int,
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = _now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # The clock of a node without an RTC may be behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _read_root(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        if (folder / "ca.key").stat().st_mode & 0o077:
            raise ConfigError(f"{folder / 'ca.key'} can be read by others", hint=f"chmod 600 {folder / 'ca.key'}")
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {(error.strerror or '').lower()}", hint=HINT) from None
    except (ValueError, TypeError):
        raise ConfigError(f"{folder} does not contain a certificate authority in PEM format", hint=HINT) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.pem'}", hint="restore both files")
    return certificate, key


def _show(path: Path) -> CertificateInfo:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or '').lower()}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a certificate in PEM format") from None
    digest = certificate.fingerprint(hashes.SHA256()).hex()
    return CertificateInfo(path, certificate.subject.rfc4514_string(), certificate.not_valid_after_utc, digest)


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_pair(certificate: Path, key: Path, pair: Pair) -> None:
    write_new(key, pair.key, 0o600)
    write_new(certificate, pair.certificate, 0o644)
