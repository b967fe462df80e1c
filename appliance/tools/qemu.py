"""QEMU on a host: what it may use there, its disks, its cables, its process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.plan.vm.vm import Card, choose_accel

# Whether KVM works is not told by /dev/kvm alone: where it is there and cannot run a kernel, QEMU does not fall back.
PROBE = """
ls /sys/module 2>/dev/null | grep '^kvm'
(exec 3<>/dev/kvm) 2>/dev/null && echo device
true
"""

# $1 pid file, $2 the machine's name: its pid, if it is that machine that runs.
FIND = """
pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] || exit 0
tr '\\0' '\\n' <"/proc/$pid/cmdline" | grep -qxF -- "$2,debug-threads=on" || exit 0
echo "$pid $(stat -c %Y "/proc/$pid")"
"""

# $1 QMP socket, $2 log; then the command. It stays when we go, in a session of its own.
LAUNCH = """
socket=$1 log=$2
shift 2
rm -f "$socket"
umask 077
setsid "$@" </dev/null >"$log" 2>&1 &
pid=$!
tries=0
until [ -S "$socket" ]; do
    kill -0 "$pid" 2>/dev/null || { cat "$log" >&2; exit 1; }
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || { kill -9 "$pid"; echo "QEMU does not come up" >&2; exit 1; }
    sleep 0.1
done
"""

GONE = 'grep -q "^State:.Z" "/proc/$1/status" 2>/dev/null || [ ! -e "/proc/$1" ]'
"""Shell: whether process $1 has ended, its files closed."""

# $1 pid, $2 seconds: end it, and wait until it is gone.
END = f"""
kill -TERM "$1" 2>/dev/null || exit 0
tries=0
until {GONE}; do
    tries=$((tries + 1))
    [ "$tries" -ne "$(($2 * 10))" ] || kill -KILL "$1" 2>/dev/null
    [ "$tries" -le "$(($2 * 10 + 50))" ] || exit 1
    sleep 0.1
done
"""

# $1 disk, $2 MiB: an empty ext4 file system as qcow2, written beside and renamed.
MAKE_STATE = """
set -e
umask 077
trap 'rm -f "$1.raw" "$1.new"' EXIT
rm -f "$1.raw" "$1.new"
truncate -s "$2M" "$1.raw"
mke2fs -q -F -t ext4 -L sms-state -m 1 "$1.raw"
qemu-img convert -f raw -O qcow2 "$1.raw" "$1.new"
sync "$1.new"
mv -T "$1.new" "$1"
"""

# $1 disk, $2 the image behind it.
MAKE_ROOT = """
set -e
umask 077
rm -f "$1.new"
qemu-img create -q -f qcow2 -b "$2" -F qcow2 "$1.new"
mv -fT "$1.new" "$1"
"""


@dataclass(frozen=True)
class Process:
    """A machine that runs: its pid, and since when, in seconds since 1970."""

    pid: int
    since: float


def probe_accel(host: Host) -> tuple[str, str]:
    """``kvm`` where it really works, else ``tcg``, and why."""
    words = host.run("sh", "-c", PROBE).text.split()
    return choose_accel(words, "device" in words)


def find_machine(host: Host, pid_file: str, name: str) -> Process | None:
    """The machine's process; None where it does not run."""
    words = host.run("sh", "-c", FIND, "find", pid_file, name).text.split()
    return Process(int(words[0]), float(words[1])) if len(words) == 2 else None


def launch(host: Host, argv: Sequence[str], *, qmp: str, log: str) -> None:
    """Start a machine in the background.

    Raises:
        SmsError: it ended at once, with its own words.
    """
    try:
        host.run("sh", "-c", LAUNCH, "launch", qmp, log, *argv, timeout=60)
    except CommandError as error:
        said = error.result.stderr.decode(errors="replace").strip()[-1000:]
        raise SmsError(f"{host.name}: QEMU does not start: {said}", hint=_why(said)) from error


def _why(said: str) -> str:
    if "lock" in said:
        return "another machine has the disk open: `sms vm status` on every admin host"
    if "Cannot allocate memory" in said or "cannot set up guest memory" in said:
        return "give it less memory: provisioning.memory_mb"
    return ""


def has_ended(host: Host, process: Process) -> bool:
    """Whether a machine's process is gone. QEMU removes its pid file before it has closed its disks."""
    return host.works("sh", "-c", GONE, "gone", str(process.pid))


def end_machine(host: Host, process: Process, *, patience_s: int = 10) -> None:
    """End a machine's process, asked first and then not asked; SmsError where it stays."""
    host.run("sh", "-c", END, "end", str(process.pid), str(patience_s), timeout=patience_s + 30)


def plug(host: Host, card: Card) -> None:
    """Make the card's tap and put it into its bridge."""
    if not host.works("ip", "link", "show", "dev", card.tap):
        host.run("ip", "tuntap", "add", "dev", card.tap, "mode", "tap")
    host.run("ip", "link", "set", "dev", card.tap, "master", card.bridge, "up")


def unplug(host: Host, card: Card) -> None:
    """Remove the card's tap, if it is there."""
    if host.works("ip", "link", "show", "dev", card.tap):
        host.run("ip", "link", "delete", "dev", card.tap)


def image_info(host: Host, path: str) -> dict[str, Any] | None:
    """What qemu-img says of a disk; None where there is none. A disk in use may be looked at."""
    said = host.run("qemu-img", "info", "-U", "--output=json", "--", path, ok=None)
    if said.status:
        if host.works("test", "-e", path):
            raise SmsError(f"{host.name}: {path} is no disk: {said.stderr.decode(errors='replace').strip()[-300:]}")
        return None
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def make_state(host: Host, path: str, size_mb: int) -> None:
    """Make the disk of all that matters, empty."""
    host.run("sh", "-c", MAKE_STATE, "state", path, str(size_mb), timeout=600)


def make_root(host: Host, path: str, image: str) -> None:
    """Make an empty disk in front of an image."""
    host.run("sh", "-c", MAKE_ROOT, "root", path, image)


def grow(host: Host, path: str, size_mb: int) -> None:
    """Make a disk that no machine uses larger; the file system in it grows when it is mounted."""
    host.run("qemu-img", "resize", "-q", "-f", "qcow2", path, f"{size_mb}M")
