"""What has changed in a mounted overlay since it was read."""

import os
import time
from contextlib import ExitStack
from typing import List, Optional, Set, Tuple

from appliance.agent import ext, words
from appliance.agent.freeze import Frozen, joined
from appliance.agent.source import Sink, Source, chunks_of_blocks, free_chunks
from appliance.agent.store import CHUNK, ZERO, sync_system
from appliance.agent.trace import Trace, Untraceable
from appliance.agent.words import Problem

IN_MEMORY = 4096
"""Chunks that are kept in memory while writers wait; what is more is stored meanwhile."""
YOUNG_S = 3
"""A ctime of so many seconds before the last flush may be that of a write after it (1 s resolution, and a margin)."""
JUMP_S = 0.5
"""A clock that moved by more between two looks tells no ctimes."""


class Changes:
    """What changed in a mounted overlay since it was read."""

    def __init__(self, source: Source, loop: str, stack: ExitStack, limit_s: float, mark: str) -> None:
        self.source = source
        self.loop = loop
        self.limit_s = limit_s
        self.mark = mark
        self.stack = stack
        self.trace: Optional[Trace] = None
        self.memory: Optional[ext.Memory] = None
        self.found_by = ""
        self.clock = 0.0
        self.last = 1 << 62
        self.carried: Set[int] = set()
        """Chunks that the trace has told and nobody has read since."""
        self.free: Set[int] = set()
        """Chunks that belong to no file: what was deleted is not kept."""

    def remember(self) -> None:
        """From now on."""
        trace = Trace(self.loop, CHUNK)
        try:
            trace.start()
            self.stack.callback(trace.stop)
            self.trace = trace
        except Untraceable as reason:
            words.note("note: no block trace (%s); changes are found by the inodes" % reason)
        self.clock = clock_offset()
        since = time.time()
        with joined(self.loop) as folder:
            if self.trace:
                sync_system(folder)
            else:
                self._settle(folder)
        self.source.understand()
        # A freeze leaves the journal empty.
        self.source.mask()
        with open(self.loop, "rb", 0) as device:
            # What the kernel has in memory of the bitmaps; in the file they are as old as the last checkpoint.
            try:
                self.free = free_chunks(ext.Image(lambda offset, size: os.pread(device.fileno(), size, offset)))
            except ext.Unknown:
                self.free = set()
        if not self.trace and self.source.image:
            # Inodes as the file has them, for that is what is read: an older one only counts as changed.
            try:
                self.memory = ext.Memory(self.source.image, since - YOUNG_S)
                # An inode that is made and deleted meanwhile leaves no change to be found, and must not be read either.
                self.source.mask(self.memory.unused)
            except ext.Unknown:
                self.memory = None

    def _settle(self, folder: str) -> None:
        # A write under way has changed its inode's ctime when it began: what it writes later would not be told.
        frozen = Frozen(folder, self.limit_s, self.mark)
        try:
            frozen.hold()
            frozen.release()
        finally:
            frozen.close()

    def flush(self) -> None:
        """Have written what writers have left in memory: a trace tells of what reaches the device."""
        if self.trace:
            with joined(self.loop) as folder:
                sync_system(folder)

    def so_far(self, *, anew: bool = False) -> Optional[Set[int]]:
        """Chunks to read again while writers go on; None where nobody can tell, or it gets no less.

        Args:
            anew: something else has taken its time since the last look: there may be more than there was then.
        """
        if not self.trace:
            return None
        try:
            found = self._in_image(self.trace.written())
        except Untraceable:
            self.trace = None
            return None
        if anew:
            found, self.carried, self.last = found | self.carried, set(), 1 << 62
        growing, self.last = len(found) >= self.last, len(found)
        if growing:
            self.carried = found
            return None
        return found

    def final(self, sink: Sink) -> List[Tuple[int, bytes]]:
        """What differs now that writers are held, with its bytes."""
        source = self.source
        before, self.free = self.free, self._free_now()
        missed = before - self.free
        if os.fstat(source.descriptor).st_size != source.size:
            raise Problem("the overlay was grown meanwhile", "run it again")
        if self.trace:
            try:
                numbers = self._in_image(self.trace.written()) | self.carried | missed
                self.found_by = "trace"
                # What does not fit into memory is stored while they wait.
                many = sorted(numbers)
                source.take(many[IN_MEMORY:], sink)
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

    def _free_now(self) -> Set[int]:
        try:
            return free_chunks(ext.Image(self.source.read))
        except ext.Unknown:
            return set()

    def _in_image(self, numbers: Set[int]) -> Set[int]:
        return {number for number in numbers if number < self.source.count}

    def _by_inodes(self) -> Optional[Set[int]]:
        if not self.memory or abs(clock_offset() - self.clock) > JUMP_S:
            return None
        try:
            found = self.memory.changed(ext.Image(self.source.read))
            self.source.mask(self.memory.unused)
            return found
        except ext.Unknown:
            return None


def clock_offset() -> float:
    """What the wall clock shows besides the time since the boot: it moves when somebody sets the clock."""
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
