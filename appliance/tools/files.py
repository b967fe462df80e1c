"""Files of a host, by the commands of coreutils, findutils and util-linux."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from appliance.host.base import Host

SYNC_S = 600
"""Seconds until a flush to a slow disk counts as failed."""
HELD = 9
"""Exit status of flock if another process holds the lock."""


def rename(host: Host, source: str, target: str, *, replace: bool = False) -> None:
    """Rename a file, and flush its folder; without ``replace`` an existing target is left unchanged."""
    host.run("mv", "-fT" if replace else "-nT", "--", source, target)
    host.run("sync", str(PurePosixPath(target).parent), timeout=SYNC_S)


def place(host: Host, source: str, target: str, *, replace: bool = True) -> None:
    """Flush a complete file to the disk, then rename it."""
    host.run("sync", source, timeout=SYNC_S)
    rename(host, source, target, replace=replace)


def make_folders(host: Host, *paths: str) -> None:
    """Create missing folders and those above them, readable only by root; new ones are on the disk afterwards."""
    made = host.run("mkdir", "-pvm", "0700", "--", *paths).text
    if made:
        above = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        host.run("sync", *sorted(above), timeout=SYNC_S)


def link(host: Host, path: str, target: str) -> None:
    """Replace ``path`` atomically by a symbolic link to ``target``."""
    host.run("ln", "-sfn", "--", target, f"{path}.new")
    rename(host, f"{path}.new", path, replace=True)


def make_file(host: Host, path: str, size: int = 0) -> None:
    """Create a file of ``size`` bytes, a hole, readable only by root; an existing one is replaced."""
    host.run("install", "-m", "600", "/dev/null", path)
    if size:
        host.run("truncate", "-s", str(size), path)


def copy_sparse(host: Host, source: str, target: str, *, timeout: float | None) -> None:
    """Copy a file, readable only by root: as a reflink where the file system supports it, else without its holes."""
    make_file(host, target)
    host.run("cp", "--reflink=auto", "--sparse=always", "-T", "--", source, target, timeout=timeout)


def size_of(host: Host, *paths: str) -> int:
    """Return the sum of the sizes in bytes; missing files count as 0."""
    return sum(map(int, host.run("stat", "-c", "%s", "--", *paths, ok=None).text.split()))


def others_can_write(host: Host, path: str) -> bool:
    """Whether users other than root can change a file or its folder; a sticky folder is safe."""
    unsafe = ("(", "!", "-user", "root", "-o", "-perm", "/022", "!", "-perm", "-1000", ")")
    return bool(host.run("find", path, str(PurePosixPath(path).parent), "-maxdepth", "0", *unsafe).text)


def is_locked(host: Host, path: str) -> bool:
    """Whether a process has the file locked exclusively; does not wait, and does not create it."""
    if not host.works("test", "-e", path):
        return False
    return host.run("flock", "-n", "-s", "-E", str(HELD), path, "true", ok=None).status == HELD


def free_memory_mb(host: Host) -> int:
    """Return the memory that new programs can use without swapping, in MiB."""
    return _read_kib(host, "/proc/meminfo", "MemAvailable") >> 10


def used_memory_mb(host: Host, pid: int) -> int:
    """Return the memory that a process occupies, in MiB; 0 if there is no such process."""
    return _read_kib(host, f"/proc/{pid}/status", "VmRSS") >> 10


def _read_kib(host: Host, path: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", host.run("cat", path, ok=None).text, re.MULTILINE)
    return int(found.group(1)) if found else 0
