"""Lock files: flock(2), which the kernel releases when the process ends.

Who can open a file can lock it, and so keep us waiting. A lock is therefore in a folder in which no other user can
create files, belongs to root or to the user of this process, and only its owner can open it.
``LOCK`` of ``appliance/host/base.py`` is the same as a shell script.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.shared.files import make_folder

RETRY_S = 0.05
"""Seconds between two attempts."""
PORTS_WAIT_S = 5
"""Seconds to wait for the lock of ports: to attach or detach some takes a moment."""
FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Locked(Exception):
    """Another process holds the lock, and did not release it in time."""


class UnsafeLock(OSError):
    """Other users could hold or replace the lock: it does not show whether another run is at work."""

    hint = "other users must not be able to write or open it: `ls -ld` shows owner and mode; remove it, or correct them"

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, "cannot be trusted as a lock: %s" % why, path)


@contextmanager
def hold_lock(path: str, *, wait_s: float = 0.0, shared: bool = False, users: bool = False) -> Iterator[None]:
    """Hold a lock file while the context lasts; create its folder if it is missing.

    Args:
        wait_s: seconds to wait while another process holds it.
        shared: take a shared lock instead of an exclusive one.
        users: the folder may be that of another user, whose data the lock is beside: his site file.

    Raises:
        Locked: another process holds it.
        UnsafeLock: another user could hold or replace it.
    """
    descriptor = _open(path, users=users)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Locked(path) from None
                time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _open(path: str, *, users: bool) -> int:
    folder = os.path.dirname(path) or "."
    make_folder(folder, 0o700)
    above = os.stat(folder)
    if above.st_mode & stat.S_IWOTH:
        raise UnsafeLock(path, "every user can create files in %s" % folder)
    if not users and above.st_uid not in (0, os.geteuid()):
        raise UnsafeLock(path, "%s belongs to user %d" % (folder, above.st_uid))
    try:
        descriptor = os.open(path, FLAGS, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UnsafeLock(path, "it is not a file") from None
        raise
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise UnsafeLock(path, "it is not a file")
        if state.st_uid not in (0, os.geteuid()):
            raise UnsafeLock(path, "it belongs to user %d" % state.st_uid)
        if state.st_mode & 0o022:
            raise UnsafeLock(path, "other users can write it")
        if state.st_mode & 0o077:  # of an earlier version
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def find_holders(path: str) -> list[int]:
    """Return the ids of the processes that hold a lock file; empty if there is none, or it cannot be read.

    A process of another PID namespace has the id 0 or lower.
    """
    try:
        state = os.stat(path)
        with open("/proc/locks", encoding="ascii", errors="replace") as stream:
            rows = [line.split() for line in stream]
    except OSError:
        return []
    place = "%02x:%02x:%d" % (os.major(state.st_dev), os.minor(state.st_dev), state.st_ino)
    return [int(row[4]) for row in rows if len(row) == 8 and row[1] == "FLOCK" and row[5] == place]


def ports_lock(lock: str) -> str:
    """Return the path of the lock under which the container's ports are attached to bridges and detached.

    It is not ``lock``, that of the host: a run holds that one for as long as it waits for services, or copies. A caller
    that needs both takes that one first, or does not wait for it.
    """
    return f"{lock}.ports"
