"""Results that the agent sends as JSON objects, as the caller reads them."""

from __future__ import annotations

from typing import Any, TypedDict, Union

ALIVE_S = 30.0
"""Seconds after which an agent whose caller waits shows again that it is alive, whatever it does."""


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


class _Snapshot(TypedDict):
    """What every snapshot has, also one that was only verified."""

    number: int


class _Newest(TypedDict):
    number: int
    taken: float


class _Text(TypedDict):
    text: str
    at: float


class Fields(TypedDict, total=False):
    """Fields of all messages and results of agents, which have one meaning each; others are not used by a caller.

    An agent on another host is checked by it before anything relies on what it reports.
    """

    kind: str
    # Progress and problems
    text: str
    done: int
    total: int
    rows: list[dict[str, Any]]
    message: str
    hint: str
    status: int
    busy: bool
    # Results
    snapshot: _Snapshot
    snapshots: list[_Snapshot]
    broken: Union[dict[str, str], list[int]]
    identity: dict[str, Any]
    stored_bytes: int
    free_bytes: int
    freed_bytes: int
    sent_bytes: int
    bytes: int
    size: int
    number: int
    count: int
    chunks: int
    present: Union[bool, int]
    seconds: float
    now: float
    generations: list[int]
    unnamed: int
    damage: list[str]
    damaged: list[int]
    newest: Union[_Newest, None]
    texts: dict[str, _Text]
    paths: list[PathResult]
    notes: list[str]
    counts: dict[str, int]
    lines: int
    removed: list[int]
    swept: bool
    was: list[int]
    folder: str
    staged: str
    found: str
    side: str
    state: str
    # Migrations and adoptions
    trouble: str
    used: int
    digests: str
    neighbours: list[str]
    connections: int
    file_bytes: int
    files: Union[int, list[dict[str, Any]]]
    cut: list[str]
    lost: int
    mac: str
    pid: int
    state_new: str
    stop_s: float
    frozen_s: float
    took_s: float
    down_s: float
    up_s: float
