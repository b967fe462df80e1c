"""Which host holds the provisioning VM's disks: prevents two running VMs, and a new state next to an old one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.errors import Refused
from appliance.shared.records import from_json


@dataclass(frozen=True)
class Holder:
    """The host that has the newest disks; ``generation`` grows each time they move to another host.

    ``sequence`` is the number of the last snapshot that was begun there. ``cluster_uuid``: of the cluster
    (shared/identity.py); empty in records of earlier versions.
    """

    holder: str
    generation: int
    sequence: int = 0
    cluster_uuid: str = ""


@dataclass(frozen=True)
class HostView:
    """State of the VM as seen on one admin host.

    Attributes:
        reachable: the host answered.
        running: the VM runs there.
        holder: the host's record of who has the disks.
    """

    name: str
    reachable: bool = True
    running: bool = False
    holder: Holder | None = None


def read_holder(data: bytes | None) -> Holder | None:
    """Parse a record; None if there is none.

    Raises:
        RecordError: it is invalid. The host may have the newest disks: it must not count as none.
    """
    return None if data is None else from_json(Holder, data)


def newest_holder(views: Sequence[HostView]) -> Holder | None:
    """Return the record with the highest generation, and of these the one with the highest sequence number."""
    found = (view.holder for view in views if view.holder)
    return max(found, key=lambda holder: (holder.generation, holder.sequence), default=None)


def running_host(views: Sequence[HostView]) -> str:
    """Return the host that runs the VM; empty if none does.

    Of several it is the one that has the disks: an interrupted migration can leave a machine on the other.
    """
    running = [view.name for view in views if view.running]
    newest = newest_holder(views)
    return newest.holder if newest and newest.holder in running else next(iter(running), "")


def check_source(source: str, views: Sequence[HostView]) -> None:
    """Raise Refused if the VM cannot move away from ``source``: more runs than the machine that has the disks."""
    for view in views:
        if view.running and view.name != source:
            raise Refused(
                f"the VM also runs on {view.name}", hint=f"two must never run: `sms vm stop --host {view.name}`"
            )
    newest = newest_holder(views)
    # Its memory is older than the disks: it must neither move nor be resumed by a rollback.
    if newest and newest.holder != source and any(view.running for view in views):
        raise Refused(
            f"an interrupted migration left a machine on {source}, and the VM's disks are on {newest.holder}",
            hint=f"`sms vm stop --host {source}`",
        )


def follow_known(holder: Holder, newest: Holder | None, known: int) -> Holder:
    """Return the record to write, with a generation above the highest ``known`` one if the records were lost.

    Args:
        newest: the newest record.
        known: from snapshots and histories; in general not above that of the newest record.
    """
    lost = known > (newest.generation if newest else 0)
    return replace(holder, generation=max(holder.generation, known + 1)) if lost else holder


def name_cluster(holder: Holder, newest: Holder | None, cluster_uuid: str) -> Holder:
    """Return the record to write, with the UUID of the cluster.

    Args:
        newest: the newest record.
        cluster_uuid: of the lease; empty: not known.

    Raises:
        Refused: the newest disks are those of another cluster.
    """
    before = newest.cluster_uuid if newest else ""
    if before and cluster_uuid and before != cluster_uuid:
        raise Refused(
            f"the VM's disks are of another cluster of this name, {before}; this one is {cluster_uuid}",
            hint="give one of them another name, or another provisioning.directory; if it is one cluster: "
            f"sms overlay identity {before}",
        )
    return replace(holder, cluster_uuid=cluster_uuid or before)


def stale_generation(name: str, record: Holder | None) -> int:
    """Return the generation of disks that were left on a host, by its own record, before newer ones arrive there."""
    if record is None:
        return 0
    return record.generation if record.holder == name else max(record.generation - 1, 0)


def has_disks(here: str, views: Sequence[HostView]) -> bool:
    """Return whether ``here`` has the disks and no reachable host runs the VM."""
    newest = newest_holder(views)
    return newest is not None and newest.holder == here and not any(view.running for view in views)


def check_disks_here(here: str, views: Sequence[HostView]) -> None:
    """Raise Refused if the VM runs on another host, or another host has its disks: the folder may be shared."""
    _refuse_running(here, views)
    newest = newest_holder(views)
    if any(view.running for view in views) or newest is None or newest.holder == here:
        return
    raise Refused(f"the VM's disks are on {newest.holder}", hint=f"use `--host {newest.holder}`")


def _refuse_running(here: str, views: Sequence[HostView]) -> None:
    newest = newest_holder(views)
    for view in views:
        if view.running and view.name != here:
            if newest and newest.holder != view.name:
                raise Refused(
                    f"a machine of the VM runs on {view.name}, and its disks are on {newest.holder}",
                    hint=f"`sms vm stop --host {view.name}`",
                )
            raise Refused(
                f"the VM runs on {view.name} already",
                hint=f"`sms vm migrate {here}` moves it; `sms vm stop --host {view.name}` stops it",
            )


def may_start(here: str, views: Sequence[HostView], *, shared: bool = False, force: bool = False) -> Holder:
    """Return the record to write before the VM starts on ``here``.

    Args:
        views: of every admin host, including ``here``.
        shared: ``here`` shares the folder of the host that has the disks.
        force: start although unreachable hosts may have newer disks, or the host that had them is lost.

    Raises:
        Refused: the VM runs on another host, or its disks are or may be there.
    """
    _refuse_running(here, views)
    others = [view for view in views if view.name != here]
    newest = newest_holder(views)
    silent = [view.name for view in views if not view.reachable]
    if newest is None:
        if silent and not force:
            raise Refused(
                f"no reachable host has the VM's disks, and {', '.join(silent)} is unreachable",
                hint="make it reachable; `--force` starts with empty disks here",
            )
        return Holder(here, 2 if silent else 1)
    rivals = {view.holder.holder for view in views if view.holder and view.holder.generation == newest.generation}
    if len(rivals) > 1 and not force:
        raise Refused(
            f"{' and '.join(sorted(rivals))} both claim the VM's disks",
            hint="`sms vm start --force` on the one that has the right ones",
        )
    if newest.holder == here and len(rivals) == 1:
        # Disks of the first generation were never on another host.
        if not silent or newest.generation == 1:
            return newest
        if not force:
            raise Refused(
                f"the VM's disks have been on more than one host, and {', '.join(silent)} is unreachable: "
                "it may have newer ones",
                hint=f"make it reachable; `--force` starts with the disks of {here}",
            )
    elsewhere = next((view for view in others if view.name == newest.holder), None)
    lost = elsewhere is None or not elsewhere.reachable
    if (shared and not lost) or force:
        return Holder(here, newest.generation + 1)
    if lost:
        raise Refused(
            f"the VM's disks are on {newest.holder}, which is unreachable",
            hint=f"if it is permanently lost, `--force` starts with the disks of {here}, which may be older",
        )
    raise Refused(
        f"the VM's disks are on {newest.holder}",
        hint=f"`sms vm start --host {newest.holder}`, or `sms vm migrate {here}` to move them",
    )
