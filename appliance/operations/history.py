"""The history of a host: one JSON line per event, for the user and for runs that resume an interrupted one."""

from __future__ import annotations

import getpass
import os
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.env import Event
from appliance.plan.migration.under_way import BEGUN
from appliance.shared.history import make_event


def note(cluster: Cluster, host: Host, verb: str, event: str, **facts: Any) -> None:
    """Append an event to the history of ``host``; it is synced to the disk when this returns.

    The beginning of a verb also has who began it: user, machine and process id.

    Raises:
        SmsError: it could not be written.
    """
    if event == BEGUN:
        facts |= {"by": _user(), "on": cluster.env.hosts.here, "process": os.getpid()}
    cluster.env.history.append(host, str(cluster.places.history), make_event(host.name, verb, event, facts))


def read_history(cluster: Cluster, host: Host) -> list[Event]:
    """Return the events on ``host``, the oldest first; lines truncated by a crash are skipped."""
    return cluster.env.history.read(host, str(cluster.places.history))


def _user() -> str:
    """Return the name of the user who runs this, also by sudo."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # the user has no account here
        return str(os.getuid())
