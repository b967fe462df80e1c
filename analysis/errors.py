"""Errors of this package."""

from __future__ import annotations


class CaptureError(Exception):
    """A capture that cannot be read or classified; ``hint`` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
