"""Makes the overlay of a running appliance larger, under its feet."""

import fcntl
import os
import struct
import subprocess
from typing import Any, Dict

from appliance.agent import words
from appliance.agent.freeze import find_loops, joined, private_mounts
from appliance.agent.take import locked
from appliance.agent.words import Problem, field

LOOP_SET_STATUS64, LOOP_GET_STATUS64, LOOP_SET_CAPACITY = 0x4C04, 0x4C05, 0x4C07
"""ioctls of linux/loop.h."""
INFO_BYTES, SIZE_LIMIT = 232, 32
"""Of struct loop_info64, and where lo_sizelimit is in it."""
CAP_SYS_RESOURCE = 24
STOPPED = "sms stop, then `sms overlay grow` again, then sms start"


def grow(request: Dict[str, Any]) -> Dict[str, Any]:
    """Make the file, its loop device and the file system as large as ``size`` bytes; never smaller.

    With ``rehearse`` it is only looked whether that can be done.

    Raises:
        Problem: status 3 where this host cannot do it while the overlay is in use; nothing was changed.
    """
    overlay = field(request, "overlay", str)
    size = field(request, "size", int)
    with locked(field(request, "lock", str)):
        _need_capability()
        loops = find_loops(overlay)
        if len(loops) != 1:
            raise Problem("%s is open in %d loop devices, not in one" % (overlay, len(loops)), "`losetup -l`", 3)
        if field(request, "rehearse", bool, False):
            return {"size": os.stat(overlay).st_size, "file_system": system_size(loops[0])}
        words.step("file", "make the overlay's file longer")
        lengthen(overlay, size)
        private_mounts()
        with joined(loops[0]):
            words.step("loop", "")
            widen(loops[0])
            words.step("system", "grow the file system, in use")
            _resize(loops[0])
        return {"size": os.stat(overlay).st_size, "file_system": system_size(loops[0])}


def lengthen(path: str, size: int) -> None:
    """Make a file at least as long as ``size`` bytes, with a hole at its end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def widen(loop: str) -> None:
    """Have a loop device see all of its file. Apptainer limits it to what the file measured at the start.

    Raises:
        Problem: this kernel cannot lift the limit while the device is in use.
    """
    descriptor = os.open(loop, os.O_RDWR | os.O_CLOEXEC)
    try:
        info = bytearray(INFO_BYTES)
        fcntl.ioctl(descriptor, LOOP_GET_STATUS64, info)
        if struct.unpack_from("<Q", info, SIZE_LIMIT)[0]:
            struct.pack_into("<Q", info, SIZE_LIMIT, 0)
            fcntl.ioctl(descriptor, LOOP_SET_STATUS64, bytes(info))
        fcntl.ioctl(descriptor, LOOP_SET_CAPACITY, 0)
    except OSError as error:
        raise Problem("%s cannot be made larger while it is in use: %s" % (loop, error.strerror), STOPPED)
    finally:
        os.close(descriptor)


def system_size(path: str) -> int:
    """Bytes of the ext3 file system on a device or in a file."""
    with open(path, "rb") as stream:
        stream.seek(1024)
        block = stream.read(1024)
    if len(block) < 1024 or struct.unpack_from("<H", block, 56)[0] != 0xEF53:
        raise Problem("%s holds no ext3 file system" % path)
    (blocks,), (unit,) = struct.unpack_from("<I", block, 4), struct.unpack_from("<I", block, 24)
    return int(blocks << 10 + unit)


def _resize(loop: str) -> None:
    done = subprocess.Popen(["resize2fs", loop], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.communicate()[0].decode(errors="replace").strip()
    if done.returncode:
        last = said.splitlines()[-1:] or [""]
        raise Problem("the file system does not grow while it is in use: %s" % last[0], STOPPED)


def _need_capability() -> None:
    """The kernel grows a mounted ext3 for CAP_SYS_RESOURCE only, which root of some containers and VMs has not."""
    with open("/proc/self/status") as stream:
        lines = dict(line.split(":", 1) for line in stream if ":" in line)
    if not int(lines["CapEff"], 16) >> CAP_SYS_RESOURCE & 1:
        raise Problem("root has no CAP_SYS_RESOURCE here: the kernel grows no file system in use for it", STOPPED, 3)
