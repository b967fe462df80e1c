"""Sealed folders: ``manifest.json`` has the digest of each file, ``manifest.sig`` is the manifest's signature.

Images of the provisioning VM and of nodes are such folders. The key pair is that of ``sms key create``. The signed data
begins with a fixed prefix, so that signatures made with the same key for other purposes are not accepted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from appliance.errors import Refused
from appliance.shared.files import replace_file

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
_CONTEXT = b"sms sealed folder, format 1\n"
_MAX_BYTES = 16 << 20  # of a manifest; with 3000 packages it has 200 KiB


@dataclass(frozen=True)
class Seal:
    """A manifest with a valid signature.

    Attributes:
        about: the whole manifest, including ``files``.
        digest: SHA-256 of the manifest in hex; it identifies the whole folder.
        signer: file of the public key that verified it.
    """

    about: dict[str, Any]
    digest: str
    signer: Path

    @property
    def files(self) -> dict[str, tuple[str, int]]:
        """SHA-256 in hex and size of each file, by its path below the folder."""
        return {name: (each["sha256"], each["bytes"]) for name, each in self.about["files"].items()}


def seal(folder: Path, private_key: Path, *, about: Mapping[str, Any] | None = None) -> str:
    """Write the manifest of all files below a folder, and its signature; return the manifest's digest.

    Args:
        folder: all regular files below it are included; it must not contain links.
        private_key: PEM, Ed25519, RSA or EC, without a passphrase.
        about: additional fields of the manifest, such as ``packages``.

    Raises:
        Refused: the key cannot be read, or the folder contains something that is not a regular file.
    """
    key = _private(private_key)
    files = {name: dict(zip(("sha256", "bytes"), digest_file(folder / name), strict=True)) for name in _names(folder)}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"format": 1, "made": made, **(about or {}), "files": files}, indent=1, sort_keys=True) + "\n"
    manifest = text.encode()
    signature = _sign(key, _CONTEXT + manifest)
    # The signature is written last: a folder without one is incomplete.
    (folder / SIGNATURE).unlink(missing_ok=True)
    replace_file(str(folder / MANIFEST), manifest, 0o644)
    replace_file(str(folder / SIGNATURE), base64.b64encode(signature) + b"\n", 0o644)
    return hashlib.sha256(manifest).hexdigest()


def check_seal(folder: Path, public_keys: Sequence[Path]) -> Seal:
    """Verify the manifest's signature, and all files against the manifest.

    Raises:
        Refused: not signed with any of the keys, or files are missing, modified or not in the manifest; lists all.
    """
    found = read_seal(folder, public_keys)
    wrong = []
    present = _names(folder)
    for name, expected in sorted(found.files.items()):
        if name not in present:
            wrong.append(f"{name} is missing")
        elif digest_file(folder / name) != expected:
            wrong.append(f"{name} does not match its digest")
    wrong += [f"{name} is not in the manifest" for name in present if name not in found.files]
    if wrong:
        raise Refused(f"{folder}: {'; '.join(wrong[:5])}", hint="build it again, or copy it again")
    return found


def read_seal(folder: Path, public_keys: Sequence[Path]) -> Seal:
    """Verify the manifest's signature only; the files are not read.

    Raises:
        Refused: not signed, or not with one of the keys.
    """
    try:
        with (folder / MANIFEST).open("rb") as stream:
            manifest = stream.read(_MAX_BYTES + 1)
        signature = (folder / SIGNATURE).read_bytes()[:65536]
    except FileNotFoundError as error:
        raise Refused(f"{folder} is not signed: it has no {Path(error.filename).name}", hint="build it again") from None
    except OSError as error:
        raise Refused(f"cannot read {error.filename}: {error.strerror}") from error
    return open_manifest(str(folder), manifest, signature, public_keys)


def open_manifest(where: str, manifest: bytes, signature: bytes, public_keys: Sequence[Path]) -> Seal:
    """Verify a manifest's signature and parse it; also for folders on other hosts, from their bytes.

    Raises:
        Refused: none of the keys signed it.
    """
    try:
        signed = base64.b64decode(signature, validate=False)
    except binascii.Error:
        signed = b""
    signer = next((path for path in public_keys if _verifies(path, signed, _CONTEXT + manifest)), None)
    if signer is None or len(manifest) > _MAX_BYTES:
        raise Refused(
            f"{where} is not signed with any of {', '.join(str(path) for path in public_keys) or 'no keys'}",
            hint="`sms key show` lists the keys; if it is this site's, build it again",
        )
    about = json.loads(manifest)  # trusted: the signature is valid
    return Seal(about, hashlib.sha256(manifest).hexdigest(), signer)


def digest_file(path: Path) -> tuple[str, int]:
    """Return SHA-256 in hex and size of a regular file, without following links.

    Raises:
        Refused: it is not a regular file, or cannot be read.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error


def _names(folder: Path) -> list[str]:
    """Return all files below a folder, sorted, without the two files of the seal."""
    names = []
    for path in folder.rglob("*"):
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            continue
        name = str(path.relative_to(folder))
        if not stat.S_ISREG(kind):
            raise Refused(f"{path} is not a regular file; a sealed folder must not contain anything else")
        if name not in (MANIFEST, SIGNATURE):
            names.append(name)
    return sorted(names)


def _private(path: Path) -> Any:
    try:
        if path.stat().st_mode & 0o077:
            raise Refused(f"{path} must not be readable by others", hint=f"chmod 600 {path}")
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise Refused(
            f"cannot read the signing key {path}: {error.strerror}", hint="`sms key create` creates a pair"
        ) from error
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is not a private key in PEM format without a passphrase") from error


def read_key(path: Path) -> tuple[str, bytes]:
    """Return the type of a public key (ed25519, ec, rsa) and the key as PEM, without what else its file contains.

    Raises:
        Refused: it cannot be read, or its type cannot verify a seal.
    """
    key = _public(path)
    kind = {Ed25519PublicKey: "ed25519", ec.EllipticCurvePublicKey: "ec", rsa.RSAPublicKey: "rsa"}
    name = next((name for each, name in kind.items() if isinstance(key, each)), None)
    if name is None:
        raise Refused(f"{path} is a key of type {type(key).__name__}", hint="`sms key create` creates a pair")
    return name, key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _public(path: Path) -> Any:
    try:
        return serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the public key {path}: {error}", hint="`sms key create` creates a pair") from error


def _scheme(key: Any) -> tuple[Any, ...] | None:
    """Return what follows the data in calls of ``sign`` and ``verify``; None for another type of key."""
    if isinstance(key, Ed25519PrivateKey | Ed25519PublicKey):
        return ()
    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return (ec.ECDSA(hashes.SHA256()),)
    if isinstance(key, rsa.RSAPrivateKey | rsa.RSAPublicKey):
        return padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=32), hashes.SHA256()
    return None


def _sign(key: Any, data: bytes) -> bytes:
    scheme = _scheme(key)
    if scheme is None:
        raise Refused(f"cannot sign with a key of type {type(key).__name__}", hint="`sms key create` creates a pair")
    signature: bytes = key.sign(data, *scheme)
    return signature


def _verifies(path: Path, signature: bytes, data: bytes) -> bool:
    key = _public(path)
    scheme = _scheme(key)
    if scheme is None:
        return False
    try:
        key.verify(signature, data, *scheme)
    except InvalidSignature:
        return False
    return True
