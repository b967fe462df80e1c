"""The file system of a SIF as a tar: Apptainer dumps its squashfs, sqfs2tar of squashfs-tools-ng converts it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.tools.programs import find_missing

SYSTEM = re.compile(r"^(\d+) *\|.*\|FS \(Squashfs/\*System/([a-z0-9_]+)\)", re.MULTILINE)
"""Of `apptainer sif list`: number and architecture of the root file system, named as in Go, which OCI does as well."""


def find_system(host: Host, sif: str) -> tuple[int, str]:
    """Return number and architecture of the root file system in a SIF.

    Raises:
        SmsError: it has none, or more than one.
    """
    listed = host.run("apptainer", "sif", "list", sif).text
    found = SYSTEM.findall(listed)
    if len(found) != 1:
        raise SmsError(f"{sif} has {len(found)} squashfs file systems, not one", hint="`sms build` creates an image")
    return int(found[0][0]), found[0][1]


def write_layer(host: Host, sif: str, number: int, layer: Path) -> tuple[str, int]:
    """Write object ``number`` of a SIF of this machine to ``layer`` as a tar; return its SHA-256 in hex, and its size.

    Owners, modes, hard links and extended attributes are kept; names are sorted: the same file system, the same bytes.

    Raises:
        Refused: sqfs2tar is missing.
        SmsError: a program failed.
    """
    if find_missing(host, "sqfs2tar"):
        raise Refused(f"{host.name} lacks sqfs2tar", hint="install the package squashfs-tools-ng")
    squashfs = layer.with_name("root.squashfs")
    _write_output(host, squashfs, "apptainer", "sif", "dump", str(number), sif)
    found = _write_output(host, layer, "sqfs2tar", str(squashfs))
    squashfs.unlink()
    return found


def _write_output(host: Host, path: Path, *argv: str) -> tuple[str, int]:
    """Write what a command prints to a file; return SHA-256 in hex, and size."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file, host.stream(*argv) as stream:
        while block := stream.read():
            digest.update(block)
            size += file.write(block)
        stream.result()
    return digest.hexdigest(), size
