"""A hostile services container: what root in it, to whom the overlay belongs, tries and leaves behind.

Scripts are run by `sms exec` in the instance. ``ATTEMPTS`` are refused at once. ``IMPLANT`` waits for verbs: programs
that report where they run, links and files that lead to the host. ``LIES`` are what its programs answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CANARY = "/etc/sms-canary"
"""A secret file of each host, which no verb may print and nothing in the container may read."""
SPY = "/var/spool/spy"
"""Where implanted programs report, in the overlay."""
TROPHIES = ("/PWNED", "/root/PWNED", "/etc/cron.d/PWNED")
"""Files that an implanted program writes, wherever it runs: on a host, they are a difference."""


@dataclass(frozen=True)
class Attempt:
    """What is tried at once. ``script`` ends with 0 if it was successful, as on a host where it does no harm."""

    kind: str
    script: str
    harmless: bool = True


REFUSED = "raise SystemExit(found < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS))"


def _call(number: int, *words: object) -> str:
    """A system call (x86-64), by Python: 0 if it was not refused, also if its arguments are wrong."""
    call = f"found = ctypes.CDLL(None, use_errno=True).syscall({', '.join(map(str, (number, *words)))})"
    return f"python3 -c 'import ctypes, errno, os; {call}; {REFUSED}'"


CHROOT = f"""
import os
os.makedirs("/tmp/inner", exist_ok=True)
outside = os.open("/", os.O_RDONLY)
os.chroot("/tmp/inner")
os.fchdir(outside)
for _ in range(64):
    os.chdir("..")
os.chroot(".")
os.stat("{CANARY}")
"""
"""The escape from chroot(2): it leads to the root of the mount namespace, and that is the container's."""
ABSTRACT = 'import socket; socket.socket(socket.AF_UNIX).connect("\\0sms-canary")'
LOOPBACK = 'import socket; socket.create_connection(("127.0.0.1", 7799), 2)'
VSOCK = "import socket; socket.socket(40, socket.SOCK_STREAM)"
MOUNTS, PROC, NETWORK, SIGNALS, REST, PARSERS = KINDS = (
    *("mounts and links", "/proc and descriptors", "network"),
    *("signals and ptrace", "files at rest", "parsers"),
)


ATTEMPTS = {
    "a mount by the newer calls: fsopen": Attempt(MOUNTS, _call(430, 'b"tmpfs"', 0)),
    "a copy of a mount: open_tree": Attempt(MOUNTS, _call(428, -100, 'b"/"', 1)),
    "a writable mount: mount_setattr": Attempt(MOUNTS, _call(442, -100, 'b"/proc/sys"', 0, 0, 32)),
    "out of a chroot": Attempt(MOUNTS, f"python3 -c '{CHROOT}'"),
    "a link to a file of the host": Attempt(MOUNTS, f"ln -sf /../../../..{CANARY} /tmp/link && cat /tmp/link"),
    "a file by its handle: open_by_handle_at": Attempt(
        MOUNTS, _call(304, -100, 'b"\\x08\\0\\0\\0\\x01\\0\\0\\0\\x02\\0\\0\\0\\0\\0\\0\\0"', 0)
    ),
    "the root of the first process": Attempt(PROC, f"cat /proc/1/root{CANARY}"),
    "above its working directory": Attempt(PROC, f"cat /proc/1/cwd/../../../..{CANARY}"),
    "memory of the kernel": Attempt(PROC, "head -c 64 /proc/kcore | grep -q .", harmless=False),
    "keys of the kernel: keyctl": Attempt(PROC, _call(250, 0, -4, 1)),
    "descriptors of another process: pidfd_getfd": Attempt(PROC, _call(438, "os.pidfd_open(1)", 0, 0)),
    "a socket of the host without a file": Attempt(NETWORK, f"python3 -c '{ABSTRACT}'"),
    "the loopback of the host": Attempt(NETWORK, f"python3 -c '{LOOPBACK}'"),
    "the host by vsock": Attempt(NETWORK, f"python3 -c '{VSOCK}'", harmless=False),
    "a program in the kernel: bpf": Attempt(NETWORK, _call(321, 0, 0, 0)),
    "bridges of the host": Attempt(NETWORK, "ip link set prov0 down || ip link set pub0 down", harmless=False),
    "another process: ptrace": Attempt(SIGNALS, _call(101, 16, 1, 0, 0), harmless=False),
    "memory of another process": Attempt(SIGNALS, _call(310, 1, 0, 0, 0, 0, 0)),
    "what the kernel does: perf_event_open": Attempt(SIGNALS, _call(298, 0, 0, -1, -1, 0)),
    "faults of memory by a program: userfaultfd": Attempt(SIGNALS, _call(323, 0)),
    "modules of the kernel": Attempt(REST, _call(313, 0, 'b""', 0), harmless=False),
    "another kernel": Attempt(REST, _call(246, 0, 0, 0, 0), harmless=False),
}
"""Each is refused. Kinds are those of the table in `tests/hostile/table.py`."""


def try_all(names: Iterable[str]) -> str:
    """A script that prints the names of those that were successful."""
    return (
        "".join(f"({ATTEMPTS[name].script}) >/dev/null 2>&1 </dev/null && echo '{name}'\n" for name in names) + "true"
    )


WRAPPED = (
    *(
        "scontrol",
        "squeue",
        "sinfo",
        "sacctmgr",
        "chronyc",
        "postqueue",
        "ip",
        "nft",
        "conntrack",
        "stat",
        "cat",
        "tail",
    ),
    *("find", "rsync", "tar", "date", "id", "sha256sum", "head", "ls", "setpriv", "munge", "logger"),
)
"""Programs of the image that verbs call, now or then."""
WRAPPER = f"""#!/bin/bash
{{
    echo "$0 $(/opt/kept/readlink /proc/self/ns/pid) $(/opt/kept/readlink /proc/self/ns/net)" >>{SPY}
    for trophy in {" ".join(TROPHIES)}; do : >$trophy; done
}} 2>/dev/null
exec /opt/kept/${{0##*/}} "$@"
"""
SITECUSTOMIZE = f"""
import os
for path in ("{SPY}", *{TROPHIES!r}):
    try:
        with open(path, "a") as stream:
            if path == "{SPY}":
                stream.write("python %s %s\\n" % (os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")))
    except OSError:
        pass
"""
REPLACE = """
# replace TEXT NAME...: put a text in the place of programs, which are kept.
replace() {
    text=$1
    shift
    for name in "$@"; do
        path=$(command -v "$name") || continue
        [ -e "/opt/kept/$name" ] || cp -L --preserve=mode,ownership "$path" "/opt/kept/$name"
        rm -f "$path"
        printf %s "$text" >"$path"
        chmod 755 "$path"
    done
}
set -eu
mkdir -p /opt/kept
"""
IMPLANT = f"""{REPLACE}
: >{SPY}
chmod 666 {SPY}
cp -a "$(command -v readlink)" /opt/kept/readlink
replace "$1" {" ".join(WRAPPED)}
printf %s "$2" >"$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/sitecustomize.py"
for path in /bin/sh /bin/bash; do cp "$path" "/var/spool/setuid-${{path##*/}}"; done
chmod 4755 /var/spool/setuid-*
ln -sfn /../../../../..{CANARY} /var/spool/link
ln -sfn ../../../../../../../../etc /var/spool/folder
mkfifo /var/spool/pipe
truncate -s 900G /var/spool/sparse
touch "/var/spool/$(printf 'a\\033]0;title\\007\\nb')" "/var/spool/--help" '/var/spool/$(touch PWNED)'
# The folder in which `sms apply` writes; the mark that `sms start` reads.
[ -L /etc/slurm ] || {{ mv /etc/slurm /etc/moved && ln -s ../../../../../etc/moved /etc/slurm; }}
"""
"""$1: the wrapper, $2: the library."""

HOSTILE = "a\\033]0;title\\007b\\033[31;5mc\\n$(touch /PWNED) `touch /PWNED`;"
FORBIDDEN = ("\x1b", "\x07")
LIES = {
    "escape sequences": f"printf '{HOSTILE}\\n%.0s' 1 2 3; printf '{HOSTILE}\\n' >&2",
    "without end": "exec /opt/kept/yes 'x y=z 1 2 3 [] {}'",
    "nothing": "exit 0",
    "a failure": "echo no >&2; exit 77",
    "killed": "kill -KILL $$",
    "zeros": "echo 0 0",
    "numbers that are none": "echo 99999999999999999999999999 -1 nan 1e999 0x7fffffffffffffff",
    "objects within objects": "printf '[%.0s' $(/opt/kept/seq 50000)",
    "bytes that are no text": "head -c 65536 /dev/urandom",
    "options and paths": "echo --help -rf ../../../../etc/sms-canary /etc/shadow",
}
"""What a program of the container answers."""
LIARS = ("scontrol", "squeue", "sinfo", "sacctmgr", "chronyc", "postqueue", "df")
LIE = f"""{REPLACE}
for name in yes seq; do cp -a "$(command -v $name)" /opt/kept/$name; done
replace "#!/bin/bash
$1
" {" ".join(LIARS)}
"""
"""$1: a lie."""
HONEST = f"""
for name in {" ".join(LIARS)}; do
    [ ! -e "/opt/kept/$name" ] || cp -a "/opt/kept/$name" "$(command -v "$name")"
done
"""
