"""Loop devices that are removed when the process ends, even if it is killed."""

import errno
import fcntl
import os
import struct
import time
from contextlib import contextmanager
from typing import Iterator, Tuple

from appliance.agent.freeze import MS_NOATIME, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, mounted
from appliance.agent.protocol import Problem

GET_FREE, SET_FD, CLR_FD, CONFIGURE = 0x4C82, 0x4C00, 0x4C01, 0x4C0A
SET_STATUS, GET_STATUS, SET_CAPACITY = 0x4C04, 0x4C05, 0x4C07
"""ioctls of linux/loop.h; CONFIGURE came with Linux 5.8."""
READ_ONLY, AUTOCLEAR = 1, 4
INFO = struct.Struct("<5Q4I64s64s32s2Q")
"""struct loop_info64."""
CLAIM_WAIT_S = 10.0
"""Seconds that another program may hold the device that the kernel names as free."""
RELEASE_WAIT_S = 10.0
"""Seconds that a device may take to release its file."""


def attach(descriptor: int, *, read_only: bool) -> Tuple[int, str]:
    """Attach a loop device to an open file, which needs no name; return its descriptor and path.

    The kernel detaches it when its last user closes it.

    Raises:
        Problem: another program keeps the free device for itself.
    """
    flags = (READ_ONLY if read_only else 0) | AUTOCLEAR
    info = INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, b"sms", b"", b"", 0, 0)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + CLAIM_WAIT_S
        while True:
            path = "/dev/loop%d" % fcntl.ioctl(control, GET_FREE)
            loop = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
            try:
                _bind(loop, descriptor, info)
                return loop, path
            except OSError as error:
                os.close(loop)
                # Another process took it, or has it open exclusively; then the kernel names the same device again.
                if error.errno != errno.EBUSY:
                    raise
                if time.monotonic() > deadline:
                    raise Problem(
                        "%s is free, but another program holds it" % path, "`fuser -v %s` shows the program" % path
                    )
                time.sleep(0.01)
    finally:
        os.close(control)


def _bind(loop: int, descriptor: int, info: bytes) -> None:
    try:
        fcntl.ioctl(loop, CONFIGURE, struct.pack("<2I", descriptor, 0) + info + bytes(64))
        return
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
    fcntl.ioctl(loop, SET_FD, descriptor)
    try:
        fcntl.ioctl(loop, SET_STATUS, info)
    except BaseException:
        fcntl.ioctl(loop, CLR_FD, 0)
        raise


@contextmanager
def image_mounted(descriptor: int, *, read_only: bool) -> Iterator[str]:
    """Mount the file system in an open file while the context lasts; needs ``private_mounts``.

    Read-only, the journal is not replayed, and what is only in the journal is not visible. Writable, all data is in the
    file when the context has ended.

    Raises:
        Problem: the loop device does not release the file.
    """
    loop, path = attach(descriptor, read_only=read_only)
    flags = MS_NOATIME | MS_NODEV | MS_NOSUID | MS_NOEXEC | (MS_RDONLY if read_only else 0)
    try:
        # A program that was given the same free device may still have it open, exclusively, until it finds it taken.
        with mounted(path, "ext3", flags, "noload" if read_only else "", CLAIM_WAIT_S) as folder:
            os.close(loop)
            loop = -1
            yield folder
    finally:
        if loop >= 0:
            os.close(loop)
    if not read_only:
        _wait_for_release(path)


def _wait_for_release(path: str) -> None:
    """Wait until the device is detached: then the file system is closed and all of it is written."""
    backing = "/sys/block/%s/loop/backing_file" % os.path.basename(path)
    deadline = time.monotonic() + RELEASE_WAIT_S
    while os.path.exists(backing):
        if time.monotonic() > deadline:
            raise Problem(
                "%s does not release the copy" % path,
                "`losetup -l` shows the device; end its user, then run this again",
            )
        time.sleep(0.01)
