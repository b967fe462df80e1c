"""Apptainer: build, sign, verify, instances. spython is used here and nowhere else."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host, OnLine, Result
from appliance.plan.image.definition import SQUASHFS

SBOM_DATATYPE = "9"
"""SIF data type of a bill of materials; in group 1, what the signature covers."""
LOOP_TAKEN = re.compile("while mounting image .*device or resource busy", re.DOTALL)
"""What Apptainer prints where another program took the loop device that it had chosen."""
LOOP_TRIES, LOOP_AGAIN_S = 3, 0.5
"""How often a container is made then, and seconds between two tries."""


@dataclass(frozen=True)
class Instance:
    """A running instance."""

    name: str
    pid: int
    image: str


def build_image(definition: str, image: str, *, arguments: Mapping[str, str], on_line: OnLine) -> None:
    """Build ``image`` from a definition file on this machine.

    Args:
        arguments: values for the definition's ``{{ name }}``.

    Raises:
        SmsError: the build failed; its last lines say why.
    """
    from spython.utils import stream_command

    squash = ("--mksquashfs-args", SQUASHFS)
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    # Both outputs in one stream: spython's own Client.build reads one and lets the other fill up
    # until the build hangs. The build ends when this process does, however that ends.
    argv = ["setpriv", "--pdeathsig", "TERM", "apptainer", "build", "--force", *squash, *words, image, definition]
    said: list[str] = []
    try:
        for line in stream_command(argv, no_newline_regexp="^$", output_type="both"):
            said.append(line.rstrip())
            on_line(said[-1])
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        tail = "\n    ".join([word for word in said if word][-15:])
        raise SmsError(f"apptainer build failed\n    {tail or error}") from error


def run_container(host: Host, *argv: str, input: bytes | None = None, timeout: float) -> Result:
    """Run an apptainer command that makes a container; again, where a loop device was taken by somebody else meanwhile.

    Nothing has run inside then.

    Raises:
        CommandError: it failed, for another reason or each time.
    """
    for _ in range(LOOP_TRIES - 1):
        result = host.run(*argv, input=input, ok=None, timeout=timeout)
        if not result.status:
            return result
        if not LOOP_TAKEN.search(result.stderr.decode(errors="replace")):
            raise CommandError(result)
        time.sleep(LOOP_AGAIN_S)
    return host.run(*argv, input=input, timeout=timeout)


def add_sbom(host: Host, image: str, sbom: str) -> None:
    """Put the bill of materials at path ``sbom`` into the image file, before it is signed."""
    host.run(
        "apptainer",
        "sif",
        "add",
        "--datatype",
        SBOM_DATATYPE,
        "--sbomformat",
        "cyclonedx-json",
        "--groupid",
        "1",
        "--filename",
        "sbom.cdx.json",
        image,
        sbom,
    )


def sign_pem(host: Host, image: str, private_key: str) -> None:
    """Sign with a PEM key."""
    host.run("apptainer", "sign", "--key", private_key, image, timeout=120)


def sign_pgp(host: Host, image: str, keyring: str | None, fingerprint: str) -> None:
    """Sign with the key of the keyring that has ``fingerprint``."""
    index = _pgp_index(host, keyring, fingerprint)
    host.run(*_with_keyring(keyring), "apptainer", "sign", "--keyidx", str(index), image, timeout=120)


def _with_keyring(keyring: str | None) -> tuple[str, ...]:
    return ("env", f"APPTAINER_KEYSDIR={keyring}") if keyring else ()


def _pgp_index(host: Host, keyring: str | None, fingerprint: str) -> int:
    listed = host.run(*_with_keyring(keyring), "apptainer", "key", "list", "--secret", ok=None).text
    keys = re.findall(r"^(\d+)\).*?(?:F|Fingerprint): *([0-9A-Fa-f ]{40,})", listed, re.MULTILINE | re.DOTALL)
    for number, found in keys:
        if found.replace(" ", "").strip().upper()[:40] == fingerprint.upper():
            return int(number)
    raise SmsError(
        f"no private PGP key with fingerprint {fingerprint} in the keyring",
        hint="`apptainer key list --secret` shows what is there; `apptainer key newpair` makes one",
    )


def verify_pem(host: Host, image: str, public_keys: Sequence[str]) -> str:
    """Hold the whole image against the keys; give the path of the one that signed it.

    Raises:
        Refused: unsigned, signed by somebody else, or changed since.
    """
    reasons: list[str] = []
    for key in public_keys:
        result = host.run("apptainer", "verify", "--all", "--key", key, image, ok=None, timeout=300)
        if result.status == 0:
            return key
        reasons.append(_why_not(result.stdout + result.stderr))
    raise Refused(
        f"{image} is not to be trusted: {'; '.join(dict.fromkeys(reasons)) or 'no public key to hold it against'}",
        hint="do not start it; `sms build` makes one that is signed by this site",
    )


def verify_pgp(host: Host, image: str, keyring: str | None, fingerprint: str) -> None:
    """Demand that the PGP key with ``fingerprint`` has signed every part of the image.

    Raises:
        Refused: it has not.
    """
    result = host.run(
        *_with_keyring(keyring), "apptainer", "verify", "--all", "--local", "--json", image, ok=None, timeout=300
    )
    # What is not JSON comes before it.
    _, brace, rest = result.stdout.decode(errors="replace").partition("{")
    try:
        signers = [entry["Signer"] for entry in json.loads(brace + rest)["SignerKeys"] or []]
    except (ValueError, KeyError, TypeError):
        signers = []
    good = [
        signer["KeyCheck"] and signer["DataCheck"] and signer["Fingerprint"].upper() == fingerprint.upper()
        for signer in signers
    ]
    if result.status or not good or not all(good):
        raise Refused(
            f"{image} is not to be trusted: {_why_not(result.stdout + result.stderr)}",
            hint=f"it must be signed by the PGP key {fingerprint}, and by no other kind of key",
        )


def export_pgp(host: Host, keyring: str | None, fingerprint: str, path: str) -> None:
    """Write the public key with ``fingerprint`` to ``path``, in ASCII armour.

    Raises:
        SmsError: the keyring has no such key.
    """
    host.remove(path)
    result = host.run(*_with_keyring(keyring), "apptainer", "key", "export", "--ascii", path, fingerprint, ok=None)
    if result.status:
        raise SmsError(
            f"no PGP key with fingerprint {fingerprint} in the keyring",
            hint="`apptainer key list` shows what is there; signing.pgp_keyring names another keyring",
        )


def import_pgp(host: Host, keyring: str, path: str) -> None:
    """Make a keyring that holds the public key of a file."""
    host.run("mkdir", "-p", "-m", "0700", keyring)
    host.run(*_with_keyring(keyring), "apptainer", "key", "import", path)


REASONS = {
    "not provided for DSSE": "it was signed with a PEM key",
    "not provided for PGP": "it was signed with a PGP key",
    "unknown entity": "it was signed with another key",
    "signature made by unknown": "it was signed with another key",
    "signature not found": "it is not signed",
    "integrity compromised": "it was changed after it was signed",
    "do not match threshold": "it was signed with another key",
    "not associated with object group": "it holds something that no signature covers",
    "no such file": "it is not there",
}
"""Words of `apptainer verify`, and what they mean to a person."""


def _why_not(said: bytes) -> str:
    text = said.decode(errors="replace")
    for words, meaning in REASONS.items():
        if words in text:
            return meaning
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "apptainer verify failed"


def labels(host: Host, image: str) -> dict[str, str]:
    """Labels of an image."""
    inspected = json.loads(host.run("apptainer", "inspect", "--json", image).stdout)
    found: dict[str, str] = inspected["data"]["attributes"].get("labels") or {}
    return found


def read_inside(host: Host, image: str, path: str) -> bytes:
    """A file of an image."""
    return host.run("apptainer", "exec", "--no-home", "--contain", "--cleanenv", image, "cat", path).stdout


def find_instance(host: Host, name: str) -> Instance | None:
    """The running instance of that name."""
    # Its own file is asked for, not a pattern: `list` takes globs.
    listed = host.run("apptainer", "instance", "list", "--json", name)
    for entry in json.loads(listed.stdout or b"{}").get("instances") or []:
        if entry["instance"] == name:
            return Instance(name, int(entry["pid"]), entry["img"])
    return None


def create_overlay(host: Host, path: str, size_mb: int) -> None:
    """A sparse ext3 overlay image."""
    host.run("apptainer", "overlay", "create", "--size", str(size_mb), "--sparse", path, timeout=300)


def version(host: Host) -> tuple[int, int]:
    """Its version, as far as hosts must agree on it."""
    said = host.run("apptainer", "--version").text
    found = re.search(r"(\d+)\.(\d+)", said)
    if not found:
        raise SmsError(f"{host.name}: apptainer does not tell its version: {said[:100]}")
    return int(found[1]), int(found[2])
