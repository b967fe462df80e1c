"""Interface by which operations report progress.

Verbs take a ``Progress``; the command line implements it with rich, tests and scripts pass
``Silent()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Step(Protocol):
    """A step in progress."""

    def detail(self, text: str) -> None:
        """Update the step's short status text; the last one remains."""

    def moved(self, done: int, total: int) -> None:
        """Report transferred bytes; ``total`` is 0 if unknown."""


class Progress(Protocol):
    """Receiver of progress reports."""

    def step(self, text: str) -> AbstractContextManager[Step]:
        """Start a step that lasts as long as the context; an exception marks it as failed."""

    def report(self, text: str) -> None:
        """Print a permanent line."""

    def warn(self, text: str) -> None:
        """Print a permanent line that a person must not miss, such as what is lost, marked as a warning."""


class Silent:
    """Discards all reports; a subclass that keeps them keeps the warnings, too."""

    def detail(self, text: str) -> None:
        pass

    def moved(self, done: int, total: int) -> None:
        pass

    @contextmanager
    def step(self, text: str) -> Iterator[Step]:
        yield self

    def report(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.report(f"WARNING: {text}")
