"""Which changes of the site's files services apply by a reload, which by a restart, and which only by a new start."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.catalog import Service
from appliance.catalog.model import SeedFile
from appliance.plan.overlay.seed import OF_SERVICES, SECRET_PLACES, secrets_of

Kind = Literal["reload", "restart"]
SERVICES = "/etc/sms/services.json"
SUPERVISOR = "/etc/sms/supervisord.conf"
TLS = "/etc/sms/tls/"
RUN_BY = ("run", "user", "groups", "capabilities", "setup", "running", "needs")
"""What of a service's entry in services.json its next start reads; the rest is read at each use."""
MEASURED = 5
"""Restarts of the history that a prediction is from."""
MARGIN, LEAST_S = 1.5, 0.1
"""A predicted outage is the longest measured one times this, and at least so many seconds: it is not to be exceeded."""


@dataclass(frozen=True)
class FileChange:
    """A file that differs in the running container.

    ``before`` and ``after`` are None where it is secret or did not exist. ``edited``: somebody changed it there.
    """

    path: str
    before: str | None
    after: str | None
    edited: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that are removed (-) and added (+), without empty ones; none if the file is secret."""
        if self.before is None or self.after is None:
            return ()
        diff = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return tuple(line for line in list(diff)[2:] if line[0] in "+-" and line[1:].strip())


@dataclass(frozen=True)
class Action:
    """What a service does to apply changed files; ``why``: their paths, or that an earlier run has left it."""

    service: str
    kind: Kind
    why: tuple[str, ...]


def plan_actions(
    services: Sequence[Service], changes: Iterable[FileChange], pending: Mapping[str, Kind]
) -> tuple[Action, ...]:
    """Return the actions in the order in which services start: the least that applies all changes.

    Args:
        pending: actions that an interrupted run has left.
    """
    kinds: dict[str, Kind] = dict(pending)
    why: dict[str, list[str]] = {name: ["an interrupted run"] for name in pending}
    for change in changes:
        for name, kind in _actions_of(services, change):
            if kind == "restart" or name not in kinds:
                kinds[name] = kind
            why.setdefault(name, []).append(change.path)
    return tuple(
        Action(service.name, kinds[service.name], tuple(why[service.name]))
        for service in services
        if service.name in kinds
    )


def _actions_of(services: Sequence[Service], change: FileChange) -> list[tuple[str, Kind]]:
    if change.path == SERVICES:
        return [(name, "restart") for name in _changed_services(services, change)]
    for service in services:
        for file in service.files:
            if file.path == change.path:
                kind = _kind(file, change)
                return [(service.name, kind)] if kind else []
    for service in services:
        if service.site_files and change.path.startswith(f"{service.site_files.path}/"):
            name = change.path.rpartition("/")[2]
            return [(service.name, "reload" if re.search(service.site_files.reloaded, name) else "restart")]
    states = [(path, service.name) for service in services for path in service.state]
    if within := [one for one in states if change.path.startswith(f"{one[0]}/")]:
        return [(max(within, key=lambda one: len(one[0]))[1], "restart")]
    if change.path.startswith(TLS):
        return [(service.name, "restart") for service in services if service.role == "files"]
    names = {name for name in OF_SERVICES if SECRET_PLACES[name][0] == change.path}
    # /etc/hosts and accounts are read at each use.
    return [(service.name, "restart") for service in services if names & {*secrets_of(service)}]


def _kind(file: SeedFile, change: FileChange) -> Kind | None:
    """Return what a change of a service's file needs; None: nothing."""
    if file.change == "none":
        return None
    if change.before is None or change.after is None:
        return "restart"
    lines = change.lines
    if file.template:  # of the catalogue: comments begin with #. Those of other files are unknown, as are empty lines
        lines = tuple(line for line in lines if not line[1:].lstrip().startswith("#"))
        if not lines:
            return None
    elif change.before == change.after:
        return None
    applied = all(re.search(file.reloaded, line[1:].strip()) for line in lines) if lines else not file.reloaded
    if file.change == "reload" and applied:
        return "reload"
    return "restart"


def _changed_services(services: Sequence[Service], change: FileChange) -> list[str]:
    """Return the services whose next start differs."""
    before, after = (_entries(text) for text in (change.before, change.after))
    changed = [
        service.name
        for service in services
        if any(before.get(service.name, {}).get(key) != after.get(service.name, {}).get(key) for key in RUN_BY)
    ]
    if any(entry.get("sync") != after.get(name, {}).get("sync") for name, entry in before.items()):
        changed += [service.name for service in services if service.role == "files" and service.name not in changed]
    return changed


def _entries(text: str | None) -> dict[str, dict[str, object]]:
    """Return the services of a services.json; of one that is invalid none: all of them are restarted."""
    try:
        entries = json.loads(text or "{}")["services"]
        return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def predict_restart(history: Iterable[Mapping[str, object]], service: Service) -> float:
    """Return how many seconds a restart of a service takes at most: by the last ones, without any by the catalogue."""
    seconds = [
        line["seconds"]
        for line in history
        if line.get("event") == "restarted" and line.get("service") == service.name and line.get("ok") is True
    ]
    measured = [value for value in seconds if isinstance(value, int | float)][-MEASURED:]
    return bound(measured) if measured else service.restart_s or float(service.stop_wait_s)


def bound(measured: Sequence[float]) -> float:
    """Return the seconds that an outage is predicted not to exceed, by measured ones."""
    return round(max(LEAST_S, MARGIN * max(measured)), 2)


def find_exceeded(bounds: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Return a message for each service whose measured outage was longer than its bound."""
    return [
        f"{name}: outage of {measured[name]:.2f} s, predicted were at most {limit:.2f} s"
        for name, limit in bounds.items()
        if measured.get(name, 0.0) > limit
    ]
