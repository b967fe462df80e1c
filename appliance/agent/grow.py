"""Grow the overlay of a running services container."""

import fcntl
import os
import struct
import subprocess
from typing import Any, Dict

from appliance.agent import protocol
from appliance.agent.freeze import find_loops, mounted_again, private_mounts
from appliance.agent.loops import GET_STATUS, INFO, SET_CAPACITY, SET_STATUS
from appliance.agent.protocol import Problem, field
from appliance.agent.take import host_locked

SIZE_LIMIT = 32
"""Offset of lo_sizelimit in struct loop_info64."""
CAP_SYS_RESOURCE = 24
STOPPED = "sms stop, then `sms overlay grow` again, then sms start"


def grow(request: Dict[str, Any]) -> Dict[str, Any]:
    """Grow the file, its loop device and the file system to ``size`` bytes; never shrink them.

    With ``rehearse``, only check whether that is possible.

    Raises:
        Problem: status 3 where this host cannot do it while the overlay is in use; nothing was changed.
    """
    overlay = field(request, "overlay", str)
    size = field(request, "size", int)
    with host_locked(field(request, "lock", str)):
        _need_capability()
        loops = find_loops(overlay)
        if len(loops) != 1:
            raise Problem("%s is open in %d loop devices instead of one" % (overlay, len(loops)), "`losetup -l`", 3)
        if field(request, "rehearse", bool, False):
            return {"size": os.stat(overlay).st_size, "file_system": system_size(loops[0])}
        protocol.step("file", "extend the overlay's file")
        lengthen(overlay, size)
        private_mounts()
        with mounted_again(loops[0]):
            protocol.step("loop", "")
            widen(loops[0])
            protocol.step("system", "grow the file system online")
            _resize(loops[0])
        return {"size": os.stat(overlay).st_size, "file_system": system_size(loops[0])}


def lengthen(path: str, size: int) -> None:
    """Extend a file to at least ``size`` bytes, by a hole."""
    with open(path, "r+b", 0) as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)
        os.fsync(file.fileno())


def widen(loop: str) -> None:
    """Extend a loop device to its whole file. Apptainer limits it to the file's size at the start.

    Raises:
        Problem: this kernel cannot remove the limit while the device is in use.
    """
    descriptor = os.open(loop, os.O_RDWR | os.O_CLOEXEC)
    try:
        info = bytearray(INFO.size)
        fcntl.ioctl(descriptor, GET_STATUS, info)
        if struct.unpack_from("<Q", info, SIZE_LIMIT)[0]:
            struct.pack_into("<Q", info, SIZE_LIMIT, 0)
            fcntl.ioctl(descriptor, SET_STATUS, bytes(info))
        fcntl.ioctl(descriptor, SET_CAPACITY, 0)
    except OSError as error:
        raise Problem("%s cannot be enlarged while it is in use: %s" % (loop, error.strerror), STOPPED)
    finally:
        os.close(descriptor)


def system_size(path: str) -> int:
    """Return the size in bytes of the ext3 file system on a device or in a file."""
    with open(path, "rb") as stream:
        stream.seek(1024)
        block = stream.read(1024)
    if len(block) < 1024 or struct.unpack_from("<H", block, 56)[0] != 0xEF53:
        raise Problem("%s is not an ext3 file system" % path)
    (blocks,), (unit,) = struct.unpack_from("<I", block, 4), struct.unpack_from("<I", block, 24)
    return int(blocks << 10 + unit)


def _resize(loop: str) -> None:
    # Not killed with this process: it completes what the kernel has begun.
    done = subprocess.Popen(["resize2fs", loop], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.communicate()[0].decode(errors="replace").strip()
    if done.returncode:
        last = output.splitlines()[-1:] or [""]
        raise Problem("the file system cannot be grown while it is in use: %s" % last[0], STOPPED)


def _need_capability() -> None:
    """Check for CAP_SYS_RESOURCE, which growing a mounted ext3 requires and root in some containers and VMs lacks."""
    with open("/proc/self/status") as stream:
        lines = dict(line.split(":", 1) for line in stream if ":" in line)
    if not int(lines["CapEff"], 16) >> CAP_SYS_RESOURCE & 1:
        raise Problem("root has no CAP_SYS_RESOURCE here, which growing a file system in use requires", STOPPED, 3)
