"""What a failover starts from, and where one that was interrupted goes on. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.plan.retention import RESTORE

Line = Mapping[str, Any]
"""A line of the history."""


def choose_snapshot(snapshots: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The verified snapshot with the highest generation of the lease, the newest of them; None when there is none.

    What a restore has kept is a state that somebody wanted to get away from, and never chosen.
    """
    good = [one for one in snapshots if one["health"].get("ok") and not one["reason"].startswith(RESTORE)]
    return max(good, key=lambda one: (one["generation"], one["taken"]), default=None)


@dataclass(frozen=True)
class Begun:
    """A failover that has not come to its end: what it takes over from, and how far it is."""

    old: tuple[str, ...]
    shared: bool
    snapshot: int | None
    restored: bool = False


def find_begun(history: Iterable[Line]) -> Begun | None:
    """The failover that a host's history leaves open; None when there is none."""
    begun: Begun | None = None
    for line in history:
        event = line.get("event")
        if event in ("started", "done"):
            begun = None
        elif line.get("verb") == "failover" and event == "begun":
            snapshot = line.get("snapshot")
            begun = Begun(tuple(line.get("old", ())), bool(line.get("shared")), snapshot)
        elif line.get("verb") == "failover" and event == "restored" and begun:
            begun = Begun(begun.old, begun.shared, line.get("snapshot"), restored=True)
    return begun
