"""The record of what is deployed to which engine, on all admin hosts: written before anything is done with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from appliance.engines.deploy import Bundle
from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.preflight import only_one
from appliance.progress import Progress
from appliance.shared.records import RecordError, from_json, to_json

APPLYING, DEPLOYED, STOPPING, STOPPED = "applying", "deployed", "stopping", "stopped"
"""Phases of a deployment. After an interruption ``applying`` and ``stopping`` are what the next run goes on with."""


@dataclass(frozen=True)
class Deployed:
    """Which engine has the services of the cluster.

    Attributes:
        engine: ``kubernetes`` or ``nomad``.
        phase: the services are the engine's unless it is ``stopped``.
        generation: number of the deployment, from 1; each with another content has the next one.
        digest: of what is deployed (``Bundle``); ``previous``: of what was before, or empty.
        at: Unix time of the phase; ``by``: admin host that wrote it.
        image, sif, signer: name of the image, SHA-256 of its SIF, and the key that has signed that.
    """

    engine: str
    phase: str
    generation: int
    digest: str
    previous: str
    at: float
    by: str
    image: str = ""
    sif: str = ""
    signer: str = ""

    @property
    def has_services(self) -> bool:
        """Whether the engine runs the services, or is to."""
        return self.phase != STOPPED


def record_path(cluster: Cluster) -> str:
    """Return the path of the record on an admin host."""
    return f"{cluster.places.deployments}.json"


def bundle_path(cluster: Cluster, digest: str) -> str:
    """Return the path of what was deployed, on an admin host."""
    return f"{cluster.places.deployments}/{digest}.json"


def lock_deployment(cluster: Cluster, host: Host) -> AbstractContextManager[None]:
    """Hold the lock under which services are deployed, moved to an engine, and stopped there.

    Raises:
        Busy: another run is at work.
    """
    path = f"{cluster.places.lock.parent}/{cluster.site.cluster}.deploy.lock"
    return only_one(host, path, f"another `sms deploy` is at work on {host.name}")


def read_deployed(cluster: Cluster, host: Host) -> Deployed | None:
    """Return the record on a host; None if there is none.

    Raises:
        Refused: it is unreadable.
    """
    data = host.read(record_path(cluster))
    try:
        return from_json(Deployed, data) if data is not None else None
    except RecordError as error:
        raise Refused(
            f"{host.name}: {record_path(cluster)} is unreadable: {error}",
            hint="copy it from another admin host; without one, remove it and run `sms deploy --engine ENGINE`",
        ) from error


def find_deployed(cluster: Cluster, host: Host) -> Deployed | None:
    """Return the newest record of all admin hosts that answer; None if none has one.

    Raises:
        Refused: one is unreadable.
    """
    found = [read_deployed(cluster, host)]
    for other in _others(cluster, host):
        try:
            found.append(read_deployed(cluster, other))
        except Unreachable:
            continue
    return max(filter(None, found), key=lambda one: (one.generation, one.at), default=None)


def _others(cluster: Cluster, host: Host) -> Iterator[Host]:
    for admin in cluster.site.admin_hosts:
        if admin.name != host.name:
            yield cluster.host(admin.name)


def write_deployed(cluster: Cluster, host: Host, record: Deployed, progress: Progress) -> None:
    """Write the record on a host and on the other admin hosts that answer.

    Raises:
        SmsError: it could not be written on ``host``.
    """
    data = to_json(record)
    host.write(record_path(cluster), data, mode=0o600)
    for other in _others(cluster, host):
        try:
            other.write(record_path(cluster), data, mode=0o600)
        except SmsError as error:
            progress.report(f"warning: {other.name} does not know of this deployment: {error.message}")


def write_bundle(cluster: Cluster, host: Host, bundle: Bundle) -> None:
    """Keep what is deployed on the admin hosts that answer: status compares with it, a rollback applies it."""
    data, path = to_json(bundle), bundle_path(cluster, bundle.digest)
    host.write(path, data, mode=0o600)
    for other in _others(cluster, host):
        try:
            other.write(path, data, mode=0o600)
        except SmsError:
            continue  # it has no record either, or an older one


def read_bundle(cluster: Cluster, host: Host, digest: str) -> Bundle | None:
    """Return what was deployed, from the host or another admin host; None if none has it, or it is damaged."""
    if not digest:
        return None
    for one in (host, *_others(cluster, host)):
        try:
            data = one.read(bundle_path(cluster, digest))
            found = from_json(Bundle, data) if data is not None else None
        except (Unreachable, RecordError):
            continue
        if found is not None and found.digest == digest:
            return found
    return None


def begin(cluster: Cluster, host: Host, bundle: Bundle, record: Deployed, progress: Progress) -> None:
    """Record a deployment before anything of it is done: first what it is, then that it is being applied."""
    write_bundle(cluster, host, bundle)
    write_deployed(cluster, host, record, progress)
    keep = {f"{one}.json" for one in (record.digest, record.previous) if one}
    for one in (host, *_others(cluster, host)):
        try:
            for name in one.run("ls", "-A", str(cluster.places.deployments), ok=None).text.split():
                if name.endswith(".json") and name not in keep:
                    one.remove(f"{cluster.places.deployments}/{name}")
        except SmsError:
            continue


def set_phase(cluster: Cluster, host: Host, record: Deployed, phase: str, progress: Progress) -> Deployed:
    """Write the record with another phase, and return it."""
    changed = replace(record, phase=phase, at=time.time(), by=host.name)
    write_deployed(cluster, host, changed, progress)
    return changed
