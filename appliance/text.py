"""Escape untrusted text for printing, and find names that are meant. Also used by the agent and in the VM."""

from __future__ import annotations

import re
from collections.abc import Iterable

SHORT = 60
"""Maximum number of characters of an invalid value in a message."""


def printable(text: str, limit: int = 0) -> str:
    """Return the text with all non-printable characters escaped.

    Args:
        limit: maximum number of characters of ``text``; 0 for no limit.
    """
    if limit and len(text) > limit:
        text = text[: limit - 3] + "..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(text: str, limit: int = 0) -> str:
    """Return ``printable`` text with each run of white space, including line breaks, as one space."""
    return printable(" ".join(text.split()), limit)


def printable_text(text: str) -> str:
    """Return ``printable`` text that keeps its line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" else printable(letter) for letter in text)


def nearest(word: str, known: Iterable[str], *, listed: Iterable[str] | None = None, label: str = "known") -> str:
    """Return a hint with the known name closest to ``word``; if none is close, all of ``listed`` (default: known)."""
    import difflib  # for the answer to a mistake only

    names = sorted(set(known))
    close = difflib.get_close_matches(word[:100].lower(), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    names = names if listed is None else sorted(set(listed))
    return f"{label}: {', '.join(names)}" if names else "none are known"


def is_plain_name(text: str) -> bool:
    """Return whether a text from elsewhere can be the name of a file: without a folder or spaces, and not an option."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", text))


def whole_number(text: str) -> int | None:
    """Return the number in a text of at most 15 decimal digits; None if it is something else.

    ``str.isdigit`` is true for superscripts, and for more digits than ``int`` converts.
    """
    return int(text) if len(text) <= 15 and text.isascii() and text.isdecimal() else None
