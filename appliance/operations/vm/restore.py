"""``sms vm restore``: replace the VM's disks by those of a snapshot; the old disks become a snapshot themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.vm.snapshots import (
    NOTE,
    VmSnapshot,
    assign_place,
    cluster_uuid,
    default_name,
    find_snapshot,
    verify_folder,
)
from appliance.operations.vm.vm import (
    check_programs,
    find_running,
    finish_restore,
    lock_vm_everywhere,
    tidy,
    view_hosts,
)
from appliance.plan.vm.holder import check_disks_here, newest_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.tools import files
from appliance.tools.space import SPARE_BYTES, query_space, query_used


@dataclass(frozen=True)
class RestoredVm:
    """A finished restore. ``kept``: the snapshot with the disks from before."""

    host: str
    name: str
    kept: str
    taken: float


def restore_vm(cluster: Cluster, host: Host, name: str) -> RestoredVm:
    """Replace the VM's disks by those of a snapshot. The old disks are kept as a snapshot.

    If it is interrupted before the disks are exchanged, nothing has changed; later, the next start, stop or restore
    completes it.

    Raises:
        Refused: the VM runs, there is no such snapshot, or not enough space.
        SmsError: the snapshot is damaged; nothing was changed.
    """
    check_programs(host)
    where = VmPlaces(cluster.site)
    with lock_vm_everywhere(cluster, host):
        snapshot = check_restore(cluster, host, name)
        tidy(cluster, host)
        with cluster.env.progress.step(f"verify {snapshot.name}"):
            verify_folder(host, f"{where.snapshots}/{snapshot.name}")
        with cluster.env.progress.step("copy it"):
            folder = f"{where.snapshots}/{snapshot.name}"
            try:
                _copy(host, where, folder)
            except SmsError:
                tidy(cluster, host)
                raise
        kept = exchange_disks(cluster, host)
        note(cluster, host, "vm restore", "restored", name=snapshot.name, kept=kept)
    return RestoredVm(host.name, snapshot.name, kept, snapshot.taken)


def _copy(host: Host, where: VmPlaces, folder: str) -> None:
    """Copy the disks of a snapshot beside those of the VM."""
    for disk in (where.root, where.state):
        beside = f"{where.disks}/{disk.stem}.restored"
        files.copy_sparse(host, f"{folder}/{disk.name}", beside, timeout=4 * 3600)
        host.run("sync", beside, timeout=4 * 3600)
    image = where.root_image.name
    if host.works("test", "-e", f"{folder}/{image}"):
        files.copy_sparse(host, f"{folder}/{image}", f"{where.disks}/{image}.restored", timeout=60)
    host.run("sync", "-f", str(where.disks), timeout=4 * 3600)


def check_restore(cluster: Cluster, host: Host, name: str) -> VmSnapshot:
    """Return the snapshot if it can be restored now; raise Refused otherwise."""
    where = VmPlaces(cluster.site)
    if find_running(cluster, host):
        raise Refused(f"the VM runs on {host.name}", hint=f"`sms vm stop --host {host.name}` first")
    check_disks_here(host.name, view_hosts(cluster, host))
    snapshot = find_snapshot(cluster, host, name)
    folder = f"{where.snapshots}/{snapshot.name}"
    have, need = query_space(host, str(where.disks)).free, query_used(host, folder)
    if have < need + SPARE_BYTES:
        raise Refused(
            f"{have >> 20} MiB are free, {need >> 20} are needed for a copy of the snapshot",
            hint="`sms vm snapshot --prune 3` removes old ones",
        )
    return snapshot


def exchange_disks(cluster: Cluster, host: Host) -> str:
    """Replace the disks by the ``.restored`` files beside them; return the snapshot that keeps the old ones.

    The caller holds every lock, and the VM does not run.
    """
    where = VmPlaces(cluster.site)
    now = cluster.env.clock.time()
    kept = f"before-restore-{default_name(now)}"
    with cluster.env.progress.step("exchange the disks") as step:
        generation, sequence = assign_place(host, where, newest_holder(view_hosts(cluster, host)))
        about = VmSnapshot(kept, round(now, 3), reason="the disks before a restore")
        about = replace(about, cluster_uuid=cluster_uuid(cluster, host))
        _exchange(host, where, replace(about, generation=generation, sequence=sequence))
        step.detail(f"the old disks are kept as snapshot {kept}")
    return kept


def _exchange(host: Host, where: VmPlaces, kept: VmSnapshot) -> None:
    """Record the exchange, then run it: after a crash the next run completes it."""
    files.make_folders(host, f"{where.snapshots}/{kept.name}")
    host.write(f"{where.snapshots}/{kept.name}/{NOTE}", kept.note(), mode=0o600)
    host.write(str(where.restore), kept.name.encode(), mode=0o600)
    finish_restore(host, where)
