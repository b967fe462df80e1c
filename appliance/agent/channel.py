"""Channel between the coordinator of a migration and the agent on one of its hosts (frames: ``shared/wire.py``).

A side that receives nothing for ``PATIENCE_S`` treats the other as gone: a broken network does not close connections.
"""

import os
import select
from typing import Any, List

from appliance.agent.protocol import Problem
from appliance.shared.wire import Message, WireError, count_bytes, pack_message, read_message

PATIENCE_S = 10.0
BLOCK = 1 << 18


class Disconnected(Exception):
    """The coordinator is gone, or cannot be reached any more."""


class Channel:
    """The agent's side of the channel, on standard input and output."""

    def __init__(self, reader: int = 0, writer: int = 1) -> None:
        self.reader = reader
        self.writer = writer
        os.set_blocking(writer, False)

    def receive(self, patience_s: float = PATIENCE_S) -> Message:
        """Return the next message that is not a ping.

        Raises:
            Disconnected: nothing was received for ``patience_s`` seconds, or the channel was closed.
            Problem: the data received is not a message.
        """
        try:
            while True:
                message = read_message(lambda size: self.read(size, patience_s), "do")
                if message["do"] != "ping":
                    return message
        except WireError as error:
            raise Problem("received %s" % error, "is `sms` the same version on both hosts?")

    def read(self, size: int, patience_s: float = PATIENCE_S) -> bytes:
        """Read ``size`` bytes.

        Raises:
            Disconnected: nothing was received for ``patience_s`` seconds, or the channel was closed.
        """
        parts: List[bytes] = []
        while size:
            if not select.select([self.reader], [], [], patience_s)[0]:
                raise Disconnected
            block = os.read(self.reader, min(size, BLOCK))
            if not block:
                raise Disconnected
            parts.append(block)
            size -= len(block)
        return b"".join(parts)

    def read_body(self, message: Message) -> bytes:
        """Read the bytes that follow a message."""
        try:
            return self.read(count_bytes(message))
        except WireError as error:
            raise Problem("received a message with %s" % error)

    def send(self, kind: str, data: Any = b"", **facts: Any) -> None:
        """Send a message, followed by ``data``.

        Raises:
            Disconnected: the coordinator does not receive it.
        """
        self._write(pack_message(dict(facts, kind=kind), len(data)))
        self._write(data)

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            if not select.select([], [self.writer], [], PATIENCE_S)[1]:
                raise Disconnected
            try:
                view = view[os.write(self.writer, view[:BLOCK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Disconnected
