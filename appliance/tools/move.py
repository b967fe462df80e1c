"""The agent's two ends of a move, spoken with by messages: ``shared/wire.py`` says how they lie on the wire."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.progress import Progress
from appliance.shared.wire import Message, WireError, count_bytes, pack_message, read_message
from appliance.tools import agent

PING_S = 0.5
"""Much shorter than an end's patience (agent/line.py)."""
PATIENCE_S = 120.0
"""Seconds until an end that says nothing counts as lost, while all it does is copy."""
WAY_BACK_S = 30.0
"""Seconds that an end may take to put everything back by itself."""
WAITING = 16
"""Messages that are read ahead."""


class Lost(Unreachable):
    """An end does not answer any more; what it does by itself then, its agent knows."""


class End:
    """One end of a move: ``say`` and ``hear``. Until it is closed it is told that somebody is there."""

    def __init__(self, host: Host, talk: agent.Conversation) -> None:
        self.host = host
        self.talk = talk
        self.closed = threading.Event()
        self._guard = threading.Lock()
        self._heard: queue.Queue[tuple[Message, bytes] | SmsError] = queue.Queue(WAITING)
        for work in (self._read, self._ping):
            threading.Thread(target=work, daemon=True).start()

    def say(self, do: str, data: bytes = b"", **facts: Any) -> None:
        """Tell it what to do, and bytes with it.

        Raises:
            SmsError: it has ended; with its own words where it had some.
        """
        with self._guard:
            self.talk.write(pack_message({**facts, "do": do}, len(data)) + data)

    def hear(self, *kinds: str, patience_s: float = PATIENCE_S) -> tuple[Message, bytes]:
        """Its next message, which must be of one of these kinds, and the bytes with it.

        Raises:
            Lost: it says nothing for so many seconds.
            SmsError: it has ended, or says something else.
        """
        try:
            heard = self._heard.get(timeout=patience_s)
        except queue.Empty:
            raise Lost(
                f"{self.host.name} has said nothing for {patience_s:g} s",
                hint="is its network cut? What it does by itself then stands in `sms journal`",
            ) from None
        if isinstance(heard, SmsError):
            raise heard
        if heard[0].get("kind") not in kinds:
            raise SmsError(f"{self.host.name} says {heard[0].get('kind')!r} where {' or '.join(kinds)} was expected")
        return heard

    @property
    def ended_itself(self) -> bool:
        """Whether it has said why it ended: it does nothing more."""
        return self.talk.listener.problem is not None

    def _read(self) -> None:
        try:
            while True:
                message = read_message(self.talk.read_exactly, "kind")
                size = count_bytes(message)
                self._put((message, self.talk.read_exactly(size) if size else b""))
        except SmsError as error:
            self._put(error)
        except WireError as error:
            self._put(SmsError(f"{self.host.name} sends {error}"))

    def _put(self, heard: tuple[Message, bytes] | SmsError) -> None:
        while not self.closed.is_set():
            with suppress(queue.Full):
                self._heard.put(heard, timeout=1)
                break

    def _ping(self) -> None:
        while not self.closed.wait(PING_S):
            try:
                self.say("ping")
            except SmsError:
                return

    def wait(self) -> None:
        """Until it has ended, or for as long as its way back takes at most: who leaves sooner ends it in the middle."""

        def wait() -> None:
            with suppress(SmsError):
                self.talk.stream.result(ok=None)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(WAY_BACK_S)

    def close(self) -> None:
        """It goes on by itself: it is told that nobody is there any more."""
        self.closed.set()
        with self._guard:
            self.talk.end()


@contextmanager
def open_end(host: Host, command: str, request: dict[str, Any], progress: Progress) -> Iterator[End]:
    """The agent of a host as one end of a move; left, it decides by itself what is to be done.

    Raises:
        SmsError: why it ended.
    """
    with agent.converse(host, command, request, progress) as talk:
        end = End(host, talk)
        try:
            yield end
        finally:
            end.close()
            end.wait()
