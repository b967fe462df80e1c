"""Streams the output of a command into another one, and ends both if they hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from appliance.errors import SmsError
from appliance.host.stream import Stream
from appliance.operations.engines.owners import Command

BLOCK = 1 << 20
SILENT_S = 60.0
"""Seconds without a block after which a copy has failed: a disk or a connection hangs."""
END_S = 600.0
"""Seconds that writing everything to the disk may take at the end."""


class Filter(Protocol):
    """What is between both commands: it runs on this machine."""

    def feed(self, block: bytes) -> bytes:
        """Return what of the output so far is to be written.

        Raises:
            SmsError: the output is not as it must be.
        """

    def end(self) -> bytes:
        """Return the rest; raises the same."""


class Pump:
    """Copies in a thread of its own: a read or a write that hangs must not keep the caller."""

    def __init__(self, output: Stream, copy: Stream, through: Filter | None = None) -> None:
        self.output = output
        self.copy = copy
        self.through = through
        self.done = 0
        self.all_read = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while block := self.output.read(BLOCK):
                self._write(self.through.feed(block) if self.through else block)
                self.done += len(block)
            self.all_read = True
            self.output.result()
            if self.through:
                self._write(self.through.end())
            self.copy.end()
            self.copy.result()
        except BaseException as error:  # raised by the caller's thread
            self.error = error

    def _write(self, data: bytes) -> None:
        if data:
            self.copy.write(data)


def transfer(reader: Command, writer: Command, moved: Callable[[int], None], through: Filter | None = None) -> None:
    """Stream the output of ``reader`` into ``writer``.

    Args:
        moved: called with the number of bytes so far.
        through: what is written of it; all by default.

    Raises:
        SmsError: one of them failed, the filter did, or nothing has moved for ``SILENT_S``.
    """
    with reader.stream() as output, writer.stream() as copy:
        pump = Pump(output, copy, through)
        pump.thread.start()
        seen, since = (0, False), time.monotonic()
        while pump.thread.is_alive():
            pump.thread.join(0.2)
            now = (pump.done, pump.all_read)
            if now != seen:
                seen, since = now, time.monotonic()
                moved(pump.done)
            limit = END_S if pump.all_read else SILENT_S
            if time.monotonic() - since > limit:
                raise SmsError(
                    f"the copy made no progress for {limit:g} s",
                    hint=f"does a disk, or the connection, of {reader.host.name} or {writer.host.name} hang?",
                )
        if pump.error:
            raise pump.error
        moved(pump.done)
