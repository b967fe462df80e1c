"""Find the changes in a mounted overlay since it was read."""

import os
import time
from contextlib import ExitStack, closing
from typing import List, Optional, Set, Tuple

from appliance.agent import ext, protocol
from appliance.agent.freeze import Frozen, mounted_again
from appliance.agent.protocol import Problem
from appliance.agent.source import Sink, Source, chunks_of_blocks, free_chunks
from appliance.agent.store import CHUNK, ZERO, sync_system
from appliance.agent.trace import Trace, Untraceable

IN_MEMORY = 4096
"""Chunks that are kept in memory during the freeze; further ones are stored during it."""
YOUNG_S = 3
"""A ctime less than this before the last flush may be of a write after it (1 s resolution, and a margin)."""
JUMP_S = 0.5
"""When the clock was set by more than this meanwhile, ctimes are not used."""


class Changes:
    """Finds the chunks of a mounted overlay that changed since they were read."""

    def __init__(self, source: Source, loop: str, stack: ExitStack, limit_s: float, mark: str) -> None:
        self.source = source
        self.loop = loop
        self.limit_s = limit_s
        self.mark = mark
        self.stack = stack
        self.trace: Optional[Trace] = None
        self.inodes: Optional[ext.InodeState] = None
        self.found_by = ""
        self.clock = 0.0
        self.last = 1 << 62
        self.pending: Set[int] = set()
        """Chunks that the trace has reported and that were not read since."""
        self.free: Set[int] = set()
        """Chunks that the file system does not use: deleted data is not stored."""

    def start(self) -> None:
        """Start to record changes."""
        trace = Trace(self.loop, CHUNK)
        try:
            trace.start()
            self.stack.callback(trace.stop)
            self.trace = trace
        except Untraceable as reason:
            protocol.note("note: no block trace (%s); using inodes to find changes" % reason)
        self.clock = clock_offset()
        since = time.time()
        with mounted_again(self.loop) as folder:
            if self.trace:
                sync_system(folder)
            else:
                self._settle(folder)
        self.source.find_structures()
        # A freeze leaves the journal empty.
        self.source.mask()
        with open(self.loop, "rb", 0) as device:
            # The device shows the bitmaps as the kernel has them; in the file they are as old as the last checkpoint.
            self.free = _find_free(lambda offset, size: os.pread(device.fileno(), size, offset))
        if not self.trace and self.source.image:
            # From the file, which is also what is read: an outdated inode only counts as changed.
            try:
                self.inodes = ext.InodeState(self.source.image, since - YOUNG_S)
                # An inode that is created and deleted meanwhile shows no change, so its table block must read as zeros.
                self.source.mask(self.inodes.unused)
            except ext.Unknown:
                self.inodes = None

    def _settle(self, folder: str) -> None:
        # A write in progress set its inode's ctime when it began: what it writes later would be missed.
        with closing(Frozen(folder, self.limit_s, self.mark)) as frozen:
            frozen.hold()
            frozen.release()

    def flush(self) -> None:
        """Write back dirty pages: the trace reports only what reaches the device."""
        if self.trace:
            with mounted_again(self.loop) as folder:
                sync_system(folder)

    def collect(self, *, restart: bool = False) -> Optional[Set[int]]:
        """Return the chunks changed since the last call; None if unknown, or no fewer than in the last call.

        Args:
            restart: much time has passed since the last call, so there may be more changes than then.
        """
        if not self.trace:
            return None
        try:
            found = self._in_image(self.trace.written())
        except Untraceable:
            self.trace = None
            return None
        if restart:
            found, self.pending, self.last = found | self.pending, set(), 1 << 62
        growing, self.last = len(found) >= self.last, len(found)
        if growing:
            self.pending = found
            return None
        return found

    def final(self, sink: Sink) -> List[Tuple[int, bytes]]:
        """Return the chunks that still differ, with their bytes, while the file system is frozen."""
        source = self.source
        before, self.free = self.free, _find_free(source.read)
        missed = before - self.free
        if os.fstat(source.descriptor).st_size != source.size:
            raise Problem("the overlay was grown meanwhile", "run it again")
        if self.trace:
            try:
                numbers = self._in_image(self.trace.written()) | self.pending | missed
                self.found_by = "trace"
                # What does not fit into memory is stored during the freeze.
                many = sorted(numbers)
                source.read_chunks(many[IN_MEMORY:], sink)
                return source.read_many(many[:IN_MEMORY])
            except Untraceable:
                pass
        blocks = self._by_inodes()
        if blocks is not None and source.image:
            self.found_by = "inodes"
            return source.differing(self._in_image(chunks_of_blocks(blocks, source.image.layout.block)) | missed)
        self.found_by = "all"
        source.mask()
        known = {at // 32 for at in range(0, len(source.digests), 32) if source.digests[at : at + 32] != ZERO}
        return source.differing((known | set(source.data_chunks())) - self.free)

    def _in_image(self, numbers: Set[int]) -> Set[int]:
        return {number for number in numbers if number < self.source.count}

    def _by_inodes(self) -> Optional[Set[int]]:
        if not self.inodes or abs(clock_offset() - self.clock) > JUMP_S:
            return None
        try:
            found = self.inodes.changed(ext.Image(self.source.read))
            self.source.mask(self.inodes.unused)
            return found
        except ext.Unknown:
            return None


def _find_free(read: ext.Read) -> Set[int]:
    try:
        return free_chunks(ext.Image(read))
    except ext.Unknown:
        return set()


def clock_offset() -> float:
    """Return the wall clock minus the monotonic clock: it changes when the clock is set."""
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
