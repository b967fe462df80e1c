"""``sms overlay pull``: fetch a snapshot from the Borg repository or from another host."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.lease import raise_lease
from appliance.operations.preflight import lock_host
from appliance.operations.snapshots.list import Snapshot, list_snapshots
from appliance.operations.snapshots.push import choose_targets
from appliance.operations.snapshots.transfer import Offsite, Sent, send
from appliance.plan.snapshots.offsite import BORG, find
from appliance.plan.snapshots.offsite import archive_name as archive_name  # for the cli, too
from appliance.progress import Progress
from appliance.shared.order import order


@dataclass(frozen=True)
class Pulled:
    """A fetched snapshot: its number at the source and here, and whether it was present here already."""

    source: str
    snapshot: int
    number: int
    present: bool
    bytes: int


def list_remote(cluster: Cluster, host: Host, source: str) -> list[Snapshot]:
    """List the verified snapshots of the repository or another host, oldest first.

    Raises:
        ConfigError, Busy, Refused, SmsError, Unreachable: they cannot be listed.
    """
    if source == BORG:
        offsite = Offsite(cluster, host)
        known = offsite.open()
        if not offsite.exists:
            raise Refused(
                f"there is no repository {offsite.repository.url}",
                hint="`sms overlay push --to borg` creates it; is its disk mounted?",
            )
        return sorted((manifest for manifest, _ in known), key=order)
    choose_targets(cluster, host.name, [source], option="--from")
    listing = list_snapshots(cluster, cluster.host(source))
    return [one for one in listing.snapshots if one["health"].get("ok")]


def find_remote(there: list[Snapshot], source: str, selector: str) -> Snapshot:
    """Return the snapshot that a number, an archive name, a uuid prefix or ``latest`` selects.

    Raises:
        Refused: there is none, or more than one.
    """
    found = find(selector, there)
    if not found:
        names = ", ".join(str(one["number"]) for one in there[-5:]) or "none"
        raise Refused(
            f"{source} has no snapshot {selector}",
            hint=f"the newest there: {names}; `sms overlay pull --from {source} --list` shows all",
        )
    if len(found) > 1:
        raise Refused(
            f"{source} has {len(found)} snapshots {selector}",
            hint=f"name one: {', '.join(archive_name(one) for one in found)}",
        )
    return found[0]


def pull(
    cluster: Cluster, host: Host, source: str, selector: str, progress: Progress, *, dry_run: bool = False
) -> Pulled:
    """Fetch a snapshot into the store of ``host``; it is checked as a new snapshot is.

    The lease of ``host`` is raised above the snapshot's generation before, so that snapshots taken later are newer.

    Args:
        source: ``borg`` or an admin host.
        selector: ``latest``, a number, an archive name, or the beginning of a uuid.

    Raises:
        ConfigError, Busy, Refused, SmsError, Unreachable: it was not committed here.
    """
    with ExitStack() as stack:
        offsite = Offsite(cluster, host) if source == BORG else None
        if offsite and not dry_run:
            offsite.lock_repository(stack)
        one = find_remote(list_remote(cluster, host, source), source, selector)
        here = [local for local in list_snapshots(cluster, host).snapshots if local["health"].get("ok")]
        same = next((local["number"] for local in here if local["uuid"] == one["uuid"]), 0)
        if not dry_run:
            with lock_host(cluster, host):
                raise_lease(host, cluster, one["generation"])
        if same or dry_run:
            return Pulled(source, one["number"], same, bool(same), 0)
        sent: Sent
        if offsite:
            sent = offsite.pull(one, progress)
        else:
            sent = send(cluster, cluster.host(source), one["number"], host, progress)
    return Pulled(source, one["number"], int(sent.name), sent.present, sent.bytes)
