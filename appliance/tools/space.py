"""Free space of a file system, from df."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from appliance.errors import Refused
from appliance.host.base import Host, OddOutput

SPARE_BYTES = 64 << 20
"""Bytes that must stay free besides a copy."""


@dataclass(frozen=True)
class Space:
    """Size of a file system and its available space in bytes; ``free`` excludes reserved blocks."""

    size: int
    free: int


def query_space(host: Host, folder: str) -> Space:
    """Return the space of the file system of a folder, which need not exist yet.

    Raises:
        CommandError: df fails.
    """
    while folder != "/" and not host.works("test", "-d", folder):
        folder = str(PurePosixPath(folder).parent)  # on the same file system
    # A heading, then two numbers.
    size, free = host.run("df", "--block-size=1", "--output=size,avail", folder).numbers(2)
    return Space(size, free)


def need_space(host: Host, folder: str, needed: int, text: str, *, hint: str) -> None:
    """Check that the file system of a folder has ``needed`` bytes free.

    Args:
        text: of the error after the number of free MiB: what may need %d MiB.

    Raises:
        Refused: it has not.
    """
    free = query_space(host, folder).free
    if free < needed:
        message = f"{folder} on {host.name} has {free >> 20} {text % (needed >> 20)}"
        raise Refused(message, hint=hint)


def query_used(host: Host, *paths: str) -> int:
    """Return the bytes that files and folders use on the disk; missing ones count as 0."""
    shown = host.run("du", "-s", "--block-size=1", "--", *paths, ok=None, timeout=600)
    try:
        return sum(int(line.split()[0]) for line in shown.text.splitlines())
    except (ValueError, IndexError):
        raise OddOutput(shown, "it is not a size in each line") from None
