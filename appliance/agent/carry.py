"""Carries a file that nobody writes to another file system: what it holds, not its holes, and reads it again there."""

import hashlib
import os
from typing import Any, Dict, Iterator, List, Tuple

from appliance.agent import words
from appliance.agent.words import Problem, field
from appliance.shared.files import sync_folder

BLOCK = 1 << 20
"""Bytes read at a time, and held against each other."""
CLUSTER = 1 << 16
"""So many zeros in a row become a hole."""
ZEROS = bytes(CLUSTER)


def carry(request: Dict[str, Any]) -> Dict[str, Any]:
    """Copy ``source`` to ``target``, which is made anew, and hold the two against each other.

    Raises:
        Problem: what came to lie there is not what was read; ``target`` is removed.
    """
    source = field(request, "source", str)
    target = field(request, "target", str)
    if os.path.lexists(target):
        os.unlink(target)
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            words.step("copy", "copy the overlay")
            size = os.fstat(reader).st_size
            digests = _copy(reader, writer, size)
            words.step("compare", "read the copy and compare")
            _compare(writer, size, digests)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    sync_folder(os.path.dirname(target))
    return {"bytes": len(digests) * BLOCK, "size": size}


def held(descriptor: int, size: int) -> Iterator[int]:
    """Where blocks begin that are not all hole; all of them where the file system does not tell."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError:
            return  # ENXIO: no data behind
        for block in range(max(begin // BLOCK * BLOCK, at), end, BLOCK):
            yield block
            at = block + BLOCK


def _copy(reader: int, writer: int, size: int) -> Dict[int, bytes]:
    os.ftruncate(writer, size)
    blocks = list(held(reader, size))
    digests = {}
    for done, at in enumerate(blocks, 1):
        data = _read(reader, at, size)
        digests[at] = hashlib.sha256(data).digest()
        for place, piece in _pieces(data):
            while piece:
                written = os.pwrite(writer, piece, at + place)
                place, piece = place + written, piece[written:]
        if done % 16 == 0:
            words.moved(done * BLOCK, len(blocks) * BLOCK)
    os.fsync(writer)
    # What is compared is to come from the disk.
    os.posix_fadvise(writer, 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def _compare(descriptor: int, size: int, digests: Dict[int, bytes]) -> None:
    for done, at in enumerate(sorted(digests), 1):
        if hashlib.sha256(_read(descriptor, at, size)).digest() != digests[at]:
            raise Problem("the copy differs at byte %d" % at, "is the disk failing? run it again")
        if done % 16 == 0:
            words.moved(done * BLOCK, len(digests) * BLOCK)
    for at in held(descriptor, size):
        if at not in digests and any(_read(descriptor, at, size)):
            raise Problem("the copy has at byte %d what the overlay has not" % at, "is the disk failing? run it again")


def _pieces(data: bytes) -> List[Tuple[int, bytes]]:
    pieces = [(place, data[place : place + CLUSTER]) for place in range(0, len(data), CLUSTER)]
    return [(place, piece) for place, piece in pieces if piece != ZEROS[: len(piece)]]


def _read(descriptor: int, at: int, size: int) -> bytes:
    wanted = min(BLOCK, size - at)
    data = os.pread(descriptor, wanted, at)
    if len(data) != wanted:
        raise Problem("the file ends at byte %d, sooner than it should" % (at + len(data)))
    return data
