"""Snapshots of the VM's disks: list, verify and prune them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.vm.vm import all_hosts, lock_vm_everywhere
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Progress
from appliance.shared.records import from_value

NOTE = "snapshot.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

LIST = """
cd "$1" 2>/dev/null || exit 0
for note in */snapshot.json; do
    [ -e "$note" ] || continue
    name=${note%/*}
    case $name in *.part) continue ;; esac
    printf '%s\\t%s\\t' "$name" "$(du -sk "$name" | cut -f 1)"
    tr -d '\\n\\t' <"$note"
    echo
done
"""

# $1 a snapshot's folder. The state's file system is checked through FUSE if QEMU supports it, else in a copy.
VERIFY = """
cd "$1" || exit 1
for disk in root state; do
    [ -e "$disk.qcow2" ] || { echo "$disk.qcow2 is missing"; exit 1; }
    output=$(qemu-img check -q -U "$disk.qcow2" 2>&1) || { echo "$disk.qcow2: $output"; exit 1; }
done
work=$(mktemp -d) || exit 1
trap 'kill "$daemon" 2>/dev/null; wait 2>/dev/null; umount "$work/state" 2>/dev/null; rm -rf "$work"' EXIT
: >"$work/state"
daemon=
if [ -c /dev/fuse ] && qemu-storage-daemon --help 2>/dev/null | grep -q type=.fuse; then
    qemu-storage-daemon --blockdev driver=file,node-name=file,filename="$1/state.qcow2",read-only=on \\
        --blockdev driver=qcow2,node-name=disk,file=file,read-only=on \\
        --export type=fuse,id=state,node-name=disk,mountpoint="$work/state",writable=off >/dev/null 2>&1 &
    daemon=$!
    tries=0
    until [ -s "$work/state" ] || [ "$tries" -ge 50 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
fi
[ -s "$work/state" ] || qemu-img convert -U -f qcow2 -O raw "$1/state.qcow2" "$work/state" || exit 1
output=$(e2fsck -fn "$work/state" 2>&1) || { echo "state: $output" | tail -n 8; exit 1; }
"""
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
    """

    name: str
    taken: float
    frozen_ms: float = 0
    running: bool = False
    reason: str = ""
    key: str = ""
    verified: bool = False
    size_bytes: int = field(default=0, compare=False)

    def note(self) -> bytes:
        """Return the JSON record that is stored next to the disks."""
        record = asdict(self)
        del record["size_bytes"], record["name"]
        return json.dumps(record).encode() + b"\n"


def check_name(name: str) -> str:
    """Return the name if it is valid for a snapshot; raise ConfigError otherwise."""
    if not NAME.fullmatch(name) or name.endswith(".part"):
        raise ConfigError(f"invalid snapshot name {name!r}", hint="use letters, digits, dots and dashes")
    return name


def list_snapshots(cluster: Cluster, host: Host) -> list[VmSnapshot]:
    """Return all snapshots on the host, the oldest first."""
    listed = host.run("sh", "-c", LIST, "list", str(VmPlaces(cluster.site).snapshots), ok=None, timeout=120)
    return read_listed(listed.stdout.decode(errors="replace"))


def read_listed(output: str) -> list[VmSnapshot]:
    """Return the snapshots in the output of ``LIST``, the oldest first."""
    found = []
    for line in output.splitlines():
        name, kib, text = line.split("\t", 2)
        try:
            record = {**json.loads(text), "name": name, "size_bytes": int(kib) << 10}
            found.append(from_value(VmSnapshot, record))
        except (ValueError, TypeError):
            found.append(VmSnapshot(name, 0, reason="its record cannot be read", size_bytes=int(kib) << 10))
    return sorted(found, key=lambda one: (one.taken, one.name))


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
    """Return the snapshot of a name; ``latest`` is the newest one.

    Raises:
        Refused: there is no such snapshot.
    """
    there = list_snapshots(cluster, host)
    if name == "latest" and there:
        return there[-1]
    for snapshot in there:
        if snapshot.name == name:
            return snapshot
    names = ", ".join(snapshot.name for snapshot in there[-5:]) or "none"
    raise Refused(f"{host.name} has no snapshot {name} of the VM", hint=f"available: {names}")


def verify_folder(host: Host, folder: str) -> None:
    """Check both disks of a snapshot and the state's file system.

    Raises:
        SmsError: one of them is damaged; with the check's output.
    """
    try:
        host.run(*PRIVATE_MOUNTS, "sh", "-c", VERIFY, "verify", folder, timeout=1800)
    except CommandError as error:
        output = (error.result.stdout or error.result.stderr).decode(errors="replace").strip()
        raise SmsError(f"the snapshot is damaged: {output}", hint="take another one: `sms vm snapshot`") from error


def verify_snapshot(cluster: Cluster, host: Host, name: str, progress: Progress) -> VmSnapshot:
    """Verify a snapshot and return it.

    Raises:
        Refused: there is no such snapshot.
        SmsError: it is damaged.
    """
    snapshot = find_snapshot(cluster, host, name)
    with progress.step(f"verify {snapshot.name}"):
        verify_folder(host, f"{VmPlaces(cluster.site).snapshots}/{snapshot.name}")
    return snapshot


def prune_snapshots(
    cluster: Cluster, host: Host, progress: Progress, *, keep: int, dry_run: bool = False
) -> list[VmSnapshot]:
    """Remove all but the newest ``keep`` snapshots, at least one. Returns the removed ones."""
    if keep < 1:
        raise ConfigError("at least one snapshot must be kept", hint="`sms vm snapshot --prune 1`")
    with lock_vm_everywhere(cluster, host):
        removed = list_snapshots(cluster, host)[:-keep]
        for snapshot in [] if dry_run else removed:
            with progress.step(f"remove {snapshot.name}"):
                remove(host, f"{VmPlaces(cluster.site).snapshots}/{snapshot.name}")
    return removed


def remove(host: Host, folder: str) -> None:
    """Remove a snapshot's folder; it is renamed first, so that a partly removed one is never listed."""
    host.run("mv", "-T", "--", folder, f"{folder}.part", ok=None)
    host.run("rm", "-rf", "--one-file-system", "--", f"{folder}.part", timeout=300)
