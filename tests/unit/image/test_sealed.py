"""Sealed folders: signed files pass, any other file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from appliance.errors import Refused
from appliance.operations.site.keys import create_pair
from appliance.tools.sealed import check_seal, read_seal, seal


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Create a pair as ``sms key create`` does."""
    create_pair(tmp_path / "sign.key", tmp_path / "sign.pub")
    return tmp_path / "sign.key", tmp_path / "sign.pub"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them in a folder."""
    made = tmp_path / "image"
    (made / "boot").mkdir(parents=True)
    (made / "disk.qcow2").write_bytes(b"disk" * 1000)
    (made / "boot" / "vmlinuz").write_bytes(b"kernel")
    return made


def test_a_sealed_folder_passes_and_lists_its_content(folder: Path, keys: tuple[Path, Path]) -> None:
    """Files, sizes and description are returned; sealing twice is allowed."""
    seal(folder, keys[0], about={"packages": {"nginx": "1"}})
    digest = seal(folder, keys[0], about={"packages": {"nginx": "2"}})
    found = check_seal(folder, [keys[1]])
    assert found.digest == digest
    assert found.signer == keys[1]
    assert found.about["packages"] == {"nginx": "2"}
    assert {name: size for name, (_, size) in found.files.items()} == {"boot/vmlinuz": 6, "disk.qcow2": 4000}


def _change(folder: Path) -> None:
    (folder / "disk.qcow2").write_bytes(b"dusk" * 1000)


def _manifest(folder: Path) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["files"]["disk.qcow2"]["bytes"] = 1
    (folder / "manifest.json").write_text(json.dumps(text))


def _link(folder: Path) -> None:
    (folder / "disk.qcow2").rename(folder.parent / "elsewhere")
    (folder / "disk.qcow2").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_change, "disk.qcow2 does not match its digest"),
        (_manifest, "is not signed with any of"),
        (_link, "is not a regular file"),
        (lambda folder: (folder / "disk.qcow2").unlink(), "disk.qcow2 is missing"),
        (lambda folder: (folder / "more").write_text(""), "more is not in the manifest"),
        (lambda folder: (folder / "manifest.sig").unlink(), "it has no manifest.sig"),
        (lambda folder: (folder / "manifest.sig").write_text("%%%"), "is not signed with any of"),
        (lambda folder: (folder / "manifest.sig").write_text(""), "is not signed with any of"),
    ],
)
def test_damaged_folders_are_refused(
    folder: Path, keys: tuple[Path, Path], spoil: Callable[[Path], None], said: str
) -> None:
    """Each kind of damage has its message."""
    seal(folder, keys[0])
    spoil(folder)
    with pytest.raises(Refused, match=said):
        check_seal(folder, [keys[1]])


def test_another_key_is_refused_and_an_older_one_passes(folder: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """Any of the site's public keys may have signed it."""
    create_pair(tmp_path / "other.key", tmp_path / "other.pub")
    seal(folder, keys[0])
    with pytest.raises(Refused, match="not signed"):
        read_seal(folder, [tmp_path / "other.pub"])
    assert read_seal(folder, [tmp_path / "other.pub", keys[1]]).signer == keys[1]


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_keys_of_a_sites_own_are_accepted(folder: Path, tmp_path: Path, kind: str) -> None:
    """Apptainer accepts EC and RSA keys, and so does sms."""
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "ec" else rsa.generate_private_key(65537, 2048)
    private, public = tmp_path / "own.key", tmp_path / "own.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    seal(folder, private)
    check_seal(folder, [public])


def test_a_key_that_others_can_read_is_refused(folder: Path, keys: tuple[Path, Path]) -> None:
    """As `sms build` does."""
    keys[0].chmod(0o644)
    with pytest.raises(Refused, match="must not be readable by others"):
        seal(folder, keys[0])
