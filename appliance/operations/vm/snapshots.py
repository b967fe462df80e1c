"""Snapshots of the VM's disks: list, verify and prune them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.lease import query_lease
from appliance.operations.vm.vm import DISKS, all_hosts, lock_vm_everywhere, view_host
from appliance.plan.vm.holder import Holder
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.order import order
from appliance.shared.records import from_value, to_json
from appliance.tools.qemu import check_header
from appliance.tools.scripts import script_argv

NOTE = "snapshot.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")


@dataclass(frozen=True)
class VmSnapshot:
    """A snapshot of both disks.

    Attributes:
        taken: Unix time in seconds.
        frozen_ms: how long the file systems in the VM were frozen; 0 if it did not run.
        running: whether the VM ran.
        reason: why it was taken, if given.
        key: digest of the manifest of the image that its root is an overlay of; empty if unknown.
        verified: whether both disks and the state's file system were checked without errors.
        generation, sequence: decide the order (shared/order.py); 0 in records of earlier versions.
        cluster_uuid: of the cluster; empty in records of earlier versions, which count as the own ones.
        readable: whether its record could be read.
    """

    name: str
    taken: float
    frozen_ms: float = 0
    running: bool = False
    reason: str = ""
    key: str = ""
    verified: bool = False
    generation: int = 0
    sequence: int = 0
    cluster_uuid: str = ""
    size_bytes: int = field(default=0, compare=False)
    readable: bool = field(default=True, compare=False)

    def note(self) -> bytes:
        """Return the JSON record that is stored next to the disks."""
        record = asdict(self)
        del record["size_bytes"], record["name"], record["readable"]
        return json.dumps(record).encode() + b"\n"


def default_name(taken: float) -> str:
    """Return the name of a snapshot that was given none: the time at which it was taken, in UTC."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(taken))


def check_name(name: str) -> str:
    """Return the name if it is valid for a snapshot; raise ConfigError otherwise."""
    if not NAME.fullmatch(name) or name.endswith(".part"):
        raise ConfigError(f"invalid snapshot name {name!r}", hint="use letters, digits, dots and dashes")
    return name


def list_snapshots(cluster: Cluster, host: Host) -> list[VmSnapshot]:
    """Return all snapshots on the host, the oldest first."""
    return list_folder(host, VmPlaces(cluster.site))


def list_folder(host: Host, where: VmPlaces) -> list[VmSnapshot]:
    """Return all snapshots on the host, the oldest first."""
    listed = host.run(*script_argv("vm-list", str(where.snapshots)), ok=None, timeout=120)
    return read_listed(listed.stdout.decode(errors="replace"))


def read_listed(output: str) -> list[VmSnapshot]:
    """Return the snapshots in the output of ``vm-list``, the oldest first."""
    found = []
    for line in output.splitlines():
        name, kib, text = [*line.split("\t", 2), "", ""][:3]
        kib = kib if kib.isdecimal() and len(kib) < 16 else "0"
        try:
            record = {**json.loads(text), "name": name, "size_bytes": int(kib) << 10}
            found.append(from_value(VmSnapshot, record))
        except (ValueError, TypeError, RecursionError):
            unreadable = "its record cannot be read"
            found.append(VmSnapshot(name, 0, reason=unreadable, size_bytes=int(kib) << 10, readable=False))
    return sorted(found, key=lambda one: order(vars(one)))


def own_snapshots(cluster: Cluster, host: Host) -> list[VmSnapshot]:
    """Return the snapshots of this cluster on the host, the oldest first; not those of another one of its name."""
    uuid = cluster_uuid(cluster, host)
    return [one for one in list_snapshots(cluster, host) if one.cluster_uuid in ("", uuid)]


def cluster_uuid(cluster: Cluster, host: Host) -> str:
    """Return the cluster's UUID as the host knows it: of its lease, else of its record of the VM's disks.

    Raises:
        SmsError: they cannot be read.
    """
    if uuid := query_lease(host, cluster).cluster_uuid:
        return uuid
    holder = view_host(cluster, host).holder
    return holder.cluster_uuid if holder else ""


def assign_place(
    host: Host, where: VmPlaces, newest: Holder | None, known: Iterable[Mapping[str, Any]] = ()
) -> tuple[int, int]:
    """Return generation and sequence number of a new snapshot of the current disks, after all others on the host.

    The record of the disks' holder has the number when this returns. One that was lost is not created: the next start
    has to notice that. The caller holds the lock of every host.

    Args:
        newest: the newest record of all hosts.
        known: manifests of snapshots of the VM's state, which have the same order.
    """
    there = [*map(vars, list_folder(host, where)), *known]
    last = newest or Holder("", 0)
    place = (
        max([last.generation, *(one["generation"] for one in there)]),
        max([last.sequence, *(one.get("sequence") or 0 for one in there)]) + 1,
    )
    if newest:
        host.write(str(where.holder), to_json(replace(newest, sequence=place[1])), mode=0o600)
    return place


def count_elsewhere(cluster: Cluster, host: Host) -> dict[str, int]:
    """Return the number of snapshots on each other reachable admin host that does not share this host's folder."""
    here = {one.name for one in list_snapshots(cluster, host)}
    found = {}
    for other in all_hosts(cluster, host)[1:]:
        with suppress(SmsError):
            names = {one.name for one in list_snapshots(cluster, other)}
            if names and names != here:
                found[other.name] = len(names)
    return found


def find_snapshot(cluster: Cluster, host: Host, name: str) -> VmSnapshot:
    """Return the snapshot of a name; ``latest`` is the newest verified one, without any verified one the newest.

    Raises:
        Refused: there is no such snapshot.
    """
    there, every = own_snapshots(cluster, host), list_snapshots(cluster, host)
    if name == "latest" and there:
        return ([one for one in there if one.verified] or there)[-1]
    for snapshot in there:
        if snapshot.name == name:
            return snapshot
    if other := [one for one in every if one.name == name or (name == "latest" and one not in there)]:
        raise Refused(
            f"snapshot {other[-1].name} of the VM is not of this cluster, but of cluster {other[-1].cluster_uuid}",
            hint="`sms overlay identity` shows the UUIDs",
        )
    names = ", ".join(snapshot.name for snapshot in there[-5:]) or "none"
    raise Refused(f"{host.name} has no snapshot {name} of the VM", hint=f"available: {names}")


def verify_folder(host: Host, folder: str) -> None:
    """Check both disks of a snapshot and the state's file system.

    Raises:
        SmsError: one of them is damaged; with the check's output.
    """
    for disk in DISKS:
        path = f"{folder}/{disk}.qcow2"
        if host.works("test", "-e", path):
            check_header(host, path, backing=disk == "root")
    try:
        host.run(*PRIVATE_MOUNTS, *script_argv("vm-verify", folder), timeout=1800)
    except CommandError as error:
        output = (error.result.stdout or error.result.stderr).decode(errors="replace").strip()
        raise SmsError(f"the snapshot is damaged: {output}", hint="take another one: `sms vm snapshot`") from error


def verify_snapshot(cluster: Cluster, host: Host, name: str) -> VmSnapshot:
    """Verify a snapshot and return it.

    Raises:
        Refused: there is no such snapshot.
        SmsError: it is damaged.
    """
    snapshot = find_snapshot(cluster, host, name)
    with cluster.env.progress.step(f"verify {snapshot.name}"):
        verify_folder(host, f"{VmPlaces(cluster.site).snapshots}/{snapshot.name}")
    return snapshot


def prune_snapshots(cluster: Cluster, host: Host, *, keep: int, dry_run: bool = False) -> list[VmSnapshot]:
    """Remove all but the newest ``keep`` snapshots, at least one; return the removed ones.

    The newest verified one is never removed, nor one whose record cannot be read: it may be newer; nor those of another
    cluster of this name.
    """
    if keep < 1:
        raise ConfigError("at least one snapshot must be kept", hint="`sms vm snapshot --prune 1`")
    with lock_vm_everywhere(cluster, host):
        own = own_snapshots(cluster, host)
        if foreign := [one for one in list_snapshots(cluster, host) if one not in own]:
            whose = ", ".join(sorted({one.cluster_uuid for one in foreign}))
            what = f"{len(foreign)} snapshot{'s' * (len(foreign) != 1)} of the VM on {host.name}"
            cluster.env.progress.report(f"note: {what} are of cluster {whose}: not touched")
        removed = choose_removed(own, keep)
        for snapshot in [] if dry_run else removed:
            with cluster.env.progress.step(f"remove {snapshot.name}"):
                remove(host, f"{VmPlaces(cluster.site).snapshots}/{snapshot.name}")
    return removed


def choose_removed(snapshots: Sequence[VmSnapshot], keep: int) -> list[VmSnapshot]:
    """Return the snapshots that a prune removes.

    Args:
        snapshots: oldest first.
    """
    readable = [one for one in snapshots if one.readable]
    verified = [one for one in readable if one.verified]
    return [one for one in readable[:-keep] if one not in verified[-1:]]


def remove(host: Host, folder: str) -> None:
    """Remove a snapshot's folder; it is renamed first, so that a partly removed one is never listed."""
    if host.works("mv", "-T", "--", folder, f"{folder}.part"):
        host.run("sync", str(PurePosixPath(folder).parent), timeout=300)
    host.run("rm", "-rf", "--one-file-system", "--", f"{folder}.part", timeout=300)
