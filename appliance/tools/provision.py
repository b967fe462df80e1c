"""Client of the provisioning VM's HTTP interface, with a client certificate. Standard library."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from appliance.errors import Refused, SmsError
from appliance.shared.secret import UNKNOWN, WITHHELD, redact_text
from appliance.text import one_line

ANSWER_S = 30
"""Seconds without data until the VM counts as unreachable."""
CONNECT_S = 5
HANDSHAKE_S = 30
RESPONSE_S = 600
"""Seconds for all of a TLS handshake; seconds that all of a response may take longer than until its first byte. A VM
that sends single bytes would not end otherwise."""
MAX_BYTES = 64 << 20
BLOCK = 1 << 20
UNREACHABLE_HINT = "is it switched off? `sms vm start`, `sms vm status`"


class VmUnreachable(SmsError):
    """The VM does not answer."""


class VmOff(VmUnreachable):
    """The VM does not answer, and nothing was changed: no request has reached it."""

    status = Refused.status


@dataclass(frozen=True)
class Api:
    """URL of the interface, CA of its certificate, client certificate and key.

    Attributes:
        connected: not empty once it was.
        secrets: what was sent and no error shows: the VM may quote it.
    """

    url: str
    ca: Path
    cert: Path
    key: Path
    connected: list[bool] = field(default_factory=list, compare=False)
    secrets: list[bytes] = field(default_factory=list, compare=False, repr=False)

    def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S, secret: bool = False
    ) -> Any:
        """Send a request; return the JSON of the response, or None. ``secret``: no error shows any of the response.

        Raises:
            VmOff, VmUnreachable: the VM does not answer.
            Refused: status 4xx, with the VM's message.
            SmsError: another error.
        """
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        status, content = self._exchange(method, path, data, headers, timeout_s)
        return _decode(status, content, f"{method} {path}", [UNKNOWN] if secret else self.secrets)

    def send(
        self,
        path: str,
        stream: IO[bytes],
        size: int,
        *,
        headers: dict[str, str] | None = None,
        sent: Callable[[int], None] | None = None,
    ) -> Any:
        """PUT ``size`` bytes of a stream; ``sent`` is called with the number of bytes sent.

        Raises:
            VmUnreachable, Refused, SmsError: as ``request``.
        """

        def blocks() -> Any:
            done = 0
            while block := stream.read(BLOCK):
                yield block
                done += len(block)
                if sent:
                    sent(done)

        named = {"Content-Type": "application/octet-stream", "Content-Length": str(size), **(headers or {})}
        # The VM verifies digests before it responds.
        status, data = self._exchange("PUT", path, blocks(), named, 10 * ANSWER_S)
        return _decode(status, data, f"PUT {path}", self.secrets)

    def _exchange(
        self, method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        where = urlsplit(self.url)
        host, context = where.hostname or "", self._trust()
        connection = http.client.HTTPConnection(host, where.port)
        try:
            plain = socket.create_connection((host, where.port or 443), CONNECT_S)
            self.connected.append(True)
            with _limited(plain, HANDSHAKE_S):
                connection.sock = context.wrap_socket(plain, server_hostname=host)
            connection.sock.settimeout(timeout_s)
            with suppress(BrokenPipeError, ConnectionResetError):  # rejected before all was sent: read the reason
                connection.request(method, where.path.rstrip("/") + path, body, headers)
            with _limited(connection.sock, timeout_s + RESPONSE_S):
                response = connection.getresponse()
                data = response.read(MAX_BYTES + 1)
        except ssl.SSLError as error:
            raise SmsError(
                f"{self.url}: {getattr(error, 'verify_message', '') or error.reason or error}",
                hint="was the VM started with another CA than tls/ca.pem? `sms vm stop`, then `sms vm start`",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            # Others quote what was received.
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            raise (VmUnreachable if self.connected else VmOff)(
                f"the provisioning VM does not respond at {self.url}: {why}", hint=UNREACHABLE_HINT
            ) from None
        finally:
            connection.close()
        if len(data) > MAX_BYTES:
            raise SmsError(f"{method} {path}: the response is too large")
        return response.status, data

    def _trust(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise Refused(
                f"cannot read the site's certificates: {error}",
                hint=f"{self.ca}, {self.cert} and {self.key} are created by `sms init`, new ones by `sms key ca renew`",
            ) from error
        return context


@contextmanager
def _limited(link: socket.socket, limit_s: float) -> Iterator[None]:
    """End a connection that is still in use after ``limit_s`` seconds.

    Raises:
        TimeoutError: it was.
    """
    ended = threading.Event()
    # A duplicate: wrapping the socket in TLS closes it.
    with socket.socket(fileno=os.dup(link.fileno())) as same:

        def end() -> None:
            ended.set()
            with suppress(OSError):
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException):
            if not ended.is_set():
                raise
        finally:
            timer.cancel()
            timer.join()
    if ended.is_set():
        raise TimeoutError(f"it takes longer than {limit_s:g} s")


def _decode(status: int, data: bytes, what: str, secrets: list[bytes]) -> Any:
    if status in (502, 504):
        raise VmUnreachable(f"{what}: the provisioning VM runs, but its service does not", hint="sms vm status")
    if not 200 <= status < 300:
        detail = _problem(data, secrets)
        message = f"the provisioning VM: {detail}" if detail else f"the provisioning VM: {what}: status {status}"
        raise (Refused if 400 <= status < 500 else SmsError)(message, hint="" if status < 500 else "sms vm status")
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SmsError(f"{what}: the response is not JSON", hint="is provisioning.address the VM's?") from error


def _problem(data: bytes, secrets: list[bytes]) -> str:
    """Return the detail of an RFC 7807 response in one line, without secrets; empty if none may be shown."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    detail = found.get("detail") or found.get("title") if isinstance(found, dict) else None
    shown = redact_text(str(detail), secrets) if detail else ""
    # Remove control characters: the response is untrusted.
    return "" if shown == WITHHELD.decode() else one_line(shown, 2000)
