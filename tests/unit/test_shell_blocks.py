"""Commands of the documents: each is one that `sms` has."""

from __future__ import annotations

import re
import shlex

import pytest

from appliance.cli import make_parser
from tests.places import ROOT
from tests.shellblocks import Block, read_shell

PAGES = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_shell(page)]


def commands(block: Block) -> list[str]:
    """The `sms` commands of a block, without comments and what is around them."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        parts = re.split(r" *(?:&&|\|\|?|;) +", re.sub(r"\s#\s.*", "", line))
        found += [part.partition(" >")[0] for part in parts if part.startswith("sms ")]
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_its_commands_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    for command in commands(block):
        try:
            parser.parse_args(shlex.split(command)[1:])
        except SystemExit as end:
            assert not end.code, f"{block.place}: {command}: {capsys.readouterr().err}"
