"""A command under way with both its ends in our hands: bytes flow in and out while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container

from appliance.host.base import BLOCK, CommandError, OnLine, Result

KEPT_LINES = 100
"""The last lines of standard error that a result has."""
TERM_S, KILL_S = 5.0, 5.0
"""Seconds that a command gets to end when it is asked to, and when it is not asked any more."""
LATE_S = 5.0
"""Seconds to wait for the last words of one that has ended: a child of its own may hold its standard error open."""


class Stream(ABC):
    """Its standard input and output are read and written here; what it says on standard error is heard by the line.

    Reading and writing may be done by two threads at once, and must be, where the command answers more than a pipe
    holds before it has read all. Whoever leaves the context before ``result`` ends the command.
    """

    @abstractmethod
    def write(self, data: bytes | memoryview) -> int:
        """Give it all of ``data``; waits while it does not read.

        Raises:
            CommandError: it has ended.
            Unreachable: the connection broke.
        """

    @abstractmethod
    def end(self) -> None:
        """Close its standard input."""

    @abstractmethod
    def read(self, size: int = BLOCK) -> bytes:
        """Up to so many bytes, as soon as there are any; none at its end.

        Raises:
            Unreachable: the connection broke.
        """

    @abstractmethod
    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        """Close its input, leave what it still prints unread, wait for its end. ``stdout`` is empty.

        Raises:
            CommandError: the status is not in ``ok``.
            Unreachable: the connection broke.
        """

    def read_exactly(self, size: int) -> bytes:
        """So many bytes.

        Raises:
            CommandError: it ended before.
            Unreachable: the connection broke.
        """
        parts, missing = [], size
        while missing:
            block = self.read(min(missing, BLOCK))
            if not block:
                raise CommandError(self.result(ok=None), hint=f"it ended {missing} bytes too early")
            parts.append(block)
            missing -= len(block)
        return b"".join(parts)


class Ears:
    """Hears a command's standard error by the line, and keeps the last ones."""

    def __init__(self, on_line: OnLine | None) -> None:
        self.on_line = on_line
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""

    def hear(self, block: bytes) -> None:
        """The next bytes of it; none are its end."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        if not block and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, text: str) -> None:
        self.last.append(text)
        if self.on_line:
            self.on_line(text)

    @property
    def said(self) -> bytes:
        """The last lines."""
        return "\n".join(self.last).encode()
