"""Keys of repositories: what gpg exports is read as gpg reads it; everything else is refused."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.plan.image.openpgp import KeyProblem, read_keys

GPG = ("gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "")


@pytest.fixture(scope="module")
def gpg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., bytes]]:
    """gpg with a keyring of its own, which has two keys."""
    folder = tmp_path_factory.mktemp("gpg")
    folder.chmod(0o700)

    def run(*words: str, input: bytes = b"") -> bytes:
        argv = (*GPG, "--homedir", str(folder), *words)
        return subprocess.run(argv, input=input, check=True, capture_output=True).stdout

    run("--quick-generate-key", "one@example.org", "ed25519", "sign", "never")
    run("--quick-generate-key", "two@example.org", "rsa2048", "sign", "never")
    yield run
    subprocess.run(["gpgconf", "--homedir", str(folder), "--kill", "gpg-agent"], check=True)


@pytest.mark.parametrize("options", [[], ["--armor"]], ids=["binary", "armour"])
def test_what_gpg_exports(gpg: Callable[..., bytes], options: list[str]) -> None:
    data = gpg(*options, "--export")
    armored, fingerprints = read_keys(data)
    shown = gpg("--show-keys", "--with-colons", input=armored).decode().splitlines()
    assert [line.split(":")[9].lower() for line in shown if line.startswith("fpr")] == list(fingerprints)
    assert len(fingerprints) == 2 and read_keys(armored) == (armored, fingerprints)


def test_a_private_key_is_refused(gpg: Callable[..., bytes]) -> None:
    for options in ([], ["--armor"]):
        with pytest.raises(KeyProblem, match="private key"):
            read_keys(gpg(*options, "--export-secret-keys", "one@example.org"))


def test_a_damaged_key_is_refused(gpg: Callable[..., bytes]) -> None:
    data = gpg("--armor", "--export", "one@example.org")
    middle = data.splitlines()[4]
    other = middle[:-1] + (b"A" if middle[-1:] != b"A" else b"B")
    with pytest.raises(KeyProblem, match="checksum"):
        read_keys(data.replace(middle, other))
    binary = gpg("--export", "one@example.org")
    with pytest.raises(KeyProblem, match="truncated"):
        read_keys(binary[:-1])


HEAD, TAIL = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n", b"\n-----END PGP PUBLIC KEY BLOCK-----\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a key",
        b"\x00" * 40,
        b"\xff" * 40,
        b"\x99",
        b"\x99\x00",
        HEAD + TAIL,
        HEAD + b"!!!" + TAIL,
        HEAD + base64.b64encode(b"not a key") + TAIL,
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"\x99\x00\x01\x03",
        b"x" * ((1 << 20) + 1),
    ],
)
def test_what_is_not_a_key(data: bytes) -> None:
    with pytest.raises(KeyProblem):
        read_keys(data)


def test_keys_of_this_machine() -> None:
    paths = sorted(Path("/usr/share/keyrings").glob("debian-archive-keyring.*"))
    assert all(len(read_keys(path.read_bytes())[1]) > 3 for path in paths)
