"""Free space of a file system, asked of df."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.host.base import Host

QUERY = 'd=$1; until [ -d "$d" ]; do d=$(dirname "$d"); done; exec df --block-size=1 --output=size,avail "$d"'
"""Shell: of the folder $1, or the nearest one above it that is there, which has the same file system."""
SPARE_BYTES = 64 << 20
"""To be left besides a copy."""


@dataclass(frozen=True)
class Space:
    """A file system, in bytes; ``free``: what may still be written, which is less than what is unused."""

    size: int
    free: int


def query_space(host: Host, folder: str) -> Space:
    """The space of the file system that a folder is on, or will be on once it is made.

    Raises:
        CommandError: df fails.
    """
    return read_space(host.run("sh", "-c", QUERY, "space", folder).text)


def read_space(text: str) -> Space:
    """Read what ``QUERY`` prints: a heading, then two numbers."""
    size, free = text.splitlines()[-1].split()
    return Space(int(size), int(free))


def query_used(host: Host, *paths: str) -> int:
    """Bytes that files and folders take on the disk; what is not there takes none."""
    lines = host.run("du", "-s", "--block-size=1", "--", *paths, ok=None, timeout=600).text.splitlines()
    return sum(int(line.split()[0]) for line in lines)
