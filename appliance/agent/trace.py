"""Which parts of a block device were written since when: the kernel's trace of completed block requests.

Through tracefs, not blktrace(8): that one reads debugfs, which a kernel locked down for Secure Boot does not allow.
"""

import os
import re
import threading
from typing import Set

from appliance.agent.freeze import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount, unmount

BUFFER_KB = 4096
"""Of each CPU: some 40,000 requests."""
PAUSE_S = 0.05
SECTOR = 512
INSTANCE = "sms-%d-%d"
"""Of a device and a process; they are the kernel's own, and process ids are those of a container or a host."""
COMPLETED = re.compile(rb" block_rq_complete: \d+,\d+ ([A-Z]+) \(.*?\) (\d+) \+ (\d+) ")
"""Device, kind (W write, D discard), first sector, sectors: TP_printk of include/trace/events/block.h."""
READS = re.compile(rb"R|F*$")
"""Kinds that change nothing: reads, and flushes of no data (blk_fill_rwbs of kernel/trace/blktrace.c)."""
LOST = re.compile(rb"\[LOST (?:\d+ )?EVENTS\]")
"""What trace_pipe says where the kernel had no room for all (print_lost_events of kernel/trace/trace_output.c)."""


class Untraceable(Exception):
    """This kernel does not let us."""


class Trace:
    """Follows the writes to ``device`` from ``start`` to ``stop``; needs ``private_mounts``.

    A request's completion is what is noted, so that one under way when the trace begins is not missed.
    """

    def __init__(self, device: str, chunk: int) -> None:
        self.number = os.stat(device).st_rdev
        self.chunk = chunk
        self.root = "/run/sms/trace-%d" % os.getpid()
        self.folder = os.path.join(self.root, "instances", INSTANCE % (self.number, os.getpid()))
        self.pipe = -1
        self.rest = b""
        self.found: Set[int] = set()
        self.lost = False
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._drain_on, daemon=True)

    def start(self) -> None:
        """Begin.

        Raises:
            Untraceable: there is no such trace here.
        """
        try:
            os.makedirs(self.root, 0o700, exist_ok=True)
            mount("none", self.root, "tracefs", MS_NODEV | MS_NOSUID | MS_NOEXEC)
            remove_left(os.path.join(self.root, "instances"))
            os.mkdir(self.folder)
            # From here on nobody else can remove it.
            self.pipe = os.open(os.path.join(self.folder, "trace_pipe"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._set("buffer_size_kb", "%d" % BUFFER_KB)
            number = os.major(self.number) << 20 | os.minor(self.number)  # MKDEV of linux/kdev_t.h
            self._set("events/block/block_rq_complete/filter", "dev == %d" % number)
            self._set("events/block/block_rq_complete/enable", "1")
        except OSError as error:
            self.stop()
            raise Untraceable((error.strerror or str(error)).lower())
        self._reader.start()

    def written(self) -> Set[int]:
        """Numbers of the chunks written since the last call.

        Raises:
            Untraceable: the kernel could not note all of them.
        """
        self._drain()
        with self._guard:
            found, self.found = self.found, set()
        if self.lost:
            raise Untraceable("more was written than the kernel could note")
        return found

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        if self._reader.is_alive():
            self._reader.join()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        for remove, path in ((os.rmdir, self.folder), (unmount, self.root), (os.rmdir, self.root)):
            try:
                remove(path)
            except OSError:
                pass

    def _set(self, name: str, value: str) -> None:
        with open(os.path.join(self.folder, name), "w") as stream:
            stream.write(value)

    def _drain_on(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._drain()

    def _drain(self) -> None:
        with self._guard:
            while True:
                try:
                    data = os.read(self.pipe, 1 << 16)
                except OSError:  # nothing more for now
                    return
                if not data:
                    return
                lines = (self.rest + data).split(b"\n")
                self.rest = lines.pop()
                for line in lines:
                    self._note(line)

    def _note(self, line: bytes) -> None:
        if LOST.search(line):
            self.lost = True
        found = COMPLETED.search(line)
        if not found:
            return
        kind, sector, count = found.group(1), int(found.group(2)), int(found.group(3))
        if count and not READS.match(kind):
            begin, end = sector * SECTOR, (sector + count) * SECTOR
            self.found.update(range(begin // self.chunk, (end - 1) // self.chunk + 1))


def remove_left(folder: str) -> None:
    """Instances of runs that were killed; one in use, by a process that is not seen from here, stays."""
    for name in os.listdir(folder):
        pid = name.rpartition("-")[2]
        if name.startswith("sms-") and pid.isdigit() and not os.path.exists("/proc/" + pid):
            try:
                os.rmdir(os.path.join(folder, name))
            except OSError:
                pass
