"""What a failover starts from, and where one that was interrupted goes on. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.plan.snapshots.retention import RESTORE

Line = Mapping[str, Any]
"""A line of the history."""


def choose_snapshot(snapshots: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The verified snapshot with the highest generation of the lease, the newest of them; None when there is none.

    What a restore has kept is a state that somebody wanted to get away from, and never chosen.
    """
    good = [one for one in snapshots if one["health"].get("ok") and not one["reason"].startswith(RESTORE)]
    return max(good, key=lambda one: (one["generation"], one["taken"]), default=None)


ENDS = ("started", "done", "up", "arrived")
"""Events after which the appliance has run on this host: whatever had been begun there is of the past."""


@dataclass(frozen=True)
class Begun:
    """A failover that has not come to its end: what it takes over from, and how far it is.

    ``generation`` is the highest that was known when it began; ``taken`` is when its snapshot was (Unix seconds).
    """

    old: tuple[str, ...]
    shared: bool
    snapshot: int | None
    restored: bool = False
    generation: int = 0
    taken: float = 0.0


def find_begun(history: Iterable[Line], *, top: int, mine: bool) -> Begun | None:
    """The failover that a host's history leaves open; None when there is none, or others have gone on since.

    Args:
        top: the highest generation that is known now.
        mine: whether this host holds the lease: then a higher one is this failover's own.
    """
    begun: Begun | None = None
    for line in history:
        event, failover = line.get("event"), line.get("verb") == "failover"
        if event in ENDS:
            begun = None
        elif failover and event == "begun":
            old, snapshot = line.get("old"), line.get("snapshot")
            names = tuple(name for name in old if isinstance(name, str)) if isinstance(old, list | tuple) else ()
            shared, generation, taken = bool(line.get("shared")), line.get("generation"), line.get("taken")
            begun = Begun(
                names,
                shared,
                snapshot if isinstance(snapshot, int) else None,
                generation=generation if isinstance(generation, int) else 0,
                taken=float(taken) if isinstance(taken, int | float) else 0.0,
            )
        elif failover and event == "restored" and begun:
            begun = replace(begun, restored=True)
    return begun if begun and (mine or top <= begun.generation) else None
