"""Sealed folders: ``manifest.json`` says what each file is, ``manifest.sig`` that we said so.

Images of the provisioning VM and of nodes are such folders. The pair of keys is that of ``sms key create``; what is
signed begins with words of its own, so that no signature of anything else made with the same key passes here.
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

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
_WORDS = b"sms sealed folder, format 1\n"
_MOST_BYTES = 16 << 20  # of a manifest; with three thousand packages it has 200 KiB


@dataclass(frozen=True)
class Seal:
    """A manifest whose signature holds.

    Attributes:
        about: all that the manifest says, ``files`` included.
        digest: SHA-256 of the manifest, in hex: it stands for the whole folder.
        signer: file of the public key that it was held against.
    """

    about: dict[str, Any]
    digest: str
    signer: Path

    @property
    def files(self) -> dict[str, tuple[str, int]]:
        """SHA-256 in hex and size of each file, by its path below the folder."""
        return {name: (each["sha256"], each["bytes"]) for name, each in self.about["files"].items()}


def seal(folder: Path, private_key: Path, *, about: Mapping[str, Any] | None = None) -> str:
    """Write the manifest of all files below a folder, and its signature; give the manifest's digest.

    Args:
        folder: all regular files below it are named; it holds no links.
        private_key: PEM, Ed25519, RSA or EC, without a pass phrase.
        about: what the manifest also says, such as ``packages``.

    Raises:
        Refused: the key cannot be read, or something below the folder is no file.
    """
    key = _private(private_key)
    files = {name: dict(zip(("sha256", "bytes"), digest_file(folder / name), strict=True)) for name in _names(folder)}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"format": 1, "made": made, **(about or {}), "files": files}, indent=1, sort_keys=True) + "\n"
    manifest = text.encode()
    signature = _sign(key, _WORDS + manifest)
    # The signature goes last: a folder without one was never finished.
    (folder / SIGNATURE).unlink(missing_ok=True)
    _write(folder / MANIFEST, manifest)
    _write(folder / SIGNATURE, base64.b64encode(signature) + b"\n")
    return hashlib.sha256(manifest).hexdigest()


def check_seal(folder: Path, public_keys: Sequence[Path]) -> Seal:
    """Hold a folder against its manifest, and the manifest against the keys: every byte of every file is read.

    Raises:
        Refused: not signed by any of the keys, a file is missing, changed, or not named; all of them are told at once.
    """
    found = read_seal(folder, public_keys)
    wrong = []
    there = _names(folder)
    for name, wanted in sorted(found.files.items()):
        if name not in there:
            wrong.append(f"{name} is missing")
        elif digest_file(folder / name) != wanted:
            wrong.append(f"{name} is not what was signed")
    wrong += [f"{name} is not named in the manifest" for name in there if name not in found.files]
    if wrong:
        raise Refused(f"{folder}: {'; '.join(wrong[:5])}", hint="build it anew, or copy it again")
    return found


def read_seal(folder: Path, public_keys: Sequence[Path]) -> Seal:
    """Hold the manifest alone against the keys; the files are not looked at.

    Raises:
        Refused: not signed, or not by one of the keys.
    """
    try:
        with (folder / MANIFEST).open("rb") as stream:
            manifest = stream.read(_MOST_BYTES + 1)
        signature = (folder / SIGNATURE).read_bytes()[:65536]
    except FileNotFoundError as error:
        raise Refused(f"{folder} is not signed: it has no {Path(error.filename).name}", hint="build it anew") from None
    except OSError as error:
        raise Refused(f"cannot read {error.filename}: {error.strerror}") from error
    return open_manifest(str(folder), manifest, signature, public_keys)


def open_manifest(where: str, manifest: bytes, signature: bytes, public_keys: Sequence[Path]) -> Seal:
    """What a manifest says, once its signature holds; for folders of other hosts, whose bytes were fetched.

    Raises:
        Refused: no key of these signed it, or it is no manifest.
    """
    try:
        signed = base64.b64decode(signature, validate=False)
    except binascii.Error:
        signed = b""
    signer = next((path for path in public_keys if _holds(path, signed, _WORDS + manifest)), None)
    if signer is None or len(manifest) > _MOST_BYTES:
        raise Refused(
            f"{where} is not signed with any of {', '.join(str(path) for path in public_keys) or 'no keys'}",
            hint="`sms key show` tells the keys; build it anew if it is this site's",
        )
    about = json.loads(manifest)  # signed by us: it is what seal wrote
    return Seal(about, hashlib.sha256(manifest).hexdigest(), signer)


def digest_file(path: Path) -> tuple[str, int]:
    """SHA-256 in hex and size of a regular file; no link is followed.

    Raises:
        Refused: it is no regular file, or cannot be read.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error


def _names(folder: Path) -> list[str]:
    """Every file below a folder but the seal's own two, in order."""
    names = []
    for path in folder.rglob("*"):
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            continue
        name = str(path.relative_to(folder))
        if not stat.S_ISREG(kind):
            raise Refused(f"{path} is no regular file; a sealed folder holds nothing else")
        if name not in (MANIFEST, SIGNATURE):
            names.append(name)
    return sorted(names)


def _private(path: Path) -> Any:
    try:
        if path.stat().st_mode & 0o077:
            raise Refused(f"others can read {path}", hint=f"chmod 600 {path}")
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise Refused(
            f"cannot read the signing key {path}: {error.strerror}", hint="`sms key create` makes a pair"
        ) from error
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} holds no private key in PEM without a pass phrase") from error


def _sign(key: Any, data: bytes) -> bytes:
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(data)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, _padding(), hashes.SHA256())
    raise Refused(f"cannot sign with a key of the kind {type(key).__name__}", hint="`sms key create` makes a pair")


def _holds(path: Path, signature: bytes, data: bytes) -> bool:
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the public key {path}: {error}", hint="`sms key create` makes a pair") from error
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, data)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, _padding(), hashes.SHA256())
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _padding() -> padding.PSS:
    return padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=32)


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    beside.rename(path)
