"""Geometry of the matrix of who opens connections to whom, in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis import units
from analysis.model import Classification, Party, Talk

LEVELS = 5
"""Shades of a cell, by the logarithm of its bytes."""
MAX_PARTIES = 60
"""Rows and columns drawn; `analysis.matrix` makes fewer."""
MAX_TITLES = 1000
"""Busiest cells that have a title of their own."""
MAX_PAIRS = 100
"""Pairs listed."""
LABEL = 26
"""Maximum characters of a row's name."""
HEAD = 18
"""Pixels above the cells, for the numbers of the columns."""
_FEW, _WIDE, _NARROW = 24, 22, 15
_LETTER = 7.2
"""Pixels of a letter, at most."""


@dataclass(frozen=True)
class Cell:
    """A pair of parties, at ``x``, ``y``; ``level`` is 1 to LEVELS; ``title`` is "" for the least busy ones."""

    x: int
    y: int
    level: int
    title: str


@dataclass(frozen=True)
class Grid:
    """The drawing: ``pitch`` pixels per row and column, ``left`` of the names.

    Attributes:
        names: of the rows, with their middle from the top.
        lines: positions of the lines between groups of five, and around the nodes.
        least, most: bytes of the lightest and the darkest cell.
        pairs: the busiest, for a list.
    """

    pitch: int
    left: int
    size: int
    names: tuple[tuple[int, str, int], ...]
    columns: tuple[tuple[int, int], ...]
    lines: tuple[int, ...]
    cells: tuple[Cell, ...]
    least: int
    most: int
    pairs: tuple[Talk, ...]


def draw(found: Classification) -> Grid | None:
    """Return the drawing of a matrix; None without traffic."""
    parties = found.matrix.parties[:MAX_PARTIES]
    talks = [one for one in found.matrix.talks if 0 <= one.client < len(parties) and 0 <= one.server < len(parties)]
    if not talks:
        return None
    pitch = _WIDE if len(parties) <= _FEW else _NARROW
    labels = [shorten(party) for party in parties]
    sizes = [max(one.bytes, 1) for one in talks]
    titled = set(busiest(talks, MAX_TITLES))
    return Grid(
        pitch,
        round(max(map(len, labels)) * _LETTER) + 30,
        len(parties) * pitch,
        tuple((number + 1, label, HEAD + number * pitch + pitch // 2) for number, label in enumerate(labels)),
        tuple((number + 1, number * pitch + pitch // 2) for number in range(len(parties))),
        tuple(number * pitch for number in range(1, len(parties)) if _is_edge(parties, number)),
        tuple(
            Cell(
                one.server * pitch,
                HEAD + one.client * pitch,
                _level(one.bytes, min(sizes), max(sizes)),
                _title(one, parties) if one in titled else "",
            )
            for one in talks
        ),
        min(sizes),
        max(sizes),
        tuple(busiest(talks, MAX_PAIRS)),
    )


def busiest(talks: list[Talk], most: int) -> list[Talk]:
    """Return the talks with most bytes."""
    return sorted(talks, key=lambda one: (-one.bytes, one.client, one.server))[:most]


def shorten(party: Party) -> str:
    """Return a name that fits beside a row: 10.1.1.100 to .108."""
    first, separator, last = party.name.partition(" to ")
    mark = "." if "." in first else ":"
    if separator and first.rpartition(mark)[0] == last.rpartition(mark)[0]:
        return units.plain(f"{first} to {mark}{last.rpartition(mark)[2]}", LABEL)
    return units.plain(party.name, LABEL)


def _is_edge(parties: tuple[Party, ...], number: int) -> bool:
    before, after = parties[number - 1].role, parties[number].role
    return "node" in (before, after) if before != after else number % 5 == 0


def _level(size: int, least: int, most: int) -> int:
    low, high = math.log(least), math.log(most)
    part = (math.log(max(size, 1)) - low) / (high - low) if high - low > 0.01 else 1.0
    return min(int(part * LEVELS), LEVELS - 1) + 1


def _title(one: Talk, parties: tuple[Party, ...]) -> str:
    client, server = (units.plain(parties[end].name, 64) for end in (one.client, one.server))
    return f"{client} → {server}: {units.size(one.bytes)}"
