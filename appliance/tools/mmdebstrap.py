"""Roots made from packages, and images made of roots: mmdebstrap and mksquashfs."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host, OnLine
from appliance.tools.programs import find_missing

WANTED = {"mmdebstrap": "mmdebstrap", "mksquashfs": "squashfs-tools", "zstd": "zstd"}
"""Programs that a node image takes, and their packages."""
MAKE_S = 3600


def need_programs(host: Host) -> None:
    """Refuse where a program is missing.

    Raises:
        Refused: with the packages to install.
    """
    missing = [WANTED[name] for name in find_missing(host, *WANTED)]
    if missing:
        raise Refused(f"this host has no {', '.join(missing)}", hint=f"apt-get install {' '.join(missing)}")


def make_root(host: Host, argv: Sequence[str], sources: Sequence[str], *, on_line: OnLine) -> None:
    """Make the archive of a root with mmdebstrap.

    Args:
        argv: the whole command; it reads its sources on standard input.
        on_line: called with each line that it says.

    Raises:
        SmsError: with its last errors.
    """
    said: list[str] = []

    def heard(line: str) -> None:
        said.append(line)
        on_line(line)

    text = "".join(f"{line}\n" for line in sources).encode()
    try:
        host.run("sh", "-c", 'exec "$@" 2>&1', "make", *argv, input=text, timeout=MAKE_S, on_line=heard)
    except CommandError as error:
        wrong = [line for line in said if line.startswith("E:")][-4:] or said[-4:]
        raise SmsError(
            "the root cannot be made: " + "; ".join(wrong), hint="is the package mirror in reach?"
        ) from error


def unpack_root(host: Host, archive: str, root: str) -> None:
    """Unpack the archive of a root into a new folder, with owners as numbers."""
    host.run("mkdir", "-m", "0755", root)
    host.run("tar", "--zstd", "--numeric-owner", "-xpf", archive, "-C", root, timeout=MAKE_S)


def make_squashfs(host: Host, root: str, image: str, options: Sequence[str]) -> None:
    """Make a squashfs of a folder, its kernel and initramfs left out."""
    host.run("mksquashfs", root, image, *options, "-wildcards", "-e", "boot/*", timeout=MAKE_S)


def compress(host: Host, source: str, target: str) -> None:
    """zstd, as the kernel unpacks it."""
    host.run("zstd", "-q", "-f", "-15", "-o", target, source, timeout=600)
