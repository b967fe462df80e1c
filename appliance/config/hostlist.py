"""Slurm host lists: ``node[001-003,5],login`` expands to node001, node002, node003, node5 and login."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

MAX_HOSTS = 65533
"""Slurm's limit on the number of nodes of a cluster."""
LONGEST_NAME = 253
"""Characters of a name in DNS."""

_PART = re.compile(r"([^\[\],]+)|\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class HostListError(ValueError):
    """The text is not a valid host list, or expands to too many hosts."""


def expand(text: str) -> list[str]:
    """Return the names of a host list in its order, including duplicates."""
    hosts: list[str] = []
    for item in _split(text):
        hosts += itertools.islice(_expand_item(item), MAX_HOSTS + 1)
        if len(hosts) > MAX_HOSTS:
            raise HostListError(f"expands to more than {MAX_HOSTS} names")
    return hosts


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items = []
    inside, begin = False, 0
    for at, letter in enumerate(text):
        if letter == "," and not inside:
            items.append(text[begin:at])
            begin = at + 1
        elif letter in "[]":
            if (letter == "[") == inside:
                raise HostListError("has unbalanced brackets")
            inside = letter == "["
    if inside:
        raise HostListError("has unbalanced brackets")
    items.append(text[begin:])
    if not all(items):
        raise HostListError("has an empty item between two commas")
    return items


def _expand_item(item: str) -> Iterator[str]:
    """Return the names of one item; with several brackets every combination, the last one varying fastest."""
    parts: list[list[str]] = []
    total, length = 1, 0
    for literal, ranges in _PART.findall(item):
        parts.append([literal] if literal else _expand_ranges(ranges))
        total *= len(parts[-1])
        length += len(parts[-1][-1])
        if total > MAX_HOSTS:
            raise HostListError(f"expands to more than {MAX_HOSTS} names")
        if length > LONGEST_NAME:
            raise HostListError(f"has names of more than {LONGEST_NAME} characters")
    return ("".join(combination) for combination in itertools.product(*parts))


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if not match:
            raise HostListError(f"[{ranges[:40]}] is not a list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise HostListError(f"the range {text} is descending")
        if int(high) - int(low) + len(numbers) >= MAX_HOSTS:
            raise HostListError(f"expands to more than {MAX_HOSTS} names")
        # The lower bound sets the width: [008-010] is 008, 009, 010.
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def fold(names: Iterable[str]) -> str:
    """Fold names into a host list: ``node[001-003,007],login``."""
    numbered: dict[tuple[str, int], list[int]] = {}
    plain = []
    for name in dict.fromkeys(names):
        if found := re.fullmatch(r"(.*?)([0-9]{1,9})", name):
            # A number without leading zeros has no fixed width: node9 and node10 are one range.
            width = len(found[2]) if found[2].startswith("0") else 0
            numbered.setdefault((found[1], width), []).append(int(found[2]))
        else:
            plain.append(name)
    for (prefix, width), numbers in list(numbered.items()):
        # node099 and node100 belong to one list, up to the width.
        wide = (prefix, 0)
        if width and wide in numbered:
            fits = [number for number in numbered[wide] if len(str(number)) == width]
            numbers += fits
            numbered[wide] = [number for number in numbered[wide] if number not in fits]
    parts = [_ranges(prefix, width, sorted(numbers)) for (prefix, width), numbers in numbered.items() if numbers]
    return ",".join([*parts, *plain])


def _ranges(prefix: str, width: int, numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}" for low, high in runs]
    return f"{prefix}{texts[0]}" if len(numbers) == 1 else f"{prefix}[{','.join(texts)}]"
