"""The output of definitions/scripts/survey: sections, from a host whose content is not trusted."""

from __future__ import annotations

from dataclasses import dataclass, field

FILE_STATES = ("read", "cut", "special", "unreadable", "skipped", "secret", "there")
MOST_SECTIONS = 2000
LARGEST = 2 << 20
"""Bytes of a section; the script sends at most half of that."""


@dataclass(frozen=True)
class Section:
    """A file, or the output of a command.

    Attributes:
        status: of a file: read, cut (only its beginning was read), special, unreadable, skipped, secret or there (its
            content was not requested); of a command: read or skipped.
        ended: exit status of a command; 124 if it exceeded its time.
        size, mode, uid, gid: of a file, as it is on the host.
    """

    name: str
    status: str
    body: bytes = b""
    ended: int = 0
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0

    @property
    def binary(self) -> bool:
        """Whether it is not text."""
        return b"\0" in self.body

    @property
    def encoded(self) -> bool:
        """Whether it is UTF-8."""
        try:
            self.body.decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def text(self) -> str:
        """Its text; what is not UTF-8 is replaced, and a binary file has none."""
        return "" if self.binary else self.body.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The lines of its text, without their ends."""
        return self.text.replace("\r\n", "\n").split("\n")


@dataclass
class Frames:
    """All sections: files by path, commands by name. ``complete``: whether the script came to its end."""

    files: dict[str, Section] = field(default_factory=dict)
    runs: dict[str, Section] = field(default_factory=dict)
    complete: bool = False

    def text(self, *paths: str) -> str:
        """Return the text of the first of these files that the host has; empty if it has none."""
        return next((self.files[path].text for path in paths if path in self.files), "")

    def output(self, name: str) -> list[str]:
        """Return the lines of a command's output; none if the host lacks the command."""
        return [line for line in self.runs[name].lines if line.strip()] if name in self.runs else []

    def below(self, *folders: str) -> list[Section]:
        """Return the files directly in these folders, in the order of the folders."""
        return [one for folder in folders for path, one in self.files.items() if path.rpartition("/")[0] == folder]


def read_frames(data: bytes) -> Frames:
    """Return the sections in the output of the script. Lines that belong to none are ignored."""
    found = Frames()
    header: list[str] | None = None
    body: list[bytes] = []
    count = 0
    for line in data.split(b"\n"):
        if line.startswith(b" "):
            body.append(line[1:])
        elif line.startswith(b"@"):
            words = line.decode("ascii", "replace").split(" ")
            if words[0] in ("@file", "@run") and len(words) >= 3 and count < MOST_SECTIONS:
                header, body, count = words, [], count + 1
            elif words[0] == "@end" and header is not None:
                _add(found, header, b"\n".join(body), _number(words, 1))
                header = None
            elif words[0] == "@done":
                found.complete = True
    return found


def _add(found: Frames, header: list[str], body: bytes, ended: int) -> None:
    kind, name, status = header[:3]
    if len(body) > LARGEST:
        body, status = body[:LARGEST], "cut"
    if kind == "@run":
        found.runs.setdefault(name, Section(name, status, body, ended))
        return
    size = _number(header, 3)
    if status == "read" and size == len(body) + 1:  # the line end of the last line
        body += b"\n"
    status = status if status in FILE_STATES else "unreadable"
    section = Section(name, status, body, 0, size, _number(header, 4, 8), _number(header, 5), _number(header, 6))
    found.files.setdefault(name, section)


def _number(words: list[str], index: int, base: int = 10) -> int:
    try:
        return int(words[index], base) if len(words[index]) < 16 else 0
    except (IndexError, ValueError):
        return 0
