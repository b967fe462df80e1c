"""Copy and remove trees with all metadata: owners, modes, times, attributes, hard links, devices, holes."""

import errno
import fcntl
import os
import stat
import struct
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from appliance.agent import protocol
from appliance.agent.diff import attributes, lstat
from appliance.agent.names import DirCursor, kind_of, show
from appliance.agent.store import CHUNK
from appliance.agent.trees import Contents, Tree

GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602
"""ioctls of linux/fs.h: what chattr(1) sets."""
IMMUTABLE, APPEND = 0x10, 0x20
COPIED_FLAGS = 0x8 | IMMUTABLE | APPEND | 0x40 | 0x80 | 0x10000
"""Flags that users set: synchronous, immutable, append-only, no dump, no atime, synchronous folder."""
PAGE = 4096
BLANK = bytes(PAGE)
REPORT_EVERY = 256
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSPC, errno.E2BIG, errno.ERANGE)


class Counts:
    """What was copied."""

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0
        self.whiteouts: List[str] = []
        """Paths of whiteouts that were not created."""
        self.unset = 0
        """Number of attributes that the target's file system does not support."""
        self.hollow: List[str] = []
        """Files whose contents are in the image only."""


class Task(NamedTuple):
    """A folder being copied: its remaining names, its metadata, its name."""

    names: Iterator[bytes]
    state: os.stat_result
    name: bytes


class Copier:
    """Copies parts of a tree into another file system.

    Args:
        links: an empty folder of the target's file system, where each file with several names has a further one while
            copying.
        outside: the target is not an overlay: whiteouts are listed instead of created, and attributes that it does not
            support are counted.
    """

    def __init__(self, tree: Tree, links: int, *, outside: bool) -> None:
        self.tree = tree
        self.links = links
        self.outside = outside
        self.counts = Counts()
        self.linked: Dict[int, int] = {}
        """Inodes with several names: how many of them were created."""
        self.named: Dict[int, os.stat_result] = {}
        self.path: List[bytes] = []

    def copy(self, source: DirCursor, target: DirCursor, name: bytes, path: List[bytes]) -> None:
        """Copy ``name`` from the folder of ``source`` to that of ``target``, where it must not exist."""
        self.path = list(path)
        first = os.stat(name, dir_fd=source.here, follow_symlinks=False)
        if not self._one(source, target, name, first):
            return
        stack = [self._enter(source, target, name, first)]
        while stack:
            one = next(stack[-1].names, None)
            if one is None:
                task = stack.pop()
                source.up()
                target.up()
                self.apply_metadata(source.here, target.here, task.name, task.state)
                self.path.pop()
                continue
            self.path.append(one)
            state = os.stat(one, dir_fd=source.here, follow_symlinks=False)
            if self._one(source, target, one, state):
                stack.append(self._enter(source, target, one, state))
            else:
                self.path.pop()

    def finish(self) -> int:
        """Remove the extra names of linked files; return how many files have fewer names than in the source."""
        for number, state in self.named.items():
            name = b"%d" % number
            flags = self.tree.flags(state) & COPIED_FLAGS if stat.S_ISREG(state.st_mode) else 0
            descriptor = -1
            if flags:  # flags can prevent the removal of a name, so set them after it
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.links)
            os.unlink(name, dir_fd=self.links)
            if flags:
                self._set_flags(descriptor, flags)
                os.close(descriptor)
        return sum(self.named[number].st_nlink > count for number, count in self.linked.items())

    def _enter(self, source: DirCursor, target: DirCursor, name: bytes, state: os.stat_result) -> Task:
        os.mkdir(name, 0o700, dir_fd=target.here)
        source.down(name)
        target.down(name)
        return Task(iter(source.names()), state, name)

    def _one(self, source: DirCursor, target: DirCursor, name: bytes, state: os.stat_result) -> bool:
        """Copy one entry; return True for a folder, which is left to the caller."""
        kind = kind_of(state)
        if kind == "removed" and self.outside:
            self.counts.whiteouts.append(show(self.path))
            return False
        self.counts.entries += 1
        if self.counts.entries % REPORT_EVERY == 0:
            protocol.detail("%d entries" % self.counts.entries)
        if kind == "folder":
            return True
        if state.st_nlink > 1 and self._link(target, name, state):
            return False
        if kind == "file":
            self._file(source, target, name, state)
        elif kind == "link":
            os.symlink(os.readlink(name, dir_fd=source.here), name, dir_fd=target.here)
        else:
            os.mknod(name, state.st_mode, state.st_rdev, dir_fd=target.here)
        self.apply_metadata(source.here, target.here, name, state)
        if state.st_nlink > 1:
            os.link(name, b"%d" % state.st_ino, src_dir_fd=target.here, dst_dir_fd=self.links, follow_symlinks=False)
            self.named[state.st_ino] = state
            self.linked[state.st_ino] = 1
        return False

    def _link(self, target: DirCursor, name: bytes, state: os.stat_result) -> bool:
        if state.st_ino not in self.linked:
            return False
        os.link(b"%d" % state.st_ino, name, src_dir_fd=self.links, dst_dir_fd=target.here, follow_symlinks=False)
        self.linked[state.st_ino] += 1
        return True

    def _file(self, source: DirCursor, target: DirCursor, name: bytes, state: os.stat_result) -> None:
        contents = self.tree.contents(source.here, name, state)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=target.here)
        try:
            self.counts.bytes += write_contents(contents, descriptor)
        finally:
            os.close(descriptor)
            contents.close()

    def apply_metadata(self, source: int, target: int, name: bytes, state: os.stat_result) -> None:
        """Set owner, mode, attributes, times and flags of an entry as in the source folder."""
        link = stat.S_ISLNK(state.st_mode)
        os.chown(name, state.st_uid, state.st_gid, dir_fd=target, follow_symlinks=False)
        if not link:
            os.chmod(name, stat.S_IMODE(state.st_mode), dir_fd=target)
        self._attributes(source, target, name)
        os.utime(name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        flags = self.tree.flags(state) & COPIED_FLAGS
        several = state.st_nlink > 1 and not stat.S_ISDIR(state.st_mode)
        if flags and not several and (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
            self._set_flags(descriptor, flags)
            os.close(descriptor)

    def _attributes(self, source: int, target: int, name: bytes) -> None:
        wanted = attributes(source, name, internal=True)
        path = b"/proc/self/fd/%d/%s" % (target, name)
        if "trusted.overlay.metacopy" in wanted and self.outside:
            self.counts.hollow.append(show(self.path))
        for one in os.listxattr(path, follow_symlinks=False):
            if one not in wanted:  # an ACL or label inherited from the folder
                try:
                    os.removexattr(path, one, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
        for one, value in wanted.items():
            try:
                os.setxattr(path, one, value, follow_symlinks=False)
            except OSError as error:
                if not self.outside or error.errno not in UNSUPPORTED:
                    raise
                self.counts.unset += 1

    def _set_flags(self, descriptor: int, flags: int) -> None:
        try:
            set_flags(descriptor, flags)
        except OSError:
            if not self.outside:
                raise
            self.counts.unset += 1


def write_contents(contents: Contents, descriptor: int) -> int:
    """Write a file's contents into an empty file, zeros as holes; return the number of bytes written."""
    os.ftruncate(descriptor, contents.size)
    written = 0
    for number in contents.windows():
        data = memoryview(contents.window(number))
        for at, end in data_ranges(data):
            offset, view = number * CHUNK + at, data[at:end]
            written += end - at
            while len(view):
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done
    return written


def data_ranges(data: memoryview) -> Iterator[Tuple[int, int]]:
    """Yield the ranges (begin, end) that are not pages of zeros."""
    begin: Optional[int] = None
    for at in range(0, len(data), PAGE):
        page = data[at : at + PAGE]
        if page == BLANK[: len(page)]:
            if begin is not None:
                yield begin, at
            begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, len(data)


def get_flags(descriptor: int) -> int:
    """Return the flags set by chattr(1); 0 where they are not supported."""
    try:
        raw = fcntl.ioctl(descriptor, GET_FLAGS, bytes(8))
    except OSError:
        return 0
    flags: int = struct.unpack("<I", raw[:4])[0]
    return flags


def set_flags(descriptor: int, wanted: int) -> None:
    """Set the flags in ``COPIED_FLAGS``; leave the others unchanged."""
    fcntl.ioctl(descriptor, SET_FLAGS, struct.pack("<Q", (get_flags(descriptor) & ~COPIED_FLAGS) | wanted))


def make_writable(descriptor: int) -> int:
    """Clear the flags of a folder that prevent changes to its entries; return its previous flags."""
    flags = get_flags(descriptor)
    if flags & (IMMUTABLE | APPEND):
        set_flags(descriptor, flags & COPIED_FLAGS & ~(IMMUTABLE | APPEND))
    return flags


def remove(cursor: DirCursor, name: bytes) -> int:
    """Remove an entry of the cursor's folder, with all below it; return the number of entries removed.

    Only for a file system that no other process writes to.
    """
    state = lstat(cursor, name)
    if state is None:
        return 0
    if not stat.S_ISDIR(state.st_mode):
        _unlink(cursor, name, state)
        return 1
    cursor.down(name)
    make_writable(cursor.here)
    stack = [(iter(cursor.names()), name)]
    removed = 0
    while stack:
        names, own = stack[-1]
        one = next(names, None)
        if one is None:
            stack.pop()
            cursor.up()
            os.rmdir(own, dir_fd=cursor.here)
            removed += 1
            continue
        state = lstat(cursor, one)
        if state and stat.S_ISDIR(state.st_mode):
            cursor.down(one)
            make_writable(cursor.here)
            stack.append((iter(cursor.names()), one))
        elif state:
            _unlink(cursor, one, state)
            removed += 1
    return removed


def _unlink(cursor: DirCursor, name: bytes, state: os.stat_result) -> None:
    try:
        os.unlink(name, dir_fd=cursor.here)
    except OSError as error:
        if error.errno != errno.EPERM or not stat.S_ISREG(state.st_mode):
            raise
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=cursor.here)
        make_writable(descriptor)
        os.close(descriptor)
        os.unlink(name, dir_fd=cursor.here)
