"""Read an overlay for a snapshot: find the chunks that hold data, and their digests."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from appliance.agent import ext, protocol
from appliance.agent.store import CHUNK, ZERO, count_chunks, digest_of
from appliance.shared.files import data_units

SPAN = 64
"""Chunks that a worker reads at once."""
WORKERS = min(4, os.cpu_count() or 1)
BLANK = bytes(CHUNK)

Sink = Callable[[int, Any], bytes]
"""(number of a chunk, its bytes) -> its digest; stores the chunk."""


def is_blank(data: Any) -> bool:
    """Whether a chunk consists of zeros."""
    return bool(data == BLANK if len(data) == CHUNK else not any(data))


def chunk_digest(data: Any) -> bytes:
    """Return a chunk's digest; that of zeros is ``ZERO``."""
    return ZERO if is_blank(data) else digest_of(data)


class Source:
    """Reads an overlay file chunk by chunk. Masked blocks, such as the journal's log, are read as zeros."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.descriptor).st_size
        self.count = count_chunks(self.size)
        self.digests = bytearray(self.count * 32)
        self.masked: Dict[int, List[Tuple[int, int]]] = {}
        self.image: Optional[ext.Image] = None

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Read bytes of the file, unmasked."""
        return os.pread(self.descriptor, size, offset)

    def find_structures(self) -> None:
        """Parse the file system's structures into ``image``; None if its format is not supported."""
        try:
            self.image = ext.Image(self.read)
        except ext.Unknown:
            self.image = None

    def mask(self, unused: Iterable[int] = ()) -> None:
        """Read the journal's log as zeros from now on; only for an image whose journal is empty when it is stored.

        Args:
            unused: further blocks to read as zeros.
        """
        if not self.image:
            return
        block = self.image.layout.block
        masked: Dict[int, List[Tuple[int, int]]] = {}
        try:
            log = self.image.journal_blocks()
        except ext.Unknown:
            log = []
        for one in (*log, *unused):
            at = one * block
            masked.setdefault(at // CHUNK, []).append((at % CHUNK, block))
        self.masked = masked

    def chunk(self, number: int) -> Any:
        """Read a chunk, masked."""
        return self._masked(number, self.read(number * CHUNK, CHUNK))

    def _masked(self, number: int, data: Any) -> Any:
        holes = self.masked.get(number)
        if not holes:
            return data
        changed = bytearray(data)
        for at, size in holes:
            size = min(size, len(changed) - at)
            changed[at : at + size] = bytes(size)
        return bytes(changed)

    def data_chunks(self) -> List[int]:
        """Return the numbers of the chunks that are not holes."""
        return list(data_units(self.descriptor, self.size, CHUNK))

    def read_chunks(self, numbers: Iterable[int], sink: Sink, *, show: bool = False) -> None:
        """Read chunks in several threads, pass them to ``sink``, and keep their digests; ``show`` reports progress."""
        wanted = sorted(set(numbers))
        spans = list(_spans(wanted))
        done = 0
        with ThreadPoolExecutor(WORKERS) as pool:
            for index, digests in enumerate(pool.map(lambda span: self._read_span(span, sink), spans)):
                first, count = spans[index]
                self.digests[first * 32 : (first + count) * 32] = digests
                done += count
                if show and done % (SPAN * 16) < count:
                    protocol.progress(done * CHUNK, len(wanted) * CHUNK)

    def _span(self, span: Tuple[int, int]) -> Iterator[Tuple[int, Any]]:
        """Yield the number and the masked bytes of each chunk of a span, which is read at once."""
        first, count = span
        data = memoryview(self.read(first * CHUNK, count * CHUNK))
        for at in range(count):
            yield first + at, self._masked(first + at, data[at * CHUNK : (at + 1) * CHUNK])

    def _read_span(self, span: Tuple[int, int], sink: Sink) -> bytes:
        return b"".join(ZERO if is_blank(one) else sink(number, one) for number, one in self._span(span))

    def differing(self, numbers: Iterable[int]) -> List[Tuple[int, bytes]]:
        """Return the chunks among ``numbers`` that differ from what was read before, with their current bytes."""
        spans = list(_spans(sorted(set(numbers))))
        with ThreadPoolExecutor(WORKERS) as pool:
            return [one for found in pool.map(self._differing_span, spans) for one in found]

    def _differing_span(self, span: Tuple[int, int]) -> List[Tuple[int, bytes]]:
        return [
            (number, bytes(one))
            for number, one in self._span(span)
            if chunk_digest(one) != self.digests[number * 32 : number * 32 + 32]
        ]

    def read_many(self, numbers: Iterable[int]) -> List[Tuple[int, bytes]]:
        """Read chunks; return their numbers and bytes."""
        read = (one for span in _spans(sorted(set(numbers))) for one in self._span(span))
        return [(number, bytes(data)) for number, data in read if number * CHUNK < self.size]

    def put(self, chunks: Iterable[Tuple[int, Any]], sink: Sink) -> None:
        """Pass chunks that were read before to ``sink``, and keep their digests."""
        for number, data in chunks:
            digest = ZERO if is_blank(data) else sink(number, data)
            self.digests[number * 32 : number * 32 + 32] = digest

    def blank(self, numbers: Iterable[int]) -> None:
        """Treat chunks as zeros, whatever they contain."""
        for number in numbers:
            self.digests[number * 32 : number * 32 + 32] = ZERO

    def used_bytes(self) -> int:
        """Return the bytes of all chunks that are not zeros."""
        blank = sum(self.digests[at : at + 32] == ZERO for at in range(0, len(self.digests), 32))
        return (self.count - blank) * CHUNK


def _spans(numbers: List[int]) -> List[Tuple[int, int]]:
    """Return runs of consecutive numbers, none longer than ``SPAN``, as (first, count)."""
    found: List[Tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number and found[-1][1] < SPAN:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def chunks_of_blocks(blocks: Set[int], size: int) -> Set[int]:
    """Return the numbers of the chunks that contain the blocks, which have ``size`` bytes."""
    if size >= CHUNK:
        return {one for block in blocks for one in range(block * size // CHUNK, (block * size + size - 1) // CHUNK + 1)}
    each = CHUNK // size
    return {block // each for block in blocks}


def free_chunks(image: ext.Image) -> Set[int]:
    """Return the numbers of the chunks without a block that the file system uses."""
    layout = image.layout
    if layout.blocks_per_group % 8 or layout.block > CHUNK // 8:
        return set()
    bitmap = b"".join(image.blocks(group.block_bitmap)[: layout.blocks_per_group // 8] for group in layout.groups)
    if layout.first:
        # With small blocks the bitmap begins at block 1.
        shifted = (int.from_bytes(bitmap, "little") << layout.first) | (1 << layout.first) - 1
        bitmap = shifted.to_bytes(len(bitmap) + 1, "little")
    each = CHUNK // layout.block // 8
    nothing = bytes(each)
    whole = layout.blocks * layout.block // CHUNK
    return {number for number in range(whole) if bitmap[number * each : number * each + each] == nothing}
