"""The overlay as it is read for a snapshot: what of it holds data, and the digest of each chunk."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from appliance.agent import ext, words
from appliance.agent.store import CHUNK, ZERO, count_chunks, digest_of

SPAN = 64
"""Chunks that a worker reads at a time."""
WORKERS = min(4, os.cpu_count() or 1)
BLANK = bytes(CHUNK)

Sink = Callable[[int, Any], bytes]
"""(number of a chunk, its bytes) -> its digest, once it is kept somewhere."""


def is_blank(data: Any) -> bool:
    """Whether a chunk is zeros alone."""
    return bool(data == BLANK if len(data) == CHUNK else not any(data))


class Source:
    """An overlay file, read chunk by chunk. The journal's log is read as zeros: nothing in a clean image needs it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.descriptor).st_size
        self.count = count_chunks(self.size)
        self.digests = bytearray(self.count * 32)
        self.masked: Dict[int, List[Tuple[int, int]]] = {}
        self.image: Optional[ext.Image] = None

    def close(self) -> None:
        """Done with it."""
        os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file as it is."""
        return os.pread(self.descriptor, size, offset)

    def understand(self) -> None:
        """Find the file system's structures, and the journal's log; leave it where they are not known."""
        try:
            self.image = ext.Image(self.read)
        except ext.Unknown:
            self.image = None

    def mask(self, unused: Iterable[int] = ()) -> None:
        """Read the journal's log as zeros from now on; only for an image whose journal will be empty.

        Args:
            unused: further blocks to be read as zeros.
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
        """The bytes of a chunk."""
        data = self.read(number * CHUNK, CHUNK)
        return self._without_log(number, data)

    def _without_log(self, number: int, data: Any) -> Any:
        holes = self.masked.get(number)
        if not holes:
            return data
        changed = bytearray(data)
        for at, size in holes:
            size = min(size, len(changed) - at)
            changed[at : at + size] = bytes(size)
        return bytes(changed)

    def data_chunks(self) -> List[int]:
        """Numbers of the chunks that lie on the disk; the others are holes."""
        found: List[int] = []
        offset = last = 0
        while offset < self.size:
            try:
                begin = os.lseek(self.descriptor, offset, os.SEEK_DATA)
                offset = os.lseek(self.descriptor, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            first = max(begin // CHUNK, last)
            last = (offset - 1) // CHUNK + 1
            found.extend(range(first, last))
        return found

    def take(self, numbers: Iterable[int], sink: Sink, *, show: bool = False) -> None:
        """Read chunks, hand them to ``sink``, remember their digests. Several threads."""
        wanted = sorted(set(numbers))
        spans = list(_spans(wanted))
        done = 0
        with ThreadPoolExecutor(WORKERS) as pool:
            for index, digests in enumerate(pool.map(lambda span: self._take_span(span, sink), spans)):
                first, count = spans[index]
                self.digests[first * 32 : (first + count) * 32] = digests
                done += count
                if show and done % (SPAN * 16) < count:
                    words.moved(done * CHUNK, len(wanted) * CHUNK)

    def _take_span(self, span: Tuple[int, int], sink: Sink) -> bytes:
        first, count = span
        data = memoryview(self.read(first * CHUNK, count * CHUNK))
        digests = bytearray()
        for at in range(count):
            one: Any = data[at * CHUNK : (at + 1) * CHUNK]
            if first + at in self.masked:
                one = self._without_log(first + at, one)
            digests += ZERO if is_blank(one) else sink(first + at, one)
        return bytes(digests)

    def differing(self, numbers: Iterable[int]) -> List[Tuple[int, bytes]]:
        """Those chunks among ``numbers`` that are not what was taken, with their bytes of now. Several threads."""
        spans = list(_spans(sorted(set(numbers))))
        with ThreadPoolExecutor(WORKERS) as pool:
            return [one for found in pool.map(self._differing_span, spans) for one in found]

    def _differing_span(self, span: Tuple[int, int]) -> List[Tuple[int, bytes]]:
        first, count = span
        data = memoryview(self.read(first * CHUNK, count * CHUNK))
        found = []
        for at in range(count):
            number = first + at
            one: Any = self._without_log(number, data[at * CHUNK : (at + 1) * CHUNK])
            digest = ZERO if is_blank(one) else digest_of(one)
            if digest != self.digests[number * 32 : number * 32 + 32]:
                found.append((number, bytes(one)))
        return found

    def read_many(self, numbers: Iterable[int]) -> List[Tuple[int, bytes]]:
        """The bytes of chunks as they are."""
        found = []
        for first, count in _spans(sorted(set(numbers))):
            data = self.read(first * CHUNK, count * CHUNK)
            found += [
                (first + at, self._without_log(first + at, data[at * CHUNK : (at + 1) * CHUNK]))
                for at in range(count)
                if (first + at) * CHUNK < self.size
            ]
        return found

    def put(self, chunks: Iterable[Tuple[int, Any]], sink: Sink) -> None:
        """Chunks that were read before."""
        for number, data in chunks:
            digest = ZERO if is_blank(data) else sink(number, data)
            self.digests[number * 32 : number * 32 + 32] = digest

    def blank(self, numbers: Iterable[int]) -> None:
        """Chunks that count as zeros, whatever stands in them."""
        for number in numbers:
            self.digests[number * 32 : number * 32 + 32] = ZERO

    def used_bytes(self) -> int:
        """Bytes of the chunks that are not zeros."""
        blank = sum(self.digests[at : at + 32] == ZERO for at in range(0, len(self.digests), 32))
        return (self.count - blank) * CHUNK


def _spans(numbers: List[int]) -> List[Tuple[int, int]]:
    """Runs of numbers that follow each other, none longer than ``SPAN``: (first, how many)."""
    found: List[Tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number and found[-1][1] < SPAN:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def chunks_of_blocks(blocks: Set[int], size: int) -> Set[int]:
    """Numbers of the chunks that blocks of ``size`` bytes lie in."""
    if size >= CHUNK:
        return {one for block in blocks for one in range(block * size // CHUNK, (block * size + size - 1) // CHUNK + 1)}
    each = CHUNK // size
    return {block // each for block in blocks}


def free_chunks(image: ext.Image) -> Set[int]:
    """Numbers of the chunks of which the file system uses no block."""
    layout = image.layout
    if layout.blocks_per_group % 8 or layout.block > CHUNK // 8:
        return set()
    bitmap = b"".join(image.blocks(group.block_bitmap)[: layout.blocks_per_group // 8] for group in layout.groups)
    if layout.first:
        # Small blocks: the first bit is block 1.
        shifted = (int.from_bytes(bitmap, "little") << layout.first) | (1 << layout.first) - 1
        bitmap = shifted.to_bytes(len(bitmap) + 1, "little")
    each = CHUNK // layout.block // 8
    nothing = bytes(each)
    whole = layout.blocks * layout.block // CHUNK
    return {number for number in range(whole) if bitmap[number * each : number * each + each] == nothing}
