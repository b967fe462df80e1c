"""The record of which engine has the services, on every admin host; ``engines/deployed.py`` writes it."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.shared.records import RecordError, from_json

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
        services: those that the engine runs.
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
    services: tuple[str, ...] = ()

    @property
    def has_services(self) -> bool:
        """Whether the engine runs the services, or is to."""
        return self.phase != STOPPED


def record_path(cluster: Cluster) -> str:
    """Return the path of the record on an admin host."""
    return f"{cluster.places.deployments}.json"


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


def refuse_deployed(cluster: Cluster, host: Host) -> None:
    """Check that no engine has services of the cluster: an admin host that starts them, too, is a second writer.

    Raises:
        Refused: one has them.
    """
    record = read_deployed(cluster, host)
    if record is None or not record.has_services:
        return
    both = sorted({one.name for one in cluster.services} & set(record.services))
    if both:
        raise Refused(
            f"{record.engine} has {', '.join(both)}",
            hint="`sms migrate --to container` moves them back with their state; `sms deploy stop` stops them there",
        )
