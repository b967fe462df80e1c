"""``sms key``: the key pair that signs images."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from appliance.config.model import Site
from appliance.errors import ConfigError, Refused
from appliance.operations.context import need_build_host
from appliance.shared.files import make_folder, sync_folder


def create_site_pair(site: Site) -> str:
    """Create the pair that the site file names; return the public key's fingerprint.

    Raises:
        Refused: one of the files already exists, or this machine is not the build host.
    """
    need_build_host(site)
    return create_pair(site.signing.private_key, site.signing.public_keys[0])


def create_pair(private: Path, public: Path) -> str:
    """Create an Ed25519 pair as PEM files; return the public key's fingerprint.

    Raises:
        Refused: one of the files already exists.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for path in (private, public):
        if path.exists():
            raise Refused(
                f"{path} already exists", hint="images signed with it would no longer start; move it away first"
            )
    key = Ed25519PrivateKey.generate()
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    make_folder(str(private.parent), 0o700)
    write_new(private, private_pem, 0o600)
    try:
        write_new(public, public_pem, 0o644)
    except OSError:
        private.unlink()
        raise
    return fingerprint(public)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a new file with ``mode`` and flush it and its folder to the disk; with its name it is always complete.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be written; it does not exist.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(beside, path)
        try:
            sync_folder(str(path.parent))
        except OSError:
            path.unlink()
            raise
    finally:
        beside.unlink(missing_ok=True)


def fingerprint(public: Path) -> str:
    """Return the SHA-256 of the public key (SubjectPublicKeyInfo, DER), in hex.

    Raises:
        ConfigError: the file is not a public key.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(public.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {public}: {error.strerror}", hint="`sms key create` creates a pair") from error
    except ValueError as error:
        raise ConfigError(f"{public} is not a public key in PEM format") from error
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()
