"""QEMU on a host: accelerator, disks, network devices, process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.plan.vm.vm import Card, choose_accel
from appliance.tools import files

# $1 QMP socket, $2 log; then the command. It runs in its own session and outlives this program.
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
    [ "$tries" -lt 300 ] || { kill -9 "$pid"; echo "QEMU did not create its QMP socket within 30 s" >&2; exit 1; }
    sleep 0.1
done
"""

# $1 PID, $2 seconds until SIGKILL: terminate the process and wait for its end.
END = """
kill -TERM "$1" 2>/dev/null || exit 0
tries=0
until grep -q "^State:.Z" "/proc/$1/status" 2>/dev/null || [ ! -e "/proc/$1" ]; do
    tries=$((tries + 1))
    [ "$tries" -ne "$(($2 * 10))" ] || kill -KILL "$1" 2>/dev/null
    [ "$tries" -le "$(($2 * 10 + 50))" ] || exit 1
    sleep 0.1
done
"""


@dataclass(frozen=True)
class Process:
    """A running machine: PID and start time in seconds since 1970."""

    pid: int
    since: float


def probe_accel(host: Host) -> tuple[str, str]:
    """Return ``kvm`` if it works, otherwise ``tcg``, and the reason."""
    listed = host.run("ls", "/sys/module", ok=None).text.split()
    # /dev/kvm alone does not prove that KVM works, and QEMU does not fall back if it cannot run a kernel.
    opens = host.works("dd", "if=/dev/kvm", "of=/dev/null", "count=0", "status=none")
    return choose_accel([name for name in listed if name.startswith("kvm")], opens)


def find_machine(host: Host, pid_file: str, name: str) -> Process | None:
    """Return the machine's process; None if it does not run."""
    pid = host.run("cat", "--", pid_file, ok=None).text
    if not pid.isdecimal():
        return None
    # The file may be of an earlier boot: the process must be the machine.
    words = host.run("cat", f"/proc/{pid}/cmdline", ok=None).stdout.split(b"\0")
    since = host.run("stat", "-c", "%Y", f"/proc/{pid}", ok=None).text
    return Process(int(pid), float(since)) if f"{name},debug-threads=on".encode() in words and since else None


def launch(host: Host, argv: Sequence[str], *, qmp: str, log: str) -> None:
    """Start a machine in the background.

    Raises:
        SmsError: QEMU did not start; with its error message.
    """
    try:
        host.run("sh", "-c", LAUNCH, "launch", qmp, log, *argv, timeout=60)
    except CommandError as error:
        output = error.result.stderr.decode(errors="replace").strip()[-1000:]
        raise SmsError(f"{host.name}: QEMU does not start: {output}", hint=_why(output)) from error


def _why(output: str) -> str:
    if "lock" in output:
        return "another machine has the disk open: `sms vm status` on every admin host"
    if "Cannot allocate memory" in output or "cannot set up guest memory" in output:
        return "give it less memory: provisioning.memory_mb"
    return ""


def has_ended(host: Host, process: Process) -> bool:
    """Return whether a machine's process has ended. QEMU removes its PID file before it closes its disks."""
    shown = host.run("cat", f"/proc/{process.pid}/status", ok=None)
    return bool(shown.status) or b"\nState:\tZ" in shown.stdout


def end_machine(host: Host, process: Process, *, patience_s: int = 10) -> None:
    """Terminate a machine's process with SIGTERM, then SIGKILL; SmsError if it does not end."""
    host.run("sh", "-c", END, "end", str(process.pid), str(patience_s), timeout=patience_s + 30)


def plug(host: Host, card: Card) -> None:
    """Create the card's tap device and attach it to its bridge."""
    if not host.works("ip", "link", "show", "dev", card.tap):
        host.run("ip", "tuntap", "add", "dev", card.tap, "mode", "tap")
    host.run("ip", "link", "set", "dev", card.tap, "master", card.bridge, "up")


def unplug(host: Host, card: Card) -> None:
    """Remove the card's tap device, if it exists."""
    if host.works("ip", "link", "show", "dev", card.tap):
        host.run("ip", "link", "delete", "dev", card.tap)


DiskInfo = TypedDict(
    "DiskInfo",
    {
        "format": str,
        "virtual-size": int,
        "actual-size": int,
        "backing-filename": str,
        "full-backing-filename": str,
    },
    total=False,
)
"""Information of qemu-img on a disk; sizes in bytes."""


def image_info(host: Host, path: str) -> DiskInfo | None:
    """Return qemu-img's information on a disk, which may be in use; None if it does not exist."""
    output = host.run("qemu-img", "info", "-U", "--output=json", "--", path, ok=None)
    if output.status:
        if host.works("test", "-e", path):
            raise SmsError(
                f"{host.name}: {path} is not a disk image: {output.stderr.decode(errors='replace').strip()[-300:]}"
            )
        return None
    found: DiskInfo = json.loads(output.stdout)
    return found


def make_state(host: Host, path: str, size_mb: int) -> None:
    """Create an empty state disk."""
    raw, new = f"{path}.raw", f"{path}.new"
    try:
        files.make_file(host, raw, size_mb << 20)
        host.run("mke2fs", "-q", "-F", "-t", "ext4", "-L", "sms-state", "-m", "1", "-e", "remount-ro", raw, timeout=600)
        files.make_file(host, new)
        host.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, new, timeout=600)
        files.place(host, new, path)
    finally:
        host.run("rm", "-f", "--", raw, new)


def make_root(host: Host, path: str, image: str) -> None:
    """Create an empty disk with a backing image."""
    new = f"{path}.new"
    make_disk(host, new, backing=image)
    files.place(host, new, path)


def make_disk(host: Host, path: str, *, backing: str = "", size: int | None = None) -> None:
    """Create an empty disk readable only by root, of ``size`` bytes or that of ``backing``, which is not opened then.

    An existing one is replaced.
    """
    over = ("-b", backing, "-F", "qcow2") if backing else ()
    files.make_file(host, path)
    sized = () if size is None else (str(size),)
    host.run("qemu-img", "create", "-q", "-f", "qcow2", *(["-u"] if backing and sized else []), *over, path, *sized)


def grow(host: Host, path: str, size_mb: int) -> None:
    """Enlarge a disk that is not in use; the file system in it grows when it is mounted."""
    host.run("qemu-img", "resize", "-q", "-f", "qcow2", path, f"{size_mb}M")
