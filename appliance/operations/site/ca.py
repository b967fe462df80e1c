"""The site's certificate authority: authenticates the provisioning VM and its clients to each other.

Stored in the folder ``tls/`` beside the site file. Its key never leaves the admin host: the VM gets an
intermediate CA certificate, which can only sign client certificates of nodes. The VM's certificates are stored too, so
that the key is needed for renewals only and can be kept elsewhere between them.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from appliance.errors import Busy, ConfigError, Refused, SmsError
from appliance.operations.site.issued import (
    LOCK_WAIT_S,
    LOG,
    SERIAL,
    Revocation,
    add_revoked,
    log_issued,
    read_issued,
    read_revoked,
    serial_of,
)
from appliance.operations.site.keys import write_new
from appliance.shared.files import make_folder, sync_folder
from appliance.shared.history import AppendLine
from appliance.shared.locks import Locked, hold_lock

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Unit = Literal["admin", "services"]

FOLDER = "tls"
"""Folder of the CA, relative to the site file."""
NEW = ".new"
"""Folder in it, in which a new authority is made; one that is there without ``ca.pem`` was left by a killed run."""
CLIENTS: dict[str, Unit] = {"admin": "admin", "services": "services"}
"""Names of the client certificates created with the CA, and their OU."""
ROOT_DAYS, ISSUER_DAYS, SERVER_DAYS, CLIENT_DAYS = 7300, 90, 90, 90
ISSUER_SOON_DAYS = 35
"""With fewer days left, the VM's certificates are renewed: a node's certificate must not outlive its issuer's."""
SERVER, ISSUER = "vm-server", "vm-issuer"
"""Files of the VM's certificates and keys, without their endings."""
SOON_DAYS = 35
"""A client certificate that expires within this many days is due for renewal: with the VM's."""
ALARM_DAYS = 21
"""With fewer days left, the runs that should have renewed a certificate report that they cannot."""
UNHEALTHY_DAYS = 14
"""With fewer days left, it has not been renewed for weeks: status reports it as a fault."""
HINT = "`sms key ca create` creates one beside the site file"
LOST = "bring the key back from where you keep a copy; a new authority would invalidate all certificates of this one"


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
    beside = folder / NEW
    # What an interrupted run has left is worth nothing: nothing can be verified without the root certificate.
    left = beside.is_dir() and not os.path.lexists(folder / "ca.pem")
    for each in names:
        if os.path.lexists(folder / each) and not left:
            raise Refused(f"{folder / each} already exists", hint="`sms key ca show` lists the certificates")
    make_folder(str(folder), 0o700)
    shutil.rmtree(beside, ignore_errors=True)
    make_folder(str(beside), 0o700)
    root = _self_signed("sms site CA")
    log_issued(beside, _load(root.certificate), "authority")
    _write_pair(beside / "ca.pem", beside / "ca.key", root)
    for client, unit in CLIENTS.items():
        _write_pair(beside / f"{client}.pem", beside / f"{client}.key", issue_client(beside, client, unit))
    for line in (beside / LOG).read_text().splitlines():
        AppendLine(str(folder / LOG), line).perform()
    for each in names:
        if each == "ca.pem":
            sync_folder(str(folder))
        (beside / each).replace(folder / each)
    sync_folder(str(folder))
    shutil.rmtree(beside, ignore_errors=True)
    return tuple(folder / each for each in reversed(names))


def issue_server(folder: Path, *, hostname: str, addresses: Sequence[str], days: int = SERVER_DAYS) -> Pair:
    """Issue a certificate for a server, such as the VM's web server, with its host name and addresses.

    Raises:
        SmsError: the CA is missing or cannot be read.
    """
    from cryptography import x509

    names: list[Any] = [x509.DNSName(hostname)]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    return _issue(folder, _name(hostname, None), days, "SERVER_AUTH", (x509.SubjectAlternativeName(names), False))


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


def renew_clients(folder: Path, clients: Collection[str] = tuple(CLIENTS)) -> tuple[Path, ...]:
    """Replace client certificates and their keys; return the files. The root is not changed.

    The previous certificates stay valid until they expire, unless they are revoked.
    """
    files: tuple[Path, ...] = ()
    for client, unit in CLIENTS.items():
        if client in clients:
            _log_present(folder, client)
            files += _store(folder, client, issue_client(folder, client, unit))
    return files


def _log_present(folder: Path, client: str) -> None:
    """Log the certificate of a client if an earlier release issued it: later it could not be revoked by name."""
    try:
        present = _load((folder / f"{client}.pem").read_bytes())
    except (OSError, ValueError):
        return
    if serial_of(present) not in {each.serial for each in read_issued(folder)}:
        log_issued(folder, present, "client", issued=present.not_valid_before_utc.timestamp())


def _store(folder: Path, name: str, pair: Pair) -> tuple[Path, ...]:
    """Replace a certificate and its key; return both files, the key first."""
    files = ((folder / f"{name}.key", pair.key, 0o600), (folder / f"{name}.pem", pair.certificate, 0o644))
    try:
        with hold_lock(str(folder / ".renew.lock"), wait_s=LOCK_WAIT_S, users=True):
            # Both files are complete before either is replaced, so that key and certificate match but for a moment.
            for path, data, mode in files:
                beside = path.with_name(f".{path.name}.new")
                beside.unlink(missing_ok=True)
                write_new(beside, data, mode)
            for path, _, _ in files:
                path.with_name(f".{path.name}.new").replace(path)
            sync_folder(str(folder))
    except Locked:
        raise Busy(f"another sms renews certificates in {folder}", hint="run this again") from None
    return tuple(path for path, _, _ in files)


def has_key(folder: Path) -> bool:
    """Return whether the authority's key is here: certificates can be renewed."""
    return (folder / "ca.key").exists()


def vm_pairs(folder: Path, *, hostname: str, addresses: Sequence[str], renew: bool = False) -> tuple[Pair, Pair]:
    """Return the VM's server and issuer; new ones with ``renew``, if there are none, or if they expire soon.

    Unless ``renew`` is set, the present ones are used until they expire if the authority's key is not here.

    Raises:
        ConfigError: new ones are needed, and the authority's key is not here.
    """
    server, issuer = read_pair(folder, SERVER), read_pair(folder, ISSUER)
    if server and issuer and not renew and is_for(server.certificate, hostname, addresses):
        left = min(_load(pair.certificate).not_valid_after_utc for pair in (server, issuer)) - _now()
        if left.days >= ISSUER_SOON_DAYS or (left.days >= 0 and not has_key(folder)):
            return server, issuer
    server, issuer = issue_server(folder, hostname=hostname, addresses=addresses), issue_issuer(folder)
    _store(folder, SERVER, server)
    _store(folder, ISSUER, issuer)
    return server, issuer


def first_end(pairs: Sequence[Pair]) -> float:
    """Return when the first of these certificates expires, as Unix time."""
    return min(_load(pair.certificate).not_valid_after_utc for pair in pairs).timestamp()


def read_pair(folder: Path, name: str) -> Pair | None:
    """Return a stored certificate of this authority and its key; None if they are missing or do not match."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        pair = Pair((folder / f"{name}.pem").read_bytes(), (folder / f"{name}.key").read_bytes())
        certificate = _load(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()))
    except Exception:  # a file of another authority, or one that a crash has left
        return None
    return pair if key.public_key() == certificate.public_key() else None


def is_for(server: bytes, hostname: str, addresses: Sequence[str]) -> bool:
    """Return whether a server's certificate has exactly these names."""
    from cryptography import x509

    try:
        names = _load(server).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    has = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return has == [hostname, *addresses]


def matches(certificate: bytes, key: bytes) -> bool:
    """Return whether a certificate and a key, in PEM format, belong together."""
    from cryptography.hazmat.primitives import serialization

    try:
        return serialization.load_pem_private_key(key, password=None).public_key() == _load(certificate).public_key()
    except (ValueError, TypeError):
        return False


def supersedes(certificate: bytes, present: bytes, revoked: Collection[str]) -> bool:
    """Return whether a certificate replaces the present one: it is valid for longer, or that one is revoked."""
    new = _load(certificate)
    if serial_of(new) in revoked:
        return False
    try:
        old = _load(present)
    except ValueError:
        return True
    return serial_of(old) in revoked or new.not_valid_after_utc > old.not_valid_after_utc


def days_left(certificate: bytes) -> int | None:
    """Return for how many whole days a certificate is valid, negative if it has expired; None if it is not one."""
    try:
        return (_load(certificate).not_valid_after_utc - _now()).days
    except ValueError:
        return None


def renew_due_clients(folder: Path) -> tuple[Path, ...]:
    """Replace the client certificates that expire within ``SOON_DAYS`` or do not match their keys; return the files."""
    due = [each.file.stem for each in show_ca(folder) if each.file.stem in CLIENTS and each.days_left < SOON_DAYS]
    torn = [client for client in CLIENTS if _is_torn(folder / f"{client}.pem", folder / f"{client}.key")]
    return renew_clients(folder, {*due, *torn}) if due or torn else ()


def expiring_clients(folder: Path) -> tuple[str, ...]:
    """Return a message for each client certificate of the folder that should have been renewed long ago."""
    late = [each for each in show_ca(folder) if each.file.stem in CLIENTS and each.days_left < ALARM_DAYS]
    return tuple(
        f"{each.file} expires in {max(each.days_left, 0)} days: `sms key ca renew` on the machine that has tls/ca.key"
        for each in late
    )


def _is_torn(certificate: Path, key: Path) -> bool:
    """Return whether both files are there and do not belong together: a crash came between them."""
    return certificate.exists() and key.exists() and not matches(certificate.read_bytes(), key.read_bytes())


def revoke(folder: Path, words: Sequence[str]) -> list[Revocation]:
    """Revoke certificates: all of a client, which gets another one, or single ones by their serial numbers.

    Returns those that were not revoked before. The VM refuses them once the list is installed there.

    Raises:
        ConfigError: a word is neither, a serial number is not that of a client, or a client is named and the
            authority's key is not here; nothing was changed.
    """
    serials, clients = _read_words(folder, words)
    for client in clients:
        _log_present(folder, client)
    # Before others are issued, so that an interruption leaves none unrevoked; and after, for what was issued meanwhile.
    revoked = add_revoked(folder, _of_serials(folder, serials) + _of_clients(folder, clients))
    renew_clients(folder, clients)
    present = {serial_of(_load((folder / f"{client}.pem").read_bytes())) for client in clients}
    return revoked + add_revoked(folder, [each for each in _of_clients(folder, clients) if each.serial not in present])


def rehearse_revoke(folder: Path, words: Sequence[str]) -> list[Revocation]:
    """Return what ``revoke`` would revoke, without those that an earlier release issued and did not log.

    Raises:
        ConfigError: as ``revoke``.
    """
    serials, clients = _read_words(folder, words)
    known = {each.serial for each in read_revoked(folder)}
    found = _of_serials(folder, serials) + _of_clients(folder, clients)
    return [each for each in found if each.serial not in known]


def _read_words(folder: Path, words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the serial numbers and the clients among ``words``, all of them checked."""
    log = {each.serial: each for each in read_issued(folder)}
    serials = {word.replace(":", "").upper() for word in words if word not in CLIENTS}
    for serial in sorted(serials):
        if not SERIAL.fullmatch(serial):
            raise ConfigError(
                f"{serial[:70]!r} is neither {' nor '.join(CLIENTS)} nor a serial number",
                hint="`sms key ca log` lists the certificates with their serial numbers",
            )
        if serial in log and log[serial].purpose != "client":
            raise ConfigError(
                f"{serial} is the certificate of the VM or of the authority: nodes do not check a list",
                hint="those of the VM expire within 90 days; only another authority makes them invalid at once",
            )
    clients = [client for client in CLIENTS if client in words]
    if clients:
        _read_root(folder)  # without its key nothing is revoked: nobody would have a valid certificate
    return serials, clients


def _of_serials(folder: Path, serials: Collection[str]) -> list[Revocation]:
    now, log = time.time(), {each.serial: each for each in read_issued(folder)}
    return [
        Revocation(serial, log[serial].subject, now, log[serial].ends) if serial in log else Revocation(serial, at=now)
        for serial in sorted(serials)
    ]


def _of_clients(folder: Path, clients: Collection[str]) -> list[Revocation]:
    """Return all certificates that these clients ever had and that have not expired."""
    now, subjects = time.time(), {_name(client, CLIENTS[client]).rfc4514_string() for client in clients}
    return [
        Revocation(each.serial, each.subject, now, each.ends)
        for each in read_issued(folder)
        if each.subject in subjects and each.ends > now
    ]


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
    log_issued(folder, _load(signed), "issuer" if signs else purpose.partition("_")[0].lower())
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


def _load(certificate: bytes) -> x509.Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(certificate)


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
        hint = LOST if (folder / "ca.pem").exists() else HINT
        raise ConfigError(f"cannot read {error.filename}: {(error.strerror or '').lower()}", hint=hint) from None
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
