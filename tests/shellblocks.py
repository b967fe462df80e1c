"""Shell blocks of the documents: indented by four spaces, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """An indented block."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    """Return the indented blocks of a page."""
    lines = path.read_text().splitlines()
    blocks: list[Block] = []
    fenced, number = False, 0
    while number < len(lines):
        line = lines[number]
        fenced ^= line.startswith("```")
        if fenced or not line.startswith("    ") or (number and lines[number - 1].strip()):
            number += 1
            continue
        first = number
        while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
            number += 1
        text = "\n".join(each[4:] for each in lines[first:number]).rstrip()
        blocks.append(Block(path.name, first + 1, text))
    return blocks


COMMAND = re.compile(
    r"(sms|make|pipx|pip|sh|apptainer|nsenter|tcpdump|curl|printf|cat|cd|mkdir|sed|tests/machine|\.venv/bin/\S+|"
    r"script=\S+|\(umask)(\s|$)"
)
"""What a block of commands begins with; others are parts of files, and output."""


def read_shell(path: Path) -> list[Block]:
    """Return the blocks of commands of a page."""
    return [block for block in read_blocks(path) if COMMAND.match(block.text)]
