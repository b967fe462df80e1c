"""``sms overlay pull``: fetch a snapshot from the Borg repository or from another host."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.lease import raise_lease
from appliance.operations.preflight import lock_host
from appliance.operations.snapshots.list import Snapshot, foreign_error, foreign_note, list_snapshots
from appliance.operations.snapshots.push import choose_targets
from appliance.operations.snapshots.transfer import Offsite, Sent, send
from appliance.plan.snapshots.offsite import BORG, LATEST, find
from appliance.plan.snapshots.offsite import archive_name as archive_name  # for the cli, too
from appliance.shared.identity import Identity, assume, uuid_of
from appliance.shared.order import order


@dataclass(frozen=True)
class Pulled:
    """A fetched snapshot: its number at the source and here, and whether it was present here already."""

    source: str
    snapshot: int
    number: int
    present: bool
    bytes: int


@dataclass(frozen=True)
class Remote:
    """The verified snapshots of the cluster elsewhere, oldest first, and those of other clusters of this name.

    ``unknown``: which cluster this host is of is not known.
    """

    snapshots: list[Snapshot]
    foreign: list[Snapshot]
    unknown: bool = False


def list_remote(cluster: Cluster, host: Host, source: str, identity: Identity) -> Remote:
    """List the verified snapshots of the repository or another host.

    Args:
        identity: of the cluster as ``host`` knows it.

    Raises:
        ConfigError, Busy, Refused, SmsError, Unreachable: they cannot be listed.
    """
    if source == BORG:
        offsite = Offsite(cluster, host)
        identity = replace(identity, hosts=tuple(admin.name for admin in cluster.site.admin_hosts))
        every = [manifest for manifest, _ in offsite.open()]
        if not offsite.exists:
            raise Refused(
                f"there is no repository {offsite.repository.url}",
                hint="`sms overlay push --to borg` creates it; is its disk mounted?",
            )
    else:
        choose_targets(cluster, host.name, [source], option="--from")
        listing = list_snapshots(cluster, cluster.host(source))
        every = [one for one in (*listing.snapshots, *listing.foreign) if one["health"].get("ok")]
    every.sort(key=order)
    identity = assume(identity, every)
    own = [one for one in every if identity.owns(one)]
    return Remote(own, [one for one in every if not identity.owns(one)], not identity.uuid)


def find_remote(remote: Remote, source: str, selector: str) -> Snapshot:
    """Return the snapshot that a number, an archive name, a uuid prefix or ``latest`` selects.

    Raises:
        Refused: there is none, or more than one.
    """
    there = remote.snapshots
    found = find(selector, there)
    other = remote.foreign if selector == LATEST else find(selector, remote.foreign)
    if other and (not found or (remote.unknown and selector == LATEST)):
        raise foreign_error(other, source)
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


def pull(cluster: Cluster, host: Host, source: str, selector: str, *, dry_run: bool = False) -> Pulled:
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
        listing = list_snapshots(cluster, host)
        remote = list_remote(cluster, host, source, listing.identity)
        one = find_remote(remote, source, selector)
        if note := foreign_note(remote.foreign, source):
            cluster.env.progress.report(note)
        here = [local for local in listing.snapshots if local["health"].get("ok")]
        same = next((local["number"] for local in here if local["uuid"] == one["uuid"]), 0)
        if not dry_run and not cluster.vm:  # the next snapshot of the VM's state sorts after all others in the store
            with lock_host(cluster, host):
                note = raise_lease(host, cluster, one["generation"], cluster_uuid=uuid_of(one))
            if note:
                cluster.env.progress.report(note)
        if same or dry_run:
            return Pulled(source, one["number"], same, bool(same), 0)
        sent: Sent
        if offsite:
            sent = offsite.pull(one, cluster.env.progress)
        else:
            sent = send(cluster, cluster.host(source), one["number"], host)
    return Pulled(source, one["number"], int(sent.name), sent.present, sent.bytes)
