"""ext3 images: check, resize, read files inside, find loop devices. e2fsprogs and losetup."""

from __future__ import annotations

import re

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.overlay import LAYERS

FOLDER = "040"
"""The first digits of a folder's mode, as debugfs prints it with six."""
UNCORRECTED = 4
"""Bit of e2fsck's exit status: uncorrected errors (e2fsck(8))."""
OPERATIONAL = 8 | 16 | 32 | 128
"""Bits for operational errors: the image could not be opened, or e2fsck was cancelled."""


def users_of(host: Host, path: str) -> list[str]:
    """Return the loop devices of this host that have the file open."""
    # losetup compares device and inode, but only the name if the file does not exist.
    if not host.works("test", "-e", path):
        return []
    return host.run("losetup", "--noheadings", "--output", "NAME", "--associated", path).text.split()


def check(host: Host, path: str, *, whole: bool = False) -> None:
    """Replay the journal of an overlay, repair what e2fsck repairs automatically, check its mount options and layers.

    The image must not be in use.

    Args:
        whole: check everything, even if the file system is marked clean.

    Raises:
        SmsError: the image has other damage, mount options in its superblock, by which an error could make the host
            panic, or a link in the place of a layer: mounts of it would be elsewhere.
    """
    result = host.run("e2fsck", "-p", *(["-f"] if whole else []), path, ok=None, timeout=1800)
    if result.status < UNCORRECTED:
        _check_options(host, path)
        _check_layers(host, path)
        return
    # Its first lines name the damage; general advice follows.
    lines = (result.stdout + result.stderr).decode(errors="replace").splitlines()
    output = " / ".join([line.strip() for line in lines if line.strip()][:3])[:400]
    # A destroyed superblock is reported as an operational error too.
    if result.status & OPERATIONAL and "super-block" not in output and "superblock" not in output:
        raise SmsError(f"cannot check {path}: {output}", hint="is it readable and writable for root?")
    raise SmsError(
        f"{path} is damaged: {output}",
        hint="`sms overlay restore latest` replaces it by a snapshot; `e2fsck -n` on a copy shows the damage",
    )


def _check_options(host: Host, path: str) -> None:
    # Those of mke2fs.conf, as in appliance/agent/ext.py.
    shown = dict(re.findall(r"^([\w ]+): +(.+)$", host.run("dumpe2fs", "-h", path, ok=None).text, re.MULTILINE))
    usual = set(shown.get("Default mount options", "?").split()) <= {"user_xattr", "acl", "(none)"}
    if not usual or "Mount options" in shown or shown.get("Errors behavior", "Panic") == "Panic":
        raise SmsError(
            f"{path} has mount options in its superblock, such as errors=panic",
            hint="`dumpe2fs -h` shows them, `tune2fs -e continue` sets one; `sms overlay restore latest` replaces it",
        )


def _check_layers(host: Host, path: str) -> None:
    # /INODE/MODE/UID/GID/NAME/SIZE/, from all blocks of the folder, whatever its index leads to.
    listed = host.run("debugfs", "-R", "ls -p /", path, ok=None).text
    for name in LAYERS:
        modes = re.findall(rf"^/\d+/(\d+)/\d+/\d+/{name}/", listed, re.MULTILINE)
        if [mode[:3] for mode in modes] != [FOLDER]:
            raise SmsError(
                f"{path} is not an overlay of a container: it has not one folder /{name}",
                hint="`sms overlay restore latest` replaces it by a snapshot; where does this one come from?",
            )


def free_bytes(host: Host, path: str) -> int:
    """Return the bytes that an ordinary file can still get in an image that is not in use.

    Raises:
        SmsError: it is not an ext3 file system.
    """
    result = host.run("dumpe2fs", "-h", path, ok=None)
    names = ("Free blocks", "Reserved block count", "Block size")
    found = dict(re.findall(rf"^({'|'.join(names)}): +(\d+)$", result.text, re.MULTILINE))
    if result.status or len(found) < len(names):
        raise SmsError(f"{path} is not an ext3 file system", hint=f"dumpe2fs -h {path}")
    free, reserved, unit = (int(found[name]) for name in names)
    return max(0, free - reserved) * unit


def sizes_of(host: Host, path: str) -> tuple[int, int, int]:
    """Return in bytes: the size of an image file, of its file system, and the file's usage on the disk.

    Raises:
        SmsError: the file is not an ext3 file system.
    """
    users = users_of(host, path)
    # While the image is in use, the loop device has the current state.
    result = host.run("dumpe2fs", "-h", users[0] if users else path, ok=None)
    found = dict(re.findall(r"^(Block count|Block size): +(\d+)$", result.text, re.MULTILINE))
    if result.status or len(found) < 2:
        raise SmsError(f"{path} is not an ext3 file system", hint=f"dumpe2fs -h {path}")
    size, blocks, unit = host.run("stat", "--dereference", "--format=%s %b %B", path).numbers(3)
    return size, int(found["Block count"]) * int(found["Block size"]), blocks * unit


def resize(host: Host, path: str) -> None:
    """Grow the file system of an image to the size of its file. It must be checked and not in use."""
    host.run("resize2fs", path, timeout=1800)


def read_inside(host: Host, path: str, name: str, *, limit: int = MAX_OUTPUT) -> bytes:
    """Return a file of an image, which need not be mounted; empty if the file does not exist.

    Raises:
        TooMuchOutput: it has more bytes than ``limit``.
    """
    if '"' in name or "\n" in name:
        raise SmsError(f"no such file: {name!r}")
    return host.run("debugfs", "-R", f'cat "{name}"', path, ok=None, limit=limit).stdout


SHUT_DOWN = """\
set -e
mkdir -p -m 700 /run/sms
folder=$(mktemp -d /run/sms/cut.XXXXXX)
trap 'umount -l "$folder" 2>/dev/null; rmdir "$folder"' EXIT
trap 'exit 1' HUP INT TERM
# Mount the same superblock again, visible only to this process.
mount --make-rprivate /
mount -t ext3 "$1" "$folder"
"$2" -c 'import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack("I", 2))' "$folder"
"""
"""Shell script: shut down the file system on loop device $1 without a flush (EXT4_IOC_SHUTDOWN), with Python $2."""


def shut_down(host: Host, path: str, *, python: str = "python3") -> None:
    """Stop all writes to a mounted image at once, like a pulled disk: another host has taken over.

    Processes with open files get errors from then on. Dirty pages of the image file itself are still written.

    Raises:
        SmsError: the shutdown failed, or several loop devices have the image open.
    """
    users = users_of(host, path)
    if len(users) > 1:
        raise SmsError(f"{', '.join(users)} all have {path} open", hint="`losetup -l` lists them")
    for loop in users:
        host.run("unshare", "--mount", "sh", "-c", SHUT_DOWN, "shutdown", loop, python)
