"""Commands that an engine runs in a container, whose output arrives whole.

`kubectl exec` and `nomad alloc exec` lose the end of what a command has printed if it ends before all of that has
arrived, with status 0 (kubernetes #60140 and #124571, nomad #27146). So the command is held: after it, a shell prints a
mark and waits for the end of its input, which the reader closes once it has seen the mark. No data has the mark: it is
random.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from secrets import token_hex

from appliance.errors import SmsError
from appliance.host.base import BLOCK, CommandError, CommandTimeout, Host, Result, TooMuchOutput
from appliance.host.stream import Stream, expires_after

HOLD = 'mark=$1; shift; "$@" </dev/null; status=$?; printf %s "$mark"; cat >/dev/null; exit $status'
GRACE_S = 15.0
"""Seconds after which this side ends a command that `timeout` on the other one has not ended."""
KILL_AFTER_S = 5


class Mark(bytes):
    """What a held command prints at its end."""


def new_mark() -> Mark:
    """Return the mark of one command."""
    return Mark(b"sms-held-%s" % token_hex(16).encode())


def hold_argv(mark: Mark, *argv: str) -> tuple[str, ...]:
    """Return the words in the container that run ``argv``, and wait until its output has arrived."""
    return ("sh", "-c", HOLD, "hold", mark.decode(), *argv)


class HeldStream(Stream):
    """The output of a held command, which has no input; the mark is not part of it."""

    def __init__(self, stream: Stream, mark: Mark) -> None:
        self.stream = stream
        self.mark = mark
        self.whole = False
        self._kept = b""

    def write(self, data: bytes | memoryview) -> int:
        raise NotImplementedError("its input only tells when its output has arrived")

    def end(self) -> None:
        """Nothing: it ends when the mark has arrived."""

    def read(self, size: int = BLOCK) -> bytes:
        """As of any stream.

        Raises:
            CommandError: the command ended without the mark; ``SmsError`` if its status says nothing about it.
        """
        while not self.whole:
            block = self.stream.read(size)
            if not block:
                result = self.stream.result()
                raise SmsError(
                    f"{result.host}: the output of a command in a container ended too early",
                    hint="did the connection to the engine break, or its pod or task end? Try again",
                )
            self._kept += block
            at = self._kept.rfind(self.mark)
            if at >= 0:  # what a child of the command prints after it is dropped
                self.whole = True
                self.stream.end()
            at = at if at >= 0 else len(self._kept) - len(self.mark)
            found, self._kept = self._kept[: max(at, 0)], self._kept[max(at, 0) :]
            if found:
                return found
        return b""

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        return self.stream.result(ok=ok)

    def close(self) -> None:
        self.stream.close()

    def abort(self) -> None:
        self.stream.abort()


def _without_hold(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command for a message."""
    at = argv.index(HOLD) if HOLD in argv else 0
    return (*argv[: at - 2], *argv[at + 3 :]) if at >= 2 else argv


@contextmanager
def held_stream(host: Host, argv: tuple[str, ...], mark: Mark) -> Iterator[HeldStream]:
    """Stream the output of a command on a host that runs a held one in a container."""
    with host.stream(*argv) as stream:
        yield HeldStream(stream, mark)


def run_held(
    host: Host, argv: tuple[str, ...], mark: Mark, *, ok: Container[int] | None = (0,), timeout: float, limit: int
) -> Result:
    """Run a command on a host that runs a held one in a container; ``timeout`` in seconds, ``limit`` in bytes.

    Raises:
        CommandError: as ``Host.run``; ``CommandTimeout``, ``TooMuchOutput`` and ``Unreachable`` too.
        SmsError: its output ended too early.
    """
    found, size, began = [], 0, time.monotonic()
    timed = ("timeout", f"--kill-after={KILL_AFTER_S}", f"{timeout:g}", *argv)
    with held_stream(host, timed, mark) as output, expires_after(timeout + GRACE_S, output.abort):
        try:
            while block := output.read():
                found.append(block)
                size += len(block)
                if size > limit:
                    raise TooMuchOutput(Result(host.name, argv, -signal.SIGKILL, b"", b""), limit)
            result = output.result(ok=None)
        except TooMuchOutput:
            raise
        except CommandError as error:
            result = error.result
    result = replace(result, argv=_without_hold(argv), stdout=b"".join(found))
    if result.status and time.monotonic() - began >= timeout:
        raise CommandTimeout(result, hint=f"the command did not end within {timeout:g} s and was terminated")
    return result.expect(ok)
