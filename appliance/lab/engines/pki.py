"""Keys and certificates of a Kubernetes cluster on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from appliance.lab.engines.agents import kubeconfig


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority in a folder, whose certificates are valid for a year."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engines of a lab")])
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.certificate = self._write("ca", builder, self._key).certificate

    def issue(self, name: str, user: str, group: str = "", addresses: Sequence[str] = ()) -> Pair:
        """A certificate for a client ``user`` in a ``group``, and for a server at addresses and host names."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        parts += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(x509.Name(parts), key)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if addresses:
            names = [
                x509.IPAddress(ip_address(each)) if each[0].isdigit() else x509.DNSName(each) for each in addresses
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return self._write(name, builder, key)

    def kubeconfig(self, url: str, pair: Pair) -> bytes:
        """Return how a user reaches the API server."""
        return kubeconfig(url, self.certificate.read_bytes(), pair.certificate.read_bytes(), pair.key.read_bytes())

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name, subject_name=subject, public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1), not_valid_after=now + timedelta(days=365),
        )  # fmt: skip

    def _write(self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> Pair:
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.touch(mode=0o600)
        kinds = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        pair.key.write_bytes(key.private_bytes(*kinds))
        return pair
