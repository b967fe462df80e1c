"""Copy a file that is not being written to another file system, without its holes, and verify the copy."""

import hashlib
import os
from typing import Any, Dict, List, Tuple

from appliance.agent import protocol
from appliance.agent.protocol import Problem, field
from appliance.shared.files import create_file, data_units, sync_folder, write_at

BLOCK = 1 << 20
"""Bytes that are read and compared at a time."""
CLUSTER = 1 << 16
"""Bytes; aligned runs of so many zeros become holes."""
ZEROS = bytes(CLUSTER)


def copy_file(request: Dict[str, Any]) -> Dict[str, Any]:
    """Copy ``source`` to ``target``, which is replaced; read the copy back and compare.

    Raises:
        Problem: the copy differs; ``target`` is removed.
    """
    source = field(request, "source", str)
    target = field(request, "target", str)
    with open(source, "rb", 0) as reader, create_file(target) as writer:
        try:
            protocol.step("copy", "copy the overlay")
            size = os.fstat(reader.fileno()).st_size
            digests = _copy(reader.fileno(), writer.fileno(), size)
            protocol.step("compare", "read the copy back and compare")
            _compare(writer.fileno(), size, digests)
        except BaseException:
            os.unlink(target)
            raise
    sync_folder(os.path.dirname(target))
    return {"bytes": len(digests) * BLOCK, "size": size}


def _copy(reader: int, writer: int, size: int) -> Dict[int, bytes]:
    os.ftruncate(writer, size)
    blocks = [number * BLOCK for number in data_units(reader, size, BLOCK)]
    digests = {}
    for done, at in enumerate(blocks, 1):
        data = _read(reader, at, size)
        digests[at] = hashlib.sha256(data).digest()
        for place, piece in _pieces(data):
            write_at(writer, piece, at + place)
        if done % 16 == 0:
            protocol.progress(done * BLOCK, len(blocks) * BLOCK)
    os.fsync(writer)
    # The comparison must read from the disk, not from the cache.
    os.posix_fadvise(writer, 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def _compare(descriptor: int, size: int, digests: Dict[int, bytes]) -> None:
    for done, at in enumerate(sorted(digests), 1):
        if hashlib.sha256(_read(descriptor, at, size)).digest() != digests[at]:
            raise Problem("the copy differs at byte %d" % at, "is the disk failing? run it again")
        if done % 16 == 0:
            protocol.progress(done * BLOCK, len(digests) * BLOCK)
    for number in data_units(descriptor, size, BLOCK):
        at = number * BLOCK
        if at not in digests and any(_read(descriptor, at, size)):
            raise Problem(
                "the copy has data at byte %d, where the overlay has none" % at, "is the disk failing? run it again"
            )


def _pieces(data: bytes) -> List[Tuple[int, bytes]]:
    pieces = [(place, data[place : place + CLUSTER]) for place in range(0, len(data), CLUSTER)]
    return [(place, piece) for place, piece in pieces if piece != ZEROS[: len(piece)]]


def _read(descriptor: int, at: int, size: int) -> bytes:
    wanted = min(BLOCK, size - at)
    data = os.pread(descriptor, wanted, at)
    if len(data) != wanted:
        raise Problem("the file ends at byte %d, before its size" % (at + len(data)))
    return data
