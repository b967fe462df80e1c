"""Text of others, made safe to print. For every side: the agent's Python and the VM's, too."""

SHORT = 60
"""Characters that a message shows of a wrong value."""


def printable(text: str, limit: int = 0) -> str:
    """Text on one line, with all that a terminal would obey as its escape.

    Args:
        limit: characters of ``text`` that are shown at most; 0 shows all.
    """
    if limit and len(text) > limit:
        text = text[: limit - 3] + "..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(text: str, limit: int = 0) -> str:
    """As ``printable``, with each run of white space, line ends included, as one blank."""
    return printable(" ".join(text.split()), limit)
