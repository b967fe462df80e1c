"""A second copy of an image: its blocks shared where the file system can, its holes kept where it cannot."""

import errno
import fcntl
import os

from appliance.agent import words
from appliance.agent.store import full
from appliance.agent.words import Problem
from appliance.shared.files import free_bytes

FICLONE = 0x40049409
"""ioctl of linux/fs.h."""
STEP = 16 << 20
"""Bytes between two words on how far it is."""


def share(source: int, target: int) -> bool:
    """Have an open file hold what another one does, by reflink; false where the file system cannot."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def copy_into(source: int, target: int, where: str) -> bool:
    """Copy an open file into an empty one; say whether they share their blocks.

    Args:
        where: what stands in the error when the file system is full.

    Raises:
        Problem: there is no room.
    """
    if share(source, target):
        return True
    state = os.fstat(source)
    used, free = state.st_blocks * 512, free_bytes(target)
    if used > free:
        raise Problem(
            "no room beside %s for a copy: it takes %d MiB, and %d are free" % (where, used >> 20, free >> 20),
            "make room there, then run this again",
            3,
        )
    try:
        os.ftruncate(target, state.st_size)
        _copy_data(source, target, state.st_size, used)
    except OSError as error:
        raise full(error, where)
    return False


def _copy_data(source: int, target: int, size: int, used: int) -> None:
    offset = done = told = 0
    while offset < size:
        try:
            begin = os.lseek(source, offset, os.SEEK_DATA)
            offset = os.lseek(source, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        os.lseek(target, begin, os.SEEK_SET)
        while begin < offset:
            moved = os.sendfile(target, source, begin, min(STEP, offset - begin))
            if not moved:
                return
            begin += moved
            done += moved
            if done - told >= STEP:
                words.moved(min(done, used), used)
                told = done
