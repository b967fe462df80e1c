"""Snapshots of the VM's state disk in a store of their own, like those of the overlay; the VM keeps running.

``sms vm snapshot`` keeps both disks on the host, to go back to. These hold the state only, are small because they share
chunks, and are pushed elsewhere. A cluster ``of_vm`` is passed to all functions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import Snapshot, check_request, list_snapshots, store
from appliance.operations.snapshots.pull import list_remote
from appliance.operations.snapshots.push import site_targets
from appliance.operations.snapshots.transfer import Offsite
from appliance.operations.vm.snapshot import copy_running
from appliance.operations.vm.snapshots import assign_place, cluster_uuid
from appliance.operations.vm.vm import check_programs, find_running, lock_vm_everywhere, tidy, view_hosts
from appliance.plan.snapshots.offsite import BORG
from appliance.plan.vm.holder import check_disks_here, newest_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.lease import LAST_RAISING
from appliance.shared.order import order
from appliance.shared.records import RecordError, from_json, to_json
from appliance.tools import files
from appliance.tools.qemu import check_header
from appliance.tools.space import SPARE_BYTES, need_space, query_used

COPY_S = 4 * 3600
UNCHANGED = "unchanged.json"
"""Record beside the snapshots: of which disk the newest one is a copy, if the VM was off."""


@dataclass(frozen=True)
class StoppedDisk:
    """The state disk of a VM that is off, and the UUID of the snapshot that was taken of it.

    ``disk``: device, inode, size and times of modification and change, which differ once it was written or replaced.
    """

    disk: str
    uuid: str


def has_vm(cluster: Cluster, host: Host) -> bool:
    """Return whether the host runs the VM, or has its disks.

    Raises:
        Refused: a host's record of who has the disks is invalid.
    """
    if find_running(cluster, host):
        return True
    newest = newest_holder(view_hosts(cluster, host))
    return newest is not None and newest.holder == host.name


def vm_since(cluster: Cluster, host: Host) -> float:
    """Return since when the VM runs on the host, in Unix seconds; 0 if it is not known, such as of one that is off."""
    running = find_running(cluster, host)
    return running.since if running else 0.0


def raise_above_copies(cluster: Cluster, host: Host) -> str:
    """Raise the generation of the record of who has the disks above copies elsewhere that are newer than all here.

    The record and the store were lost then, and the VM was started with other disks: their snapshots would count as
    the older ones, and be pruned first. Return a note if it was raised, else an empty text.

    Raises:
        Busy, SmsError, Unreachable: a target of the site cannot be queried.
    """
    listing = list_snapshots(cluster, host)
    here = {one["uuid"] for one in listing.snapshots}
    newest = max(map(order, listing.snapshots), default=None)
    ahead: list[Snapshot] = []
    for target in site_targets(cluster, host.name):
        if target == BORG:
            there = [manifest for manifest, _ in Offsite(cluster, host, listing.identity).open()]
        else:
            there = list_remote(cluster, host, target, listing.identity).snapshots
        ahead += [one for one in there if one["uuid"] not in here and (newest is None or order(one) > newest)]
    top = max((one["generation"] for one in ahead if one["generation"] <= LAST_RAISING), default=-1)
    if top < 0:
        return ""
    with lock_vm_everywhere(cluster, host):
        holder = newest_holder(view_hosts(cluster, host))
        if holder is None or holder.holder != host.name or holder.generation > top:
            return ""
        raised = replace(holder, generation=top + 1)
        host.write(str(VmPlaces(cluster.site).holder), to_json(raised), mode=0o600)
    return (
        f"copies elsewhere are of generation {top}, which this host did not know; its snapshots are of {top + 1} from "
        "now on: `sms vm restore --from` restores one of those, if they are what was lost"
    )


def take_vm_state(cluster: Cluster, host: Host, *, reason: str = "", if_changed: bool = False) -> Snapshot | None:
    """Take a snapshot of the VM's state disk: copied while the VM runs, checked, every byte read again.

    Args:
        if_changed: return None where the VM is off and the disk is that of the newest snapshot.

    Raises:
        Busy: another run is at work on the VM.
        Refused: the VM or its disks are on another host, there is no disk, or not enough space.
        SmsError: it could not be taken, or is damaged; nothing of it is left.
    """
    check_programs(host)
    part = f"{store(cluster)}.part"
    with cluster.env.locks.hold(host, lock_path(cluster), "another run works on snapshots of the VM's state"):
        remove_copy(host, part)  # of a run that was killed
        try:
            copied = _copy_disk(cluster, host, part, if_changed=if_changed)
            if not copied:
                return None
            request = {
                "store": store(cluster),
                "overlay": f"{part}/state.raw",
                "lock": "",  # the copy is only this run's
                "method": "delta",
                "facts": {
                    "cluster": cluster.label,
                    "cluster_uuid": cluster_uuid(cluster, host),
                    "host": host.name,
                    "generation": copied.facts["generation"],
                    "image": {"key": copied.image},
                    "slurm_cluster": cluster.site.cluster,
                },
                "copied": copied.facts,
                "reason": reason,
                **check_request(cluster),
            }
            taken: Snapshot = cluster.env.agents.call(host, "take", request, cluster.env.progress)["snapshot"]
        finally:
            with suppress(SmsError):
                remove_copy(host, part)
        if not copied.facts["running"]:
            host.write(_stopped_path(cluster), to_json(StoppedDisk(copied.disk, taken["uuid"])), mode=0o600)
    return taken


def rehearse_vm_state(cluster: Cluster, host: Host) -> list[str]:
    """Check what a snapshot checks before it begins, and return its steps. Changes nothing.

    Raises:
        Refused: as ``take_vm_state``.
    """
    check_programs(host)
    where = VmPlaces(cluster.site)
    check_disks_here(host.name, view_hosts(cluster, host))
    _identify_disk(host, where)
    how = "while the VM runs; its file systems are frozen for some milliseconds"
    return [
        f"copy {where.state}" + (f", {how}" if find_running(cluster, host) else ": the VM is off"),
        f"check its file system, store what is new in {store(cluster)}, read all of it again, then commit it",
    ]


@dataclass(frozen=True)
class Copied:
    """A copy of the state disk, as ``state.raw``.

    ``facts``: fields of its snapshot's manifest. ``image``: digest of the manifest of the image that the VM's root
    belongs to. ``disk``: as in StoppedDisk.
    """

    facts: dict[str, Any]
    image: str
    disk: str


def _copy_disk(cluster: Cluster, host: Host, part: str, *, if_changed: bool) -> Copied | None:
    """Copy the state disk into the folder ``part``, with the VM's lock held only as long as its own disk is read."""
    where = VmPlaces(cluster.site)
    with lock_vm_everywhere(cluster, host):
        views = view_hosts(cluster, host)
        check_disks_here(host.name, views)
        there = list_snapshots(cluster, host)
        running = find_running(cluster, host) is not None
        if not running:
            tidy(cluster, host)
        disk = _identify_disk(host, where)
        newest = there.snapshots[-1]["uuid"] if there.snapshots and there.snapshots[-1]["health"].get("ok") else ""
        if if_changed and not running and newest and _read_stopped(cluster, host) == StoppedDisk(disk, newest):
            return None
        need = 2 * query_used(host, str(where.state)) + SPARE_BYTES
        hint = "`sms overlay prune --vm` removes old ones"
        need_space(host, store(cluster), need, "MiB free, a copy of the VM's state may take %d", hint=hint)
        known = [*there.snapshots, *there.foreign]
        generation, sequence = assign_place(host, where, newest_holder(views), known)
        facts = {"generation": generation, "sequence": sequence, "running": running, "found_by": ""}
        image = (host.read(str(where.root_image)) or b"").decode(errors="replace").strip()[:64]
        host.run("mkdir", "-p", "-m", "0700", str(PurePosixPath(part).parent), part)
        with cluster.env.progress.step("copy the state disk") as step:
            if running:
                taken, frozen_ms = copy_running(host, where, part, step, cluster.env.clock, ["state"])
                facts |= {"taken": round(taken, 3), "frozen_ms": round(frozen_ms, 1)}
                step.detail(f"frozen for {frozen_ms:.0f} ms")
            else:
                files.copy_sparse(host, str(where.state), f"{part}/state.qcow2", timeout=COPY_S)
    with cluster.env.progress.step("check its file system"):
        _convert(host, f"{part}/state.qcow2", f"{part}/state.raw")
    return Copied(facts, image, disk)


def _convert(host: Host, source: str, raw: str) -> None:
    """Convert a copy of the disk to a sparse file, and complete the journal of the file system in it.

    Raises:
        SmsError: it is damaged.
    """
    check_header(host, source)
    files.make_file(host, raw)
    host.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", source, raw, timeout=COPY_S)
    # If the guest agent did not freeze it, it is as after a power failure.
    checked = host.run("e2fsck", "-f", "-p", raw, ok=None, timeout=COPY_S)
    if checked.status & ~1:
        output = (checked.stdout or checked.stderr).decode(errors="replace").strip()[-400:]
        raise SmsError(f"the file system of the VM's state is damaged: {output}", hint="sms vm status")


def lock_path(cluster: Cluster) -> str:
    """Return the path of the lock of runs that copy the state disk from or to the store."""
    return f"/run/sms/{cluster.label}.snapshot.lock"


def remove_copy(host: Host, part: str) -> None:
    """Remove the folder of a copy that a run has made, or has left when it was killed."""
    host.run("rm", "-rf", "--one-file-system", "--", part, timeout=300)


def _identify_disk(host: Host, where: VmPlaces) -> str:
    found = host.run("stat", "-c", "%d %i %s %.9Y %.9Z", str(where.state), ok=None)
    if found.status:
        raise Refused(f"the VM has no disks on {host.name}", hint="`sms vm status` shows where they are")
    return found.text


def _stopped_path(cluster: Cluster) -> str:
    return f"{store(cluster)}/{UNCHANGED}"


def _read_stopped(cluster: Cluster, host: Host) -> StoppedDisk | None:
    """Return the record; None without one or if it cannot be read: a snapshot is taken then."""
    with suppress(RecordError):
        return from_json(StoppedDisk, host.read(_stopped_path(cluster)) or b"")
    return None
