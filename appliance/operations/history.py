"""The history of a host: one JSON line per event, for the user and for runs that resume an interrupted one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.shared.history import AppendLine, make_event
from appliance.tools import agent

Event = Mapping[str, object]
"""A line of the history: ``at``, ``host``, ``verb``, ``event``, and facts that depend on these two."""


def note(cluster: Cluster, host: Host, verb: str, event: str, **facts: Any) -> None:
    """Append an event to the history of ``host``; it is synced to the disk when this returns.

    Raises:
        SmsError: it could not be written.
    """
    agent.perform(host, AppendLine(str(cluster.places.history), make_event(host.name, verb, event, facts)))


def read_history(cluster: Cluster, host: Host) -> list[Event]:
    """Return the events on ``host``, the oldest first; lines truncated by a crash are skipped."""
    lines: list[Event] = []
    for text in (host.read(str(cluster.places.history)) or b"").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
