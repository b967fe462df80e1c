"""ext3 images: checked, looked into, asked who uses them. e2fsprogs and losetup."""

from __future__ import annotations

import re

from appliance.errors import SmsError
from appliance.host.base import Host

UNCORRECTED = 4
"""Bit of e2fsck's exit status: errors are left (e2fsck(8))."""
OPERATIONAL = 8 | 16 | 32 | 128
"""Bits that say nothing of the image: it could not be opened, or e2fsck was ended."""

# losetup goes by device and inode, but by the mere name where there is no such file.
USERS = '[ ! -e "$1" ] || exec losetup --noheadings --output NAME --associated "$1"'


def users_of(host: Host, path: str) -> list[str]:
    """Loop devices of this host that have the file open."""
    return host.run("sh", "-c", USERS, "users", path).text.split()


def check(host: Host, path: str, *, whole: bool = False) -> None:
    """Replay the journal and mend what can be mended without asking. Nobody may use the image.

    Args:
        whole: look at everything, also where it was left in order.

    Raises:
        SmsError: it is damaged beyond that.
    """
    result = host.run("e2fsck", "-p", *(["-f"] if whole else []), path, ok=None, timeout=1800)
    if result.status < UNCORRECTED:
        return
    words = (result.stdout + result.stderr).decode(errors="replace").strip()[-400:]
    # A file that is no file system any more ends as an operational error as well.
    if result.status & OPERATIONAL and "super-block" not in words and "superblock" not in words:
        raise SmsError(f"{path} cannot be checked: {words}", hint="can root read and write it, and its file system?")
    raise SmsError(
        f"{path} is damaged: {words}",
        hint="put a backup of it in its place; `e2fsck -n` on a copy shows the damage",
    )


def sizes_of(host: Host, path: str) -> tuple[int, int, int]:
    """Bytes of an image file, of the file system in it, and those that the file takes on the disk.

    Raises:
        SmsError: there is no ext3 file system in it.
    """
    users = users_of(host, path)
    # While it is in use, the kernel's own view of it is the newer one.
    script = 'stat --dereference --format="%s %b %B" "$1" && exec dumpe2fs -h "$2" 2>/dev/null'
    said = host.run("sh", "-c", script, "sizes", path, users[0] if users else path, ok=None)
    found = dict(re.findall(r"^(Block count|Block size): +(\d+)$", said.text, re.MULTILINE))
    if said.status or len(found) < 2:
        raise SmsError(f"{path} holds no ext3 file system", hint=f"dumpe2fs -h {path}")
    size, blocks, unit = (int(word) for word in said.text.splitlines()[0].split())
    return size, int(found["Block count"]) * int(found["Block size"]), blocks * unit


def resize(host: Host, path: str) -> None:
    """Have the file system in an image take all of its file. Nobody may use it, and it must have been checked."""
    host.run("resize2fs", path, timeout=1800)


def read_inside(host: Host, path: str, name: str) -> bytes:
    """A file of an image that need not be mounted; empty where it is missing."""
    if '"' in name or "\n" in name:
        raise SmsError(f"no such file: {name!r}")
    return host.run("debugfs", "-R", f'cat "{name}"', path, ok=None).stdout


CUT = """\
set -e
mkdir -p /run/sms
folder=$(mktemp -d /run/sms/cut.XXXXXX)
trap 'umount -l "$folder" 2>/dev/null; rmdir "$folder"' EXIT
# The same superblock once more, seen by this process alone.
mount --make-rprivate /
mount -t ext3 "$1" "$folder"
"$2" -c 'import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack("I", 2))' "$folder"
"""
"""Shell: shut the file system on loop device $1 down, without a last flush (EXT4_IOC_SHUTDOWN), by Python $2."""


def cut_off(host: Host, path: str, *, python: str = "python3") -> None:
    """End all writing to a mounted image at once, as pulling its disk would: somebody else has it now.

    Who has files open there gets errors from now on. What the kernel holds of the image's own file is written still.

    Raises:
        SmsError: it cannot be cut off, or nobody knows which of several loop devices is meant.
    """
    users = users_of(host, path)
    if len(users) > 1:
        raise SmsError(f"{', '.join(users)} all have {path} open", hint="`losetup -l` shows who has it")
    for loop in users:
        host.run("unshare", "--mount", "sh", "-c", CUT, "cut", loop, python)
