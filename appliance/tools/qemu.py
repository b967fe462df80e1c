"""QEMU on a host: accelerator, disks, network devices, process."""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import dataclass
from typing import TypedDict

from appliance.errors import SmsError, disk_hint
from appliance.host.base import CommandError, Host
from appliance.plan.vm.vm import FIRST_DESCRIPTOR, Card, Machine, choose_accel
from appliance.shared.ports import port_address
from appliance.tools import files
from appliance.tools.bridge import query_mtus

# Keeps the end of its input in its output, a file of root: 1 to 2 MiB, whatever the machine or its console prints.
KEEP_LOG = """\
import os
LIMIT = 2 << 20
while block := os.read(0, 1 << 16):
    try:
        size = os.fstat(1).st_size
        if size + len(block) > LIMIT:
            end = os.pread(1, LIMIT // 2, max(size - LIMIT // 2, 0))
            os.ftruncate(1, 0)
            os.write(1, end)
        os.write(1, block)
    except OSError:
        pass  # such as of a full disk: the machine must not wait
"""
# Opens what the machine uses, then runs it as another user, in a session of its own: it outlives this program.
LAUNCH = """\
import fcntl, json, os, pwd, signal, socket, struct, subprocess, sys
spec, argv = json.loads(sys.argv[1]), sys.argv[2:]
sys.excepthook = lambda kind, error, trace: sys.stderr.write("%s\\n" % error)
os.umask(0o077)
FILES = {
    "read": os.O_RDONLY,
    "write": os.O_RDWR,
    "log": os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND,
    "append": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}

def open_one(kind, path):
    if kind == "socket":
        if os.path.lexists(path):
            os.unlink(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(path)
        server.listen(8)
        found = server.detach()
    elif kind == "tap":
        found = os.open("/dev/net/tun", os.O_RDWR)
        # TUNSETIFF; IFF_TAP, IFF_NO_PI and IFF_VNET_HDR, which QEMU sets itself if it opens the device.
        fcntl.ioctl(found, 0x400454CA, struct.pack("16sH22x", path.encode(), 0x5002))
    else:
        found = os.open(path, FILES[kind], 0o600)
    if kind in ("log", "append"):  # the machine gets a pipe to a process that ends with it
        kept, (reader, found) = found, os.pipe()
        keep = [sys.executable, "-I", "-c", spec["keep"]]
        quiet = subprocess.DEVNULL
        one = subprocess.Popen(keep, stdin=reader, stdout=kept, stderr=quiet, cwd="/", start_new_session=True)
        keepers.append(one)
        os.close(kept)
        os.close(reader)
    # Out of the way of the numbers that the machine expects.
    moved = fcntl.fcntl(found, fcntl.F_DUPFD_CLOEXEC, 200)
    os.close(found)
    return moved

account = pwd.getpwnam(spec["user"])
if not account.pw_uid:
    sys.exit("%s is root" % spec["user"])
kvm = os.stat("/dev/kvm").st_gid if spec["kvm"] else 0
become = ["setpriv", "--reuid", str(account.pw_uid), "--regid", str(account.pw_gid)]
become += ["--groups", str(kvm)] if kvm else ["--clear-groups"]
become += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
keepers = []
opened = [open_one(kind, path) for kind, path in spec["opened"]]
log = open_one("log", spec["log"])
pid = os.fork()
if not pid:
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number, found in enumerate(opened, spec["first"]):
            os.dup2(found, number)
        with open(spec["pid"], "w") as file:
            file.write("%d\\n" % os.getpid())
        os.chdir("/")
        os.execvpe("setpriv", become + argv, {"PATH": os.defpath, "LC_ALL": "C"})
    except BaseException as error:
        os.write(2, str(error).encode())
    os._exit(1)
for found in opened:
    os.close(found)
# It answers commands once all its devices are there.
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout(60)
try:
    peer.connect(spec["qmp"])
    peer.sendall(b'{"execute": "qmp_capabilities"} {"execute": "query-status"}')
    answers = b""
    while answers.count(b'"return"') < 2:
        block = peer.recv(1 << 16)
        if not block:
            raise OSError("QEMU ended")
        answers += block
except OSError as error:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
    os.waitpid(pid, 0)
    os.close(log)
    keepers[-1].wait(10)  # it has written all
    with open(spec["log"], "rb") as file:
        output = file.read(1 << 16).decode("utf-8", "replace").strip()
    sys.exit(output or "QEMU does not answer: %s" % error)
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


# As the machine's account, whose only group is that of the device.
OPEN_KVM = """
group=$(stat -c %g /dev/kvm) || exit
[ "$group" = 0 ] && groups=--clear-groups || groups=--groups=$group
exec setpriv --reuid=65534 --regid=65534 "$groups" --no-new-privs sh -c ': <>/dev/kvm'
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
    opens = host.works("sh", "-c", OPEN_KVM)
    return choose_accel([name for name in listed if name.startswith("kvm")], opens)


def create_user(host: Host, name: str, comment: str) -> bool:
    """Create a system account without home and login, if there is none; return whether there was none."""
    if host.works("id", "-u", name):
        return False
    about = ("--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin")
    host.run("useradd", "--system", "--user-group", *about, "--comment", comment, name)
    return True


def find_machine(host: Host, pid_file: str, name: str) -> Process | None:
    """Return the machine's process; None if it does not run."""
    pid = host.run("cat", "--", pid_file, ok=None).text
    if not pid.isdecimal():
        return None
    # The file may be of an earlier boot: the process must be the machine.
    words = host.run("cat", f"/proc/{pid}/cmdline", ok=None).stdout.split(b"\0")
    since = host.run("stat", "-c", "%Y", f"/proc/{pid}", ok=None).text
    return Process(int(pid), float(since)) if f"{name},debug-threads=on".encode() in words and since else None


@dataclass(frozen=True)
class Run:
    """How a machine runs: its account, its PID file, its QMP socket, and the log of its standard output and error."""

    user: str
    pid: str
    qmp: str
    log: str


def launch(host: Host, machine: Machine, run: Run) -> None:
    """Start a machine in the background, and wait until it answers.

    Raises:
        SmsError: QEMU did not start; with its error message.
    """
    opened = [(one.kind, one.path) for one in machine.opened]
    spec = json.dumps({**vars(run), "kvm": machine.kvm, "first": FIRST_DESCRIPTOR, "opened": opened, "keep": KEEP_LOG})
    try:
        host.run("python3", "-I", "-c", LAUNCH, spec, *machine.argv, timeout=90)
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
        if mtu := query_mtus(host, [card.bridge])[card.bridge]:  # a smaller one would be that of the bridge, too
            host.run("ip", "link", "set", "dev", card.tap, "mtu", str(mtu))
    host.run("ip", "link", "set", "dev", card.tap, "address", port_address(card.tap), "master", card.bridge, "up")


def unplug(host: Host, card: Card) -> None:
    """Remove the card's tap device, if it exists."""
    if host.works("ip", "link", "show", "dev", card.tap):
        host.run("ip", "link", "delete", "dev", card.tap)


HEADER = struct.Struct(">IIQ56xQ")
"""The beginning of a qcow2 disk: magic, version, offset of the name of its backing file, incompatible features."""
QCOW2_MAGIC, DATA_FILE = 0x514649FB, 1 << 2
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
    output = host.run("qemu-img", "info", "-U", "-f", "qcow2", "--output=json", "--", path, ok=None)
    if output.status:
        if host.works("test", "-e", path):
            raise SmsError(
                f"{host.name}: {path} is not a disk image: {output.stderr.decode(errors='replace').strip()[-300:]}"
            )
        return None
    found: DiskInfo = output.parse(DiskInfo)
    return found


def check_header(host: Host, path: str, *, backing: bool = False) -> None:
    """Check a disk that QEMU's account could write, before root opens it; QEMU must not have it open any more.

    Args:
        backing: it may have a backing file, which the caller does not open.

    Raises:
        SmsError: it is not a qcow2 disk, or qemu-img would open another file that its header names.
    """
    shown = host.run("od", "-An", "-v", "-tx1", f"-N{HEADER.size}", "--", path).text
    try:
        magic, version, backing_at, features = HEADER.unpack(bytes.fromhex(shown))
    except (ValueError, struct.error):
        magic = version = backing_at = features = 0
    if (magic, version) != (QCOW2_MAGIC, 3):
        raise SmsError(f"{host.name}: {path} is not a qcow2 disk of version 3", hint="`sms vm status`")
    if features & DATA_FILE or (backing_at and not backing):
        raise SmsError(
            f"{host.name}: the header of {path} names another file, which sms has not written there",
            hint="who could change it? Restore a snapshot of before: `sms vm snapshot --list`",
        )


def write_disk(host: Host, raw: str, path: str, *, timeout: float) -> None:
    """Write a disk with the content of a raw file, into an existing file, and flush it.

    Raises:
        CommandError: it could not be written.
        SmsError: not all of it was written.
    """
    host.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path, timeout=timeout)
    host.run("sync", path, timeout=timeout)
    # On a full disk qemu-img ignores that it could not write its tables at the end: the disk would be empty, status 0.
    found = host.run("qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", raw, path, ok=(0, 1), timeout=timeout)
    if found.status:
        raise SmsError(
            f"{host.name}: {path} could not be written completely", hint=disk_hint(os.strerror(errno.ENOSPC))
        )


def make_state(host: Host, path: str, size_mb: int) -> None:
    """Create an empty state disk."""
    raw, new = f"{path}.raw", f"{path}.new"
    try:
        files.make_file(host, raw, size_mb << 20)
        host.run("mke2fs", "-q", "-F", "-t", "ext4", "-L", "sms-state", "-m", "1", "-e", "remount-ro", raw, timeout=600)
        files.make_file(host, new)
        write_disk(host, raw, new, timeout=600)
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
    """Enlarge a disk that is not in use; the file system in it grows when it is mounted.

    Raises:
        SmsError: its header names another file.
    """
    check_header(host, path)
    host.run("qemu-img", "resize", "-q", "-f", "qcow2", path, f"{size_mb}M")
