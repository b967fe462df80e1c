"""A running command whose standard input and output the caller streams."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import TypeVar

from appliance.host.base import BLOCK, CommandError, OnLine, Result
from appliance.shared.outputs import MAX_OUTPUT

KEPT_LINES, KEPT_LETTERS = 100, 10_000
"""Number of trailing lines of standard error that a result contains, and how much of each."""
TERM_S, KILL_S = 5.0, 5.0
"""Seconds to wait after SIGTERM, and after SIGKILL."""
MAX_ERRORS = 1 << 28
"""Bytes of standard error of a command: far more than an agent's progress. It could go on for ever."""
Waited = TypeVar("Waited")
LATE_S = 5.0
"""Seconds to wait for standard error after the command ended: its child processes may hold it open."""


@contextmanager
def expires_after(seconds: float | None, end: Callable[[], None]) -> Iterator[threading.Event]:
    """Call ``end`` in a thread if the context lasts longer, whatever arrives meanwhile; then the event is set."""
    expired = threading.Event()
    if seconds is None:
        yield expired
        return

    def expire() -> None:
        expired.set()
        end()

    watchdog = threading.Timer(seconds, expire)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield expired
    finally:
        watchdog.cancel()


class Silence:
    """A context that calls ``end`` in a thread if a wait within it takes ``seconds``; then ``expired`` is set."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self.seconds = seconds
        self.end = end
        self.expired = False
        self._done = threading.Event()
        self._until = math.inf

    def limit(self, wait: Callable[[], Waited]) -> Waited:
        """Return the result of a wait. What its caller does in between, such as printing, is not limited."""
        self._until = time.monotonic() + self.seconds
        try:
            return wait()
        finally:
            self._until = math.inf

    def _watch(self) -> None:
        while not self._done.wait(min(self.seconds, max(0.0, self._until - time.monotonic()))):
            if time.monotonic() >= self._until:
                self.expired = True
                self.end()
                return

    def __enter__(self) -> Silence:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()


class Stream(ABC):
    """A command's standard input and output as bytes; standard error is collected by line.

    Reading and writing may be done by two threads at once, and must be if the command writes more than a pipe
    holds before it has read all its input. Leaving the context before ``result`` terminates the command, but not after
    ``leave``.
    """

    left = False

    @abstractmethod
    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``; block while the command does not read.

        Raises:
            CommandError: the command has ended.
            Unreachable: the connection broke.
        """

    @abstractmethod
    def end(self) -> None:
        """Close the command's standard input."""

    @abstractmethod
    def read(self, size: int = BLOCK) -> bytes:
        """Return up to ``size`` bytes as soon as any are available; empty at the end.

        Raises:
            Unreachable: the connection broke.
        """

    @abstractmethod
    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        """Close the input, discard the remaining output, wait for the command to end. ``stdout`` is empty.

        Raises:
            CommandError: the status is not in ``ok``.
            Unreachable: the connection broke.
        """

    def leave(self) -> None:
        """Let the command continue to its own end; its output pipe is closed then."""
        self.left = True

    @abstractmethod
    def close(self) -> None:
        """Terminate the command if it still runs, unless it was left."""

    @abstractmethod
    def abort(self) -> None:
        """End this side of it at once, from any thread: reads and writes of others end, and ``result`` returns."""

    def read_exactly(self, size: int) -> bytes:
        """Return exactly ``size`` bytes.

        Raises:
            CommandError: the output ended before.
            Unreachable: the connection broke.
        """
        parts, missing = [], size
        while missing:
            block = self.read(min(missing, BLOCK))
            if not block:
                raise CommandError(self.result(ok=None), hint=f"the output ended {missing} bytes too early")
            parts.append(block)
            missing -= len(block)
        return b"".join(parts)


class LineReader:
    """Splits a byte stream into lines, passes them on and keeps the last ones.

    A line of more than ``MAX_OUTPUT`` bytes is passed on in parts.
    """

    def __init__(self, on_line: OnLine | None) -> None:
        self.on_line = on_line
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.size = 0
        """Bytes so far."""
        self._rest = bytearray()

    def feed(self, block: bytes) -> None:
        """Add the next block; an empty one marks the end."""
        self.size += len(block)
        first, *lines = block.split(b"\n")
        self._rest += first
        for line in lines:
            self._pass_on()
            self._rest += line
        if self._rest and (not block or len(self._rest) > MAX_OUTPUT):
            self._pass_on()

    def _pass_on(self) -> None:
        text = self._rest.decode(errors="replace")
        self._rest.clear()
        self.last.append(text[:KEPT_LETTERS])
        if self.on_line:
            self.on_line(text)

    @property
    def tail(self) -> bytes:
        """The last ``KEPT_LINES`` lines."""
        return "\n".join(self.last).encode()
