"""The guest agent of a virtual machine: commands inside it, and its file systems held still. Over virtio-serial."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.tools.qmp import Line, NotThere, open_line, refusal

SILENCE_S = 30
LARGEST_INPUT = 4 << 20
"""Bytes of a command's input: the agent takes it in one message."""


@dataclass(frozen=True)
class Ran:
    """What a command inside left. ``cut``: it said more than the agent keeps."""

    status: int
    stdout: bytes
    stderr: bytes
    cut: bool = False


class Guest:
    """A conversation with the agent."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def sync(self) -> None:
        """Find the beginning of our own conversation: others may have left theirs in the middle."""
        number = secrets.randbelow(1 << 31)
        self.line.send({"execute": "guest-sync-delimited", "arguments": {"id": number}}, before=b"\xff")
        deadline = self.line.deadline()
        while self.line.receive(deadline).get("return") != number:
            continue

    def ask(self, command: str, **arguments: Any) -> Any:
        """What the agent returns.

        Raises:
            SmsError: it refuses, with its own words.
            NotThere: it is gone.
        """
        for said in self.line.ask(command, arguments):
            if "error" in said:
                raise refusal(said, "guest agent", command)
            if "return" in said:
                return said["return"]
        return None

    def count(self, command: str) -> int:
        """The number that the agent returns; errors as of ``ask``."""
        return _number(self.ask(command), command)

    def tell(self, command: str, **arguments: Any) -> None:
        """Say what has no answer."""
        self.line.send({"execute": command, "arguments": arguments})

    def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60) -> Ran:
        """Run a command inside and wait for its end.

        Raises:
            SmsError: there is no such program, it did not end in time (and runs on), or its input is too large.
        """
        if input is not None and len(input) > LARGEST_INPUT:
            raise SmsError(
                f"the input has {len(input)} bytes; the guest agent takes {LARGEST_INPUT}",
                hint="bring large files over the network",
            )
        wanted: dict[str, Any] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if input is not None:
            wanted["input-data"] = base64.b64encode(input).decode()
        pid = self.begin(wanted)
        deadline, pause = time.monotonic() + timeout_s, 0.02
        while True:
            found = self.ask("guest-exec-status", pid=pid)
            if not isinstance(found, dict):
                raise SmsError("guest agent: guest-exec-status: not what it is to answer")
            if found.get("exited"):
                return _ran(found)
            if time.monotonic() > deadline:
                raise SmsError(f"`{argv[0]}` in the VM did not end within {timeout_s:g} s; it runs on there")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.3)

    def begin(self, wanted: dict[str, Any]) -> int:
        """Begin a command; its pid."""
        try:
            return _pid(self.ask("guest-exec", **wanted))
        except SmsError as error:
            if "frozen" not in error.message:
                raise
            # Whoever held the file systems was killed: nobody else can be on this line meanwhile.
            self.ask("guest-fsfreeze-thaw")
            return _pid(self.ask("guest-exec", **wanted))


# Whoever has taken the machine over answers what he likes.
def _number(said: Any, command: str) -> int:
    if isinstance(said, bool) or not isinstance(said, int):
        raise SmsError(f"guest agent: {command}: not what it is to answer")
    return said


def _pid(said: Any) -> int:
    return _number(said.get("pid") if isinstance(said, dict) else None, "guest-exec")


def _ran(found: dict[str, Any]) -> Ran:
    signal = found.get("signal")
    code = found.get("exitcode", 1 if signal is None else 128 + _number(signal, "guest-exec-status"))
    status = _number(code, "guest-exec-status") & 0xFF
    try:
        out, err = (base64.b64decode(found.get(name, "")) for name in ("out-data", "err-data"))
    except (ValueError, TypeError):
        raise SmsError("guest agent: guest-exec-status: its output is not base64") from None
    return Ran(status, out, err, bool(found.get("out-truncated") or found.get("err-truncated")))


@contextmanager
def open_guest(host: Host, path: str, *, silence_s: float = SILENCE_S) -> Iterator[Guest]:
    """Speak with the agent of a machine that the host runs.

    Raises:
        NotThere: it does not answer; the machine may still be starting.
    """
    with open_line(host, path, "guest agent", silence_s=silence_s) as line:
        guest = Guest(line)
        guest.sync()
        yield guest


def answers(host: Host, path: str, *, silence_s: float = 3) -> bool:
    """Whether the agent answers."""
    try:
        with open_guest(host, path, silence_s=silence_s):
            return True
    except NotThere:
        return False
