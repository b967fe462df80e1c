"""Atomic files: replaced as a whole, and flushed to the disk before anything relies on them."""

from __future__ import annotations

import os


def sync_folder(path: str) -> None:
    """Flush the entries of a folder to the disk: what was created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: a reader, or the machine after a power failure, sees the old or the new content.

    Raises:
        OSError: it could not be written; the old file is unchanged.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o755, exist_ok=True)
    beside = path + ".new"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while len(view):
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(beside, path)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise
    sync_folder(folder)


def free_bytes(where: str | os.PathLike[str] | int) -> int:
    """Return the free bytes of the file system of a path or an open file."""
    state = os.statvfs(where)
    return state.f_bavail * state.f_frsize
