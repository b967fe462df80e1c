"""Apptainer: build, sign, verify, instances. The only user of spython."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host, OnLine, Result
from appliance.plan.image.definition import SQUASHFS
from appliance.tools.scripts import script_argv

SBOM_DATATYPE = "9"
"""SIF data type of an SBOM; it is added to group 1, which the signature covers."""
LOOP_BUSY = re.compile("while mounting image .*device or resource busy", re.DOTALL)
"""Apptainer's message if another program took the loop device that it had chosen."""
LOOP_TRIES, LOOP_RETRY_S = 3, 0.5
"""Number of attempts then, and seconds between two."""


@dataclass(frozen=True)
class Instance:
    """A running instance."""

    name: str
    pid: int
    image: str


@dataclass(frozen=True)
class BuildAccess:
    """What a build can read.

    Attributes:
        arguments: values of ``{{ name }}`` in the definition.
        binds: mounts in %post and %test, as Apptainer writes them; they are not in the image.
        environment: variables of the build, none of them secret.
        hide: removes secrets from a line of output.
    """

    arguments: dict[str, str]
    binds: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hide: Callable[[str], str] = str


def build_image(definition: str, image: str, access: BuildAccess, *, on_line: OnLine) -> None:
    """Build ``image`` from a definition file on this machine.

    Raises:
        SmsError: the build failed; the message has its last lines.
    """
    from spython.utils import stream_command

    squash = ("--mksquashfs-args", SQUASHFS)
    options = [word for name, value in access.arguments.items() for word in ("--build-arg", f"{name}={value}")]
    options += [word for bind in access.binds for word in ("--bind", bind)]
    environment = ("env", *(f"{name}={value}" for name, value in access.environment.items()))
    # Both outputs in one stream: spython's Client.build reads only one, and the build blocks when the
    # other is full. setpriv terminates the build with this process.
    argv = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        *environment,
        "apptainer",
        "build",
        "--force",
        *squash,
        *options,
        image,
        definition,
    ]
    output: list[str] = []
    try:
        for line in stream_command(argv, no_newline_regexp="^$", output_type="both"):
            output.append(access.hide(line.rstrip()))
            on_line(output[-1])
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        tail = "\n    ".join([text for text in output if text][-15:])
        raise SmsError(f"apptainer build failed\n    {tail or error}") from error


def run_container(host: Host, *argv: str, input: bytes | None = None, timeout: float) -> Result:
    """Run an apptainer command that creates a container; retry if another program took its loop device.

    In that case nothing has run inside yet.

    Raises:
        CommandError: the command failed for another reason, or in each attempt.
    """
    for _ in range(LOOP_TRIES - 1):
        result = host.run(*argv, input=input, ok=None, timeout=timeout)
        if not result.status:
            return result
        if not LOOP_BUSY.search(result.stderr.decode(errors="replace")):
            raise CommandError(result)
        time.sleep(LOOP_RETRY_S)
    return host.run(*argv, input=input, timeout=timeout)


def add_sbom(host: Host, image: str, sbom: str) -> None:
    """Add the SBOM at path ``sbom`` to the image file, before it is signed."""
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
    """Sign with the key in the keyring that has ``fingerprint``."""
    index = _pgp_index(host, keyring, fingerprint)
    host.run(*_with_keyring(keyring), "apptainer", "sign", "--keyidx", str(index), image, timeout=120)


def _with_keyring(keyring: str | None) -> tuple[str, ...]:
    return ("env", f"APPTAINER_KEYSDIR={keyring}") if keyring else ()


def has_private_pgp(host: Host, keyring: str | None, fingerprint: str) -> bool:
    """Return whether the keyring has the private key with ``fingerprint``."""
    return _find_pgp(host, keyring, fingerprint) is not None


def _pgp_index(host: Host, keyring: str | None, fingerprint: str) -> int:
    found = _find_pgp(host, keyring, fingerprint)
    if found is not None:
        return found
    raise SmsError(
        f"no private PGP key with fingerprint {fingerprint} in the keyring",
        hint="`apptainer key list --secret` lists the keys; `apptainer key newpair` creates one",
    )


def _find_pgp(host: Host, keyring: str | None, fingerprint: str) -> int | None:
    listed = host.run(*_with_keyring(keyring), "apptainer", "key", "list", "--secret", ok=None).text
    keys = re.findall(r"^(\d+)\).*?(?:F|Fingerprint): *([0-9A-Fa-f ]{40,})", listed, re.MULTILINE | re.DOTALL)
    for number, found in keys:
        if found.replace(" ", "").strip().upper()[:40] == fingerprint.upper():
            return int(number)
    return None


def verify_pem(host: Host, image: str, public_keys: Sequence[str]) -> str:
    """Verify the signature of the whole image; return the path of the key that signed it.

    Raises:
        Refused: not signed, signed with another key, or modified since.
    """
    reasons: list[str] = []
    for key in public_keys:
        result = host.run("apptainer", "verify", "--all", "--key", key, image, ok=None, timeout=300)
        if result.status == 0:
            return key
        reasons.append(_reason(result.stdout + result.stderr))
    raise Refused(
        f"{image} cannot be trusted: {'; '.join(dict.fromkeys(reasons)) or 'no public key to verify it with'}",
        hint="do not start it; `sms build` creates one that is signed by this site",
    )


def verify_pgp(host: Host, image: str, keyring: str | None, fingerprint: str) -> None:
    """Verify that the PGP key with ``fingerprint`` has signed every part of the image.

    Raises:
        Refused: it has not.
    """
    result = host.run(
        *_with_keyring(keyring), "apptainer", "verify", "--all", "--local", "--json", image, ok=None, timeout=300
    )
    # Other output may precede the JSON.
    _, brace, rest = result.stdout.decode(errors="replace").partition("{")
    try:
        signers = [entry["Signer"] for entry in json.loads(brace + rest)["SignerKeys"] or []]
    except (ValueError, KeyError, TypeError, RecursionError):
        signers = []
    good = [
        signer["KeyCheck"] and signer["DataCheck"] and signer["Fingerprint"].upper() == fingerprint.upper()
        for signer in signers
    ]
    if result.status or not good or not all(good):
        raise Refused(
            f"{image} cannot be trusted: {_reason(result.stdout + result.stderr)}",
            hint=f"it must be signed with the PGP key {fingerprint}, and with no other kind of key",
        )


def export_pgp(host: Host, keyring: str | None, fingerprint: str, path: str) -> None:
    """Export the public key with ``fingerprint`` to ``path``, ASCII-armoured.

    Raises:
        SmsError: the keyring has no such key.
    """
    host.remove(path)
    result = host.run(*_with_keyring(keyring), "apptainer", "key", "export", "--ascii", path, fingerprint, ok=None)
    if result.status:
        raise SmsError(
            f"no PGP key with fingerprint {fingerprint} in the keyring",
            hint="`apptainer key list` lists the keys; signing.pgp_keyring selects another keyring",
        )


def import_pgp(host: Host, keyring: str, path: str) -> None:
    """Create a keyring with the public key in a file."""
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
    "not associated with object group": "it contains objects that no signature covers",
    "no such file": "it does not exist",
}
"""Messages of `apptainer verify` and their meaning."""


def _reason(output: bytes) -> str:
    text = output.decode(errors="replace")
    for pattern, meaning in REASONS.items():
        if pattern in text:
            return meaning
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "apptainer verify failed"


class _Attributes(TypedDict, total=False):
    labels: dict[str, str] | None


class _Data(TypedDict):
    attributes: _Attributes


class _Inspected(TypedDict):
    """What ``apptainer build`` stores in a SIF about it."""

    data: _Data


class _Running(TypedDict):
    instance: str
    pid: int
    img: str


class _Listed(TypedDict, total=False):
    """What ``apptainer instance list`` prints."""

    instances: list[_Running] | None


def labels(host: Host, image: str) -> dict[str, str]:
    """Return the labels of a SIF, whether its signature is valid or not: nothing of it is run.

    Raises:
        CommandError: it is not one that ``apptainer build`` has written.
    """
    inspected: _Inspected = host.run(*script_argv("image-metadata", image)).parse(_Inspected)
    return inspected["data"]["attributes"].get("labels") or {}


def find_instance(host: Host, name: str) -> Instance | None:
    """Return the running instance of this name, or None."""
    # Compare the name: `list` treats it as a glob.
    return next((one for one in list_instances(host, name) if one.name == name), None)


def list_instances(host: Host, glob: str) -> list[Instance]:
    """Return the running instances whose names match."""
    listed: _Listed = host.run("apptainer", "instance", "list", "--json", glob).parse(_Listed, empty=b"{}")
    return [Instance(one["instance"], one["pid"], one["img"]) for one in listed.get("instances") or []]


def create_overlay(host: Host, path: str, size_mb: int) -> None:
    """Create a sparse ext3 overlay image."""
    host.run("apptainer", "overlay", "create", "--size", str(size_mb), "--sparse", path, timeout=300)


def prove_writable(host: Host, run_inside: tuple[str, ...]) -> None:
    """Write a file inside and read it back: Apptainer only warns of a read-only overlay.

    Raises:
        SmsError: the overlay cannot be written.
    """
    script = 'f=/var/lib/.sms-write; echo "$1" >"$f" && sync "$f" && [ "$(cat "$f")" = "$1" ] && rm "$f"'
    if not host.works(*run_inside, "sh", "-c", script, "prove", "sms"):
        raise SmsError("the overlay cannot be written", hint="is its file system full, or mounted read-only?")


def version(host: Host) -> tuple[int, int]:
    """Return the major and minor version, which must be the same on all hosts."""
    output = host.run("apptainer", "--version").text
    found = re.search(r"(\d+)\.(\d+)", output)
    if not found:
        raise SmsError(f"{host.name}: unknown version of apptainer: {output[:100]}")
    return int(found[1]), int(found[2])
