"""The line between who moves an appliance and the agent on one of its hosts: messages both ways, bytes behind them.

    4 bytes the length of a message, the message as JSON; `bytes` in it says how many bytes follow

Whoever hears nothing for a while takes the other side for gone: a network that is cut tells nobody its end.
"""

import json
import os
import select
import struct
from typing import Any, Dict, List

from appliance.agent.words import Problem

LENGTH = ">I"
LONGEST = 1 << 20
"""Bytes of a message, without what follows it."""
MOST_BYTES = 1 << 34
"""Of what follows one."""
PATIENCE_S = 10.0
BLOCK = 1 << 18


class Gone(Exception):
    """Who moves the appliance is gone, or cannot be heard any more."""


class Line:
    """This side of it, on standard input and output."""

    def __init__(self, reader: int = 0, writer: int = 1) -> None:
        self.reader = reader
        self.writer = writer
        os.set_blocking(writer, False)

    def hear(self, patience_s: float = PATIENCE_S) -> Dict[str, Any]:
        """The next message that says more than that somebody is there.

        Raises:
            Gone: nothing came for so many seconds, or the line has ended.
            Problem: what came is no message.
        """
        while True:
            (length,) = struct.unpack(LENGTH, self.take(4, patience_s))
            if length > LONGEST:
                raise Problem("a message of %d bytes came" % length, "is `sms` the same version on both hosts?")
            message = _read(self.take(length, patience_s))
            if message["do"] != "ping":
                return message

    def take(self, size: int, patience_s: float = PATIENCE_S) -> bytes:
        """So many bytes.

        Raises:
            Gone: nothing came for so many seconds, or the line has ended.
        """
        parts: List[bytes] = []
        while size:
            if not select.select([self.reader], [], [], patience_s)[0]:
                raise Gone
            block = os.read(self.reader, min(size, BLOCK))
            if not block:
                raise Gone
            parts.append(block)
            size -= len(block)
        return b"".join(parts)

    def body(self, message: Dict[str, Any]) -> bytes:
        """The bytes that follow a message."""
        size = message.get("bytes", 0)
        if not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
            raise Problem("a message with %r bytes came" % (size,))
        return self.take(size)

    def say(self, kind: str, data: Any = b"", **facts: Any) -> None:
        """A message, and bytes behind it.

        Raises:
            Gone: nobody takes it.
        """
        text = json.dumps(dict(facts, kind=kind, bytes=len(data))).encode()
        self._give(struct.pack(LENGTH, len(text)) + text)
        self._give(data)

    def _give(self, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            if not select.select([], [self.writer], [], PATIENCE_S)[1]:
                raise Gone
            try:
                view = view[os.write(self.writer, view[:BLOCK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Gone


def _read(data: bytes) -> Dict[str, Any]:
    try:
        message = json.loads(data.decode())
    except ValueError:
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise Problem("what came is no message", "is `sms` the same version on both hosts?")
    return message
