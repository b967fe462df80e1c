"""Open paths below the root of a running container.

Every folder and symbolic link there belongs to the container, while the agent opens them as root of the host: an
absolute link would lead to any file of the host. openat2(2) resolves a path as in chroot(2). Where it is missing, in an
old kernel or by a seccomp filter, each component is opened separately: services that an interrupted migration has
stopped must start again on any kernel.
"""

import ctypes
import errno
import os
import stat
import struct
from contextlib import ExitStack, contextmanager
from typing import Iterator

SYS_OPENAT2 = 437
"""The same number on every architecture that Debian, Enterprise Linux and SUSE support."""
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
"""linux/openat2.h."""
ATTEMPTS = 100
"""A rename anywhere while ".." is resolved interrupts the call, and the container may rename all the time."""
LINKS = 40
"""Symbolic links that a path may lead through (path_resolution(7))."""


@contextmanager
def open_in_root(root: str, path: str) -> Iterator[int]:
    """Open a path for reference only (O_PATH), with ``root`` as the root of every link and of "..".

    Nothing is read and no device, pipe or socket is opened: check the kind of file with ``os.fstat``, then use
    ``by_descriptor``.

    Raises:
        OSError: there is no such path below the root.
    """
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            descriptor = _openat2(top, path)
        except OSError as error:
            # An unknown call is EPERM under some filters; opening for reference only is never refused so itself.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            descriptor = _walk(top, path)
    finally:
        os.close(top)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def by_descriptor(descriptor: int) -> str:
    """Return a path of this process that refers to what a descriptor of ``open_in_root`` has open."""
    return "/proc/self/fd/%d" % descriptor


def _openat2(top: int, path: str) -> int:
    how = ctypes.create_string_buffer(
        struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS), 24
    )
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = errno.EAGAIN
    for _ in range(ATTEMPTS):
        arguments = (ctypes.c_int(top), ctypes.c_char_p(os.fsencode(path)), how, ctypes.c_size_t(len(how)))
        found = call(ctypes.c_long(SYS_OPENAT2), *arguments)
        if found >= 0:
            return int(found)
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def _walk(top: int, path: str) -> int:
    """Resolve a path as ``_openat2`` does: the system follows no link, and ".." is a folder that was passed before."""
    pending, links = path.split("/")[::-1], 0
    with ExitStack() as stack:
        passed = [top]
        while pending:
            name = pending.pop()
            if name == "..":
                passed[1:] = passed[1:-1]
            if name in ("", ".", ".."):
                continue
            one = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=passed[-1])
            stack.callback(os.close, one)
            if not stat.S_ISLNK(os.fstat(one).st_mode):
                passed.append(one)
                continue
            links += 1
            target = os.readlink("", dir_fd=one)
            if links > LINKS or not target:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if target.startswith("/"):
                passed[1:] = []
            pending += target.split("/")[::-1]
        return os.dup(passed[-1])
