"""``sms overlay pull``: a snapshot comes back from the Borg repository or from another host."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import Snapshot, list_snapshots
from appliance.operations.snapshots.push import choose_targets
from appliance.operations.snapshots.transfer import BORG, Offsite, Sent, send
from appliance.plan.snapshots.offsite import archive_name, find, order
from appliance.progress import Progress


@dataclass(frozen=True)
class Pulled:
    """A snapshot that has come: its number there and here, and whether it was here before."""

    source: str
    snapshot: int
    number: int
    present: bool
    bytes: int


def list_elsewhere(cluster: Cluster, host: Host, source: str) -> list[Snapshot]:
    """Verified snapshots that the repository or another host has, the oldest first.

    Raises:
        ConfigError, Busy, Refused, SmsError, Unreachable: they cannot be told.
    """
    if source == BORG:
        offsite = Offsite(cluster, host)
        known = offsite.open()
        if not offsite.exists:
            raise Refused(
                f"there is no repository {offsite.repository.url}",
                hint="`sms overlay push --to borg` makes it; is its disk mounted?",
            )
        return sorted((manifest for manifest, _ in known), key=order)
    choose_targets(cluster, host.name, [source], option="--from")
    listing = list_snapshots(cluster, cluster.host(source))
    return [one for one in listing.snapshots if one["health"].get("ok")]


def name_of(one: Snapshot) -> str:
    """The name that a snapshot has in the repository."""
    return archive_name(one)


def find_elsewhere(there: list[Snapshot], source: str, wanted: str) -> Snapshot:
    """The one that is meant.

    Raises:
        Refused: there is none, or more than one.
    """
    found = find(wanted, there)
    if not found:
        names = ", ".join(str(one["number"]) for one in there[-5:]) or "none"
        raise Refused(
            f"{source} has no snapshot {wanted}",
            hint=f"the newest there: {names}; `sms overlay pull --from {source} --list` shows all",
        )
    if len(found) > 1:
        raise Refused(
            f"{source} has {len(found)} snapshots {wanted}",
            hint=f"name one: {', '.join(archive_name(one) for one in found)}",
        )
    return found[0]


def pull(
    cluster: Cluster, host: Host, source: str, wanted: str, progress: Progress, *, dry_run: bool = False
) -> Pulled:
    """Bring a snapshot into the store of ``host``, checked like one that is taken.

    Args:
        source: ``borg`` or an admin host.
        wanted: ``latest``, a number, an archive's name, or the beginning of a uuid.

    Raises:
        ConfigError, Busy, Refused, SmsError, Unreachable: why it does not count here.
    """
    with ExitStack() as stack:
        offsite = Offsite(cluster, host) if source == BORG else None
        if offsite and not dry_run:
            offsite.one_at_a_time(stack)
        one = find_elsewhere(list_elsewhere(cluster, host, source), source, wanted)
        here = [mine for mine in list_snapshots(cluster, host).snapshots if mine["health"].get("ok")]
        same = next((mine["number"] for mine in here if mine["uuid"] == one["uuid"]), 0)
        if same or dry_run:
            return Pulled(source, one["number"], same, bool(same), 0)
        sent: Sent
        if offsite:
            sent = offsite.pull(one, progress)
        else:
            sent = send(cluster, cluster.host(source), one["number"], host, progress)
    return Pulled(source, one["number"], int(sent.name), sent.present, sent.bytes)
