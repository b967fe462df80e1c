"""Freeze the file system of an overlay in use, and thaw it whatever happens to this process."""

import ctypes
import errno
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import Any, ContextManager, Dict, Iterator, List

from appliance.agent.protocol import Problem, field
from appliance.shared.locks import Locked, hold_lock

FIFREEZE = 0xC0045877
FITHAW = 0xC0045878
"""ioctls of linux/fs.h."""
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE, MS_NOATIME, MS_NODEV, MS_NOSUID, MS_NOEXEC, MS_RDONLY = 16384, 1 << 18, 1024, 4, 2, 8, 1
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
FOLDER = "/run/sms"
OWN_S = 2.0
"""How long a freeze waits for another run's: longer than one that ends a freeze without an owner takes."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_file_system(descriptor: int) -> None:
    """syncfs(2)."""
    _call("syncfs", descriptor)


def private_mounts() -> None:
    """Enter a mount namespace of its own: later mounts are visible to this process only, and end with it."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _remove_stale_folders()


def end_with_parent() -> None:
    """For ``preexec_fn``: the program is killed when we are, as it would keep the mounts of our namespace."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def _remove_stale_folders() -> None:
    """Remove the mount points of killed runs, whose mounts ended with them."""
    os.makedirs(FOLDER, 0o700, exist_ok=True)
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
    """umount2(2) with MNT_DETACH: open files stay usable."""
    _call("umount2", target.encode(), MNT_DETACH)


@contextmanager
def mounted(source: str, kind: str, flags: int, options: str = "", wait_s: float = 0.0) -> Iterator[str]:
    """Mount a file system on a new folder while the context lasts; needs ``private_mounts``.

    ``wait_s``: how long another program may hold the device.
    """
    target = "%s/agent-%d-%d" % (FOLDER, os.getpid(), time.monotonic() * 1e6)
    os.makedirs(target, 0o700)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                mount(source, target, kind, flags, options)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
        try:
            yield target
        finally:
            unmount(target)
    finally:
        os.rmdir(target)


def find_loops(path: str) -> List[str]:
    """Return the loop devices of this machine that have the file open."""
    try:
        os.stat(path)
    except FileNotFoundError:
        # losetup would compare only the name, which another host of a lab on this machine has, too.
        return []
    output = subprocess.check_output(["losetup", "--noheadings", "--output", "NAME", "--associated", path])
    return output.decode().split()


def mounted_again(loop: str) -> ContextManager[str]:
    """Mount the already mounted file system of ``loop`` once more. Writable, since ext3 refuses to change the mode."""
    return mounted(loop, "ext3", MS_NOATIME | MS_NODEV | MS_NOSUID | MS_NOEXEC)


def thaw(descriptor: int) -> bool:
    """Thaw the file system; return whether it was frozen."""
    try:
        fcntl.ioctl(descriptor, FITHAW, 0)
    except OSError:
        return False
    return True


def end_lost(request: Dict[str, Any]) -> Dict[str, Any]:
    """``thaw``: end a freeze of the overlay whose run was killed with its watchdog; return whether there was one."""
    overlay, mark = field(request, "overlay", str), field(request, "mark", str)
    thawed = False
    try:
        with hold_lock(mark):
            private_mounts()
            for loop in find_loops(overlay):
                with mounted_again(loop) as folder:
                    frozen = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    thawed = thaw(frozen) or thawed
                    os.close(frozen)
            _write_mark(mark, "")
    except Locked:
        pass  # its run lives
    return {"thawed": thawed}


def _write_mark(path: str, text: str) -> None:
    with open(path, "w") as stream:
        stream.write(text)


class Frozen:
    """A file system that is frozen from ``hold`` to ``release``.

    A second process, the watchdog, thaws it when this one ends, or does not release it within ``limit_s`` seconds.
    Both hold a lock on the file ``mark``, which says so meanwhile: where it does and is not locked, both were killed,
    and a run that sees it, that of the guard or the next one, thaws.
    """

    def __init__(self, folder: str, limit_s: float, mark: str) -> None:
        self.limit_s = limit_s
        self.mark = mark
        self.stack = ExitStack()
        self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.pipe = -1
        self.watcher = 0
        self.began = 0.0
        self.seconds = 0.0

    def hold(self) -> None:
        """Freeze it.

        Raises:
            Problem: it is frozen already, or the kernel refuses.
        """
        try:
            self.stack.enter_context(hold_lock(self.mark, wait_s=OWN_S))  # the watchdog inherits it
        except Locked:
            raise Problem("another run has frozen the overlay", "try again in a minute", 3)
        thaw(self.descriptor)  # a run may have been killed together with its watchdog
        sync_file_system(self.descriptor)  # shortens the freeze
        _write_mark(self.mark, "frozen")
        self.stack.callback(_write_mark, self.mark, "")
        self._start_watchdog()
        self.began = time.monotonic()
        try:
            fcntl.ioctl(self.descriptor, FIFREEZE, 0)
        except OSError as error:
            self._end_watchdog()
            raise Problem(
                "the overlay cannot be frozen: %s" % (error.strerror or error), "has another program frozen it?"
            )

    def release(self) -> None:
        """Thaw it.

        Raises:
            Problem: the watchdog thawed it before; what was read meanwhile may be inconsistent.
        """
        frozen = thaw(self.descriptor)
        self.seconds = time.monotonic() - self.began
        self._end_watchdog()
        if not frozen or self.seconds > self.limit_s:
            raise Problem(
                "writers waited longer than %g s, and the freeze was ended" % self.limit_s,
                "too much data is changing: try again, or --freeze-limit SECONDS (Slurm's MessageTimeout is 10 s)",
            )

    def close(self) -> None:
        """Thaw it if it is still frozen, end the watchdog, clear the mark."""
        if self.watcher:
            thaw(self.descriptor)
            self._end_watchdog()
        self.stack.close()
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
                os.setsid()  # signals to our process group must not reach it
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_IGN)
                os.close(self.pipe)
                os.write(ready, b".")
                # The watchdog must not keep our output open.
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(null, stream)
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
    """Wait for a byte from the process, or for its end; then thaw if necessary.

    After ``limit_s`` seconds thaw again and again: FIFREEZE may still be waiting in the kernel for a slow write. When
    the process is gone, its ioctl has ended too, and thawing once is enough.
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
