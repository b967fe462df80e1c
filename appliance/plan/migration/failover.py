"""Decisions of a failover: which snapshot it starts from, and where an interrupted one resumes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.plan.snapshots.retention import RESTORE
from appliance.shared.order import order
from appliance.units import read_time

HistoryLine = Mapping[str, Any]
"""One line of the history of a host."""


def choose_snapshot(snapshots: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the newest verified snapshot; None when there is none.

    A snapshot that a restore kept is never chosen: somebody replaced that state on purpose.
    """
    good = [one for one in snapshots if one["health"].get("ok") and not one["reason"].startswith(RESTORE)]
    return max(good, key=order, default=None)


SIGN_S = 10.0
"""A sign of life that is so many seconds older than a snapshot shows that no guard ran any more."""


@dataclass(frozen=True)
class Loss:
    """What a failover lost, in seconds.

    ``lost_s``: from the snapshot to the last sign of life of the failed host, or at most this if there is no sign.
    ``dead_s``: from that sign until the services answered; None without one.
    """

    lost_s: float
    dead_s: float | None


def measure_loss(*, taken: float, alive: float, began: float, served: float) -> Loss:
    """Return the loss of a failover. All times are Unix times in seconds.

    Args:
        taken: of the snapshot; with a shared overlay ``alive``.
        alive: of the last sign of life of the failed host; 0 if there is none.
        began: the begin of the failover, when the failed host did not answer.
        served: when the services answered.
    """
    if not alive or alive < taken - SIGN_S:
        return Loss(round(max(began - taken, 0.0), 1), None)
    alive = max(alive, taken)  # a snapshot is one, too
    return Loss(round(alive - taken, 1), round(max(served - alive, 0.0), 1))


RUN_EVENTS = ("started", "done", "up", "arrived")
"""Events that show that the services container has run on this host: an earlier failover is no longer open."""


@dataclass(frozen=True)
class OpenFailover:
    """An unfinished failover: the hosts it takes over from, and its progress.

    ``generation`` is the highest known when it began; ``taken`` is the time of its snapshot, ``began`` that of the
    failover (Unix time, seconds). ``overlay``: inode of the overlay that the snapshot replaces; 0: there was none;
    None: not known.
    """

    old: tuple[str, ...]
    shared: bool
    snapshot: int | None
    restored: bool = False
    generation: int = 0
    taken: float = 0.0
    began: float = 0.0
    overlay: int | None = None

    def has_restored(self, overlay: int | None) -> bool:
        """Return whether its snapshot is in place, by the inode of the present overlay, 0 without one.

        The replacement may have been the last thing that it did: its line of the history is then missing.
        """
        replaced = self.overlay is not None and overlay not in (None, self.overlay)
        return not self.shared and bool(overlay) and (self.restored or (self.snapshot is not None and replaced))


def has_newer(snapshots: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Return whether there is a newer snapshot to start from than that of an interrupted failover.

    It shows that the services container has run since; so does one that remains where that snapshot was pruned.
    """
    newest, chosen = choose_snapshot(snapshots), [one for one in snapshots if one["number"] == number]
    return newest is not None and (not chosen or order(newest) > order(chosen[0]))


def find_open_failover(history: Iterable[HistoryLine], *, top: int, holds_lease: bool) -> OpenFailover | None:
    """Return the unfinished failover in the history of a host; None without one, or when it was superseded.

    Args:
        top: the highest generation known now.
        holds_lease: whether this host holds the lease: a higher generation is then this failover's own.
    """
    found: OpenFailover | None = None
    for line in history:
        event, failover = line.get("event"), line.get("verb") == "failover"
        if event in RUN_EVENTS:
            found = None
        elif failover and event == "begun":
            old, snapshot = line.get("old"), line.get("snapshot")
            names = tuple(name for name in old if isinstance(name, str)) if isinstance(old, list | tuple) else ()
            generation, overlay = line.get("generation"), line.get("overlay")
            found = OpenFailover(
                names,
                bool(line.get("shared")),
                snapshot if isinstance(snapshot, int) else None,
                generation=generation if isinstance(generation, int) else 0,
                taken=read_time(line.get("taken")),
                began=read_time(line.get("at")),
                overlay=overlay if isinstance(overlay, int) else None,
            )
        elif failover and event == "restored" and found:
            found = replace(found, restored=True)
    return found if found and (holds_lease or top <= found.generation) else None
