"""Commands of the documents: each is one that `sms` has, and runs in the lab unless its block says why it cannot."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from appliance.cli import make_parser
from tests.places import ROOT
from tests.real.pages import CLUSTER, ENGINES, FIRST_DAY, LEGACY, MACHINES
from tests.shellblocks import PAGES, Block, read_blocks, read_shell

BLOCKS = [block for page in PAGES.values() for block in read_shell(page)]
DEVELOPERS = read_shell(ROOT / "HACKING.md")
MOST_MARKED = 11


def commands(block: Block) -> list[str]:
    """The `sms` commands of a block, without comments and what is around them."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        parts = re.split(r" *(?:&&|\|\|?|;) +", re.sub(r"\s#\s.*", "", line))
        found += [part.partition(" >")[0] for part in parts if part.startswith("sms ")]
    return found


@pytest.mark.parametrize("block", [*BLOCKS, *DEVELOPERS], ids=lambda block: block.place)
def test_its_commands_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    for command in commands(block):
        try:
            parser.parse_args(shlex.split(command)[1:])
        except SystemExit as end:
            assert not end.code, f"{block.place}: {command}: {capsys.readouterr().err}"


def test_each_is_run_or_says_why_not() -> None:
    pages = [*CLUSTER.items(), *MACHINES.items(), *ENGINES.items(), *LEGACY.items(), ("first-day.md", FIRST_DAY)]
    run = [block for name, page in pages for block in page.blocks(name)]
    assert [block.place for block in BLOCKS if not block.reason and block not in run] == []
    assert [name for name, page in pages if not page.blocks(name)] == []


def test_few_are_not_run_and_reasons_are_true() -> None:
    marked = [block for block in BLOCKS if block.reason]
    assert len(marked) <= MOST_MARKED, [block.place for block in marked]
    for block in marked:
        assert len(block.reason.split()) > 3, block.place
        for path in re.findall(r"tests/[\w/.]+", block.reason):
            assert Path(ROOT, path).is_file(), f"{block.place}: {path}"


def test_marks_are_above_commands() -> None:
    """One that is misspelt, or above something else, would have no effect."""
    for path in PAGES.values():
        comments = list(dict.fromkeys(re.findall(r"^<!--.*$", path.read_text(), re.MULTILINE)))
        reasons = list(dict.fromkeys(f"<!-- not run: {block.reason} -->" for block in read_shell(path) if block.reason))
        assert comments == reasons, path.name


def test_what_is_not_run_is_not_a_command() -> None:
    """Output and parts of files begin with no program."""
    for path in PAGES.values():
        for block in read_blocks(path):
            first = re.match(r"(\S+) \S", block.text)
            assert block in BLOCKS or not first or not shutil.which(first[1]), f"{block.place}: {first[0]}"
