"""What a power failure may leave of recorded changes to a folder.

A file system may write names and contents at any time and in any order; only what was flushed is certain: the content
of a file by fsync(2) of the file, a name by fsync(2) of its folder, everything by syncfs(2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
BEGIN = "begin"
"""The mark after which failures are simulated; everything before it is on the disk."""


class Record(NamedTuple):
    """A line of the recorder: C create, T truncate, W write, F flush a file, D a folder, S everything, R rename,
    U unlink, M mkdir, X rmdir, L link, Y symlink, A mark."""

    kind: str
    inode: int
    offset: int
    data: bytes
    path: str
    other: str


def read_records(path: Path) -> list[Record]:
    """Return the records in a file."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        end = data.index(b"\n", at)
        kind, inode, offset, _, size, names = data[at:end].decode().split(" ", 5)
        first, _, second = names.partition("\t")
        at = end + 1 + int(size)
        found.append(Record(kind, int(inode), int(offset), data[end + 1 : at], first, second))
    return found


@dataclass(eq=False)
class File:
    """A file: its content, what of it is on the disk, and the changes since then."""

    content: bytes = b""
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes) of each write; (size, None) of a truncation."""

    def change(self, at: int, data: bytes | None) -> None:
        self.content = _changed(self.content, at, data)
        self.pending.append((at, data))

    def flush(self) -> None:
        self.durable, self.pending = self.content, []

    def left(self, how: str) -> bytes:
        """Its content after a failure: ``full``; ``lost``; ``torn``, half of what was written; ``zeros``, the new size
        without what was written: zeros where nothing was before."""
        if how == "full" or not self.pending:
            return self.content
        found = self.durable
        changes = {"lost": [], "zeros": self.pending, "torn": self.pending[: len(self.pending) // 2 + 1]}[how]
        for number, (at, data) in enumerate(changes):
            if data and how == "zeros":
                data = found[at : at + len(data)].ljust(len(data), b"\0")
            if data and how == "torn" and number == len(changes) - 1:
                data = data[: len(data) // 2]
            found = _changed(found, at, data)
        return found


def _changed(content: bytes, at: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:at].ljust(at, b"\0")
    return content[:at].ljust(at, b"\0") + data + content[at + len(data) :]


@dataclass(eq=False)
class Folder:
    """A folder, by its identity: its path may change."""


@dataclass(eq=False)
class Link:
    target: str


Entry = File | Folder | Link
Names = dict[Folder, dict[str, Entry]]
"""The entries of each folder."""
State = dict[str, bytes | str | None]
"""By path: the bytes of a file, the target of a symbolic link, None for a folder."""


@dataclass(eq=False)
class Change:
    """A change of names: an entry is removed, or added, or both. On the disk when the folder that gains it is flushed,
    or else the one that loses it."""

    lost: tuple[Folder, str] | None
    gained: tuple[Folder, str, Entry] | None
    durable: bool = False

    @property
    def where(self) -> Folder:
        place = self.gained or self.lost
        assert place
        return place[0]

    def apply(self, names: Names) -> None:
        if self.lost:
            names[self.lost[0]].pop(self.lost[1], None)
        if self.gained:
            folder, name, entry = self.gained
            names[folder][name] = entry


class Disk:
    """A folder's file system: what its programs see, and what is on the disk."""

    def __init__(self, root: str) -> None:
        self.root, self.top = root, Folder()
        self.now: Names = {self.top: {}}
        self.base: Names = {self.top: {}}
        self.changes: list[Change] = []
        self.files: dict[int, File] = {}

    def _find(self, path: str) -> Entry | None:
        found: Entry | None = self.top
        for name in path[len(self.root) + 1 :].split("/"):
            if name:
                found = self.now[found].get(name) if isinstance(found, Folder) else None
        return found

    def _place(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        assert isinstance(folder, Folder), path
        return folder, name

    def apply(self, record: Record) -> None:
        """Apply a record."""
        kind, path = record.kind, record.path
        if kind in "WTF":
            if file := self.files.get(record.inode):
                file.flush() if kind == "F" else file.change(record.offset, record.data if kind == "W" else None)
        elif kind == "D":
            folder = self._find(path)
            for change in self.changes:
                change.durable |= change.where is folder
            while self.changes and self.changes[0].durable:
                self.changes.pop(0).apply(self.base)
        elif kind == "S":
            self.flush()
        elif kind != "A":
            change = self._read_change(record)
            change.apply(self.now)
            self.changes.append(change)

    def _read_change(self, record: Record) -> Change:
        kind, place = record.kind, self._place(record.path)
        if kind in "UX":
            return Change(place, None)
        if kind in "RL":
            entry = self._find(record.path)
            assert entry, record
            return Change(place if kind == "R" else None, (*self._place(record.other), entry))
        made: Entry = Link(record.other)
        if kind == "C":
            made = self.files[record.inode] = File()
        elif kind == "M":
            made = Folder()
            self.now[made], self.base[made] = {}, {}
        return Change(None, (*place, made))

    def flush(self) -> None:
        """Flush everything."""
        for file in self.files.values():
            file.flush()
        self.base, self.changes = _copy(self.now), []

    def states(self) -> Iterator[State]:
        """Yield what a failure now may leave."""
        pending = [change for change in self.changes if not change.durable]
        dirty = [file for file in self.files.values() if file.pending]
        lost = [
            set(),
            set(pending),
            *({one} for one in pending),
            *(set(pending) - {one} for one in pending),
            *(set(pending[at:]) for at in range(1, len(pending))),
        ]
        for number, gone in enumerate(lost):
            names = _copy(self.base)
            for change in self.changes:
                if change not in gone:
                    change.apply(names)
            for how in ("full", "lost", "zeros", "torn"):
                yield self._state(names, dict.fromkeys(dirty, how))
            for one in dirty if number < 2 and len(dirty) > 1 else []:
                yield self._state(names, {**dict.fromkeys(dirty, "full"), one: "zeros"})
                yield self._state(names, {**dict.fromkeys(dirty, "lost"), one: "full"})

    def state(self) -> State:
        """Return what programs see now."""
        return self._state(self.now, {})

    def _state(self, names: Names, left: dict[File, str]) -> State:
        found: State = {}
        folders: list[tuple[str, Folder]] = [(self.root, self.top)]
        while folders:
            path, folder = folders.pop()
            found[path] = None
            for name, entry in names[folder].items():
                if isinstance(entry, Folder):
                    folders.append((f"{path}/{name}", entry))
                elif isinstance(entry, Link):
                    found[f"{path}/{name}"] = entry.target
                else:
                    found[f"{path}/{name}"] = entry.left(left.get(entry, "full"))
        return found


def _copy(names: Names) -> Names:
    return {folder: dict(entries) for folder, entries in names.items()}


def read_state(root: Path) -> State:
    """Return what is in a folder."""
    found: State = {str(root): None}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


def write_state(state: State, root: str, copy: Path) -> None:
    """Write a state of ``root`` to another folder."""
    for path, content in sorted(state.items()):
        where = copy / path[len(root) + 1 :]
        if content is None:
            where.mkdir(parents=True, exist_ok=True)
        elif isinstance(content, str):
            where.symlink_to(content)
        else:
            where.write_bytes(content)
            where.chmod(0o600)


def sample(every: Sequence[T], samples: int) -> list[T]:
    """Return so many of them, evenly spread, the last one included; all if there are fewer."""
    count = min(samples, len(every))
    return [every[(place + 1) * len(every) // count - 1] for place in range(count)]


def failures(root: str, records: list[Record], *, memory: bool = False) -> Iterator[tuple[State, tuple[str, ...]]]:
    """Yield each state that a failure after some prefix of the records may leave, and the marks before it.

    With ``memory`` the program is killed there: what it has written is left as it is.
    """
    disk, begun = Disk(root), False
    marks: tuple[str, ...] = ()
    seen = set()
    for record in records:
        disk.apply(record)
        if record.kind == "A":
            if record.path == BEGIN:
                disk.flush()
                begun = True
            else:
                marks = (*marks, record.path)
        if begun:
            for state in [disk.state()] if memory else disk.states():
                key = hash((marks, frozenset(state.items())))
                if key not in seen:
                    seen.add(key)
                    yield state, marks
