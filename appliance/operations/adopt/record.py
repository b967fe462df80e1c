"""The record of an adoption, on the admin host that got the services: what undo and finish need."""

from __future__ import annotations

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.plan.adopt.adoption import Adoption
from appliance.shared.records import RecordError, from_json, to_json


def record_path(cluster: Cluster) -> str:
    """Return the path of the record on an admin host."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.adopt.json"


def save_record(cluster: Cluster, host: Host, record: Adoption) -> None:
    """Write the record."""
    host.write(record_path(cluster), to_json(record), mode=0o600)


def find_record(cluster: Cluster) -> Adoption | None:
    """Return the newest record of all admin hosts that answer; None without one.

    Raises:
        Refused: there is none, and a host does not answer, which may have one.
        SmsError: one cannot be read.
    """
    names, silent = [host.name for host in cluster.site.admin_hosts], list[str]()

    def read(name: str) -> Adoption | None:
        try:
            return _read(cluster, cluster.host(name))
        except Unreachable:
            silent.append(name)
            return None

    with cluster.env.pool(len(names)) as pool:
        found = [one for one in pool.map(read, names) if one]
    if silent and not found:
        raise Refused(
            f"{', '.join(sorted(silent))} cannot be reached", hint="what is known of an adoption may be there only"
        )
    return max(found, key=lambda one: one.at, default=None)


def _read(cluster: Cluster, host: Host) -> Adoption | None:
    data = host.read(record_path(cluster))
    try:
        return from_json(Adoption, data) if data is not None else None
    except RecordError as error:
        raise SmsError(f"{host.name}: {record_path(cluster)}: {error}") from error
