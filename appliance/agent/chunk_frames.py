"""Frames that transfer chunks of an overlay to another host.

4 bytes the chunk's number, 1 byte its encoding, 4 bytes its length, 32 bytes its digest, then the chunk
"""

import struct
from typing import Any, Iterator, Tuple

from appliance.agent.source import chunk_digest as chunk_digest
from appliance.agent.store import ZERO
from appliance.agent.transfer import COMPRESSED, PLAIN, Compressor, damaged, decompress

HEAD = struct.Struct(">IBI32s")
BATCH = 2 << 20
"""Bytes of frames that are sent in one message."""


class FrameEncoder:
    """Encodes chunks as frames; compresses them as long as that reduces their size."""

    def __init__(self, compress: bool) -> None:
        self.compressor = Compressor() if compress else None

    def encode(self, number: int, data: Any, digest: bytes) -> bytes:
        """Return a chunk's frame; a chunk of zeros has no bytes."""
        if digest == ZERO:
            return HEAD.pack(number, PLAIN, 0, ZERO)
        kind, encoded = self.compressor.encode(bytes(data)) if self.compressor else (PLAIN, data)
        return HEAD.pack(number, kind, len(encoded), digest) + bytes(encoded)


def decode_frames(data: bytes) -> Iterator[Tuple[int, bytes, bytes]]:
    """Return the number, bytes and digest of each frame; zeros have no bytes.

    Raises:
        Problem: a frame was damaged in transit.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        if len(view) - at < HEAD.size:
            raise damaged()
        number, kind, length, digest = HEAD.unpack_from(view, at)
        at += HEAD.size
        if length > len(view) - at or kind not in (PLAIN, COMPRESSED):
            raise damaged()
        plain = decompress(kind, bytes(view[at : at + length])) if length else b""
        at += length
        if chunk_digest(plain) != digest:
            raise damaged("chunk %d" % number)
        yield number, plain, digest
