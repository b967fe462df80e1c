"""Writes what is deployed to which engine to all admin hosts, before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from appliance.engines.deploy import Bundle
from appliance.errors import SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.deployed import Deployed, read_deployed, record_path
from appliance.shared.records import RecordError, from_json, to_json

Found = TypeVar("Found")
UNUSED = """\
cd -- "$1" || exit 0
for name in *.json; do
  case $name in "$2" | "$3") ;; *) rm -f -- "$name" ;; esac
done
"""
"""Shell: remove the bundles in folder $1 but $2 and $3."""


def bundle_path(cluster: Cluster, digest: str) -> str:
    """Return the path of what was deployed, on an admin host."""
    return f"{cluster.places.deployments}/{digest}.json"


def _on_others(cluster: Cluster, host: Host, act: Callable[[Host], Found]) -> dict[str, Found | SmsError]:
    """Do the same on the other admin hosts at once, so that one that is off costs little; return results or errors."""
    names = [admin.name for admin in cluster.site.admin_hosts if admin.name != host.name]

    def attempt(name: str) -> Found | SmsError:
        try:
            return act(cluster.host(name))
        except (Unreachable, CommandError) as error:
            return error

    with cluster.env.pool(max(1, len(names))) as pool:
        return dict(zip(names, pool.map(attempt, names), strict=True))


def find_deployed(cluster: Cluster, host: Host) -> Deployed | None:
    """Return the newest record of all admin hosts that answer; None if none has one.

    Raises:
        Refused: one is unreadable.
    """
    others = _on_others(cluster, host, lambda one: read_deployed(cluster, one))
    found = [read_deployed(cluster, host), *(one for one in others.values() if isinstance(one, Deployed))]
    return max(filter(None, found), key=lambda one: (one.generation, one.at), default=None)


def _write_all(cluster: Cluster, host: Host, write: Callable[[Host], None]) -> None:
    """Write on a host, then on the others.

    Raises:
        SmsError: it could not be written on ``host``.
    """
    write(host)
    for name, error in _on_others(cluster, host, write).items():
        if error is not None:
            cluster.env.progress.report(f"warning: {name} does not know of this deployment: {error.message}")


def read_bundle(cluster: Cluster, host: Host, digest: str) -> Bundle | None:
    """Return what was deployed, from the host or another admin host; None if none has it, or it is damaged."""

    def read(one: Host) -> Bundle | None:
        try:
            data = one.read(bundle_path(cluster, digest))
            found = from_json(Bundle, data) if data is not None else None
        except RecordError:
            return None
        return found if found is not None and found.digest == digest else None

    if not digest:
        return None
    if found := read(host):
        return found
    others = _on_others(cluster, host, read).values()
    return next((one for one in others if isinstance(one, Bundle)), None)


def begin(cluster: Cluster, host: Host, bundle: Bundle, record: Deployed) -> None:
    """Record a deployment before anything of it is done: first what it is, then that it is being applied.

    What is deployed is kept: status compares with it, a rollback applies the one before.
    """
    content, head = to_json(bundle), to_json(record)

    def write(one: Host) -> None:
        one.write(bundle_path(cluster, bundle.digest), content, mode=0o600)
        one.write(record_path(cluster), head, mode=0o600)
        kept = (f"{record.digest}.json", f"{record.previous}.json")
        one.run("sh", "-c", UNUSED, "unused", str(cluster.places.deployments), *kept)

    _write_all(cluster, host, write)


def set_phase(cluster: Cluster, host: Host, record: Deployed, phase: str) -> Deployed:
    """Write the record with another phase, and return it."""
    changed = replace(record, phase=phase, at=cluster.env.clock.time(), by=host.name)
    data = to_json(changed)

    def write(one: Host) -> None:
        one.write(record_path(cluster), data, mode=0o600)

    _write_all(cluster, host, write)
    return changed
