"""The provisioning VM's HTTP interface, asked with a client certificate. Standard library."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from appliance.errors import Refused, SmsError
from appliance.text import one_line

ANSWER_S = 30
"""Seconds without a byte until the VM counts as away."""
CONNECT_S = 5
MOST_BYTES = 64 << 20
BLOCK = 1 << 20
AWAY = "is it switched off? `sms vm start`, `sms vm status`"


class Away(SmsError):
    """Nobody answers at the VM's address."""


@dataclass(frozen=True)
class Api:
    """Where it is, whom it is trusted by, and the certificate that is shown to it."""

    url: str
    ca: Path
    cert: Path
    key: Path

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
        """The answer's JSON, None where there is none.

        Raises:
            Away: nobody answers.
            Refused: what was asked for is refused (4xx), with the VM's own words.
            SmsError: it fails.
        """
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        status, said = self._exchange(method, path, data, headers, timeout_s)
        return _decode(status, said, f"{method} {path}")

    def send(
        self,
        path: str,
        stream: IO[bytes],
        size: int,
        *,
        headers: dict[str, str] | None = None,
        sent: Callable[[int], None] | None = None,
    ) -> Any:
        """PUT ``size`` bytes of a stream; ``sent`` is told how many have gone.

        Raises:
            Away, Refused, SmsError: as ``ask``.
        """

        def blocks() -> Any:
            gone = 0
            while block := stream.read(BLOCK):
                yield block
                gone += len(block)
                if sent:
                    sent(gone)

        named = {"Content-Type": "application/octet-stream", "Content-Length": str(size), **(headers or {})}
        # Digests of what came are made before it answers.
        status, said = self._exchange("PUT", path, blocks(), named, 10 * ANSWER_S)
        return _decode(status, said, f"PUT {path}")

    def _exchange(
        self, method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        where = urlsplit(self.url)
        link = http.client.HTTPSConnection(where.hostname or "", where.port, timeout=CONNECT_S, context=self._trust())
        try:
            link.connect()
            link.sock.settimeout(timeout_s)
            with suppress(BrokenPipeError, ConnectionResetError):  # it has said no before all was sent: hear why
                link.request(method, where.path.rstrip("/") + path, body, headers)
            answer = link.getresponse()
            said = answer.read(MOST_BYTES + 1)
        except ssl.SSLError as error:
            raise SmsError(
                f"{self.url}: {getattr(error, 'verify_message', '') or error.reason or error}",
                hint="was the VM started with another CA than tls/ca.pem? `sms vm stop`, `sms vm start`",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise Away(f"the provisioning VM does not answer at {self.url}: {error}", hint=AWAY) from error
        finally:
            link.close()
        if len(said) > MOST_BYTES:
            raise SmsError(f"{method} {path}: the answer is too long")
        return answer.status, said

    def _trust(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise Refused(
                f"the site's certificates cannot be read: {error}",
                hint=f"{self.ca}, {self.cert} and {self.key} are made by `sms init`; `sms key ca renew` makes new ones",
            ) from error
        return context


def _decode(status: int, said: bytes, what: str) -> Any:
    if status in (502, 504):
        raise Away(f"{what}: the provisioning VM is up, its server is not", hint="sms vm status")
    if not 200 <= status < 300:
        detail = _problem(said)
        words = f"the provisioning VM: {detail}" if detail else f"the provisioning VM: {what}: status {status}"
        raise (Refused if 400 <= status < 500 else SmsError)(words, hint="" if status < 500 else "sms vm status")
    if not said:
        return None
    try:
        return json.loads(said)
    except ValueError as error:
        raise SmsError(f"{what}: the answer is no JSON", hint="is provisioning.address the VM's?") from error


def _problem(said: bytes) -> str:
    """The detail of an RFC 7807 answer, in one line; nothing where it is none."""
    try:
        found = json.loads(said)
    except ValueError:
        return ""
    detail = found.get("detail") or found.get("title") if isinstance(found, dict) else None
    # Control characters of a stranger do not reach the terminal.
    return one_line(str(detail), 2000) if detail else ""
