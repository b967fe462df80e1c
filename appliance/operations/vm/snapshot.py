"""``sms vm snapshot``: copy both disks at one point in time, while the VM runs.

The guest agent freezes the file systems; QEMU starts the backup of both disks in one transaction, which takes
milliseconds; they are thawed. From then on QEMU copies each block before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.history import note
from appliance.operations.vm.snapshots import (
    NOTE,
    VmSnapshot,
    assign_place,
    check_name,
    cluster_uuid,
    default_name,
    remove,
    verify_folder,
)
from appliance.operations.vm.vm import DISKS, check_programs, find_running, lock_vm_everywhere, tidy, view_hosts
from appliance.plan.vm.holder import check_disks_here, newest_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.tools import files
from appliance.tools.guest import Guest, open_guest
from appliance.tools.qemu import image_info, make_disk
from appliance.tools.qmp import NotResponding, Qmp, open_qmp
from appliance.tools.space import SPARE_BYTES, query_space, query_used

COPY_S = 4 * 3600
THAW_AFTER_S = 10
"""Seconds after which the guest thaws its file systems on its own, even if this process was killed."""
THAW_WATCHDOG = f"sleep {THAW_AFTER_S}; fsfreeze -u /var/lib/sms-provision; fsfreeze -u /"


def snapshot_vm(cluster: Cluster, host: Host, name: str = "", *, reason: str = "") -> VmSnapshot:
    """Take a snapshot of both disks; a running VM keeps running. Only a verified snapshot is kept.

    Raises:
        Refused: the name is in use, there is no disk, or not enough space.
        SmsError: the snapshot failed; nothing is left of it.
    """
    check_programs(host)
    where = VmPlaces(cluster.site)
    name = check_name(name or default_name(cluster.env.clock.time()))
    with lock_vm_everywhere(cluster, host):
        check_disks_here(host.name, view_hosts(cluster, host))
        running = find_running(cluster, host) is not None
        if not running:
            tidy(cluster, host)
        _check(host, where, name)
        return take_locked(cluster, host, name, reason=reason, running=running)


def _check(host: Host, where: VmPlaces, name: str) -> None:
    if host.works("test", "-e", f"{where.snapshots}/{name}"):
        raise Refused(f"snapshot {name} already exists", hint="choose another name; `sms vm snapshot --list`")
    if not host.works("test", "-e", str(where.state)):
        raise Refused(f"the VM has no disks on {host.name}", hint="`sms vm status` shows where they are")
    # Of a running VM each disk is copied twice.
    used = [query_used(host, str(disk)) for disk in (where.root, where.state)]
    have, need = query_space(host, str(where.disks)).free, sum(used) + max(used)
    if have < need + SPARE_BYTES:
        raise Refused(
            f"{have >> 20} MiB are free, a snapshot may take {need >> 20}",
            hint="`sms vm snapshot --prune 3` removes old ones",
        )


def take_locked(cluster: Cluster, host: Host, name: str, *, reason: str, running: bool) -> VmSnapshot:
    """Take a snapshot; the caller holds the lock of every host and has checked the free space."""
    where = VmPlaces(cluster.site)
    part = f"{where.snapshots}/{name}.part"
    key = (host.read(str(where.root_image)) or b"").decode(errors="replace").strip()[:64]
    with ExitStack() as undo:
        undo.callback(remove, host, f"{where.snapshots}/{name}")
        # Other *.part folders were left by killed runs.
        files.make_folders(host, str(where.snapshots))
        find = ("find", str(where.snapshots), "-mindepth", "1", "-maxdepth", "1", "-name", "*.part")
        host.run(*find, "-exec", "rm", "-rf", "--", "{}", "+")
        host.run("mkdir", "-m", "0700", part)
        generation, sequence = assign_place(host, where, newest_holder(view_hosts(cluster, host)))
        taken, frozen_ms = cluster.env.clock.time(), 0.0
        with cluster.env.progress.step("copy both disks") as step:
            if running:
                taken, frozen_ms = copy_running(host, where, part, step, cluster.env.clock)
                step.detail(f"frozen for {frozen_ms:.0f} ms")
            else:
                for source in (where.root, where.state):
                    files.copy_sparse(host, str(source), f"{part}/{source.name}", timeout=COPY_S)
                host.run("sync", "-f", part, timeout=COPY_S)
        snapshot = VmSnapshot(name, round(taken, 3), round(frozen_ms, 1), running, reason, key)
        uuid = cluster_uuid(cluster, host)
        snapshot = replace(snapshot, generation=generation, sequence=sequence, cluster_uuid=uuid)
        with cluster.env.progress.step("verify it"):
            verify_folder(host, part)
        snapshot = replace(snapshot, verified=True)
        host.write(f"{part}/{NOTE}", snapshot.note(), mode=0o600)
        if key:
            host.write(f"{part}/{where.root_image.name}", key.encode(), mode=0o600)
        host.run("sync", "-f", part, timeout=300)
        files.rename(host, part, f"{where.snapshots}/{name}", replace=True)
        undo.pop_all()
    size = query_used(host, f"{where.snapshots}/{name}")
    note(cluster, host, "vm snapshot", "taken", name=name, frozen_ms=snapshot.frozen_ms, running=running)
    return replace(snapshot, size_bytes=size)


def copy_running(
    host: Host, where: VmPlaces, part: str, step: Any, clock: Clock, disks: Sequence[str] = DISKS
) -> tuple[float, float]:
    """Copy disks of a running VM. Returns the time of the copy, and how long the VM was frozen, in ms.

    Args:
        part: the folder of the copies.

    Raises:
        SmsError: the copy failed, or the VM thawed too early.
    """
    for disk in disks:
        _make_target(host, where, part, disk)
    with ExitStack() as stack:
        targets = [f"{part}/{disk}.qcow2" for disk in disks]
        qmp = stack.enter_context(open_qmp(host, str(where.qmp), silence_s=300, files=targets))
        clear_jobs(qmp, clock)
        for disk in disks:
            qmp.execute("blockdev-add", **_target(qmp.pass_file(), disk))
            stack.callback(_forget, qmp, disk)
        guest = _guest(host, where, stack)
        if guest and guest.execute("guest-fsfreeze-status") != "thawed":
            guest.execute("guest-fsfreeze-thaw")  # the run that froze them was killed
        try:
            taken, frozen_ms = _begin(qmp, guest, disks, clock)
        except SmsError:
            clear_jobs(qmp, clock)
            raise
        try:
            names = [f"snap-{disk}" for disk in disks]
            qmp.wait_for_jobs(names, timeout_s=COPY_S, on_progress=step.moved)
        except SmsError as error:
            raise SmsError(f"{error.message}", hint="is the disk full? `sms vm snapshot --prune 3`") from error
    for target in targets:  # QEMU may keep its descriptor: what is checked must not change afterwards
        files.copy_sparse(host, target, f"{target}.new", timeout=COPY_S)
        files.rename(host, f"{target}.new", target, replace=True)
    return taken, frozen_ms


def _guest(host: Host, where: VmPlaces, stack: ExitStack) -> Guest | None:
    """Return the guest agent; None if it does not answer. The copy is then crash-consistent, as after a power failure,
    and the file system's journal repairs it."""
    with suppress(NotResponding, CommandError):
        return stack.enter_context(open_guest(host, str(where.guest), silence_s=20))
    return None


def _begin(qmp: Qmp, guest: Guest | None, disks: Sequence[str], clock: Clock) -> tuple[float, float]:
    """Freeze the file systems, start all copies at one point in time, thaw them."""
    watchdog = guest.start({"path": "/bin/sh", "arg": ["-c", THAW_WATCHDOG]}) if guest else 0
    began = clock.monotonic()
    frozen = guest.count("guest-fsfreeze-freeze") if guest else 0
    try:
        taken = clock.time()
        qmp.execute("transaction", actions=[_action(disk) for disk in disks])
    finally:
        thawed = guest.count("guest-fsfreeze-thaw") if guest else 0
        frozen_ms = (clock.monotonic() - began) * 1000 if guest else 0.0
    if guest:
        guest.kill(watchdog)
    if thawed < frozen:
        raise SmsError("the VM thawed its file systems too early: the host is too slow", hint="try again")
    return taken, frozen_ms


def _action(disk: str) -> dict[str, object]:
    # Of the root only what was written since the image: the image itself is read-only.
    data = {
        "job-id": f"snap-{disk}",
        "device": disk,
        "target": f"snap-{disk}",
        "sync": "top" if disk == "root" else "full",
        "auto-dismiss": False,
    }
    return {"type": "blockdev-backup", "data": data}


def _make_target(host: Host, where: VmPlaces, part: str, disk: str) -> None:
    info = image_info(host, str(where.root if disk == "root" else where.state))
    if info is None:
        raise SmsError(f"the VM's disk {disk} is missing")
    backing = info["backing-filename"] if disk == "root" else ""
    make_disk(host, f"{part}/{disk}.qcow2", backing=backing, size=info["virtual-size"])


def _target(name: str, disk: str) -> dict[str, object]:
    file = {"driver": "file", "filename": name, "node-name": f"snap-{disk}-file"}
    return {"driver": "qcow2", "node-name": f"snap-{disk}", "file": file, "backing": None}


def _forget(qmp: Qmp, disk: str) -> None:
    with suppress(SmsError):
        qmp.execute("blockdev-del", **{"node-name": f"snap-{disk}"})


def clear_jobs(qmp: Qmp, clock: Clock) -> None:
    """Cancel jobs and remove block devices that a killed run has left in QEMU."""
    ours = [job for job in qmp.execute("query-jobs") if str(job["id"]).startswith("snap-")]
    for job in ours:
        with suppress(SmsError):
            qmp.execute("job-cancel", id=job["id"])
    deadline = clock.monotonic() + 30
    while ours and clock.monotonic() < deadline:
        there = {job["id"]: job["status"] for job in qmp.execute("query-jobs")}
        for job in ours:
            if there.get(job["id"]) == "concluded":
                qmp.execute("job-dismiss", id=job["id"])
        ours = [job for job in ours if there.get(job["id"]) not in (None, "concluded")]
        clock.sleep(0.1 if ours else 0)
    for disk in DISKS:
        _forget(qmp, disk)
