"""Results that the agent sends as JSON objects, as the caller reads them."""

from __future__ import annotations

from typing import TypedDict


class PathResult(TypedDict, total=False):
    """A path that was restored or extracted: ``kind`` in the snapshot, image where the snapshot has no entry.

    ``entries`` and ``bytes`` were copied, ``removed`` is the number of entries replaced; a rehearsal has none of them.
    """

    path: str
    kind: str
    entries: int
    bytes: int
    removed: int


class PathResults(TypedDict):
    """The paths of one request, and notes for people."""

    paths: list[PathResult]
    notes: list[str]
