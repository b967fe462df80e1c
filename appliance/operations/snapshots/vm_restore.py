"""``sms vm restore --from``: replace the VM's state disk by a snapshot from a store or the Borg repository."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.lease import query_lease
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.pull import find_remote, list_remote, pull
from appliance.operations.snapshots.vm_state import lock_path, remove_copy
from appliance.operations.vm.restore import RestoredVm, exchange_disks
from appliance.operations.vm.vm import check_programs, find_running, lock_vm_everywhere, tidy, view_hosts
from appliance.plan.vm.holder import Holder, HostView, follow_known, may_start, name_cluster, newest_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.identity import uuid_of
from appliance.shared.lease import LAST_RAISING
from appliance.shared.records import to_json
from appliance.tools import files
from appliance.tools.qemu import write_disk
from appliance.tools.space import SPARE_BYTES, need_space, query_used

COPY_S = 4 * 3600


@dataclass(frozen=True)
class StateSource:
    """Which snapshot: its number, archive name or ``latest`` at ``borg``, at an admin host or in the own store.

    ``force``: admin hosts that do not answer are lost; else they may have newer disks, or run the VM.
    """

    source: str
    selector: str
    force: bool = False


@dataclass(frozen=True)
class Choice:
    """A chosen snapshot, and the highest generation of all at its source and here."""

    snapshot: Snapshot
    known: int


def restore_state(cluster: Cluster, host: Host, wanted: StateSource) -> RestoredVm:
    """Replace the VM's state disk, also where all of its disks are lost. Old disks are kept as a snapshot.

    The root disk stays: it has no state, and a start creates one where there is none.

    Args:
        cluster: ``of_vm``.

    Raises:
        Busy, Unreachable: the source cannot be used, or another run is at work.
        Refused: the VM runs or may run, there is no such snapshot, or not enough space.
        SmsError: the snapshot is damaged; nothing was changed.
    """
    check_programs(host)
    where, part = VmPlaces(cluster.site), f"{store(cluster)}.part"
    check_state(cluster, host, wanted)
    with cluster.env.locks.hold(host, lock_path(cluster), "another run works on snapshots of the VM's state"):
        choice = choose(cluster, host, wanted)
        number = choice.snapshot["number"]
        if wanted.source != host.name:
            number = pull(cluster, host, wanted.source, str(number)).number
        need_space(
            host, store(cluster), choice.snapshot["used_bytes"] + SPARE_BYTES, "MiB free, %d are needed", hint=""
        )
        remove_copy(host, part)
        try:
            host.run("mkdir", "-m", "0700", part)
            request = {"store": store(cluster), "snapshot": str(number), "target": f"{part}/state.raw"}
            cluster.env.agents.call(host, "restore", request, cluster.env.progress)
            with lock_vm_everywhere(cluster, host):
                holder = check_state(cluster, host, wanted, choice)
                tidy(cluster, host)
                kept = _exchange(cluster, host, f"{part}/state.raw")
                host.write(str(where.holder), to_json(holder), mode=0o600)
                generation = holder.generation
                note(cluster, host, "vm restore", "restored", name=str(number), kept=kept, generation=generation)
        finally:
            with suppress(SmsError):
                remove_copy(host, part)
    return RestoredVm(host.name, f"{number} of {wanted.source}", kept, choice.snapshot["taken"])


def choose(cluster: Cluster, host: Host, wanted: StateSource) -> Choice:
    """Return the chosen snapshot.

    Raises:
        Refused: there is none, or more than one.
    """
    listing = list_snapshots(cluster, host)
    if wanted.source == host.name:
        one, there = find_snapshot(listing, wanted.selector), list(listing.snapshots)
    else:
        remote = list_remote(cluster, host, wanted.source, listing.identity)
        one = find_remote(remote, wanted.source, wanted.selector)
        there = [*listing.snapshots, *remote.snapshots]
    # Implausible ones do not count, because another host may have written them.
    return Choice(one, max(each["generation"] for each in there if each["generation"] <= LAST_RAISING or each == one))


def check_state(cluster: Cluster, host: Host, wanted: StateSource, choice: Choice | None = None) -> Holder:
    """Return the record of who has the disks that a restore writes.

    Raises:
        Refused: the VM runs, or its disks are, or may be, on another host.
    """
    if find_running(cluster, host):
        raise Refused(f"the VM runs on {host.name}", hint=f"`sms vm stop --host {host.name}` first")
    views = view_hosts(cluster, host)
    newest = newest_holder(views)
    if newest and newest.holder != host.name and _answers(newest.holder, views):
        raise Refused(f"the VM's disks are on {newest.holder}", hint=f"use `--host {newest.holder}`")
    try:
        chosen = may_start(host.name, views, force=wanted.force)
    except Refused as error:
        silent = ", ".join(view.name for view in views if not view.reachable)
        hint = f"make {silent} reachable; if it is permanently lost, fence it, and add --force"
        raise Refused(error.message, hint=hint if silent else error.hint) from error
    if choice is None:
        return chosen
    chosen = replace(chosen, sequence=newest.sequence if newest else 0)
    uuid = query_lease(host, cluster).cluster_uuid or uuid_of(choice.snapshot)
    return name_cluster(follow_known(chosen, newest, choice.known), newest, uuid)


def _answers(name: str, views: list[HostView]) -> bool:
    return any(view.name == name and view.reachable for view in views)


def _exchange(cluster: Cluster, host: Host, raw: str) -> str:
    """Put the state disk in place; return the snapshot that keeps the old disks, empty if there were none."""
    where = VmPlaces(cluster.site)
    beside = {disk: f"{where.disks}/{disk.stem}.restored" for disk in (where.state, where.root)}
    files.make_folders(host, str(where.disks))
    need = query_used(host, raw, str(where.root)) + SPARE_BYTES
    need_space(host, str(where.disks), need, "MiB free, %d are needed", hint="`sms vm snapshot --prune 3`")
    old = host.works("test", "-e", str(where.state))
    try:
        with cluster.env.progress.step("write the state disk"):
            files.make_file(host, beside[where.state])
            write_disk(host, raw, beside[where.state], timeout=COPY_S)
            if old and host.works("test", "-e", str(where.root)):
                # Both disks are exchanged, so that the snapshot of the old ones is complete.
                files.copy_sparse(host, str(where.root), beside[where.root], timeout=COPY_S)
                host.run("sync", beside[where.root], timeout=COPY_S)
                image = where.root_image
                if host.works("test", "-e", str(image)):
                    files.copy_sparse(host, str(image), f"{image}.restored", timeout=60)
                host.run("sync", "-f", str(where.disks), timeout=COPY_S)
        if old:
            return exchange_disks(cluster, host)
        files.rename(host, beside[where.state], str(where.state))
        return ""
    except SmsError:
        if not host.works("test", "-e", str(where.restore)):
            host.run("rm", "-f", "--", *beside.values(), f"{where.root_image}.restored", ok=None)
        raise
