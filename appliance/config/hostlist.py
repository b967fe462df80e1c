"""Slurm host lists: ``node[001-003,5],login`` stands for node001, node002, node003, node5 and login."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 65533
"""Slurm's own bound on the nodes of a cluster."""

_PART = re.compile(r"([^\[\],]+)|\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class HostListError(ValueError):
    """The text is not a host list, or it stands for too many hosts."""


def expand(text: str) -> list[str]:
    """The names that a host list stands for, in its order, repeated ones included."""
    hosts: list[str] = []
    for item in _split(text):
        hosts += itertools.islice(_expand_item(item), MAX_HOSTS + 1)
        if len(hosts) > MAX_HOSTS:
            raise HostListError(f"stands for more than {MAX_HOSTS} names")
    return hosts


def _split(text: str) -> list[str]:
    """The items between the commas that are outside of brackets."""
    items = [""]
    inside = False
    for letter in text:
        if letter == "," and not inside:
            items.append("")
            continue
        if letter in "[]":
            if (letter == "[") == inside:
                raise HostListError("has brackets that do not match")
            inside = letter == "["
        items[-1] += letter
    if inside:
        raise HostListError("has brackets that do not match")
    if not all(items):
        raise HostListError("has nothing between two commas")
    return items


def _expand_item(item: str) -> Iterator[str]:
    """The names of one item; several brackets stand for every combination, the last one counting fastest."""
    parts = [[literal] if literal else _expand_ranges(ranges) for literal, ranges in _PART.findall(item)]
    total = 1
    for part in parts:
        total *= len(part)
    if total > MAX_HOSTS:
        raise HostListError(f"stands for more than {MAX_HOSTS} names")
    return ("".join(combination) for combination in itertools.product(*parts))


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if not match:
            raise HostListError(f"[{ranges[:40]}] is not a list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise HostListError(f"the range {text} runs backwards")
        if int(high) - int(low) + len(numbers) >= MAX_HOSTS:
            raise HostListError(f"stands for more than {MAX_HOSTS} names")
        # The width of the lower bound is that of all: [008-010] is 008, 009, 010.
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
