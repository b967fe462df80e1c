"""Error classes with message, hint and exit status.

Exit statuses: 0 ok, 1 failed, 2 usage or configuration error, 3 refused by a preflight check, nothing
was changed, 4 done but unhealthy or not verified, 5 rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL = "`df -h` and `df -i` show the full file system: free space there, then run it again"
DISK_HINTS = {
    "no space left on device": FULL,
    "resulted in short write": FULL,  # e2fsprogs
    "disk quota exceeded": "the quota of that file system is used up: free space there, then run it again",
    "read-only file system": "`findmnt -O ro` shows it, `dmesg` why; once it can be written, run it again",
    "input/output error": "is a disk failing? `dmesg` shows it; what was there before is unchanged",
}
"""By the text of an error of the system, in lower case, what to do about it."""


def disk_hint(text: str) -> str:
    """Return what to do about an error of a disk that a text names; empty if it names none."""
    return next((hint for words, hint in DISK_HINTS.items() if words in text.lower()), "")


class SmsError(Exception):
    """The operation failed. ``message`` says what is wrong, ``hint`` what to do about it."""

    status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Problem:
    """One error in a user's file.

    ``line`` counts from 1 (0: unknown), ``path`` is the dotted place in the document.
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
    """The command line or a file is invalid; carries all problems found, not only the first."""

    status = 2

    def __init__(self, message: str = "", *, hint: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message or "\n".join(str(problem) for problem in problems), hint=hint)
        self.problems = tuple(problems)


class Refused(SmsError):
    """A preflight check failed. Nothing was changed."""

    status = 3


class Busy(Refused):
    """Another run holds the lock; try again later."""


class Unverified(SmsError):
    """It is done, but the result could not be verified or recorded. The exit status is that of an unhealthy result."""

    status = 4


class RolledBack(SmsError):
    """A step failed and all changes were rolled back."""

    status = 5
