"""Chunks of an overlay on their way to another host, each with its number and its digest.

4 bytes the number, 1 byte how it is packed, 4 bytes its length, 32 bytes its digest, then the chunk
"""

import struct
from typing import Any, Iterator, Tuple

from appliance.agent.source import is_blank
from appliance.agent.store import ZERO, digest_of
from appliance.agent.transfer import PACKED, PLAIN, Press, unpack
from appliance.agent.words import Problem

HEAD = struct.Struct(">IBI32s")
BATCH = 2 << 20
"""Bytes of chunks that go together."""


class Packer:
    """Makes parcels; packs chunks for as long as it pays."""

    def __init__(self, compress: bool) -> None:
        self.press = Press() if compress else None

    def wrap(self, number: int, data: Any, digest: bytes) -> bytes:
        """One parcel; a chunk of zeros has no bytes."""
        if digest == ZERO:
            return HEAD.pack(number, PLAIN, 0, ZERO)
        kind, packed = self.press.pack(bytes(data)) if self.press else (PLAIN, data)
        return HEAD.pack(number, kind, len(packed), digest) + bytes(packed)


def digest_or_zero(data: Any) -> bytes:
    """A chunk's digest; that of zeros is ``ZERO``."""
    return ZERO if is_blank(data) else digest_of(data)


def open_parcels(data: bytes) -> Iterator[Tuple[int, bytes, bytes]]:
    """Number, bytes and digest of each; zeros have no bytes.

    Raises:
        Problem: one is not what was sent.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        if len(view) - at < HEAD.size:
            raise _broken()
        number, kind, length, digest = HEAD.unpack_from(view, at)
        at += HEAD.size
        if length > len(view) - at or kind not in (PLAIN, PACKED):
            raise _broken()
        plain = unpack(kind, bytes(view[at : at + length])) if length else b""
        at += length
        if digest_or_zero(plain) != digest:
            raise _broken()
        yield number, plain, digest


def _broken() -> Problem:
    return Problem("what came is not what was sent: it was damaged on the way", "run it again: what has come is kept")
