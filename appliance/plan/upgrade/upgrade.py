"""The record of an upgrade in progress, the check for lost jobs, and the predicted outage. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.errors import SmsError
from appliance.shared.records import RecordError, from_json

STOPPING = "stopping"
"""The old image runs or is being stopped; the overlay is as it left it."""
LAYING = "laying"
"""The overlay is being replaced with a snapshot; the replacement may or may not be complete."""
STARTING = "starting"
"""The new image is being started or runs; it may have changed the overlay."""
SWITCHING = "switching"
"""A second instance with the new image takes over on a copy of the overlay, which replaces the overlay at the end.

Which file the overlay is decides: the old image must not be started on the one that the new image has used.
"""
RETURNING = "returning"
"""Rollback: the new image is being stopped and the old overlay restored; the restore may or may not be complete."""
RESTORED = "restored"
"""Rollback: the overlay is as the old image left it, which can be started."""
DONE = "done"
RETURNED = "returned"

ENDED = (DONE, RETURNED)
STOP_S, KEEP_S, START_S = 5.0, 1.0, 7.0
"""Assumed durations of stop, snapshot and start in seconds, if none was measured; the lab needs less."""
COMMANDS = 90
"""Number of sequential commands on the host during the outage.

With two admin hosts and no mirror: 13 of the stop, 8 of the records of its phases, 18 of the snapshot, 41 of the start,
and 6 (without systemd) to 14 for unit and guard, which are part of the measured outage.
"""


@dataclass(frozen=True)
class Side:
    """The old or the new image on the host."""

    path: str
    key: str
    sha256: str


@dataclass(frozen=True)
class Upgrade:
    """Record of an upgrade.

    Attributes:
        snapshot: taken while the container ran.
        kept: snapshot of the overlay as the old image left it, or right before a switch (0: not yet taken).
        lay: snapshot that replaces the overlay first (0: none).
        jobs: state by id, before the upgrade.
        stopped_at: Unix time when services began to stop, 0 before.
        outage_s: seconds from then until every service answered.
        inode: of the overlay that the old image uses, before a switch.
    """

    cluster: str
    phase: str
    before: Side
    after: Side
    began: float
    snapshot: int = 0
    kept: int = 0
    lay: int = 0
    jobs: dict[str, str] = field(default_factory=dict)
    stopped_at: float = 0.0
    outage_s: float = 0.0
    why: str = ""
    inode: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is finished or rolled back."""
        return self.phase in ENDED

    def at(self, phase: str, **changes: Any) -> Upgrade:
        """Return a copy in ``phase``."""
        return replace(self, phase=phase, **changes)


def read_upgrade(data: bytes | None, cluster: str) -> Upgrade | None:
    """Parse the record of the last upgrade; None if there was none.

    Raises:
        SmsError: it is invalid, or belongs to another cluster.
    """
    if data is None:
        return None
    try:
        found = from_json(Upgrade, data)
    except RecordError as error:
        raise SmsError(
            f"the record of the last upgrade is invalid: {error}", hint="check which image runs, then remove it"
        ) from error
    if found.cluster != cluster:
        raise SmsError(
            f"the record of the last upgrade belongs to cluster {found.cluster}",
            hint="do two clusters share a state folder?",
        )
    return found


def predict_outage(
    history: Iterable[Mapping[str, Any]], start_parts: Mapping[str, float], round_trip_s: float = 0.0
) -> tuple[float, str]:
    """Return the predicted outage in seconds, and what the prediction is based on.

    Args:
        history: events on the host, oldest first.
        start_parts: durations of the parts of the start in the rehearsal; empty without one.
        round_trip_s: duration of an empty command on the host: over SSH a large part of the outage.
    """
    stop_s, keep_s, start_s, basis = STOP_S, KEEP_S, START_S, "by default values"
    commands_s = COMMANDS * round_trip_s
    for line in history:
        if (line.get("verb"), line.get("event")) == ("upgrade", "done") and "outage_s" in line:
            parts = line.get("parts", {})
            stop_s, keep_s = float(parts.get("stop", stop_s)), float(parts.get("snapshot", keep_s))
            start_s, basis, commands_s = float(line["outage_s"]) - stop_s - keep_s, "by the last upgrade", 0.0
        elif (line.get("verb"), line.get("event")) == ("stop", "stopped"):
            stop_s = float(line.get("seconds", stop_s))
            basis = "by the last stop and default values" if basis == "by default values" else basis
    if start_parts:
        start_s, basis = sum(start_parts.values()), "by the rehearsal and the last stop"
        commands_s = COMMANDS * round_trip_s
    return stop_s + keep_s + start_s + commands_s, basis
