"""What can go wrong, as a person reads it, and the exit status that tells a script.

Exit statuses: 0 fine, 1 the work failed, 2 usage or configuration, 3 a preflight check refused
and nothing was changed, 4 done but unhealthy, 5 rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SmsError(Exception):
    """The work failed. ``message`` says what, ``hint`` what to do about it."""

    status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Problem:
    """One mistake in a file the user wrote.

    ``line`` counts from 1 (0: no line is known), ``path`` is the dotted place in the document.
    """

    file: str
    line: int
    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class ConfigError(SmsError):
    """The command line or a file is wrong: every problem found, not the first only."""

    status = 2

    def __init__(self, message: str = "", *, hint: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems), hint=hint)
        self.problems = tuple(problems)


class Refused(SmsError):
    """A preflight check said no. Nothing was changed."""

    status = 3


class Busy(Refused):
    """Another run is at work on the same; later it will do."""


class RolledBack(SmsError):
    """A step failed, and what had been changed was put back as it was."""

    status = 5
