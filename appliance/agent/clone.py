"""Copy an image: by reflink where the file system supports it, else without its holes."""

import fcntl
import os
from typing import Callable, Optional, Set

from appliance.agent import protocol
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, ZERO, count_chunks, digest_of, disk_errors
from appliance.shared.files import data_ranges, free_bytes, write_at

FICLONE = 0x40049409
"""ioctl of linux/fs.h."""
STEP = 16 << 20
"""Bytes between two progress messages."""


def reflink(source: int, target: int) -> bool:
    """Clone an open file into another one by reflink; return False where the file system does not support it."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def clone_chunks(path: str, target: int, size: int, digest: Callable[[int], bytes]) -> Optional[Set[int]]:
    """Clone a file that is being written into an empty one of ``size`` bytes; chunks that are not used become zeros.

    Args:
        digest: of the chunk of a number as it was read before.

    Returns:
        The numbers of the chunks that are as they were read; None where the file system does not support reflink.
    """
    with open(path, "rb") as stream:
        cloned = reflink(stream.fileno(), target)
    os.ftruncate(target, size)
    if not cloned:
        return None
    found = set()
    for number in range(count_chunks(size)):
        data, known = os.pread(target, CHUNK, number * CHUNK), digest(number)
        if known == ZERO:
            if data.count(0) < len(data):
                write_at(target, bytes(len(data)), number * CHUNK)
        elif digest_of(data) == known:
            found.add(number)
    return found


def copy_same(
    path: str, size: int, digest: Callable[[int], bytes], put: Callable[[int, bytes], None], missing: Set[int]
) -> None:
    """Copy the chunks that another file has at the same offset, and remove them from ``missing``.

    Args:
        path: of the file; one that cannot be opened has none.
        size: of the copy, in bytes.
        digest: of the chunk of a number.
        put: writes a chunk.
    """
    try:
        base = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for number in sorted(missing):
            data = os.pread(base, CHUNK, number * CHUNK)
            if len(data) == min(CHUNK, size - number * CHUNK) and digest_of(data) == digest(number):
                put(number, data)
                missing.discard(number)
    finally:
        os.close(base)


def copy_into(source: int, target: int, where: str) -> bool:
    """Copy an open file into an empty one; return whether they share their blocks.

    Args:
        where: the path named in errors.

    Raises:
        Problem: there is not enough space.
    """
    if reflink(source, target):
        return True
    state = os.fstat(source)
    used, free = state.st_blocks * 512, free_bytes(target)
    if used > free:
        raise Problem(
            "no room for a copy next to %s: it needs %d MiB, %d are free" % (where, used >> 20, free >> 20),
            "make room there, then run this again",
            3,
        )
    with disk_errors(where):
        os.ftruncate(target, state.st_size)
        _copy_data(source, target, state.st_size, used)
    return False


def _copy_data(source: int, target: int, size: int, used: int) -> None:
    done = reported = 0
    for begin, end in data_ranges(source, size):
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            moved = os.sendfile(target, source, begin, min(STEP, end - begin))
            if not moved:
                return
            begin += moved
            done += moved
            if done - reported >= STEP:
                protocol.progress(min(done, used), used)
                reported = done
