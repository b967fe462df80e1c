"""The history of a host: one JSON line per event, for the user and for runs that resume an interrupted one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster

Event = Mapping[str, object]
"""A line of the history: ``at``, ``host``, ``verb``, ``event``, and facts that depend on these two."""
APPEND = """\
umask 077
mkdir -p -m 0700 "$(dirname "$1")" && line=$(cat) || exit
# The writer may have been killed.
[ "${#line}" = "$2" ] || exit 1
# A crash may have truncated the last line.
[ -z "$(tail -c 1 "$1" 2>/dev/null)" ] || echo >>"$1"
printf '%s\\n' "$line" >>"$1" && sync "$1"
"""
"""Shell: append a line of $2 characters from standard input to file $1 in one write, so that lines never mix."""


def note(cluster: Cluster, host: Host, verb: str, event: str, **facts: Any) -> None:
    """Append an event to the history of ``host``; it is synced to the disk when this returns.

    Raises:
        CommandError: it could not be written.
    """
    line = {"at": round(time.time(), 3), "host": host.name, "verb": verb, "event": event, **facts}
    text = json.dumps(line, ensure_ascii=True).encode()
    host.run("sh", "-c", APPEND, "note", str(cluster.places.history), str(len(text)), input=text)


def read_history(cluster: Cluster, host: Host) -> list[Event]:
    """Return the events on ``host``, the oldest first; lines truncated by a crash are skipped."""
    lines: list[Event] = []
    for text in (host.read(str(cluster.places.history)) or b"").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
