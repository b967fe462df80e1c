"""Build root file systems from packages, and images from root file systems: mmdebstrap and mksquashfs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host, OnLine
from appliance.tools.programs import find_missing

PROGRAMS = {"mmdebstrap": "mmdebstrap", "mksquashfs": "squashfs-tools", "zstd": "zstd"}
"""Programs needed to build a node image, and their packages."""
MAKE_S = 3600


def require_programs(host: Host) -> None:
    """Check that all programs are installed.

    Raises:
        Refused: some are missing; the hint names the packages.
    """
    missing = [PROGRAMS[name] for name in find_missing(host, *PROGRAMS)]
    if missing:
        raise Refused(f"this host has no {', '.join(missing)}", hint=f"apt-get install {' '.join(missing)}")


def make_root(host: Host, argv: Sequence[str], sources: Sequence[str], *, log: Path, on_line: OnLine) -> None:
    """Create the archive of a root file system with mmdebstrap.

    Args:
        argv: the whole command; it reads the package sources from standard input.
        log: the file that ``on_line`` writes each line of output to.

    Raises:
        SmsError: mmdebstrap failed; the message has its last errors.
    """
    output: list[str] = []

    def record(line: str) -> None:
        output.append(line)
        on_line(line)

    text = "".join(f"{line}\n" for line in sources).encode()
    try:
        host.run("sh", "-c", 'exec "$@" 2>&1', "make", *argv, input=text, timeout=MAKE_S, on_line=record)
    except CommandError as error:
        errors = [line for line in output if line.startswith("E:")][-4:] or output[-4:]
        raise SmsError(
            "cannot create the root file system: " + "; ".join(errors), hint=f"the full output is in {log}"
        ) from error


def unpack_root(host: Host, archive: str, root: str) -> None:
    """Unpack the archive of a root file system into a new folder, with numeric owners."""
    host.run("mkdir", "-m", "0755", root)
    host.run("tar", "--zstd", "--numeric-owner", "-xpf", archive, "-C", root, timeout=MAKE_S)


def make_squashfs(host: Host, root: str, image: str, options: Sequence[str]) -> None:
    """Create a squashfs of a folder without its kernel and initramfs."""
    host.run("mksquashfs", root, image, *options, "-wildcards", "-e", "boot/*", timeout=MAKE_S)


def compress(host: Host, source: str, target: str) -> None:
    """Compress with zstd, in a format that the kernel can unpack."""
    host.run("zstd", "-q", "-f", "-15", "-o", target, source, timeout=600)
