"""``sms vm migrate``: move the VM to another admin host, live if both share the disks, else stopped and copied.

At any time exactly one host has the holder record with the highest generation, and only that host may start the VM. The
disks are copied and compared before the record changes; afterwards the source's disks are kept there as a snapshot.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.image.copy import DIGEST_S, HostFile, copy_file, remove_partial
from appliance.operations.vm.image import deliver_vm, fetch_vm, find_vm_image, make_current
from appliance.operations.vm.live import check_same_image, move_live
from appliance.operations.vm.snapshots import NOTE, VmSnapshot, default_name, list_folder
from appliance.operations.vm.start import StartOptions, VmNote, check_target, read_note, shares_disks, start_vm
from appliance.operations.vm.stop import stop_locked
from appliance.operations.vm.vm import DISKS, check_programs, find_running, find_vm, lock_vm_everywhere, view_hosts
from appliance.plan.vm.holder import Holder, check_source, newest_holder, read_holder, stale_generation
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.records import to_json
from appliance.tools import files
from appliance.tools.qemu import image_info
from appliance.tools.sealed import MANIFEST
from appliance.tools.sha256 import find_digest
from appliance.tools.space import SPARE_BYTES, query_space


@dataclass(frozen=True)
class MovePlan:
    """How the VM would move to another host. ``image``: key of the image to use; empty for the current one."""

    source: str
    target: str
    running: bool
    live: bool
    shared: bool
    copy_bytes: int
    free_mb: int
    image: str = ""
    image_host: str = ""


@dataclass(frozen=True)
class MovedVm:
    """A finished migration. ``paused_ms``: how long a live migration paused the VM."""

    source: str
    target: str
    running: bool
    live: bool
    copied_bytes: int
    paused_ms: float
    generation: int
    seconds: float


def plan_migrate_vm(cluster: Cluster, to: str, *, stopped: bool = False) -> MovePlan:
    """Check both hosts and return how the VM would move.

    Raises:
        Refused: the VM cannot move to this host.
    """
    source, target = find_vm(cluster, None), cluster.target(to)
    check_source(source.name, view_hosts(cluster, target))
    if source.name == target.name:
        raise Refused(f"the VM is on {to} already", hint="`sms vm status`")
    for host in (source, target):
        check_programs(host)
    where = VmPlaces(cluster.site)
    check_target(cluster, target)
    running = find_running(cluster, source) is not None
    shared = shares_disks(cluster, target, source.name)
    size = 0 if shared else files.size_of(source, str(where.root), str(where.state))
    free = query_space(target, str(where.disks)).free
    if free < size + SPARE_BYTES:
        raise Refused(
            f"{free >> 20} MiB are free on {to}, {size + SPARE_BYTES >> 20} are needed",
            hint="free space there, then run it again",
        )
    live = running and shared and not stopped
    written = read_note(cluster, source)
    key = _image_key(cluster, source, written, live=live)
    has, digest = find_vm_image(cluster, source, target, key)
    if live:
        check_same_image(written, digest)
    return MovePlan(source.name, to, running, live, shared, size, free >> 20, key, has.name)


def _image_key(cluster: Cluster, source: Host, written: VmNote, *, live: bool) -> str:
    """Return the key of the image to use after the move; empty for this machine's current one.

    A live migration keeps the image. Otherwise it is this machine's current one or, if it has none, the one that the
    source runs or ran last.
    """
    where = VmPlaces(cluster.site)
    if not live and (Path(where.current) / MANIFEST).is_file():
        return ""
    if live or written.key:
        return written.key
    root = image_info(source, str(where.root))
    return PurePosixPath(root.get("full-backing-filename") or "" if root else "").parent.name


def migrate_vm(cluster: Cluster, to: str, *, stopped: bool = False, timeout_s: float = 180) -> MovedVm:
    """Move the VM to another admin host, and start it there if it ran.

    Raises:
        Refused: the VM cannot move; nothing was changed.
        SmsError: the move failed; the host shown by `sms vm status` has intact disks, and a second run resumes.
    """
    began = cluster.env.clock.monotonic()
    target = cluster.target(to)
    paused = 0.0
    with lock_vm_everywhere(cluster, target):
        with cluster.env.progress.step("inspect both hosts") as step:
            plan = plan_migrate_vm(cluster, to, stopped=stopped)
            step.detail(f"{plan.source} to {plan.target}, " + ("live" if plan.live else "stopped"))
        source = cluster.target(plan.source)
        newest = newest_holder(view_hosts(cluster, target))
        generation = (newest.generation if newest else 0) + 1
        holder = Holder(to, generation, cluster_uuid=newest.cluster_uuid if newest else "")
        if plan.image and plan.image_host == source.name:
            fetch_vm(cluster, source, plan.image)
        if plan.live:
            paused = move_live(cluster, source, target, holder)
        else:
            stop_locked(cluster, source, timeout_s=timeout_s)
            _transfer_disks(cluster, source, target, plan, holder)
        note(cluster, target, "vm migrate", "moved", source=source.name, live=plan.live, generation=generation)
    if plan.running and not plan.live:
        start_vm(cluster, target, StartOptions(image=plan.image))
    took = round(cluster.env.clock.monotonic() - began, 1)
    return MovedVm(source.name, to, plan.running, plan.live, plan.copy_bytes, paused, generation, took)


def _transfer_disks(cluster: Cluster, source: Host, target: Host, plan: MovePlan, holder: Holder) -> None:
    """Copy the disks to the target, write the holder record, then keep the source's disks as a snapshot."""
    where = VmPlaces(cluster.site)
    image = deliver_vm(cluster, target, chosen=plan.image)
    files.make_folders(target, str(where.disks), str(where.snapshots))
    if not plan.shared:
        with ExitStack() as undo:
            for disk in DISKS:
                path, beside = f"{where.disks}/{disk}.qcow2", f"{where.disks}/{disk}.arrived"
                undo.callback(target.remove, beside)
                undo.callback(remove_partial, target, beside)  # the VM goes on with the source's disk
                found = HostFile(source, path, find_digest(source, path, timeout=DIGEST_S))
                copy_file(cluster.env, found, target, beside, f"the disk {disk}")
            generation = stale_generation(target.name, read_holder(target.read(str(where.holder))))
            _keep_as_snapshot(cluster, target, "moved over", prefix="before-arrival", generation=generation)
            for disk in DISKS:
                target.run("mv", "-T", "--", f"{where.disks}/{disk}.arrived", f"{where.disks}/{disk}.qcow2")
            if digest := source.read(str(where.root_image)):
                target.write(str(where.root_image), digest, mode=0o600)
            target.run("sync", "-f", str(where.disks), timeout=300)
            undo.pop_all()
    # From here on the target's disks are the current ones.
    target.write(str(where.holder), to_json(holder), mode=0o600)
    make_current(cluster, target, image.path)
    if plan.shared:
        return
    source.write(str(where.holder), to_json(holder), mode=0o600)
    with cluster.env.progress.step(f"keep the disks of {source.name} as a snapshot") as step:
        reason = f"moved to {target.name}"
        step.detail(_keep_as_snapshot(cluster, source, reason, prefix="before-move", generation=holder.generation - 1))


def _keep_as_snapshot(cluster: Cluster, host: Host, reason: str, *, prefix: str, generation: int) -> str:
    """Turn a host's disks into a snapshot. Returns its name; empty if the host had no disks.

    Args:
        generation: under which the disks were written last.
    """
    where = VmPlaces(cluster.site)
    present = [path for path in (where.root, where.state, where.root_image) if host.works("test", "-e", str(path))]
    if not {where.root, where.state} & set(present):
        return ""
    now = cluster.env.clock.time()
    kept = f"{prefix}-{default_name(now)}"
    key = (host.read(str(where.root_image)) or b"").decode(errors="replace").strip()[:64]
    sequence = max((one.sequence for one in list_folder(host, where)), default=0) + 1
    files.make_folders(host, f"{where.snapshots}/{kept}")
    # First: a folder without it is not listed.
    about = VmSnapshot(kept, round(now, 3), reason=reason, key=key, generation=generation, sequence=sequence)
    holder = read_holder(host.read(str(where.holder)))
    about = replace(about, cluster_uuid=holder.cluster_uuid if holder else "")
    host.write(f"{where.snapshots}/{kept}/{NOTE}", about.note(), mode=0o600)
    # One command: it ends on its own if this process is killed.
    host.run("mv", "-t", f"{where.snapshots}/{kept}", "--", *map(str, present), timeout=4 * 3600)
    host.run("sync", "-f", str(where.disks), timeout=600)
    return kept
