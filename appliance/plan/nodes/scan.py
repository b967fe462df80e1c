"""Targets of a discovery's scan, and names and addresses of new nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network

from appliance.config.hostlist import HostListError, expand
from appliance.errors import ConfigError
from appliance.plan.nodes.nodes import DHCP_WORD, NAME

MOST_ADDRESSES = 4096
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL}){{0,16}}")
_PATTERN = re.compile(r"[A-Za-z0-9-]*%(0[1-9])?d[A-Za-z0-9-]*")


def find_targets(words: Sequence[str]) -> list[str]:
    """Expand ranges to addresses and names, each once: ``10.0.0.0/24``, ``10.0.0.1-10.0.0.9``, ``bmc[1-9]``.

    Raises:
        ConfigError: a range is invalid, or there are more than ``MOST_ADDRESSES`` targets.
    """
    found: dict[str, None] = {}
    for word in words:
        for one in _targets(word):
            found[one] = None
            if len(found) > MOST_ADDRESSES:
                raise ConfigError(
                    f"more than {MOST_ADDRESSES} addresses", hint="scan a smaller range, or use several runs"
                )
    return sorted(found, key=_order)


def _order(target: str) -> tuple[int, int, str]:
    try:
        return 0, int(IPv4Address(target)), ""
    except ValueError:
        return 1, 0, target.zfill(64)


def _targets(word: str) -> Iterator[str]:
    hint = "write 10.0.0.0/24, 10.0.0.1-10.0.0.50, 10.0.0.[1-50], bmc[001-450] or an address"
    if ":" in word:
        raise ConfigError(f"{word[:100]!r} is not a range of IPv4 addresses", hint=f"{hint}; set a port with --port")
    try:
        if "/" in word:
            network = IPv4Network(word, strict=False)
            yield from map(str, network.hosts())
        elif "-" in word and (ends := _ends(word)):
            yield from (str(IPv4Address(number)) for number in range(int(ends[0]), int(ends[1]) + 1))
        else:
            yield from _names(word)
    except HostListError as error:
        raise ConfigError(f"{word[:100]!r} {error}", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{word[:100]!r} is not a range: {error}", hint=hint) from error


def _names(word: str) -> Iterator[str]:
    for one in expand(word):
        if re.fullmatch(r"[0-9.]+", one):
            yield str(IPv4Address(one))
        elif _HOST.fullmatch(one):
            yield one
        else:
            raise ValueError(f"{one[:60]!r} is neither an address nor a host name")


def _ends(word: str) -> tuple[IPv4Address, IPv4Address] | None:
    """Return the ends of an address range ``a-b``; None for other words: names can have dashes as well."""
    low, _, high = word.partition("-")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){3}", low) or not re.fullmatch(r"[0-9.]+", high):
        return None
    first = IPv4Address(low)
    last = IPv4Address(high if "." in high else f"{low.rpartition('.')[0]}.{high}")
    if last < first:
        raise ValueError("its end is before its start")
    return first, last


def check_pattern(pattern: str) -> str:
    """Return the pattern if it is valid.

    Raises:
        ConfigError: it does not produce valid node names.
    """
    if not _PATTERN.fullmatch(pattern) or not NAME.fullmatch(pattern % 1) or DHCP_WORD.fullmatch(pattern % 1):
        raise ConfigError(
            f"{pattern[:60]!r} is not a pattern of node names", hint="write it with one number: node%03d or nid%06d"
        )
    return pattern


def free_names(pattern: str, taken: Collection[str]) -> Iterator[str]:
    """Yield the unused names of a pattern, in order."""
    number = 1
    while True:
        if (name := pattern % number) not in taken:
            yield name
        number += 1


def free_addresses(first: IPv4Address, network: IPv4Network, taken: Collection[str]) -> Iterator[str]:
    """Yield the unused addresses from ``first`` to the end of the network."""
    for number in range(int(first), int(network.broadcast_address)):
        if (address := str(IPv4Address(number))) not in taken:
            yield address
