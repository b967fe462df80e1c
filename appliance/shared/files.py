"""Atomic files: replaced as a whole, and flushed to the disk before anything relies on them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import AbstractContextManager, nullcontext, suppress
from io import FileIO
from typing import Any, Iterator


def sync_folder(path: str) -> None:
    """Flush the entries of a folder to the disk: what was created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: str, mode: int = 0o755) -> None:
    """Create a folder and its missing parents, unless it exists; a new one is on the disk afterwards."""
    if not path or os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path, mode)
    sync_folder(parent or ".")


ALWAYS: AbstractContextManager[bool] = nullcontext(True)
"""Allows every commit."""


def replace_file(
    path: str, data: bytes, mode: int = 0o600, *, may_commit: AbstractContextManager[bool] = ALWAYS
) -> bool:
    """Replace a file atomically: a reader, or the machine after a power failure, sees the old or the new content.

    Processes and threads that write it at once do so one after the other.

    Args:
        may_commit: entered before the new file is renamed; yields whether it may be.

    Returns:
        Whether it was replaced.

    Raises:
        OSError: it could not be written; the old file is unchanged.
    """
    folder = os.path.dirname(path)
    make_folder(folder)
    beside = path_beside(path)
    descriptor = _open_alone(beside, mode)
    with open(descriptor, "wb") as stream:  # until the rename, so that nobody else has the file meanwhile
        try:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
            with may_commit as allowed:
                if allowed:
                    os.rename(beside, path)
                else:
                    os.unlink(beside)
        except BaseException:
            remove_file(beside)
            raise
    sync_folder(folder)
    return allowed


NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock(2) on file systems without it, such as Lustre that is mounted without the option."""


def path_beside(path: str) -> str:
    """Return the path at which the new content of a file is written before it is renamed.

    What a killed run leaves there must not be read by a daemon that reads a whole folder, such as /etc/cron.d. Cron,
    cronie, run-parts, sudo and dnsmasq take neither names that begin with a dot nor ones that end with ~, patterns of
    nft and of Slurm's prologs not the former; systemd, sysusers, rsyslog, chrony, sshd and supervisord take names by
    their suffix. Only logrotate reads hidden files, whatever their suffix is.
    """
    folder, name = os.path.split(path)
    hidden = "" if os.path.basename(folder) == "logrotate.d" else "."
    return os.path.join(folder, "%s%s.new~" % (hidden, name))


def _open_alone(path: str, mode: int) -> int:
    """Create a file, after others who write it have renamed it; remove what a killed run left. Return its descriptor.

    One name for all: the next writer finds what is left. The lock ends when the descriptor is closed.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            _remove_left(path)
            continue
        try:
            _lock(descriptor)
            if _is_at(descriptor, path):  # not removed by another writer, who locked it before us
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_left(path: str) -> None:
    """Remove a file that its writer has left; wait while he lives."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError:  # a link, or not a file
        remove_file(path)
        return
    try:
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():  # other users cannot keep us waiting
            _lock(descriptor)
        if _is_at(descriptor, path):
            remove_file(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(descriptor: int, path: str) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def remove_file(path: str) -> None:
    """Remove a file, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_state(path: str) -> None:
    """Remove a state file, if it exists; it does not come back after a power failure."""
    with suppress(FileNotFoundError):
        os.unlink(path)
        sync_folder(os.path.dirname(path))


def create_file(path: str) -> FileIO:
    """Create a file of mode 0600, and open it to read and write it unbuffered; an existing one is removed."""
    remove_file(path)
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+b", 0)


def open_regular(path: str, *, follow: bool = True) -> int:
    """Open a regular file to read it; of a pipe, which would keep the caller waiting, or a device, nothing is read.

    Args:
        follow: whether the path may be a symbolic link.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def free_bytes(where: str | os.PathLike[str] | int) -> int:
    """Return the free bytes of the file system of a path or an open file."""
    state = os.statvfs(where)
    return state.f_bavail * state.f_frsize


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all of ``data`` by pwrite(2)."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (begin, end) of the first ``size`` bytes of a file that are not holes."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        if begin < size:
            yield begin, min(end, size)


def data_units(descriptor: int, size: int, unit: int) -> Iterator[int]:
    """Yield the numbers of the units of ``unit`` bytes that are not entirely holes, in order."""
    last = 0
    for begin, end in data_ranges(descriptor, size):
        first = max(begin // unit, last)
        last = (end - 1) // unit + 1
        yield from range(first, last)
