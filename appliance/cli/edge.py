"""The edge of the program: all text on standard output and standard error passes through here and becomes printable.

Text of daemons, nodes, the VM and remote hosts can contain escape sequences, by which a terminal hides or forges lines,
or types. No caller needs to consider that: whatever writes text, also a traceback, writes it escaped. Exempt are:

- colours and cursor movements of rich: ``screen.Screen`` escapes the text between them and writes to the stream below;
- bytes, which are data for files and pipes: ``write_data`` escapes them where they reach a terminal;
- commands that the user runs on the terminal: ``sms exec``, ``shell``, ``vm exec``, ``vm console``, ``lab exec``.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

from appliance.text import printable_text

if TYPE_CHECKING:
    from typing import IO


class PrintableStream:
    """A text stream that escapes what is written to it; in everything else it is ``below``."""

    def __init__(self, below: TextIO) -> None:
        self.below = below
        self.used = False
        """Whether text was written since this program began to run a verb."""

    def write(self, text: str) -> int:
        """Write text, escaped; return the number of characters of ``text``."""
        self.used = True
        self.below.write(printable_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def guard_standard_streams() -> None:
    """Put ``PrintableStream`` over standard output and standard error; tracebacks and warnings use them, too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, PrintableStream):
            stream.used = False
        else:
            setattr(sys, name, PrintableStream(stream))


def stream_below(stream: IO[str]) -> IO[str]:
    """Return the stream below ``PrintableStream`` and below rich's own replacement of standard output."""
    while True:
        below = stream.below if isinstance(stream, PrintableStream) else getattr(stream, "rich_proxied_file", None)
        if below is None:
            return stream
        stream = cast("IO[str]", below)


def data_writer(stream: TextIO | None = None) -> Callable[[bytes], None]:
    """Return a function that writes data in pieces: unchanged to files and pipes, as printable text to a terminal.

    Args:
        stream: standard output if None.
    """
    target = stream or sys.stdout
    decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
    terminal = target.isatty()

    def write(data: bytes) -> None:
        if terminal:
            target.write(decode(data).replace("\r\n", "\n"))
        else:
            target.buffer.write(data)
        target.flush()

    return write


def write_data(data: bytes) -> None:
    """Write data to standard output: unchanged to files and pipes, as printable text to a terminal."""
    data_writer()(data)
