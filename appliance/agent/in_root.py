"""Open paths below the root of a running container.

Every folder and symbolic link there belongs to the container, while the agent opens them as root of the host: an
absolute link would lead to any file of the host. openat2(2) resolves a path as in chroot(2).
"""

import ctypes
import errno
import os
import struct
from contextlib import contextmanager
from typing import Iterator

from appliance.agent.protocol import Problem

SYS_OPENAT2 = 437
"""The same number on every architecture that Debian, Enterprise Linux and SUSE support."""
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
"""linux/openat2.h."""
ATTEMPTS = 100
"""A rename anywhere while ".." is resolved interrupts the call, and the container may rename all the time."""


@contextmanager
def open_in_root(root: str, path: str) -> Iterator[int]:
    """Open a path for reference only (O_PATH), with ``root`` as the root of every link and of "..".

    Nothing is read and no device, pipe or socket is opened: check the kind of file with ``os.fstat``, then use
    ``by_descriptor``.

    Raises:
        OSError: there is no such path below the root.
        Problem: the kernel lacks openat2(2).
    """
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = _openat2(top, path)
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
        if number == errno.ENOSYS:
            raise Problem(
                "this host's kernel %s lacks openat2(2)" % os.uname().release,
                "run a kernel of Linux 5.6 or later there; without it links in the container lead to files of the host",
                3,
            )
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)
