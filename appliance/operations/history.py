"""What verbs did on a host, one JSON line each: for people afterwards, and for runs that go on with what one began."""

from __future__ import annotations

import json
import time
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster

APPEND = """\
umask 077
mkdir -p -m 0700 "$(dirname "$1")" && line=$(cat) || exit
# Who was to say it may have been killed.
[ "${#line}" = "$2" ] || exit 1
# A crash may have cut the last line short.
[ -z "$(tail -c 1 "$1" 2>/dev/null)" ] || echo >>"$1"
printf '%s\\n' "$line" >>"$1" && sync "$1"
"""
"""Shell: a line of $2 characters of standard input to the end of file $1, in one write: lines never mix."""


def note(cluster: Cluster, host: Host, verb: str, event: str, **facts: Any) -> None:
    """Write down what happened on ``host``, for good before this returns.

    Raises:
        CommandError: it could not be written.
    """
    line = {"at": round(time.time(), 3), "host": host.name, "verb": verb, "event": event, **facts}
    text = json.dumps(line, ensure_ascii=True).encode()
    host.run("sh", "-c", APPEND, "note", str(cluster.places.history), str(len(text)), input=text)


def read_history(cluster: Cluster, host: Host) -> list[dict[str, Any]]:
    """What happened on ``host``, the oldest first; a line that a crash cut short is left out."""
    lines = []
    for text in (host.read(str(cluster.places.history)) or b"").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
