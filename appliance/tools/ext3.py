"""ext3 images: checked, looked into, asked who uses them. e2fsprogs and losetup."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Host

UNCORRECTED = 4
"""Bit of e2fsck's exit status: errors are left (e2fsck(8))."""
OPERATIONAL = 8 | 16 | 32 | 128
"""Bits that say nothing of the image: it could not be opened, or e2fsck was ended."""


def users_of(host: Host, path: str) -> list[str]:
    """Loop devices of this host that have the file open."""
    # losetup goes by device and inode, but by the mere name where there is no such file.
    script = '[ ! -e "$1" ] || exec losetup --noheadings --output NAME --associated "$1"'
    return host.run("sh", "-c", script, "users", path).text.split()


def check(host: Host, path: str) -> None:
    """Replay the journal and mend what can be mended without asking. Nobody may use the image.

    Raises:
        SmsError: it is damaged beyond that.
    """
    result = host.run("e2fsck", "-p", path, ok=None, timeout=1800)
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


def read_inside(host: Host, path: str, name: str) -> bytes:
    """A file of an image that need not be mounted; empty where it is missing."""
    if '"' in name or "\n" in name:
        raise SmsError(f"no such file: {name!r}")
    return host.run("debugfs", "-R", f'cat "{name}"', path, ok=None).stdout
