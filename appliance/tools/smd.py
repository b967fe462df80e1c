"""A State Manager (SMD of CSM or OpenCHAMI), read through its HTTP interface. Standard library."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import ConfigError, Refused, SmsError

ANSWER_S = 60
WHOLE_S = 600
"""Seconds that one collection may take: that of a large machine is long."""
MOST_BYTES = 512 << 20
BLOCK = 1 << 18


@dataclass(frozen=True)
class StateManager:
    """Where it is, and the token that is shown to it."""

    url: str
    token: str = field(default="", repr=False)
    ca: Path | None = None

    def __post_init__(self) -> None:
        where = urlsplit(self.url)
        if where.scheme not in ("http", "https") or not where.hostname or where.query or where.username:
            raise ConfigError(
                f"{self.url[:200]!r} is not the URL of a State Manager",
                hint="write https://api-gw/apis/smd, or https://smd:27779; a token goes to $SMS_SMD_TOKEN",
            )
        if self.token and where.scheme == "http":
            raise ConfigError("the token would travel in the clear", hint="ask by https://")
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise ConfigError("the token is not one line of text", hint="write it into its file, nothing else")

    def collection(self, path: str, key: str, seen: Callable[[int], None]) -> list[dict[str, Any]]:
        """The entries of a collection below ``/hsm/v2``; ``seen`` is told how many bytes have come.

        Args:
            key: where the answer has the list; empty where it is the answer.

        Raises:
            SmsError: it does not answer, not in time, or not as SMD does.
            Refused: it wants a token, or another one.
        """
        found = self._ask(path, seen)
        listed = found.get(key) if key and isinstance(found, dict) else found
        if listed is None:  # an empty collection of Go's
            listed = []
        if not isinstance(listed, list):
            raise SmsError(f"{self.url}: {path}: the answer is not SMD's", hint="is it the State Manager's URL?")
        return [one for one in listed if isinstance(one, dict)]

    def _ask(self, path: str, seen: Callable[[int], None]) -> Any:
        where = urlsplit(self.url)
        base = re.sub(r"(/hsm/v2)?/*$", "", where.path)
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        link = self._open(where.scheme, where.hostname or "", where.port)
        try:
            link.request("GET", f"{base}/hsm/v2{path}", headers=headers)
            answer = link.getresponse()
            status, said = answer.status, _read(answer, seen)
        except ssl.SSLError as error:
            raise SmsError(
                f"{self.url}: {getattr(error, 'verify_message', '') or error.reason or error}",
                hint="--ca FILE names the CA that signed its certificate",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise SmsError(f"{self.url} does not answer: {error}", hint="is it the State Manager's URL?") from error
        finally:
            link.close()
        if status in (401, 403):
            raise Refused(
                f"{self.url}: {status}", hint="--token-file FILE, or $SMS_SMD_TOKEN, with a token that counts"
            )
        # A redirection is not followed: the token is for this host alone.
        if status != 200:
            raise SmsError(f"{self.url}: GET {path}: status {status}", hint="is it the State Manager's URL?")
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            raise SmsError(
                f"{self.url}: {path}: the answer is no JSON", hint="is it the State Manager's URL?"
            ) from error

    def _open(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise Refused(f"{self.ca} cannot be read as a CA: {error}", hint="--ca FILE") from error
        return http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)


def _read(answer: http.client.HTTPResponse, seen: Callable[[int], None]) -> bytes:
    """All of it, within its time and its size."""
    deadline, blocks, size = time.monotonic() + WHOLE_S, [], 0
    while block := answer.read1(BLOCK):
        blocks.append(block)
        size += len(block)
        seen(size)
        if size > MOST_BYTES or time.monotonic() > deadline:
            raise http.client.HTTPException("its answer has no end")
    if answer.length:
        raise http.client.HTTPException("half an answer")
    return b"".join(blocks)
