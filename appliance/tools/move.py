"""The agent as source or target of a migration, controlled by messages in the wire format of ``shared/wire.py``."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.shared.records import RecordError
from appliance.shared.secret import secrets_of
from appliance.shared.wire import Message, WireError, count_bytes, pack_message, read_message
from appliance.tools.reply import Reply

if TYPE_CHECKING:
    from appliance.tools.agent import Session

PING_S = 0.5
"""Interval of pings in seconds, much shorter than the agent's timeout (agent/channel.py)."""
PATIENCE_S = 120.0
"""Seconds without a message until an endpoint counts as lost, even while it copies."""
ROLLBACK_S = 30.0
"""Maximum duration of an endpoint's automatic rollback in seconds."""
QUEUE_SIZE = 16
"""Messages read ahead."""
LARGE = 64 << 20
"""What has more bytes than this is not read ahead."""


class Lost(Unreachable):
    """An endpoint does not answer any more; its agent decides whether to commit or roll back."""


class Endpoint:
    """One endpoint of a migration. It is pinged until it is closed."""

    def __init__(self, host: Host, session: Session) -> None:
        self.host = host
        self.name = host.name
        self.session = session
        self.closed = threading.Event()
        self.ended = False
        """Whether the agent had ended when it was waited for; it may wait for its network."""
        self._lock = threading.Lock()
        self._received: queue.Queue[tuple[Message, bytes] | SmsError] = queue.Queue(QUEUE_SIZE)
        for work in (self._read, self._ping):
            threading.Thread(target=work, daemon=True).start()

    def send(self, do: str, data: bytes = b"", **facts: Any) -> None:
        """Send a command with optional data.

        Raises:
            SmsError: the agent has ended; with the problem that it reported, if any.
        """
        self.session.reader.secrets += secrets_of(data)
        with self._lock:
            self.session.write(pack_message({**facts, "do": do}, len(data)) + data)

    def receive(self, *kinds: str, patience_s: float = PATIENCE_S) -> tuple[Message, bytes]:
        """Return the next message, which must have one of these kinds, and its data.

        Raises:
            Lost: no message for ``patience_s`` seconds.
            SmsError: the agent has ended, or sent another kind of message.
        """
        try:
            received = self._received.get(timeout=patience_s)
        except queue.Empty:
            raise Lost(
                f"{self.name} sent no message for {patience_s:g} s",
                hint="is its network down? `sms journal` shows what it did on its own",
            ) from None
        if isinstance(received, SmsError):
            raise received
        if received[0].get("kind") not in kinds:
            raise SmsError(f"{self.name} sent {received[0].get('kind')!r}, expected {' or '.join(kinds)}")
        return received

    @property
    def ended_itself(self) -> bool:
        """Whether the agent has reported why it ended, and does nothing more."""
        return self.session.reader.problem is not None

    def _read(self) -> None:
        try:
            while True:
                message = Reply(self.name, read_message(self.session.read_exactly, "kind"))
                size = count_bytes(message)
                while size > LARGE and not self._received.empty() and not self.closed.wait(0.05):
                    pass
                self._put((message, self.session.read_exactly(size) if size else b""))
        except SmsError as error:
            self._put(error)
        except WireError as error:
            self._put(SmsError(f"{self.name} sent {error}"))
        except RecordError as error:
            self._put(SmsError(f"{self.name} sent an invalid message: {error}"))

    def _put(self, received: tuple[Message, bytes] | SmsError) -> None:
        while not self.closed.is_set():
            with suppress(queue.Full):
                self._received.put(received, timeout=1)
                break

    def _ping(self) -> None:
        while not self.closed.wait(PING_S):
            try:
                self.send("ping")
            except SmsError:
                return

    def wait(self) -> None:
        """Wait until the agent has ended, at most ``ROLLBACK_S``: leaving earlier would interrupt its rollback."""

        def wait() -> None:
            with suppress(SmsError):
                self.session.stream.result(ok=None)
                self.ended = True

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(ROLLBACK_S)

    def close(self) -> None:
        """Close the agent's input; it then decides on its own how to continue."""
        self.closed.set()
        with self._lock:
            self.session.end()


def receive_after(endpoint: Endpoint, kind: str, *earlier: str, patience_s: float = PATIENCE_S) -> Message:
    """Return the next message of a kind. Replies to ``earlier`` requests may come first, all within ``patience_s``.

    Raises:
        Lost, SmsError: as ``Endpoint.receive``.
    """
    end = time.monotonic() + patience_s
    while (left := end - time.monotonic()) > 0:
        reply, _ = endpoint.receive(kind, *earlier, patience_s=left)
        if reply["kind"] == kind:
            return reply
    raise Lost(f"{endpoint.name} did not confirm within {patience_s:g} s ({kind})")
