"""The agent: our own program on an admin host, brought there as one file and asked for one thing at a time."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from typing import Any

from appliance.errors import Busy, ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host, OnLine, Result
from appliance.host.stream import Ears, Stream
from appliance.progress import Progress, Silent, Step
from appliance.share import PACKAGE
from appliance.tools.python import find_python

LEAVES = ("text.py",)
"""Modules of the package itself that the agent uses."""
FOLDER = "/run/sms"
LIFELINE = "lifeline"
"""Has the agent give up when its standard input ends."""
OnRows = Callable[[list[dict[str, Any]]], None]
KINDS: dict[int, type[SmsError]] = {2: ConfigError, 3: Refused}

REMOVE_OLD = 'exec find "$1" -maxdepth 1 -type f -name "agent-*.pyz" ! -path "$2" -mtime +0 -exec rm -f {} +'
"""Shell: other versions of more than a day; a younger one may be at work, for an sms of another version."""
MAIN = "from appliance.agent.main import main\nraise SystemExit(main())\n"


@cache
def packed() -> bytes:
    """The agent as a zip file that Python runs; the same bytes for the same sources."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        folders = (sorted((PACKAGE / name).glob("*.py")) for name in ("agent", "shared"))
        paths = [*chain.from_iterable(folders), *(PACKAGE / name for name in LEAVES)]
        sources = {f"appliance/{path.relative_to(PACKAGE)}": path.read_bytes() for path in paths}
        for name, data in {**sources, "appliance/__init__.py": b"", "__main__.py": MAIN.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def place() -> str:
    """Where it lies on a host."""
    return f"{FOLDER}/agent-{hashlib.sha256(packed()).hexdigest()[:16]}.pyz"


def install(host: Host) -> tuple[str, ...]:
    """Copy it to the host where it is not there yet; give the command that runs it.

    Raises:
        Refused: the host has no Python that is new enough.
    """
    path, python = place(), find_python(host)
    if not host.works("test", "-s", path):
        host.write(path, packed(), mode=0o600)
        host.run("sh", "-c", REMOVE_OLD, "old", FOLDER, path, ok=None)
    return (python, "-I", path)


def argv(installed: tuple[str, ...], command: str, request: dict[str, Any]) -> tuple[str, ...]:
    """The command that asks it. A request holds paths and numbers, never a secret."""
    return (*installed, command, json.dumps(request))


def ask(
    host: Host,
    command: str,
    request: dict[str, Any],
    progress: Progress | None = None,
    *,
    on_rows: OnRows | None = None,
) -> dict[str, Any]:
    """Have the agent do one thing; give its result. It gives up when we are gone: locks that we hold go with us.

    Args:
        on_rows: called with the rows of a long result as they come.

    Raises:
        Busy, Refused, SmsError: what it says went wrong.
        CommandError: it died.
    """
    installed = install(host)
    with ExitStack() as stack:
        listener = Listener(progress or Silent(), stack, on_rows)
        with host.stream(*argv(installed, command, request), LIFELINE, on_line=listener.hear) as stream:
            lines = Ears(listener.hear)
            while block := stream.read():
                lines.hear(block)
            lines.hear(b"")
            return listener.outcome(stream.result(ok=None))


@contextmanager
def converse(
    host: Host,
    command: str,
    request: dict[str, Any],
    progress: Progress | None = None,
    *,
    on_line: OnLine | None = None,
) -> Iterator[Conversation]:
    """Have the agent do one thing that takes bytes or gives them; its words come on standard error then.

    Args:
        on_line: hears all that is said there, of programs too that the agent starts.
    """
    installed = install(host)
    with ExitStack() as stack:
        listener = Listener(progress or Silent(), stack)

        def hear(line: str) -> None:
            listener.hear(line)
            if on_line:
                on_line(line)

        with host.stream(*argv(installed, command, request), on_line=hear) as stream:
            yield Conversation(stream, listener)


class Conversation:
    """An agent at work, whose input and output are ours. All of it raises what the agent says went wrong."""

    def __init__(self, stream: Stream, listener: Listener) -> None:
        self.stream = stream
        self.listener = listener

    def write(self, data: bytes) -> None:
        """Give it bytes."""
        try:
            self.stream.write(data)
        except CommandError as error:
            self.listener.outcome(error.result)
            raise

    def end(self) -> None:
        """There are no more."""
        self.stream.end()

    def read(self) -> bytes:
        """What it gives next; nothing at its end."""
        return self.stream.read()

    def read_exactly(self, size: int) -> bytes:
        """So many bytes."""
        try:
            return self.stream.read_exactly(size)
        except CommandError as error:
            self.listener.outcome(error.result)
            raise

    def outcome(self) -> dict[str, Any]:
        """Wait for its end; give its result."""
        return self.listener.outcome(self.stream.result(ok=None))


class Listener:
    """Turns the agent's lines into progress, and keeps its result."""

    def __init__(self, progress: Progress, stack: ExitStack, on_rows: OnRows | None = None) -> None:
        self.progress = progress
        self.stack = stack
        self.on_rows = on_rows
        self.current: Step | None = None
        self.result: dict[str, Any] | None = None
        self.problem: dict[str, Any] | None = None

    def hear(self, line: str) -> None:
        """One line of the agent's."""
        try:
            said = json.loads(line)
            kind = said["kind"]
        except (ValueError, KeyError, TypeError):
            return  # a word of somebody else's on the way
        if kind == "result":
            self.result = said
        elif kind == "problem":
            self.problem = said
        elif kind == "step" and said["text"]:
            self.stack.close()
            self.current = self.stack.enter_context(self.progress.step(said["text"]))
        elif kind == "moved" and self.current:
            self.current.moved(said["done"], said["total"])
        elif kind == "detail" and self.current:
            self.current.detail(said["text"])
        elif kind == "note":
            self.progress.say(said["text"])
        elif kind == "rows" and self.on_rows:
            self.on_rows(said["rows"])

    def outcome(self, result: Result) -> dict[str, Any]:
        """What it ended with.

        Raises:
            Refused, SmsError, CommandError: as ``ask``.
        """
        if self.problem:
            words = self.problem
            kind = Busy if words.get("busy") else KINDS.get(words["status"], SmsError)
            raise kind(f"{result.host}: {words['message']}", hint=words["hint"])
        if self.result is None or result.status:
            short = Result(
                result.host,
                (*result.argv[:2], shlex.quote(place()), *result.argv[3:4]),
                result.status,
                b"",
                result.stderr,
            )
            raise CommandError(short, hint="it was ended in the middle; what it had begun the next run clears away")
        return self.result
