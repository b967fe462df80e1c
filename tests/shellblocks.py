"""Shell blocks of the documents: indented by four spaces, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.places import ROOT

PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
"""The documents for users, by name."""
MARK = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """Indented lines without an empty one between them; ``reason``: why they are marked as not run in the lab."""

    page: str
    line: int
    text: str
    reason: str = ""

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    """Return the indented blocks of a page. A mark is for all that is indented below it."""
    blocks: list[Block] = []
    mark, fenced, lines = "", False, [*path.read_text().splitlines(), "end"]
    begun: list[str] = []
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        indented = line.startswith("    ") and not fenced
        # Otherwise it continues an entry of a list.
        if indented and (begun or not lines[number - 1].strip()):
            begun.append(line[4:])
            continue
        if begun:
            blocks.append(Block(path.name, number - len(begun) + 1, "\n".join(begun), mark))
            begun = []
        if found := MARK.fullmatch(line):
            mark = found[1]
        elif line and not indented:
            mark = ""
    return blocks


COMMAND = re.compile(
    r"(sms|make|python3\S*|pipx?|sh|apptainer|nsenter|tcpdump|curl|printf|cat|cd|mkdir|sed|test|ip|export|tests/machine|"
    r"\S+/bin/\S+|script=\S+|\(umask)(\s|$)"
)
"""What a block of commands begins with; others are parts of files, and output."""


def read_shell(path: Path) -> list[Block]:
    """Return the blocks of commands of a page."""
    return [block for block in read_blocks(path) if COMMAND.match(block.text)]
