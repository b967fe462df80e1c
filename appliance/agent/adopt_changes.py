"""Changes of a folder that is in use, as tars for ``state-tree change`` (definitions/scripts/state-tree).

A file counts as changed if its size, times or inode differ from when it was read last. One that was changed less than
``SETTLED_NS`` before may change again without a trace, because the clock of files ticks only every few milliseconds: it
is read again in the next round.
"""

import errno
import io
import os
import stat
import tarfile
import time
from contextlib import contextmanager
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

from appliance.agent.channel import Channel
from appliance.agent.in_root import open_in_root
from appliance.agent.protocol import Problem
from appliance.shared.wire import MAX_BODY_BYTES, Message

LEASE = (b".sms-lease", b".sms-lock")
REMOVED = ".sms-removed"
"""As in state-tree."""
SETTLED_NS = 1_000_000_000
KINDS = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO)
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors where an entry has been removed or replaced since it was found."""
DEPTH, ENTRIES = 128, 4_000_000
"""More is refused by state-tree."""
DELTA_BYTES = MAX_BODY_BYTES - (64 << 20)
"""Of files: a delta is in memory, and is one message. Its files may belong to a container, where one has no end."""

Signature = Optional[Tuple[int, ...]]


class _AtItsSize(io.RawIOBase):
    """A file that may get shorter while it is read: a tar has the size before the content."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        return data + bytes(size - len(data))


class ChangedFiles:
    """Finds what has changed in a folder since the last time."""

    def __init__(self, folder: str, inside: str, root: str = "/") -> None:
        """Read nothing yet.

        Args:
            folder: below ``root``.
            inside: path of the same folder in the container, which the tars have.
            root: no link leads out of it; as for ``open_in_root``.
        """
        self.folder = folder.rstrip("/")
        self.root = root
        self.inside = inside.strip("/")
        self.known: Optional[Dict[bytes, Signature]] = None
        """By path below the folder."""

    def note(self) -> Tuple[int, int]:
        """Remember all files as they are now; return their number and bytes.

        Raises:
            Problem: it is not a folder, or it is a link.
        """
        top = self._top()
        if not top or not stat.S_ISDIR(top.st_mode):
            raise Problem("%s is not a folder" % self.folder, "is it a link? its target is what has to be named", 3)
        now = time.time_ns()
        found = dict(self._scan())
        self.known = {path: _signature(state, now) for path, state in found.items()}
        return len(found), sum(state.st_size for state in found.values() if stat.S_ISREG(state.st_mode))

    def delta(self) -> Tuple[bytes, int, int]:
        """Return the changes since the last call as a tar, the number of changed and removed entries, and bytes.

        Raises:
            Problem: ``note`` was not called.
        """
        if self.known is None:
            raise Problem("received a round before a note", status=2)
        now = time.time_ns()
        before, found = self.known, dict(self._scan())
        if b"" not in found:
            raise Problem("%s is not there any more" % self.folder)
        gone = [path for path in before if path not in found]
        made = io.BytesIO()
        size = count = 0
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
            removed = b"".join(self._inside(path) + b"\0" for path in _tops(gone))
            entry = tarfile.TarInfo(REMOVED)
            entry.size = len(removed)
            archive.addfile(entry, io.BytesIO(removed))
            self.known = {}
            # Folders come before their contents.
            for path in sorted(found):
                self.known[path] = _signature(found[path], now)
                if self.known[path] is None or self.known[path] != before.get(path):
                    added = self._add_entry(archive, path, DELTA_BYTES - size)
                    if added is None:  # removed meanwhile: the next round has it among those that are gone
                        continue
                    size += added
                    count += 1
                if made.tell() > MAX_BODY_BYTES - (1 << 20):  # many small ones: each has a header
                    raise self._too_large()
        return made.getvalue(), count + len(gone), size

    @contextmanager
    def _beside(self, path: bytes) -> Iterator[Tuple[int, bytes]]:
        """Yield a descriptor of the folder that an entry is in, and the name of the entry."""
        parent, _, name = (os.fsencode(self.folder) + path).rpartition(b"/")
        with open_in_root(self.root, os.fsdecode(parent) or "/") as descriptor:
            yield descriptor, name

    def _top(self) -> Optional[os.stat_result]:
        try:
            with self._beside(b"") as (parent, name):
                return os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return None

    def _scan(self) -> Iterator[Tuple[bytes, os.stat_result]]:
        """Yield path below the folder and status of each entry, that of the folder itself as an empty path."""
        top = self._top()
        if top is None:
            return
        yield b"", top
        left = [b""]
        count = 1
        while left:
            folder = left.pop()
            try:
                listed = self._list(folder)
            except OSError as error:
                if error.errno in REPLACED:
                    continue
                raise
            for name, found in listed:
                path = folder + b"/" + name
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    left.append(path)
            count += len(listed)
            if count > ENTRIES or folder.count(b"/") > DEPTH:
                raise Problem("%s has more than %d files, or folders in one another" % (self.folder, ENTRIES), "", 3)

    def _list(self, folder: bytes) -> List[Tuple[bytes, os.stat_result]]:
        """Return name and status of what is in a folder, without sockets: daemons create theirs."""
        listed = []
        with self._beside(folder) as (parent, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    encoded = os.fsencode(entry.name)
                    if encoded not in LEASE and stat.S_IFMT(found.st_mode) in KINDS:
                        listed.append((encoded, found))
        finally:
            os.close(descriptor)
        return listed

    def _inside(self, path: bytes) -> bytes:
        return b"/" + os.fsencode(self.inside) + path

    def _too_large(self) -> Problem:
        return Problem("%s changes by more than %d MiB" % (self.folder, DELTA_BYTES >> 20), "", 3)

    def _add_entry(self, archive: tarfile.TarFile, path: bytes, room: int) -> Optional[int]:
        """Add an entry as it is now; return its bytes, or None if it is gone.

        Raises:
            Problem: it has more bytes than ``room``.
        """
        name = os.fsdecode(self._inside(path)).lstrip("/")
        try:
            with self._beside(path) as (parent, entry_name):
                found = os.lstat(entry_name, dir_fd=parent)
                if stat.S_ISREG(found.st_mode):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    with open(os.open(entry_name, flags, dir_fd=parent), "rb") as stream:
                        found = os.fstat(stream.fileno())
                        if not stat.S_ISREG(found.st_mode):
                            return None
                        if found.st_size > room:
                            raise self._too_large()
                        entry = _entry(name, found)
                        entry.size = found.st_size
                        archive.addfile(entry, _AtItsSize(stream))
                        return found.st_size
                entry = _entry(name, found)
                if stat.S_ISLNK(found.st_mode):
                    entry.linkname = os.fsdecode(os.readlink(entry_name, dir_fd=parent))
            archive.addfile(entry)
            return 0
        except OSError as error:
            if error.errno in REPLACED:
                return None
            raise


class SendsChanges:
    """Messages of an agent whose side has the state: the coordinator copies it while it is in use."""

    channel: Optional[Channel]
    files: ChangedFiles

    def note_files(self, message: Message) -> None:
        """Remember the files of the state as they are: the coordinator copies all of them from now on."""
        assert self.channel
        files, size = self.files.note()
        self.channel.send("noted", files=files, file_bytes=size)

    def send_round(self, message: Message) -> None:
        """Send what has changed since the last time."""
        self.send_delta("delta")

    def send_delta(self, kind: str, **facts: Any) -> None:
        """Send what has changed since the last time, with further facts."""
        assert self.channel
        data, files, size = self.files.delta()
        self.channel.send(kind, data, files=files, file_bytes=size, **facts)


def _entry(name: str, found: os.stat_result) -> tarfile.TarInfo:
    """Return the header of an entry. Two names of one file become two files: slurmctld has them only for a moment."""
    entry = tarfile.TarInfo(name)
    entry.uid, entry.gid, entry.mode = found.st_uid, found.st_gid, found.st_mode & 0o7777
    entry.mtime = found.st_mtime  # pax has fractions
    kinds = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}
    entry.type = kinds.get(stat.S_IFMT(found.st_mode), tarfile.REGTYPE)
    return entry


def _signature(found: os.stat_result, now: int) -> Signature:
    """Return what differs when an entry has changed; None if it may change again without that."""
    if found.st_ctime_ns > now - SETTLED_NS:
        return None
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return (found.st_mode, found.st_uid, found.st_gid, size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _tops(paths: List[bytes]) -> List[bytes]:
    """Return the paths that are not below others of the list."""
    kept = set(paths)
    return sorted(path for path in paths if os.path.dirname(path) not in kept)
