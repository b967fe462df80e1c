"""QEMU's guest agent: run commands in a virtual machine and freeze its file systems. Over virtio-serial."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, without_secrets
from appliance.shared.secret import redact, secrets_of
from appliance.tools.qmp import Channel, NotResponding, open_channel

SILENCE_S = 30
MAX_INPUT = 4 << 20
"""Maximum input of a command in bytes: the agent accepts it in one message only."""


@dataclass(frozen=True)
class GuestResult:
    """Result of a command in the guest. ``cut``: the output was longer than the agent's buffer."""

    status: int
    stdout: bytes
    stderr: bytes
    cut: bool = False


class Guest:
    """A session with the agent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.execute = channel.execute

    def sync(self) -> None:
        """Synchronize the channel: an earlier client may have left an incomplete message."""
        number = secrets.randbelow(1 << 31)
        self.channel.send({"execute": "guest-sync-delimited", "arguments": {"id": number}}, before=b"\xff")
        deadline = self.channel.deadline()
        while self.channel.receive(deadline).get("return") != number:
            continue

    def count(self, command: str) -> int:
        """Run a command that returns a number; errors as in ``execute``."""
        return _number(self.execute(command), command)

    def run(self, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60) -> GuestResult:
        """Run a program in the guest and wait for it to end. No message shows the secrets of the input.

        Raises:
            SmsError: no such program, the input is too large, or the time limit was exceeded (it keeps running).
        """
        try:
            ran = self._run(argv, input, timeout_s)
        except SmsError as error:
            raise without_secrets(error, secrets_of(input)) from None
        return replace(ran, stderr=redact(ran.stderr, secrets_of(input)))

    def _run(self, argv: Sequence[str], input: bytes | None, timeout_s: float) -> GuestResult:
        if input is not None and len(input) > MAX_INPUT:
            raise SmsError(
                f"the input has {len(input)} bytes; the guest agent accepts {MAX_INPUT}",
                hint="copy large files over the network",
            )
        request: dict[str, object] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if input is not None:
            request["input-data"] = base64.b64encode(input).decode()
        pid = self.start(request)
        deadline, pause = time.monotonic() + timeout_s, 0.02
        while True:
            found = self.execute("guest-exec-status", pid=pid)
            if not isinstance(found, dict):
                raise SmsError("guest agent: guest-exec-status: invalid reply")
            if found.get("exited"):
                return _result(found)
            if time.monotonic() > deadline:
                raise SmsError(f"`{argv[0]}` in the VM did not end within {timeout_s:g} s; it is still running")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.3)

    def kill(self, pid: int) -> None:
        """Terminate a program that was started."""
        self.run(["/bin/sh", "-c", 'kill "$1"', "kill", str(pid)])

    def start(self, request: Mapping[str, object]) -> int:
        """Start a program; return its PID."""
        try:
            reply = self.execute("guest-exec", **request)
        except SmsError as error:
            if "frozen" not in error.message:
                raise
            # A client that froze the file systems was killed: this channel has only one client at a time.
            self.execute("guest-fsfreeze-thaw")
            reply = self.execute("guest-exec", **request)
        return _number(reply.get("pid") if isinstance(reply, dict) else None, "guest-exec")


# Replies are untrusted: the machine may be compromised.
def _number(reply: Any, command: str) -> int:
    if isinstance(reply, bool) or not isinstance(reply, int):
        raise SmsError(f"guest agent: {command}: invalid reply")
    return reply


def _result(found: Mapping[str, Any]) -> GuestResult:
    signal = found.get("signal")
    code = found.get("exitcode", 1 if signal is None else 128 + _number(signal, "guest-exec-status"))
    status = _number(code, "guest-exec-status") & 0xFF
    try:
        out, err = (base64.b64decode(found.get(name, "")) for name in ("out-data", "err-data"))
    except (ValueError, TypeError):
        raise SmsError("guest agent: guest-exec-status: its output is not base64") from None
    return GuestResult(status, out, err, bool(found.get("out-truncated") or found.get("err-truncated")))


@contextmanager
def open_guest(host: Host, path: str, *, silence_s: float = SILENCE_S) -> Iterator[Guest]:
    """Open a session with the agent of a machine on the host.

    Raises:
        NotResponding: the agent does not answer; the machine may still be starting.
    """
    with open_channel(host, path, "guest agent", silence_s=silence_s) as channel:
        guest = Guest(channel)
        guest.sync()
        yield guest


def answers(host: Host, path: str, *, silence_s: float = 3) -> bool:
    """Return whether the agent answers."""
    try:
        with open_guest(host, path, silence_s=silence_s):
            return True
    except NotResponding:
        return False
