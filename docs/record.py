"""Record what a command prints as a picture: python docs/record.py docs/demo.svg "make demo" sms lab demo."""

from __future__ import annotations

import io
import os
import pty
import re
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 100


def run(argv: list[str]) -> str:
    """Run a command on a terminal of ``WIDTH`` columns and return all that it wrote."""
    written: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        written.append(data)
        return data

    os.environ.update(COLUMNS=str(WIDTH), LINES="50", TERM="xterm-256color")
    if status := pty.spawn(argv, read):
        sys.exit(os.waitstatus_to_exitcode(status))
    return b"".join(written).decode(errors="replace")


def final_lines(text: str) -> list[str]:
    """Return the lines as they remain: without progress that was overwritten."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        last = re.split(r"\r|\x1b\[2K|\x1b\[1A", line)[-1]
        last = re.sub(r"\x1b\[(?![0-9;]*m)[0-9;?]*[A-Za-z]", "", last)
        plain = Text.from_ansi(last).plain.strip()
        if plain and not "\u2800" <= plain[0] <= "\u28ff":  # a spinner: the line's final form follows
            lines.append(last)
    return lines


def main() -> None:
    """Write the picture."""
    picture, title, *argv = sys.argv[1:]
    lines = final_lines(run(argv))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line))
    console.save_svg(picture, title=title)


if __name__ == "__main__":
    main()
