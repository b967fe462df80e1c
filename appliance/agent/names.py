"""Paths in the container, whose names are bytes: checked when they come in, told so that nothing is lost or harmful."""

import base64
import os
import stat
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from appliance.agent.words import Problem
from appliance.text import printable

LONGEST = 4096
"""Bytes of a path that are told (PATH_MAX)."""
LONGEST_NAME = 255
KEPT = 64
"""So many descriptors are open however deep a tree is."""

Names = Tuple[bytes, ...]
"""A path by its names, the root's first; () is the root itself."""


def split_path(text: str) -> Names:
    """The names of an absolute path.

    Raises:
        Problem: it is no path that can be meant.
    """
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _wrong(text, "is no text")
    if not raw.startswith(b"/"):
        raise _wrong(text, "does not begin with /")
    if b"\0" in raw or len(raw) >= LONGEST:
        raise _wrong(text, "is no path")
    names = tuple(name for name in raw.split(b"/") if name not in (b"", b"."))
    if b".." in names:
        raise _wrong(text, "has .. in it")
    if any(len(name) > LONGEST_NAME for name in names):
        raise _wrong(text, "has a name that is too long")
    return names


def _wrong(text: str, why: str) -> Problem:
    shown = repr(text if len(text) <= 100 else text[:97] + "...") if text else "an empty path"
    return Problem("%s %s" % (shown, why), "give a path as seen in the container, such as /var/spool/slurmctld", 2)


def outermost(paths: Iterable[Names]) -> List[Names]:
    """The paths without those that lie below another one of them, in order."""
    found: List[Names] = []
    for path in sorted(set(paths)):
        if not found or path[: len(found[-1])] != found[-1]:
            found.append(path)
    return found


def join(names: Iterable[bytes]) -> bytes:
    """The path as bytes, cut where it is too long for any program."""
    path = b""
    for name in names:
        path += b"/" + name
        if len(path) > LONGEST:
            return path[: LONGEST - 3] + b"..."
    return path or b"/"


def show(names: Iterable[bytes]) -> str:
    """The path as a person reads it, on a terminal too."""
    return show_raw(join(names))


def show_raw(raw: bytes) -> str:
    """Bytes that are most often text, safe to print."""
    return printable(raw[:LONGEST].decode("utf-8", "backslashreplace"))


def tell(names: Sequence[bytes]) -> Dict[str, Any]:
    """The path for programs: text, and in base64 where it is none."""
    raw = join(names)
    try:
        return {"path": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"path": raw.decode("utf-8", "backslashreplace"), "base64": base64.b64encode(raw).decode()}


def kind_of(state: os.stat_result) -> str:
    """What lies there."""
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
    """A folder is not where it was a moment ago."""


class Ladder:
    """Stands in a folder of a tree, goes down by name and up again. Never follows a link; keeps few descriptors."""

    def __init__(self, root: int) -> None:
        self.open = [os.dup(root)]
        self.known = [os.fstat(root).st_ino]
        os.set_inheritable(self.open[0], False)

    @property
    def here(self) -> int:
        """The folder it stands in."""
        return self.open[-1]

    @property
    def depth(self) -> int:
        """Steps below the root."""
        return len(self.open) - 1

    def down(self, name: bytes) -> None:
        """Into a folder.

        Raises:
            OSError: there is none of that name.
        """
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.here)
        self.open.append(descriptor)
        self.known.append(os.fstat(descriptor).st_ino)
        far = len(self.open) - 1 - KEPT
        if far > 0 and self.open[far] >= 0:
            os.close(self.open[far])
            self.open[far] = -1

    def up(self) -> None:
        """Out of it.

        Raises:
            Moved: somebody has moved it meanwhile.
        """
        child = self.open.pop()
        self.known.pop()
        try:
            if self.open[-1] < 0:
                parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=child)
                self.open[-1] = parent
                if os.fstat(parent).st_ino != self.known[-1]:
                    raise Moved("folders were moved while they were looked at", "run it again")
        finally:
            os.close(child)

    def names(self) -> List[bytes]:
        """What the folder holds, sorted by bytes."""
        return sorted(os.fsencode(name) for name in os.listdir(self.here))

    def close(self) -> None:
        """Done with it."""
        for descriptor in self.open:
            if descriptor >= 0:
                os.close(descriptor)
        self.open = []

    def __enter__(self) -> "Ladder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
