"""Holds the writers of a live overlay still, and lets them go whatever happens to this process."""

import ctypes
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import ContextManager, Iterator, List

from appliance.agent.words import Problem

FIFREEZE = 0xC0045877
FITHAW = 0xC0045878
"""ioctls of linux/fs.h."""
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE, MS_NOATIME, MS_NODEV, MS_NOSUID, MS_NOEXEC, MS_RDONLY = 16384, 1 << 18, 1024, 4, 2, 8, 1
MNT_DETACH = 2
FOLDER = "/run/sms"

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_file_system(descriptor: int) -> None:
    """syncfs(2)."""
    _call("syncfs", descriptor)


def private_mounts() -> None:
    """Mounts made from now on are seen by this process and its children only, and end with them."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _clear_left()


def _clear_left() -> None:
    """Remove the folders that killed runs mounted at: their mounts went with them."""
    os.makedirs(FOLDER, 0o755, exist_ok=True)
    for name in os.listdir(FOLDER):
        found = re.match(r"(?:agent|trace)-(\d+)(?:-\d+)?$", name)
        if found and not os.path.exists("/proc/" + found.group(1)):
            try:
                os.rmdir(os.path.join(FOLDER, name))
            except OSError:
                pass


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def unmount(target: str) -> None:
    """umount2(2), at once for everybody who looks, later for who has it open."""
    _call("umount2", target.encode(), MNT_DETACH)


@contextmanager
def mounted(source: str, kind: str, flags: int, options: str = "") -> Iterator[str]:
    """A file system at a folder of its own, for as long as the context lasts; needs ``private_mounts``."""
    target = "%s/agent-%d-%d" % (FOLDER, os.getpid(), time.monotonic() * 1e6)
    os.makedirs(target, 0o700)
    try:
        mount(source, target, kind, flags, options)
        try:
            yield target
        finally:
            unmount(target)
    finally:
        os.rmdir(target)


def find_loops(path: str) -> List[str]:
    """Loop devices of this machine that have the file open."""
    said = subprocess.check_output(["losetup", "--noheadings", "--output", "NAME", "--associated", path])
    return said.decode().split()


def joined(loop: str) -> ContextManager[str]:
    """The file system that is mounted from ``loop`` already, once more, for us: ext3 refuses it read-only."""
    return mounted(loop, "ext3", MS_NOATIME | MS_NODEV | MS_NOSUID | MS_NOEXEC)


def thaw(descriptor: int) -> bool:
    """Let writers go; say whether they were held."""
    try:
        fcntl.ioctl(descriptor, FITHAW, 0)
    except OSError:
        return False
    return True


class Frozen:
    """Writers wait from ``hold`` to ``release``.

    A second process shares the hold: it lets them go when this one is gone or silent for ``limit_s`` seconds.
    Where that one is killed as well, the file ``mark`` tells the next run to do it.
    """

    def __init__(self, folder: str, limit_s: float, mark: str) -> None:
        self.limit_s = limit_s
        self.mark = mark
        self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.pipe = -1
        self.watcher = 0
        self.began = 0.0
        self.seconds = 0.0

    def hold(self) -> None:
        """Hold them.

        Raises:
            Problem: somebody else does already, or the kernel will not.
        """
        sync_file_system(self.descriptor)  # what is written now need not be waited for later
        if os.path.exists(self.mark):
            # A run was killed together with its watchdog.
            thaw(self.descriptor)
        with open(self.mark, "w"):
            pass
        self._start_watchdog()
        self.began = time.monotonic()
        try:
            fcntl.ioctl(self.descriptor, FIFREEZE, 0)
        except OSError as error:
            self._end_watchdog()
            os.unlink(self.mark)
            raise Problem("the overlay cannot be frozen: %s" % (error.strerror or error), "does another program do it?")

    def release(self) -> None:
        """Let them go.

        Raises:
            Problem: the watchdog has done it before; what was read meanwhile may be mixed.
        """
        held = thaw(self.descriptor)
        self.seconds = time.monotonic() - self.began
        self._end_watchdog()
        if not held or self.seconds > self.limit_s:
            raise Problem(
                "writers waited longer than %g s, and were let go" % self.limit_s,
                "too much changes at once: try again, or --freeze-limit SECONDS (Slurm's MessageTimeout is 10 s)",
            )

    def close(self) -> None:
        """Let them go in any case."""
        if self.watcher:
            thaw(self.descriptor)
            self._end_watchdog()
        if os.path.exists(self.mark):
            os.unlink(self.mark)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _start_watchdog(self) -> None:
        reader, self.pipe = os.pipe()
        ready_reader, ready = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.watcher = os.fork()
        if not self.watcher:
            try:
                os.setsid()  # what is sent to our group is not meant for it
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_IGN)
                os.close(self.pipe)
                os.write(ready, b".")
                # Whoever waits for our output to end must not wait for the watchdog.
                nowhere = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(nowhere, stream)
                watch(reader, self.descriptor, self.limit_s)
            finally:
                os._exit(0)
        os.close(reader)
        os.close(ready)
        started = os.read(ready_reader, 1)
        os.close(ready_reader)
        if not started:
            raise Problem("the watchdog did not start", "is the machine out of memory?")

    def _end_watchdog(self) -> None:
        if not self.watcher:
            return
        try:
            os.write(self.pipe, b".")
        except OSError:
            pass
        os.close(self.pipe)
        os.waitpid(self.watcher, 0)
        self.watcher = 0


def watch(reader: int, descriptor: int, limit_s: float) -> None:
    """Wait for a word. Without one in time let writers go, again and again: a freeze may still be on its way into
    the kernel, waiting for a write that does not end. Where the process is gone, what it had asked for has ended too.
    """
    wait = limit_s
    while True:
        ready = select.select([reader], [], [], wait)[0]
        if ready and os.read(reader, 1):
            return
        thaw(descriptor)
        if ready:
            return
        wait = 0.02
