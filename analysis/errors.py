"""What goes wrong here, as a person reads it."""

from __future__ import annotations


class CaptureError(Exception):
    """A capture that cannot be read at all; ``hint`` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
