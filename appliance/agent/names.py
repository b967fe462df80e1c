"""Paths in the container, whose names are bytes: parse, validate and display them; a cursor through folders."""

import base64
import errno
import os
import stat
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from appliance.agent.protocol import Problem
from appliance.text import printable

LONGEST = 4096
"""Bytes of a path (PATH_MAX)."""
LONGEST_NAME = 255
MAX_OPEN = 64
"""Descriptors that a cursor keeps open, however deep the tree is."""

Names = Tuple[bytes, ...]
"""A path as its components, from the root on; () is the root."""
State = Optional[os.stat_result]


def split_path(text: str) -> Names:
    """Return the components of an absolute path.

    Raises:
        Problem: it is not a valid path.
    """
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _invalid(text, "is not text")
    if not raw.startswith(b"/"):
        raise _invalid(text, "does not begin with /")
    if b"\0" in raw or len(raw) >= LONGEST:
        raise _invalid(text, "is not a path")
    names = tuple(name for name in raw.split(b"/") if name not in (b"", b"."))
    if b".." in names:
        raise _invalid(text, "has .. in it")
    if any(len(name) > LONGEST_NAME for name in names):
        raise _invalid(text, "has a name that is too long")
    return names


def _invalid(text: str, why: str) -> Problem:
    shown = repr(text if len(text) <= 100 else text[:97] + "...") if text else "an empty path"
    return Problem("%s %s" % (shown, why), "give a path as seen in the container, such as /var/spool/slurmctld", 2)


def outermost(paths: Iterable[Names]) -> List[Names]:
    """Return the paths, sorted, without those below another one of them."""
    found: List[Names] = []
    for path in sorted(set(paths)):
        if not found or path[: len(found[-1])] != found[-1]:
            found.append(path)
    return found


def join(names: Iterable[bytes]) -> bytes:
    """Return the path as bytes, truncated to PATH_MAX."""
    path = b""
    for name in names:
        path += b"/" + name
        if len(path) > LONGEST:
            return path[: LONGEST - 3] + b"..."
    return path or b"/"


def show(names: Iterable[bytes]) -> str:
    """Return the path as printable text."""
    return show_raw(join(names))


def show_raw(raw: bytes) -> str:
    """Return bytes, usually text, as printable text."""
    return printable(raw[:LONGEST].decode("utf-8", "backslashreplace"))


def path_fields(names: Sequence[bytes]) -> Dict[str, Any]:
    """Return the path for JSON: as text, and also in base64 if it is not UTF-8."""
    raw = join(names)
    try:
        return {"path": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "backslashreplace"), "base64": base64.b64encode(raw).decode()}


def kind_of(state: os.stat_result) -> str:
    """Return the kind of a directory entry; a whiteout of overlayfs is "removed"."""
    mode = state.st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISCHR(mode):
        return "device" if state.st_rdev else "removed"
    return "device" if stat.S_ISBLK(mode) else "pipe" if stat.S_ISFIFO(mode) else "socket"


class Moved(Problem):
    """A folder was moved while it was walked."""


class DirCursor:
    """A position in a folder tree, moved by name. Never follows symbolic links; keeps few descriptors open."""

    def __init__(self, root: int) -> None:
        self.open = [os.dup(root)]
        self.known = [os.fstat(root).st_ino]
        os.set_inheritable(self.open[0], False)

    @property
    def here(self) -> int:
        """Descriptor of the current folder."""
        return self.open[-1]

    def down(self, name: bytes) -> None:
        """Move into a subfolder.

        Raises:
            OSError: there is no folder of that name.
        """
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.here)
        self.open.append(descriptor)
        self.known.append(os.fstat(descriptor).st_ino)
        far = len(self.open) - 1 - MAX_OPEN
        if far > 0 and self.open[far] >= 0:
            os.close(self.open[far])
            self.open[far] = -1

    def up(self) -> None:
        """Move to the parent.

        Raises:
            Moved: the folder was moved meanwhile.
        """
        child = self.open.pop()
        self.known.pop()
        try:
            if self.open[-1] < 0:
                parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=child)
                self.open[-1] = parent
                if os.fstat(parent).st_ino != self.known[-1]:
                    raise Moved("folders were moved while they were read", "run it again")
        finally:
            os.close(child)

    def names(self) -> List[bytes]:
        """Return the names in the folder, sorted by bytes."""
        return sorted(os.fsencode(name) for name in os.listdir(self.here))

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.open:
            if descriptor >= 0:
                os.close(descriptor)
        self.open = []

    def __enter__(self) -> "DirCursor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lstat(cursor: DirCursor, name: bytes) -> State:
    """lstat(2) of a name in the cursor's folder; None if there is none."""
    try:
        return os.stat(name, dir_fd=cursor.here, follow_symlinks=False)
    except FileNotFoundError:
        return None


def enter(cursor: DirCursor, name: bytes) -> bool:
    """Enter a folder; return False if it is not a folder, or not any more."""
    try:
        cursor.down(name)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def walk(cursor: DirCursor, name: bytes) -> Iterator[Tuple[List[bytes], os.stat_result]]:
    """Yield an entry of the cursor's folder, then all below it: its path from that folder on, and its state.

    The list is the same one each time. The cursor is in the folder of the entry; at the end, where it was.
    """
    path: List[bytes] = [b""]
    stack = [iter([name])]
    while True:
        one = next(stack[-1], None)
        if one is None:
            stack.pop()
            if not stack:
                return
            path.pop()
            cursor.up()
            continue
        state = lstat(cursor, one)
        if state is None:
            continue
        path[-1] = one
        yield path, state
        if stat.S_ISDIR(state.st_mode) and enter(cursor, one):
            stack.append(iter(cursor.names()))
            path.append(b"")
