"""The line between who moves an appliance and the agent on one of its hosts: frames both ways (``shared/wire.py``).

Whoever hears nothing for a while takes the other side for gone: a network that is cut tells nobody its end.
"""

import os
import select
from typing import Any, Dict, List

from appliance.agent.words import Problem
from appliance.shared.wire import WireError, count_bytes, pack_message, read_message

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
        try:
            while True:
                message = read_message(lambda size: self.take(size, patience_s), "do")
                if message["do"] != "ping":
                    return message
        except WireError as error:
            raise Problem("what came is %s" % error, "is `sms` the same version on both hosts?")

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
        try:
            return self.take(count_bytes(message))
        except WireError as error:
            raise Problem("a message came with %s" % error)

    def say(self, kind: str, data: Any = b"", **facts: Any) -> None:
        """A message, and bytes behind it.

        Raises:
            Gone: nobody takes it.
        """
        self._give(pack_message(dict(facts, kind=kind), len(data)))
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
