"""Who moves the services container at the moment, from where to where, in which step; or who was killed in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.shared.migration import MoveMark
from appliance.units import format_time

BEGUN = "begun"
"""Event of the history with which a verb begins what it has the lock of the host for."""
STEPS = {
    "read": "the overlay is copied, all services run",
    "copy": "the overlay is copied, all services run",
    "stopping": "services with state are stopped, their last changes are copied",
    "ended": "the services are stopped",
    "placed": "services with state are stopped, the copy is complete",
    "started": "services with state are stopped, an isolated instance starts on the target",
    "released": "the addresses are being switched",
    "up": "the services run on the target",
    "given": "the services run on the target, the source cleans up",
}
"""By the state of an agent (``MoveMark``)."""


@dataclass(frozen=True)
class Move:
    """A migration, an adoption or a switch to a second instance, as one of its hosts knows it; or another long change.

    Attributes:
        verb: of sms.
        source, target: hosts; the same where only one is changed.
        host: that knows of it.
        state: of the agent there, empty before it has begun to copy.
        step: the same in words.
        under_way: an agent or a run of sms has the lock of the host; else it was killed.
        since: Unix time; 0 if it is not known.
        by, on, process: user, machine and process id of the run of sms; empty and 0 if they are not known.
    """

    verb: str
    source: str
    target: str
    host: str
    state: str
    step: str
    under_way: bool
    since: float = 0.0
    by: str = ""
    on: str = ""
    process: int = 0

    @property
    def text(self) -> str:
        """What it is, in one sentence."""
        way = f" from {self.source} to {self.target}" if self.source != self.target else f" on {self.source}"
        since = f" since {format_time(self.since)}" if self.since else ""
        now = f"is under way{since}" if self.under_way else f"was interrupted on {self.host}"
        began = f"; begun by {self.by} on {self.on}, process {self.process}" if self.on else ""
        return f"`sms {self.verb}`{way} {now}{f': {self.step}' if self.step else ''}{began}"

    @property
    def hint(self) -> str:
        """What to do."""
        target = f" {self.target}" if self.verb == "migrate" else ""
        again = f"`sms {self.verb}{target}` again completes it or rolls it back"
        if not self.under_way:
            return again
        stop = f"; if it hangs: `kill {self.process}` on {self.on} ends it in order, {again}" if self.on else ""
        return f"wait for it, `sms journal` shows its steps{stop}"


def find_move(
    host: str, mark: MoveMark | None, history: Sequence[Mapping[str, object]], *, under_way: bool
) -> Move | None:
    """Return what is under way on a host, or was killed there; None if that is not known, or a moment's work.

    Args:
        mark: of an agent there.
        history: of the host, the oldest first.
        under_way: whether somebody has the lock of the host.
    """
    if not mark:
        last = history[-1] if history and under_way else {}
        if last.get("event") != BEGUN:
            return None
        source, target = str(last.get("from", host)), str(last.get("to", host))
        return Move(str(last.get("verb")), source, target, host, "", "", True, **_starter(last))
    request = mark.request
    verb, peer = str(request.get("verb", "migrate")), str(request.get("peer", "?"))
    source, target = (peer, host) if mark.side == "arrive" else (host, peer)
    begun = next((line for line in reversed(history) if line.get("verb") == verb and line.get("event") == BEGUN), {})
    step = STEPS.get(mark.state, mark.state)
    return Move(verb, source, target, host, mark.state, step, under_way, **_starter(begun))


def _starter(line: Mapping[str, object]) -> dict[str, Any]:
    """Return when and by whom something was begun, of its line of the history."""
    at, process = line.get("at"), line.get("process")
    return {
        "since": float(at) if isinstance(at, int | float) else 0.0,
        "by": str(line.get("by", "")),
        "on": str(line.get("on", "")),
        "process": process if isinstance(process, int) else 0,
    }
