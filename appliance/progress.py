"""How the work tells what it is doing, without knowing who listens.

The verbs take a ``Progress``; the command line shows it with rich, tests and scripts pass
``Silent()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Step(Protocol):
    """A step under way."""

    def detail(self, text: str) -> None:
        """Say in a few words where the step is; the last one said stays."""

    def moved(self, done: int, total: int) -> None:
        """Say how many of how many bytes are done; ``total`` is 0 where nobody knows it."""


class Progress(Protocol):
    """Where steps are announced."""

    def step(self, text: str) -> AbstractContextManager[Step]:
        """A step that lasts as long as the context; its failure is shown as one."""

    def say(self, text: str) -> None:
        """A line that stays."""


class Silent:
    """Says nothing."""

    def detail(self, text: str) -> None:
        pass

    def moved(self, done: int, total: int) -> None:
        pass

    @contextmanager
    def step(self, text: str) -> Iterator[Step]:
        yield self

    def say(self, text: str) -> None:
        pass
