"""The one door to the outside: run an argv, move bytes, hold something open on a host."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from appliance.errors import SmsError

if TYPE_CHECKING:
    from appliance.host.stream import Stream

BLOCK = 1 << 18
"""Bytes moved at a time by ``send`` and ``fetch``."""

SHORT = 77
"""Exit status where other than the promised number of bytes arrived."""
WRITE_BESIDE = f"""\
trap 'rm -f "$1.new"' EXIT
trap 'exit 143' HUP INT TERM
umask 077
mkdir -p "$(dirname "$1")" && cat >"$1.new" || exit
[ "$(stat -c %s "$1.new")" = "$3" ] || exit {SHORT}
chmod "$2" "$1.new" && sync "$1.new" && mv -fT "$1.new" "$1"
"""
"""Shell: $3 bytes of standard input to file $1 with mode $2, so that a reader sees the old file or the new one.

A connection that breaks looks like the end of the input from there: hence the number.
"""

OnLine = Callable[[str], None]
Progress = Callable[[int], None]
"""Called with the number of bytes moved so far."""


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, and its two outputs as bytes."""

    host: str
    argv: tuple[str, ...]
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text, without the white space around it."""
        return self.stdout.decode(errors="replace").strip()


class CommandError(SmsError):
    """A command ended with a status that its caller did not expect."""

    def __init__(self, result: Result, *, hint: str = "") -> None:
        self.result = result
        said = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()[-8:]
        command = shlex.join(result.argv)
        if len(command) > 300:
            command = command[:300] + " ..."
        message = f"{result.host}: `{command}` ended with status {result.status}"
        super().__init__("\n    ".join([message, *said]), hint=hint)


class CommandTimeout(CommandError):
    """A command did not end in time and was ended, with all it had started."""


class Unreachable(SmsError):
    """The host cannot be reached, or is not the one it should be."""


class Stuck(Unreachable):
    """The host takes connections, and answers nothing in time: it is alive, and overloaded or broken."""


def count_bytes(source: BinaryIO) -> int:
    """Bytes from where ``source`` stands to its end.

    Raises:
        SmsError: it is no file that can be measured.
    """
    try:
        here = source.tell()
        end = source.seek(0, os.SEEK_END)
        source.seek(here)
    except OSError as error:
        raise SmsError(
            f"{getattr(source, 'name', 'a stream')} cannot be sent: its size is not known",
            hint="write it into a file first",
        ) from error
    return end - here


def check_written(host: str, path: str, status: int, stderr: bytes) -> None:
    """Raise what ``WRITE_BESIDE`` ended with."""
    if status:
        hint = "other than all its bytes arrived, the file is as it was: run it again" if status == SHORT else ""
        raise CommandError(Result(host, ("write", path), status, b"", stderr), hint=hint)


class Host(ABC):
    """A machine that commands run on. Everything outside this process happens through one.

    ``run`` may be called from several threads.
    """

    name: str

    @abstractmethod
    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
    ) -> Result:
        """Run ``argv`` and wait for its end.

        Args:
            input: bytes for its standard input; without them it reads an empty one.
            ok: the exit statuses that are fine; ``None`` takes any.
            timeout: seconds until the command and all it started are ended; ``None`` waits.
            on_line: called with each line of standard output as it comes.

        Raises:
            CommandError: the status is not in ``ok``.
            CommandTimeout: it did not end in time.
            Unreachable: the host did not answer.
        """

    @abstractmethod
    def send(self, source: BinaryIO, path: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        """Copy ``source`` to ``path`` on the host: written beside it, flushed to disk, renamed.

        Raises:
            SmsError: the size of ``source`` cannot be known.
            CommandError: it could not be written, or not all of it arrived; ``path`` is as it was.
            Unreachable: the connection broke.
        """

    @abstractmethod
    def fetch(self, path: str, sink: BinaryIO, *, progress: Progress | None = None) -> None:
        """Copy the bytes of ``path`` on the host to ``sink``."""

    @abstractmethod
    def hold(self, *argv: str, timeout: float = 30) -> AbstractContextManager[str]:
        """Run ``argv`` for as long as the context lasts; give the first line it prints.

        The command must print one line when it is ready, and end when its standard input
        closes, which also happens when this process or the connection dies.

        Raises:
            CommandError: it ended before it printed a line.
            CommandTimeout: it did not print one in time.
            Unreachable: the host did not answer.
        """

    @abstractmethod
    def stream(self, *argv: str, on_line: OnLine | None = None) -> AbstractContextManager[Stream]:
        """Run ``argv`` with its input and its output in the caller's hands, for GBs both ways, without a time limit.

        Left before its ``result``, by an error or Ctrl-C, the command is ended with all it started.

        Args:
            on_line: called with each line of standard error as it comes, by another thread.

        Raises:
            Unreachable: the host did not answer.
        """

    @abstractmethod
    def interact(self, *argv: str) -> int:
        """Run ``argv`` on the user's terminal and give its exit status."""

    def works(self, *argv: str) -> bool:
        """Whether ``argv`` runs and ends with status 0."""
        return self.run(*argv, ok=None).status == 0

    def read(self, path: str) -> bytes | None:
        """The bytes of a small file, or None where there is none."""
        result = self.run("sh", "-c", '[ -e "$1" ] || exit 44; exec cat -- "$1"', "read", path, ok=(0, 44))
        return None if result.status == 44 else result.stdout

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Make ``path`` hold ``data`` with ``mode``; say whether anything had to change.

        Written beside it, flushed and renamed, so that a reader sees the old file or the new one.
        """
        state = self.run("sh", "-c", '[ -f "$1" ] && stat -c %a "$1" && exec cat -- "$1"', "state", path, ok=None)
        if state.status == 0 and state.stdout == f"{mode:o}\n".encode() + data:
            return False
        argv = ("sh", "-c", WRITE_BESIDE, "write", path, f"{mode:o}", str(len(data)))
        result = self.run(*argv, input=data, ok=None)
        check_written(self.name, path, result.status, result.stderr)
        return True

    def remove(self, path: str) -> None:
        """Remove one file, if it is there. Never a folder."""
        self.run("rm", "-f", "--", path)

    @contextmanager
    def lock(self, path: str, *, wait_s: float = 0) -> Iterator[None]:
        """Hold an exclusive lock on ``path``; it is let go when this process dies, however.

        Args:
            wait_s: seconds to wait for another run that holds it.

        Raises:
            CommandError: another run holds it.
        """
        script = 'mkdir -p "$(dirname "$1")" && exec flock -w "$2" -E 75 "$1" sh -c "echo held; exec cat >/dev/null"'
        with self.hold("sh", "-c", script, "lock", path, f"{wait_s:g}", timeout=30 + wait_s):
            yield
