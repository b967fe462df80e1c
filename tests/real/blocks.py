"""Runs the blocks of commands of the documents in a lab, command by command, where a reader would."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from appliance.host.base import Result
from appliance.host.local import Local
from appliance.lab import Lab
from tests.places import ROOT
from tests.real.proxy import mirrors_for
from tests.shellblocks import PAGES, Block, read_shell

T = TypeVar("T")
MACHINE = "machine"
"""The machine that has the lab, as a place of commands."""
PATH = f"{ROOT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Steps = Sequence[tuple[str, str]]
"""Commands, each with the host that it runs on."""
WATCH_S = 8
"""Seconds until a command that a reader ends with Ctrl-C gets the signal."""
ENDED = (0, 124, 130)
"""Its exit status."""
HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
KEPT = re.compile(r"((?:export )?\w+=\S+|cd \S+)(?: && (.+))?$")
"""What counts for the commands after it, too."""
COMMENT = re.compile(r"\s+#\s.*")


@dataclass(frozen=True)
class Page:
    """What a page of the documents needs in the lab.

    Attributes:
        where: the host that its commands run on.
        before: what makes the state that the page begins with.
        hooks: what has to be done before a command, by its beginning.
        names: the lab's names by the example's; the keys are regular expressions.
        endless: commands, by their beginning, that run until a reader ends them.
        places: other hosts for commands and blocks, by their beginning.
        statuses: other exit statuses than 0 that the page names, by the beginning of the command.
    """

    where: str
    before: Steps = ()
    hooks: Mapping[str, Steps] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    endless: Sequence[str] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    statuses: Mapping[str, int] = field(default_factory=dict)

    def blocks(self, name: str) -> list[Block]:
        """The blocks of a page of the documents that run here."""
        return [block for block in read_shell(PAGES[name]) if not block.reason]


def split_commands(text: str) -> Iterator[str]:
    """Yield the commands of a block: a continued line is one, as is one with its here-document; without comments."""
    lines = iter(text.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line += "\n" + next(lines)
        command = COMMENT.sub("", line)
        if found := HEREDOC.search(command):
            for more in lines:
                command += "\n" + more
                if more == found[1]:
                    break
        if command.strip() and not command.startswith("#"):
            yield command


@dataclass
class Reader:
    """Somebody who follows the documents in a lab."""

    lab: str

    def run(self, where: str, script: str, *, timeout: float = 1500) -> Result:
        """Run a script on a host."""
        folder = "/run" if where == MACHINE else "/root"  # both end with the lab, or the machine of the tests
        # What the machine of the tests exports is not there on a reader's.
        argv = (
            "env",
            "-C",
            folder,
            "-u",
            "SMS_SITE",
            "TERM=dumb",
            "NO_PROXY=10.0.0.0/8",  # programs written in Go: engines are not behind the proxy that leads to mirrors
            *(() if where.startswith("node") else (f"PATH={PATH}",)),
        )
        if where == MACHINE:
            return Local().run(*argv, "bash", "-c", script, ok=None, timeout=timeout)
        lab = Lab.open(self.lab)  # each time: a host that was off has another first process
        with mirrors_for(lab) as variables:
            return lab.running_host(where).run(*argv, *variables, "bash", "-c", script, ok=None, timeout=timeout)

    def do(self, steps: Steps) -> None:
        """Run steps, each of which has to succeed."""
        for where, script in steps:
            done = self.run(where, f"set -eu\n{script}")
            assert done.status == 0, f"{where}: {script}: {describe(done)}"

    def check(self, page: Page, name: str) -> None:
        """Run the commands of a page after what it needs; fail with all that went wrong."""
        self.do(page.before)
        wrong = [each for block in page.blocks(name) for each in self.follow(page, block)]
        assert not wrong, "\n".join(wrong)

    def follow(self, page: Page, block: Block) -> list[str]:
        """Run the commands of a block; return what went wrong, with the output."""
        text, wrong, kept = block.text, [], ""
        for name, there in page.names.items():
            text = re.sub(name, there, text, flags=re.MULTILINE)
        for command in split_commands(text):
            self.do(_of(page.hooks, command) or ())
            if found := KEPT.match(command):
                kept += found[1] + "\n"
                if not found[2]:
                    continue
                command = found[2]
            done = self._run_one(page, _of(page.places, command, text) or page.where, command, kept)
            expected = ENDED if command.startswith(tuple(page.endless)) else (_of(page.statuses, command) or 0,)
            if done.status not in expected:
                wrong.append(f"{block.place}: {command}: {describe(done)}")
        return wrong

    def _run_one(self, page: Page, where: str, command: str, kept: str) -> Result:
        script = f"set -eo pipefail\n{kept}{command}"
        if command.startswith(tuple(page.endless)):
            script = f"timeout --signal INT --kill-after 20 {WATCH_S} bash -c {shlex.quote(script)}"
        return self.run(where, script)


def _of(table: Mapping[str, T], *texts: str) -> T | None:
    """What a table has for the beginning of one of these texts; the first text counts most."""
    return next((value for text in texts for beginning, value in table.items() if text.startswith(beginning)), None)


def describe(done: Result) -> str:
    """The exit status and the end of the output of a command."""
    return f"status {done.status}\n{done.stdout.decode()[-3000:]}\n{done.stderr.decode()[-3000:]}"
