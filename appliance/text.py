"""Escape untrusted text for printing. Also used by the agent and in the VM."""

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
