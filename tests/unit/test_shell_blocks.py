"""Commands of the documents: each is one that `sms` has, and runs in the lab unless its block says why it cannot."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from appliance.cli import make_parser
from tests.places import ROOT
from tests.shellblocks import RUN, Block, read_shell

PAGES = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_shell(page)]
REASONS = {
    "is itself a run of tests or benchmarks",
    "needs the provisioning VM, which tests/real/vm starts",
    "needs a Borg repository; tests/real/snapshots has one",
    "needs a PGP key; tests/real/image/test_build.py has one",
    "needs a host that is fenced; tests/real/migration/test_failover.py has one",
    "installs on the machine itself; tests/real/site/test_wheel.py does so in a root of its own",
    "captures a real network for hours; tests/real/classify captures the lab's",
    "builds, and lab hosts reach no mirror; first-day.md upgrades",
    "builds, and lab hosts reach no mirror",
    "runs without an end; every lab host has a guard",
    "creates and removes labs one after the other, as tests/real/lab does",
    "writes the site file; first-day.md does",
    "shows the verbs of the other pages",
    "PID is a placeholder",
}
"""Why a block is not run."""
MOST_MARKED = 54


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


def test_each_is_run_or_says_why_not() -> None:
    run = {*RUN, "first-day.md"}
    left = [block.place for block in BLOCKS if not block.reason and block.page not in run]
    assert left == []
    assert {block.reason for block in BLOCKS if block.reason} == REASONS, "each reason is one of these, and is used"
    marked = [block for block in BLOCKS if block.reason]
    assert len(marked) <= MOST_MARKED, Counter(block.page for block in marked)
    for reason in REASONS:
        for path in re.findall(r"tests/[\w/.]+", reason):
            assert Path(ROOT, path).exists()
