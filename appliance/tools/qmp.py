"""QMP, QEMU's own protocol: one JSON object a line on a unix socket of the host that runs it.

The socket is reached through the host's door, by a relay of a few lines that Python runs there (3.6 will do).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.host.stream import Stream
from appliance.text import one_line

RELAY = """\
import os, select, socket, sys
there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
there.settimeout(5)
try:
    there.connect(sys.argv[1])
except OSError as error:
    sys.stderr.write("%s: %s\\n" % (sys.argv[1], error.strerror or error))
    sys.exit(74)
silence = float(sys.argv[2])
there.settimeout(silence)
while True:
    ready = select.select([0, there], [], [], silence)[0]
    if not ready:
        sys.stderr.write("no answer within %g s\\n" % silence)
        sys.exit(75)
    if 0 in ready:
        data = os.read(0, 1 << 16)
        if not data:
            break
        try:
            there.sendall(data)
        except OSError as error:
            sys.stderr.write("it does not listen: %s\\n" % error)
            sys.exit(75)
    if there in ready:
        data = there.recv(1 << 16)
        if not data:
            break
        while data:
            data = data[os.write(1, data):]
"""
"""Standard input to a socket and back, until one of them ends, or nothing was said for so many seconds."""
GONE, SILENT = 74, 75
MOST_BYTES = 64 << 20
"""Of one message: a guest agent's answer may hold 16 MiB of output as base64."""


class NotThere(SmsError):
    """Nobody listens on the socket, or whoever does says nothing."""


class Line:
    """Messages of one JSON object each, over a relay.

    Attributes:
        answer_s: seconds that the answer to one question may take, whatever else is said meanwhile.
    """

    def __init__(self, stream: Stream, what: str, answer_s: float) -> None:
        self.stream = stream
        self.what = what
        self.answer_s = answer_s
        self._rest = b""

    def send(self, message: dict[str, Any], *, before: bytes = b"") -> None:
        """Say something; NotThere where nobody hears it."""
        try:
            self.stream.write(before + json.dumps(message).encode() + b"\n")
        except CommandError as error:
            raise self._gone(error) from error

    def ask(self, command: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Ask, and give what comes then, which may be other things before the answer.

        Raises:
            NotThere: nothing comes any more, or the time is over.
        """
        self.send({"execute": command, "arguments": arguments})
        deadline = self.deadline()
        while True:
            yield self.receive(deadline)

    def deadline(self) -> float:
        """When an answer is late that is asked for now."""
        return time.monotonic() + self.answer_s

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message; NotThere where none comes any more, or the time is over."""
        while True:
            # One who keeps talking of other things does not answer either.
            if time.monotonic() > deadline:
                raise NotThere(f"{self.what}: no answer within {self.answer_s:g} s")
            if b"\n" in self._rest:
                break
            block = self.stream.read()
            if not block:
                raise self._gone(CommandError(self.stream.result(ok=None)))
            self._rest += block
            if len(self._rest) > MOST_BYTES:
                raise SmsError(f"{self.what}: a message of more than {MOST_BYTES >> 20} MiB")
        line, _, self._rest = self._rest.partition(b"\n")
        return parse_line(line, self.what)

    def _gone(self, error: CommandError) -> NotThere:
        said = error.result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return NotThere(f"{self.what}: {said[0] if said else 'the connection was closed'}")


def parse_line(line: bytes, what: str) -> dict[str, Any]:
    """One message; what stands before 0xFF is left over from somebody else's conversation.

    Raises:
        SmsError: it is no JSON object.
    """
    text = line.rpartition(b"\xff")[2].strip()
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SmsError(f"{what}: not a JSON object: {text[:80]!r}")
    return found


def refusal(said: dict[str, Any], who: str, command: str) -> SmsError:
    """The error of an answer that is one, in the words of who gave it, whatever those are."""
    error = said.get("error")
    words = error.get("desc") if isinstance(error, dict) else error
    text = words if isinstance(words, str) and words else "an error"
    return SmsError(f"{who}: {command}: {one_line(text, 500)}")


@contextmanager
def open_line(host: Host, path: str, what: str, *, silence_s: float) -> Iterator[Line]:
    """Speak on a unix socket of a host.

    Args:
        silence_s: seconds after which one who says nothing is gone, and after which an answer is late.
    """
    with host.stream("python3", "-I", "-c", RELAY, path, f"{silence_s:g}") as stream:
        yield Line(stream, what, silence_s)


class Qmp:
    """A conversation with QEMU; ``events`` are those that came meanwhile."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.events: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: Any) -> Any:
        """What QEMU returns.

        Raises:
            SmsError: it refuses, with its own words.
            NotThere: it is gone.
        """
        for said in self.line.ask(command, arguments):
            if "error" in said:
                raise refusal(said, "QEMU", command)
            if "return" in said:
                return said["return"]
            if "event" in said:
                self.events.append(said)
        return None

    def wait_for_jobs(self, names: list[str], *, timeout_s: float, on_progress: Any = None) -> None:
        """Wait until jobs have ended well.

        Raises:
            SmsError: one failed; the others are cancelled.
        """
        deadline = time.monotonic() + timeout_s
        left = set(names)
        while left:
            jobs = {job["id"]: job for job in self.ask("query-jobs") if job["id"] in names}
            for name in sorted(left):
                job = jobs.get(name, {"status": "null", "error": "it is gone"})
                if job["status"] in ("concluded", "null"):
                    if job["status"] == "concluded":
                        self.ask("job-dismiss", id=name)
                    left.discard(name)
                    if job.get("error"):
                        self._cancel(left)
                        raise SmsError(f"QEMU: {name}: {job['error']}")
            if on_progress:
                on_progress(
                    sum(job.get("current-progress", 0) for job in jobs.values()),
                    sum(job.get("total-progress", 0) for job in jobs.values()),
                )
            if left and time.monotonic() > deadline:
                self._cancel(left)
                raise SmsError(f"QEMU: {', '.join(sorted(left))} did not end within {timeout_s:g} s")
            if left:
                time.sleep(0.1)

    def _cancel(self, names: set[str]) -> None:
        for name in names:
            try:
                self.ask("job-cancel", id=name)
            except NotThere:
                raise
            except SmsError:
                continue  # it has ended meanwhile


@contextmanager
def open_qmp(host: Host, path: str, *, silence_s: float = 60) -> Iterator[Qmp]:
    """Speak with a QEMU of the host.

    Raises:
        NotThere: it does not run, or does not answer.
    """
    with open_line(host, path, "QEMU", silence_s=silence_s) as line:
        greeting = line.receive(line.deadline())
        if "QMP" not in greeting:
            raise SmsError(f"{path}: whoever listens there is not QEMU")
        qmp = Qmp(line)
        qmp.ask("qmp_capabilities")
        yield qmp
