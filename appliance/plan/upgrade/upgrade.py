"""An upgrade as it is written down while it goes on, what becomes of jobs across it, and how long it may take. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import SmsError

STOPPING = "stopping"
"""What was before runs, or is being stopped; its overlay is as it left it."""
LAYING = "laying"
"""A snapshot is being laid in the overlay's place: it may be there or not."""
STARTING = "starting"
"""What comes after is being started, or runs; the overlay is its own now."""
RETURNING = "returning"
"""It is being stopped, and the overlay of before put back: it may be there or not."""
RESTORED = "restored"
"""What was before may be started: the overlay is as it left it."""
DONE = "done"
RETURNED = "returned"

ENDED = (DONE, RETURNED)
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT")
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
LOST = ("NODE_FAIL", "BOOT_FAIL")
STOP_S, KEEP_S, START_S = 5.0, 1.0, 7.0
"""What an upgrade's parts take where none was measured: the services of the lab end and begin in less."""
COMMANDS = 50
"""What is run on the host, one after the other, while services are away."""


@dataclass(frozen=True)
class Side:
    """An image on the host, before or after."""

    path: str
    key: str
    sha256: str


@dataclass(frozen=True)
class Upgrade:
    """An upgrade, as far as it has come.

    ``snapshot`` was taken while the appliance ran, ``kept`` of the stopped overlay (0: not yet); ``lay`` is one that is
    put in the overlay's place first (0: none). ``jobs``: state by id, before. ``stopped_at``: Unix time when services
    began to stop, 0 while they serve; ``outage_s``: from then until every service answered.
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

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.phase in ENDED

    def text(self) -> bytes:
        """As it lies in its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def at(self, phase: str, **changes: Any) -> Upgrade:
        """The same, come to ``phase``."""
        return replace(self, phase=phase, **changes)


def read_upgrade(data: bytes | None, cluster: str) -> Upgrade | None:
    """What a file says of the last upgrade; None where there was none.

    Raises:
        SmsError: it cannot be read, or is another cluster's.
    """
    if data is None:
        return None
    try:
        said = json.loads(data)
        sides = {name: Side(**said[name]) for name in ("before", "after")}
        found = Upgrade(**{**said, **sides})
    except (ValueError, TypeError, KeyError) as error:
        raise SmsError(
            f"the note of the last upgrade cannot be read: {error}", hint="look at what runs, then remove it"
        ) from error
    if found.cluster != cluster:
        raise SmsError(f"the note of the last upgrade is of cluster {found.cluster}", hint="do two share one folder?")
    return found


def read_ended(log: str) -> dict[str, str]:
    """Jobs that completed, by lines of slurmctld's log such as ``_job_complete: JobId=5 done``; arrays by 12_3(15)."""
    return dict.fromkeys(re.findall(r"job_complete: JobId=([0-9]+(?:_[0-9]+)?)[ (]", log), "COMPLETED")


def is_active(state: str) -> bool:
    """Whether a job has not come to its end."""
    return state in RUNS or state in WAITS


def lost_jobs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Jobs that did not come through, each with what became of it.

    One that ended by itself meanwhile, well or badly, has come through; Slurm tells of it for some minutes.
    """
    lost = []
    for job, state in before.items():
        now = after.get(job)
        if not is_active(state) or (now is None and state == "COMPLETING"):
            continue
        if now is None:
            lost.append(f"job {job} was {state} and is not known any more")
        elif now in LOST or (state in RUNS and now in WAITS):
            lost.append(f"job {job} was {state} and is {now}")
    return lost


def active_jobs(jobs: Mapping[str, str]) -> dict[str, str]:
    """Those that run or wait."""
    return {job: state for job, state in jobs.items() if is_active(state)}


def count_jobs(jobs: Mapping[str, str]) -> str:
    """How many run and how many wait, in words."""
    running = sum(state in RUNS for state in jobs.values())
    waiting = sum(state in WAITS for state in jobs.values())
    return f"{running} running, {waiting} waiting"


def predict_outage(
    history: Iterable[Mapping[str, Any]], start_parts: Mapping[str, float], round_trip_s: float = 0.0
) -> tuple[float, str]:
    """Seconds that an upgrade may take from stop to answer, and what that is known from.

    Args:
        history: what verbs did on the host, the oldest first.
        start_parts: the parts of a start that was measured just now, in a rehearsal; empty where there was none.
        round_trip_s: until a command that does nothing has ended on the host: over SSH it is much of the outage.
    """
    stop_s, keep_s, start_s, known = STOP_S, KEEP_S, START_S, "nothing was measured yet"
    way_s = COMMANDS * round_trip_s
    for line in history:
        if (line.get("verb"), line.get("event")) == ("upgrade", "done") and "outage_s" in line:
            parts = line.get("parts", {})
            stop_s, keep_s = float(parts.get("stop", stop_s)), float(parts.get("snapshot", keep_s))
            start_s, known, way_s = float(line["outage_s"]) - stop_s - keep_s, "as the last upgrade", 0.0
        elif (line.get("verb"), line.get("event")) == ("stop", "stopped"):
            stop_s = float(line.get("seconds", stop_s))
            known = "as the last stop and what is usual" if known.startswith("nothing") else known
    if start_parts:
        start_s, known = sum(start_parts.values()), "as the rehearsal and the last stop"
        way_s = COMMANDS * round_trip_s
    return stop_s + keep_s + start_s + way_s, known
