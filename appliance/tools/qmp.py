"""QMP, QEMU's monitor protocol: one JSON object per line on a Unix socket of its host.

The socket is reached through the Host interface, with a small relay in Python (3.6 or later).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.host.stream import Stream
from appliance.text import one_line

RELAY = """\
import array, os, select, socket, sys
there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
there.settimeout(5)
try:
    files = [os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW) for path in sys.argv[3:]]
    there.connect(sys.argv[1])
except OSError as error:
    sys.stderr.write("%s: %s\\n" % (error.filename or sys.argv[1], error.strerror or error))
    sys.exit(74)
silence = float(sys.argv[2])
there.settimeout(silence)
held = b""
while True:
    ready = select.select([0, there], [], [], silence)[0]
    if not ready:
        sys.stderr.write("no answer within %g s\\n" % silence)
        sys.exit(75)
    if 0 in ready:
        data = os.read(0, 1 << 16)
        if not data:
            break
        lines, found, rest = (held + data).rpartition(b"\\n")
        lines, held = lines + found, rest
        rights = []
        if files and b'"add-fd"' in lines:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [files.pop(0)]))]
        try:
            if lines:
                there.sendall(lines[there.sendmsg([lines], rights):])
        except OSError as error:
            sys.stderr.write("cannot send: %s\\n" % error)
            sys.exit(75)
    if there in ready:
        data = there.recv(1 << 16)
        if not data:
            break
        while data:
            data = data[os.write(1, data):]
"""
"""Relay lines between standard input and output and a socket, until one closes or a timeout without data.

Files named after the timeout are opened; each command ``add-fd`` takes the next one along.
"""
Message = Mapping[str, object]
"""An object of QMP or of the guest agent. Its values are untrusted: the machine may be compromised."""
MAX_BYTES = 64 << 20
"""Maximum size of a message: a guest agent's reply may contain 16 MiB of output as base64."""


class NotResponding(SmsError):
    """Nothing listens on the socket, or it does not answer."""


class Channel:
    """JSON messages over a relay.

    Attributes:
        answer_s: time limit of a reply in seconds, regardless of other messages in between.
    """

    def __init__(self, stream: Stream, what: str, answer_s: float) -> None:
        self.stream = stream
        self.what = what
        self.answer_s = answer_s
        self._rest = b""

    def send(self, message: Message, *, before: bytes = b"") -> None:
        """Send a message; NotResponding if the connection is closed."""
        try:
            self.stream.write(before + json.dumps(message).encode() + b"\n")
        except CommandError as error:
            raise self._not_responding(error) from error

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command; return its result. Other messages, such as events, may precede it.

        Raises:
            SmsError: the peer reports an error.
            NotResponding: the connection was closed, or the time limit exceeded.
        """
        self.send({"execute": command, "arguments": arguments})
        deadline = self.deadline()
        while True:
            reply = self.receive(deadline)
            if "error" in reply:
                raise _error_of(reply, self.what, command)
            if "return" in reply:
                return reply["return"]

    def deadline(self) -> float:
        """Return the deadline for the reply to a command sent now."""
        return time.monotonic() + self.answer_s

    def receive(self, deadline: float) -> Message:
        """Return the next message; NotResponding if the connection was closed, or after ``deadline``."""
        while True:
            # Other messages do not extend the time limit.
            if time.monotonic() > deadline:
                raise NotResponding(f"{self.what}: no answer within {self.answer_s:g} s")
            if b"\n" in self._rest:
                break
            block = self.stream.read()
            if not block:
                raise self._not_responding(CommandError(self.stream.result(ok=None)))
            self._rest += block
            if len(self._rest) > MAX_BYTES:
                raise SmsError(f"{self.what}: a message of more than {MAX_BYTES >> 20} MiB")
        line, _, self._rest = self._rest.partition(b"\n")
        return parse_line(line, self.what)

    def _not_responding(self, error: CommandError) -> NotResponding:
        reply = error.result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return NotResponding(f"{self.what}: {reply[0] if reply else 'the connection was closed'}")


def parse_line(line: bytes, what: str) -> Message:
    """Parse one message; anything before 0xFF belongs to an earlier session.

    Raises:
        SmsError: it is not a JSON object.
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


def _error_of(reply: Message, sender: str, command: str) -> SmsError:
    """Return the error of an error reply, with the sender's message."""
    error = reply.get("error")
    description = error.get("desc") if isinstance(error, dict) else error
    text = description if isinstance(description, str) and description else "an error"
    return SmsError(f"{sender}: {command}: {one_line(text, 500)}")


@contextmanager
def open_channel(host: Host, path: str, what: str, *, silence_s: float, files: Sequence[str] = ()) -> Iterator[Channel]:
    """Open a channel to a Unix socket of a host.

    Args:
        silence_s: timeout in seconds, both for silence and for each reply.
        files: files of the host for commands ``add-fd``, in their order.
    """
    with host.stream("python3", "-I", "-c", RELAY, path, f"{silence_s:g}", *files) as stream:
        yield Channel(stream, what, silence_s)


class Qmp:
    """A QMP session."""

    def __init__(self, channel: Channel) -> None:
        self.execute = channel.execute

    def pass_file(self) -> str:
        """Give QEMU, which cannot open files, the next file of the session. Returns the name that it opens it by."""
        return f"/dev/fdset/{self.execute('add-fd')['fdset-id']}"

    def wait_for_jobs(self, names: list[str], *, timeout_s: float, on_progress: Any = None) -> None:
        """Wait until jobs have completed.

        Raises:
            SmsError: one failed or the time limit was exceeded; the others are cancelled.
        """
        deadline = time.monotonic() + timeout_s
        left = set(names)
        while left:
            jobs = {job["id"]: job for job in self.execute("query-jobs") if job["id"] in names}
            for name in sorted(left):
                job = jobs.get(name, {"status": "null", "error": "the job disappeared"})
                if job["status"] in ("concluded", "null"):
                    if job["status"] == "concluded":
                        self.execute("job-dismiss", id=name)
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
                self.execute("job-cancel", id=name)
            except NotResponding:
                raise
            except SmsError:
                continue  # the job has ended meanwhile


@contextmanager
def open_qmp(host: Host, path: str, *, silence_s: float = 60, files: Sequence[str] = ()) -> Iterator[Qmp]:
    """Open a QMP session with a QEMU on the host.

    Args:
        files: files of the host for ``pass_file``.

    Raises:
        NotResponding: QEMU does not run, or does not answer; or one of ``files`` cannot be opened.
    """
    with open_channel(host, path, "QEMU", silence_s=silence_s, files=files) as channel:
        greeting = channel.receive(channel.deadline())
        if "QMP" not in greeting:
            raise SmsError(f"{path} is not a QMP socket")
        qmp = Qmp(channel)
        qmp.execute("qmp_capabilities")
        yield qmp
