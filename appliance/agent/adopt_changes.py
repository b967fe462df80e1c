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
from typing import Dict, Iterator, List, Optional, Tuple

from appliance.agent.protocol import Problem

LEASE = (b".sms-lease", b".sms-lock")
REMOVED = ".sms-removed"
"""As in state-tree."""
SETTLED_NS = 1_000_000_000
KINDS = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO)
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors where an entry has been removed or replaced since it was found."""
DEPTH, ENTRIES = 128, 4_000_000
"""More is refused by state-tree."""

Signature = Optional[Tuple[int, ...]]


class ChangedFiles:
    """Finds what has changed in a folder since the last time."""

    def __init__(self, folder: str, inside: str) -> None:
        """Read nothing yet.

        Args:
            folder: on this host.
            inside: path of the same folder in the container, which the tars have.
        """
        self.folder = folder
        self.inside = inside.strip("/")
        self.known: Optional[Dict[bytes, Signature]] = None
        """By path below the folder."""

    def note(self) -> Tuple[int, int]:
        """Remember all files as they are now; return their number and bytes.

        Raises:
            Problem: it is not a folder, or it is a link.
        """
        if os.path.islink(self.folder) or not os.path.isdir(self.folder):
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
            self._add(archive, REMOVED, b"".join(self._inside(path) + b"\0" for path in _tops(gone)))
            self.known = {}
            # Folders come before their contents.
            for path in sorted(found):
                self.known[path] = _signature(found[path], now)
                if self.known[path] is None or self.known[path] != before.get(path):
                    added = self._add_entry(archive, path)
                    if added is None:  # removed meanwhile: the next round has it among those that are gone
                        continue
                    size += added
                    count += 1
        return made.getvalue(), count + len(gone), size

    def _scan(self) -> Iterator[Tuple[bytes, os.stat_result]]:
        """Yield path below the folder and status of each entry, that of the folder itself as an empty path."""
        top = os.fsencode(self.folder)
        try:
            yield b"", os.lstat(top)
        except FileNotFoundError:
            return
        left = [b""]
        count = 1
        while left:
            folder = left.pop()
            try:
                with os.scandir(top + folder) as entries:
                    listed = list(entries)
            except OSError as error:
                if error.errno in REPLACED:
                    continue
                raise
            for entry in listed:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name in LEASE or stat.S_IFMT(found.st_mode) not in KINDS:
                    continue  # daemons create their sockets
                path = folder + b"/" + entry.name
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    left.append(path)
            count += len(listed)
            if count > ENTRIES or folder.count(b"/") > DEPTH:
                raise Problem("%s has more than %d files, or folders in one another" % (self.folder, ENTRIES), "", 3)

    def _inside(self, path: bytes) -> bytes:
        return b"/" + os.fsencode(self.inside) + path

    def _add_entry(self, archive: tarfile.TarFile, path: bytes) -> Optional[int]:
        """Add an entry as it is now; return its bytes, or None if it is gone."""
        place = os.fsencode(self.folder) + path
        name = os.fsdecode(self._inside(path)).lstrip("/")
        try:
            found = os.lstat(place)
            if stat.S_ISREG(found.st_mode):
                descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with open(descriptor, "rb") as stream:
                    found = os.fstat(descriptor)
                    if not stat.S_ISREG(found.st_mode):
                        return None
                    data = stream.read(found.st_size)
                self._add(archive, name, data, found)
                return len(data)
            entry = _entry(name, found)
            if stat.S_ISLNK(found.st_mode):
                entry.linkname = os.fsdecode(os.readlink(place))
            archive.addfile(entry)
            return 0
        except OSError as error:
            if error.errno in REPLACED:
                return None
            raise

    def _add(self, archive: tarfile.TarFile, name: str, data: bytes, found: Optional[os.stat_result] = None) -> None:
        entry = _entry(name, found) if found else tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


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
