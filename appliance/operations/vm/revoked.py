"""The list of revoked certificates on every admin host: the VM may be started from any of them, at any time later."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.site.issued import SERIAL, Revocation, Revocations, add_revoked, read_revoked
from appliance.operations.vm.client import tls_folder
from appliance.shared.records import RecordError, from_json, to_json


def merge_revoked(cluster: Cluster) -> dict[str, str]:
    """Add the lists of all admin hosts to the one of this machine, and write the union to each of them.

    A list only grows, so that an older copy takes nothing back. Returns a message for each host whose list could not
    be read or written, by its name; its file is left as it is.

    Raises:
        ConfigError: the list of this machine cannot be read.
        SmsError: it cannot be written.
    """
    folder = tls_folder(cluster)
    problems: dict[str, str] = {}
    hosts = [cluster.host(admin.name) for admin in cluster.site.admin_hosts]
    with cluster.env.pool(8) as pool:
        found = list(pool.map(lambda host: _read(cluster, host), hosts))
    add_revoked(folder, [each for one in found if isinstance(one, list) for each in one])
    union = read_revoked(folder)
    serials = {each.serial for each in union}
    for host, one in zip(hosts, found, strict=True):
        if isinstance(one, str):
            problems[host.name] = one
        elif {each.serial for each in one} != serials:
            try:
                host.write(str(cluster.places.revoked), to_json(Revocations(union)), mode=0o600)
            except SmsError as error:
                problems[host.name] = f"the list of revoked certificates on {host.name}: {error.message}"
    return problems


def _read(cluster: Cluster, host: Host) -> list[Revocation] | str:
    """Return the list of a host, or why it cannot be read."""
    path = str(cluster.places.revoked)
    try:
        found = from_json(Revocations, host.read(path) or b"{}").revoked
    except (SmsError, RecordError) as error:
        return f"the list of revoked certificates, {path} on {host.name}, cannot be read: {error}"
    if not all(SERIAL.fullmatch(each.serial) for each in found):
        return f"the list of revoked certificates, {path} on {host.name}, is invalid"
    return found
