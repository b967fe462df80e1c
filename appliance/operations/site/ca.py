"""The site's certificate authority: who may ask the provisioning VM, and which VM is to be believed.

It lies in the folder ``tls/`` beside the site file. Its key never leaves the admin host: the VM gets an
issuing certificate of its own, which can vouch for nodes and for nothing else.
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

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Unit = Literal["admin", "services"]

FOLDER = "tls"
"""Where the authority lies, seen from the site file."""
CLIENTS: dict[str, Unit] = {"admin": "admin", "services": "services"}
"""Names of the client certificates that are made along with it, and their OU."""
ROOT_DAYS, ISSUER_DAYS, SERVER_DAYS, CLIENT_DAYS = 7300, 90, 825, 1825
"""The issuer's is made anew at each start of the VM: whoever takes its key from there has it for little longer than a
node's certificate (30 days) holds."""
ISSUER_SOON_DAYS = 35
"""With less left, it is time for a new issuer: a node's certificate must not outlast it."""
SOON_DAYS = 60
"""A certificate that ends within so many days is due."""
HINT = "`sms key ca create` makes one beside the site file"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key as PEM; the key is left out of its repr."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Pair({len(self.certificate)} bytes)"


@dataclass(frozen=True)
class Shown:
    """One certificate of the folder, as it is told of."""

    file: Path
    subject: str
    ends: datetime.datetime
    sha256: str

    @property
    def days_left(self) -> int:
        """Whole days until it ends; less than nothing once it has."""
        return (self.ends - _now()).days

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "file": str(self.file),
            "subject": self.subject,
            "ends": self.ends.isoformat(),
            "days_left": self.days_left,
            "sha256": self.sha256,
        }


def ca_folder(site: Path) -> Path:
    """Where the authority of a site file lies."""
    return site.absolute().parent / FOLDER


def make_ca(folder: Path, *, name: str = "sms site CA") -> tuple[Path, ...]:
    """Make a new authority and its first clients; give the files, the root's certificate first.

    The root's certificate comes last: where it is, all of it is there.

    Raises:
        Refused: there is one already; all that it has vouched for would be worthless.
    """
    names = [*(f"{client}.{end}" for client in CLIENTS for end in ("key", "pem")), "ca.key", "ca.pem"]
    for each in names:
        if os.path.lexists(folder / each):
            raise Refused(f"{folder / each} is there already", hint="`sms key ca show` tells what is there")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        beside = Path(new)  # mode 0700
        _write_pair(beside / "ca.pem", beside / "ca.key", _self_signed(name))
        for client, unit in CLIENTS.items():
            _write_pair(beside / f"{client}.pem", beside / f"{client}.key", issue_client(beside, client, unit))
        for each in names:
            (beside / each).rename(folder / each)
    return tuple(folder / each for each in reversed(names))


def issue_server(folder: Path, *, hostname: str, addresses: Sequence[str], days: int = SERVER_DAYS) -> Pair:
    """A certificate for the VM's web server, under its host name and addresses.

    Raises:
        SmsError: the authority is not there, or cannot be read.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names: list[Any] = [x509.DNSName(hostname)]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    extensions = [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (_usage(digital_signature=True), True),
    ]
    return _issue(folder, _name(hostname, None), extensions, days)


def issue_client(folder: Path, name: str, ou: Unit, *, days: int = CLIENT_DAYS) -> Pair:
    """A client's certificate, CN=``name``, OU=``ou``.

    Raises:
        SmsError: the authority is not there, or cannot be read.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (_usage(digital_signature=True), True),
    ]
    return _issue(folder, _name(name, ou), extensions, days)


def issue_issuer(folder: Path, *, name: str = "sms node issuer", days: int = ISSUER_DAYS) -> Pair:
    """The authority that lives in the VM: it can vouch for clients, not for servers, nor for further authorities.

    Raises:
        SmsError: the site's authority is not there, or cannot be read.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (_usage(key_cert_sign=True, crl_sign=True), True),
    ]
    return _issue(folder, _name(name, None), extensions, days)


def show_ca(folder: Path) -> tuple[Shown, ...]:
    """Every certificate of the authority's folder, the root first.

    Raises:
        ConfigError: there is no authority, or one of its files is no certificate.
    """
    if not (folder / "ca.pem").exists():
        raise ConfigError(f"there is no certificate authority in {folder}", hint=HINT)
    others = sorted(path for path in folder.glob("*.pem") if path.name != "ca.pem")
    return tuple(_show(path) for path in (folder / "ca.pem", *others))


def renew_clients(folder: Path) -> tuple[Path, ...]:
    """Make the client certificates anew, each with a new key; give the files. The root stays as it is."""
    done: list[Path] = []
    for client, unit in CLIENTS.items():
        pair = issue_client(folder, client, unit)
        # The key first would be a key without its certificate for a moment: both are there, or neither is new.
        for path, data, mode in (
            (folder / f"{client}.key", pair.key, 0o600),
            (folder / f"{client}.pem", pair.certificate, 0o644),
        ):
            beside = path.with_name(f".{path.name}.new")
            beside.unlink(missing_ok=True)
            _write(beside, data, mode)
            done.append(path)
        for path in done[-2:]:
            path.with_name(f".{path.name}.new").replace(path)
    return tuple(done)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(common: str, unit: str | None) -> x509.Name:
    from cryptography import x509

    parts = [x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    return x509.Name([*parts, x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _usage(**given: bool) -> x509.KeyUsage:
    from cryptography import x509

    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: given.get(name, False) for name in every.split()})


def _self_signed(name: str) -> Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    extensions = [
        (x509.BasicConstraints(ca=True, path_length=1), True),
        (_usage(key_cert_sign=True, crl_sign=True), True),
    ]
    subject = _name(name, None)
    return Pair(_sign(subject, subject, key.public_key(), key, extensions, _now(), ROOT_DAYS), _pem(key))


def _issue(folder: Path, subject: x509.Name, extensions: list[tuple[Any, bool]], days: int) -> Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate, authority = _read_root(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    extensions = [
        *extensions,
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    ends = certificate.not_valid_after_utc
    days = min(days, (ends - _now()).days)
    if days < 1:
        raise SmsError(f"the site's certificate authority ended on {ends:%Y-%m-%d}", hint=HINT)
    signed = _sign(subject, certificate.subject, key.public_key(), authority, extensions, _now(), days)
    return Pair(signed, _pem(key))


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    public: Any,
    authority: EllipticCurvePrivateKey,
    extensions: list[tuple[Any, bool]],
    now: datetime.datetime,
    days: int,
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # A node without a clock of its own may be late by a while.
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
        raise ConfigError(f"{folder} holds no certificate authority in PEM", hint=HINT) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.pem'}", hint="put both back")
    return certificate, key


def _show(path: Path) -> Shown:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or '').lower()}") from None
    except ValueError:
        raise ConfigError(f"{path} holds no certificate in PEM") from None
    digest = certificate.fingerprint(hashes.SHA256()).hex()
    return Shown(path, certificate.subject.rfc4514_string(), certificate.not_valid_after_utc, digest)


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_pair(certificate: Path, key: Path, pair: Pair) -> None:
    _write(key, pair.key, 0o600)
    _write(certificate, pair.certificate, 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
