"""The new size of an overlay. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.errors import ConfigError, Refused
from appliance.units import LARGEST_OVERLAY

MIB = 1 << 20
UNITS = {"M": MIB, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class SizeSpec:
    """A size in bytes; ``relative``: to add to the present size."""

    size: int
    relative: bool = False


def parse_size(text: str) -> SizeSpec:
    """Parse a size such as ``4096M``, ``4G``, ``1.5T`` or ``+1G``.

    Raises:
        ConfigError: it is not a size, or too large.
    """
    found = re.fullmatch(r"(\+?)(\d{1,9}(?:\.\d{1,6})?)([MGTmgt])(?:iB|ib)?", text, re.ASCII)
    if not found:
        raise ConfigError(f"invalid size {text!r}", hint="write it as 4096M, 4G or +1G")
    size = int(float(found[2]) * UNITS[found[3].upper()]) // MIB * MIB
    if not 0 < size <= LARGEST_OVERLAY:
        raise ConfigError(f"{text} is less than 1M or more than 1T", hint="write it as 4096M, 4G or +1G")
    return SizeSpec(size, bool(found[1]))


def new_size(spec: SizeSpec, *, file: int, system: int) -> int:
    """Return the new size of the overlay's file, in bytes.

    Args:
        file: present size of the file.
        system: present size of its file system: smaller after an interrupted run. A relative size is added to it.

    Raises:
        Refused: the overlay is larger already.
        ConfigError: it is more than an overlay may have.
    """
    size = spec.size if not spec.relative else -(-system // MIB) * MIB + spec.size
    if size > LARGEST_OVERLAY:
        raise ConfigError("an overlay has 1T at most", hint="give a smaller size")
    if size < file and size // MIB < file // MIB:
        if size > system and spec.relative:
            return file  # an interrupted run enlarged the file to more than this one requests
        raise Refused(
            f"the overlay has {file // MIB} MiB already, and cannot shrink",
            hint=f"give a larger size, or a relative one: sms overlay grow +{max(1, spec.size >> 30)}G",
        )
    return max(size, file)


def grown(file: int, system: int, size: int) -> bool:
    """Whether the file and its file system have the size already. ext3 leaves out a last group of few blocks."""
    return file >= size and size - system < MIB
