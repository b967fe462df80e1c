"""How large an overlay is to become. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.errors import ConfigError, Refused

MIB = 1 << 20
UNITS = {"M": MIB, "G": 1 << 30, "T": 1 << 40}
LARGEST = 1 << 44
"""16 TiB: what ext3 can have with blocks of 4 KiB, and what the site file takes."""


@dataclass(frozen=True)
class Wanted:
    """A size in bytes, or so many more."""

    size: int
    more: bool = False


def read_size(text: str) -> Wanted:
    """The size of ``4096M``, ``4G``, ``1.5T`` or ``+1G``.

    Raises:
        ConfigError: it is none, or too large.
    """
    found = re.fullmatch(r"(\+?)(\d{1,9}(?:\.\d{1,6})?)([MGTmgt])(?:iB|ib)?", text, re.ASCII)
    if not found:
        raise ConfigError(f"{text!r} is no size", hint="write it as 4096M, 4G or +1G")
    size = int(float(found[2]) * UNITS[found[3].upper()]) // MIB * MIB
    if not 0 < size <= LARGEST:
        raise ConfigError(f"{text} is less than 1M or more than 16T", hint="write it as 4096M, 4G or +1G")
    return Wanted(size, bool(found[1]))


def new_size(wanted: Wanted, *, file: int, system: int) -> int:
    """What the overlay's file is to measure, in bytes.

    Args:
        file: what it measures.
        system: what the file system in it has. It lags behind where a run was cut off, and more is counted from there.

    Raises:
        Refused: the overlay is larger already.
        ConfigError: ext3 cannot be that large.
    """
    size = wanted.size if not wanted.more else -(-system // MIB) * MIB + wanted.size
    if size > LARGEST:
        raise ConfigError("an overlay has 16T at most", hint="ask for less")
    if size < file and size // MIB < file // MIB:
        if size > system and wanted.more:
            return file  # it was made longer by a run that was cut off, for more than this one wants
        raise Refused(
            f"the overlay has {file // MIB} MiB already, and never shrinks",
            hint=f"ask for more than that, or for more of it: sms overlay grow +{max(1, wanted.size >> 30)}G",
        )
    return max(size, file)


def grown(file: int, system: int, wanted: int) -> bool:
    """Whether the file and the file system in it have the size already. A last group of few blocks is left out."""
    return file >= wanted and wanted - system < MIB
