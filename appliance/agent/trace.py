"""Find the written chunks of a block device by the kernel's trace of completed block requests.

Reads tracefs, not blktrace(8), which needs debugfs: kernel lockdown (Secure Boot) forbids that.
"""

import os
import re
import threading
import time
from typing import Set

from appliance.agent.freeze import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount, unmount

BUFFER_KB = 4096
"""Per CPU: about 40,000 requests."""
PAUSE_S = 0.05
SECTOR = 512
INSTANCE = re.compile(r"sms-(?:(\d+)-)?(\d+)")
"""Names of our instances: the pid namespace (not in older versions), and the pid in it."""
STALE_S = 3600
"""Seconds after which an instance of another pid namespace is removed, unless its trace is being read."""
COMPLETED = re.compile(rb" block_rq_complete: \d+,\d+ ([A-Z]+) \(.*?\) (\d+) \+ (\d+) ")
"""Device, kind (W write, D discard), first sector, sectors: TP_printk of include/trace/events/block.h."""
READS = re.compile(rb"R|F*$")
"""Kinds that write no data: reads and empty flushes (blk_fill_rwbs of kernel/trace/blktrace.c)."""
LOST = re.compile(rb"\[LOST (?:\d+ )?EVENTS\]")
"""Line in trace_pipe when the buffer was full (print_lost_events of kernel/trace/trace_output.c)."""


class Untraceable(Exception):
    """The trace is not available, or incomplete."""


class Trace:
    """Records the chunks of ``device`` written from ``start`` to ``stop``; needs ``private_mounts``.

    It traces completions, so that a request in progress when the trace begins is not missed.
    """

    def __init__(self, device: str, chunk: int) -> None:
        self.number = os.stat(device).st_rdev
        self.chunk = chunk
        self.root = "/run/sms/trace-%d" % os.getpid()
        self.folder = os.path.join(self.root, "instances", "sms-%d-%d" % (pid_namespace(), os.getpid()))
        self.pipe = -1
        self.rest = b""
        self.found: Set[int] = set()
        self.lost = False
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._drain_until_ended, daemon=True)

    def start(self) -> None:
        """Start the trace.

        Raises:
            Untraceable: the kernel does not support it or refuses.
        """
        try:
            os.makedirs(self.root, 0o700, exist_ok=True)
            mount("none", self.root, "tracefs", MS_NODEV | MS_NOSUID | MS_NOEXEC)
            remove_stale(os.path.join(self.root, "instances"))
            os.mkdir(self.folder)
            self._set("buffer_size_kb", "%d" % BUFFER_KB)
            number = os.major(self.number) << 20 | os.minor(self.number)  # MKDEV of linux/kdev_t.h
            self._set("events/block/block_rq_complete/filter", "dev == %d" % number)
            self.pipe = os.open(os.path.join(self.folder, "trace_pipe"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._set("events/block/block_rq_complete/enable", "1")
        except OSError as error:
            self.stop()
            raise Untraceable((error.strerror or str(error)).lower())
        self._reader.start()

    def written(self) -> Set[int]:
        """Return the numbers of the chunks written since the last call.

        Raises:
            Untraceable: the kernel's buffer was full.
        """
        self._drain()
        with self._guard:
            found, self.found = self.found, set()
        if self.lost:
            raise Untraceable("more was written than the trace buffer holds")
        return found

    def stop(self) -> None:
        """End the trace and remove its instance."""
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

    def _drain_until_ended(self) -> None:
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


def pid_namespace() -> int:
    """Return the number of our pid namespace: all namespaces share the kernel's instances."""
    return os.stat("/proc/self/ns/pid").st_ino


def remove_stale(folder: str) -> None:
    """Remove instances of killed runs. The kernel refuses to remove one in use."""
    for name in os.listdir(folder):
        found = INSTANCE.fullmatch(name)
        path = os.path.join(folder, name)
        try:
            if not found:
                continue
            if found.group(1) in (None, str(pid_namespace())):
                stale = not os.path.exists("/proc/" + found.group(2))
            else:
                stale = time.time() - os.stat(path).st_mtime > STALE_S
            if stale:
                os.rmdir(path)
        except OSError:
            continue
