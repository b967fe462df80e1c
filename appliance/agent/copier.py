"""Copies and removes trees with all that files have: owners, modes, times, attributes, hard links, devices, holes."""

import errno
import fcntl
import os
import stat
import struct
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from appliance.agent import words
from appliance.agent.names import Ladder, kind_of, show
from appliance.agent.sides import Contents, Side
from appliance.agent.store import CHUNK
from appliance.agent.tree import attributes, look

GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602
"""ioctls of linux/fs.h: what chattr(1) sets."""
IMMUTABLE, APPEND = 0x10, 0x20
CARRIED = 0x8 | IMMUTABLE | APPEND | 0x40 | 0x80 | 0x10000
"""Flags that are a user's: synchronous, immutable, append-only, no dump, no atime, synchronous folder."""
PAGE = 4096
BLANK = bytes(PAGE)
TOLD_EVERY = 256
ACCEPTED = (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSPC, errno.E2BIG, errno.ERANGE)


class Counts:
    """What was made."""

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0
        self.whiteouts: List[str] = []
        """Paths of those that were not made."""
        self.unset = 0
        """Attributes that the file system there does not take."""
        self.hollow: List[str] = []
        """Files whose contents lie in the image."""


class Task(NamedTuple):
    """A folder under way: names left in it, its state there, its name here."""

    names: Iterator[bytes]
    state: os.stat_result
    name: bytes


class Copier:
    """Brings trees of one side into another file system.

    Args:
        links: a folder of the target's file system that is in nobody's way: while copying, a file with several
            names has one there.
        outside: the target is no overlay: whiteouts are told and not made, what it does not take is counted.
    """

    def __init__(self, side: Side, links: int, *, outside: bool) -> None:
        self.side = side
        self.links = links
        self.outside = outside
        self.made = Counts()
        self.linked: Dict[int, int] = {}
        """Inodes with several names: how many of them were made."""
        self.named: Dict[int, os.stat_result] = {}
        self.path: List[bytes] = []

    def copy(self, source: Ladder, target: Ladder, name: bytes, path: List[bytes]) -> None:
        """Copy ``name`` from the folder where ``source`` stands into that of ``target``, where it is not yet."""
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
                self.dress(source.here, target.here, task.name, task.state)
                self.path.pop()
                continue
            self.path.append(one)
            state = os.stat(one, dir_fd=source.here, follow_symlinks=False)
            if self._one(source, target, one, state):
                stack.append(self._enter(source, target, one, state))
            else:
                self.path.pop()

    def finish(self) -> int:
        """Take the other names of linked files away; give how many files have fewer names than they had."""
        for number, state in self.named.items():
            name = b"%d" % number
            flags = self.side.flags(state) & CARRIED if stat.S_ISREG(state.st_mode) else 0
            descriptor = -1
            if flags:  # no name of it could be taken away once they are set
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.links)
            os.unlink(name, dir_fd=self.links)
            if flags:
                self._set_flags(descriptor, flags)
                os.close(descriptor)
        return sum(self.named[number].st_nlink > count for number, count in self.linked.items())

    def _enter(self, source: Ladder, target: Ladder, name: bytes, state: os.stat_result) -> Task:
        os.mkdir(name, 0o700, dir_fd=target.here)
        source.down(name)
        target.down(name)
        return Task(iter(source.names()), state, name)

    def _one(self, source: Ladder, target: Ladder, name: bytes, state: os.stat_result) -> bool:
        """Make one entry; say whether it is a folder, which is left to do."""
        kind = kind_of(state)
        if kind == "removed" and self.outside:
            self.made.whiteouts.append(show(self.path))
            return False
        self.made.entries += 1
        if self.made.entries % TOLD_EVERY == 0:
            words.detail("%d entries" % self.made.entries)
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
        self.dress(source.here, target.here, name, state)
        if state.st_nlink > 1:
            os.link(name, b"%d" % state.st_ino, src_dir_fd=target.here, dst_dir_fd=self.links, follow_symlinks=False)
            self.named[state.st_ino] = state
            self.linked[state.st_ino] = 1
        return False

    def _link(self, target: Ladder, name: bytes, state: os.stat_result) -> bool:
        if state.st_ino not in self.linked:
            return False
        os.link(b"%d" % state.st_ino, name, src_dir_fd=self.links, dst_dir_fd=target.here, follow_symlinks=False)
        self.linked[state.st_ino] += 1
        return True

    def _file(self, source: Ladder, target: Ladder, name: bytes, state: os.stat_result) -> None:
        contents = self.side.contents(source.here, name, state)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=target.here)
        try:
            self.made.bytes += write_contents(contents, descriptor)
        finally:
            os.close(descriptor)
            contents.close()

    def dress(self, source: int, target: int, name: bytes, state: os.stat_result) -> None:
        """Give an entry the owner, mode, attributes, times and flags that it has in the other folder."""
        link = stat.S_ISLNK(state.st_mode)
        os.chown(name, state.st_uid, state.st_gid, dir_fd=target, follow_symlinks=False)
        if not link:
            os.chmod(name, stat.S_IMODE(state.st_mode), dir_fd=target)
        self._attributes(source, target, name)
        os.utime(name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        flags = self.side.flags(state) & CARRIED
        several = state.st_nlink > 1 and not stat.S_ISDIR(state.st_mode)
        if flags and not several and (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
            self._set_flags(descriptor, flags)
            os.close(descriptor)

    def _attributes(self, source: int, target: int, name: bytes) -> None:
        wanted = attributes(source, name, internal=True)
        path = b"/proc/self/fd/%d/%s" % (target, name)
        if "trusted.overlay.metacopy" in wanted and self.outside:
            self.made.hollow.append(show(self.path))
        for one in os.listxattr(path, follow_symlinks=False):
            if one not in wanted:  # an ACL, or a label, that the folder has handed down
                try:
                    os.removexattr(path, one, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in ACCEPTED:
                        raise
        for one, value in wanted.items():
            try:
                os.setxattr(path, one, value, follow_symlinks=False)
            except OSError as error:
                if not self.outside or error.errno not in ACCEPTED:
                    raise
                self.made.unset += 1

    def _set_flags(self, descriptor: int, flags: int) -> None:
        try:
            set_flags(descriptor, flags)
        except OSError:
            if not self.outside:
                raise
            self.made.unset += 1


def write_contents(contents: Contents, descriptor: int) -> int:
    """Write a file's bytes into an empty one, zeros as holes; give how many were written."""
    os.ftruncate(descriptor, contents.size)
    written = 0
    for number in contents.windows():
        data = memoryview(contents.window(number))
        for at, end in runs(data):
            offset, view = number * CHUNK + at, data[at:end]
            written += end - at
            while len(view):
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done
    return written


def runs(data: memoryview) -> Iterator[Tuple[int, int]]:
    """The parts of it that are not pages of zeros: from, to."""
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
    """What chattr(1) has set."""
    try:
        raw = fcntl.ioctl(descriptor, GET_FLAGS, bytes(8))
    except OSError:
        return 0
    flags: int = struct.unpack("<I", raw[:4])[0]
    return flags


def set_flags(descriptor: int, wanted: int) -> None:
    """Set those of ``CARRIED``; the others stay as they are."""
    fcntl.ioctl(descriptor, SET_FLAGS, struct.pack("<Q", (get_flags(descriptor) & ~CARRIED) | wanted))


def free_folder(descriptor: int) -> int:
    """Let entries of a folder be made and removed whatever its flags say; give the flags that it had."""
    flags = get_flags(descriptor)
    if flags & (IMMUTABLE | APPEND):
        set_flags(descriptor, flags & CARRIED & ~(IMMUTABLE | APPEND))
    return flags


def remove(ladder: Ladder, name: bytes) -> int:
    """Remove an entry of the folder where ``ladder`` stands, with all below it; give how many there were.

    Only for a file system that nobody else writes.
    """
    state = look(ladder, name)
    if state is None:
        return 0
    if not stat.S_ISDIR(state.st_mode):
        _unlink(ladder, name, state)
        return 1
    ladder.down(name)
    free_folder(ladder.here)
    stack = [(iter(ladder.names()), name)]
    removed = 0
    while stack:
        names, own = stack[-1]
        one = next(names, None)
        if one is None:
            stack.pop()
            ladder.up()
            os.rmdir(own, dir_fd=ladder.here)
            removed += 1
            continue
        state = look(ladder, one)
        if state and stat.S_ISDIR(state.st_mode):
            ladder.down(one)
            free_folder(ladder.here)
            stack.append((iter(ladder.names()), one))
        elif state:
            _unlink(ladder, one, state)
            removed += 1
    return removed


def _unlink(ladder: Ladder, name: bytes, state: os.stat_result) -> None:
    try:
        os.unlink(name, dir_fd=ladder.here)
    except OSError as error:
        if error.errno != errno.EPERM or not stat.S_ISREG(state.st_mode):
            raise
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=ladder.here)
        free_folder(descriptor)
        os.close(descriptor)
        os.unlink(name, dir_fd=ladder.here)
