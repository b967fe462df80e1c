"""Client of a State Manager (SMD of CSM or OpenCHAMI). Standard library."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import without_secrets
from appliance.plan.endpoint import check_endpoint

ANSWER_S = 60
WHOLE_S = 600
"""Time limit of one collection in seconds: those of large machines are long."""
MAX_BYTES = 512 << 20
BLOCK = 1 << 18


@dataclass(frozen=True)
class StateManager:
    """URL and access token of a State Manager."""

    url: str
    token: str = field(default="", repr=False)
    ca: Path | None = None

    def __post_init__(self) -> None:
        where = urlsplit(self.url)
        if where.scheme not in ("http", "https") or not where.hostname or where.query or where.username:
            raise ConfigError(
                f"{self.url[:200]!r} is not the URL of a State Manager",
                hint="write https://api-gw/apis/smd, or https://smd:27779; the token belongs in $SMS_SMD_TOKEN",
            )
        if self.token:
            check_endpoint(self.url, "the State Manager's URL")
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            raise ConfigError("the token is not a single line of text", hint="the token file must contain nothing else")

    def collection(self, path: str, key: str, seen: Callable[[int], None]) -> list[Mapping[str, object]]:
        """Return the entries of a collection below ``/hsm/v2``; ``seen`` is called with the bytes received so far.

        Args:
            key: key of the list in the response; empty if the response is the list.

        Raises:
            SmsError: no answer, not in time, or not in SMD's format.
            Refused: a token is missing or invalid.
        """
        try:
            found = self._get(path, seen)
        except SmsError as error:
            raise without_secrets(error, (self.token,)) from None
        listed = found.get(key) if key and isinstance(found, dict) else found
        if listed is None:  # Go encodes an empty list as null
            listed = []
        if not isinstance(listed, list):
            raise SmsError(f"{self.url}: {path}: not a response of SMD", hint="is it the State Manager's URL?")
        return [one for one in listed if isinstance(one, dict)]

    def _get(self, path: str, seen: Callable[[int], None]) -> Any:
        where = urlsplit(self.url)
        base = re.sub(r"(/hsm/v2)?/*$", "", where.path)
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        link = self._open(where.scheme, where.hostname or "", where.port)
        try:
            link.request("GET", f"{base}/hsm/v2{path}", headers=headers)
            answer = link.getresponse()
            status, data = answer.status, _read(answer, seen)
        except ssl.SSLError as error:
            raise SmsError(
                f"{self.url}: {getattr(error, 'verify_message', '') or error.reason or error}",
                hint="set the CA that signed its certificate with --ca FILE",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise SmsError(f"{self.url} does not answer: {error}", hint="is it the State Manager's URL?") from error
        finally:
            link.close()
        if status in (401, 403):
            raise Refused(f"{self.url}: {status}", hint="give a valid token with --token-file FILE or $SMS_SMD_TOKEN")
        # Redirections are not followed: the token is only for this host.
        if status != 200:
            raise SmsError(f"{self.url}: GET {path}: status {status}", hint="is it the State Manager's URL?")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SmsError(
                f"{self.url}: {path}: the response is not JSON", hint="is it the State Manager's URL?"
            ) from error

    def _open(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise Refused(f"cannot read CA certificates from {self.ca}: {error}", hint="--ca FILE") from error
        return http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)


def _read(answer: http.client.HTTPResponse, seen: Callable[[int], None]) -> bytes:
    """Return the body of a response, within limits of time and size."""
    deadline, blocks, size = time.monotonic() + WHOLE_S, [], 0
    while block := answer.read1(BLOCK):
        blocks.append(block)
        size += len(block)
        seen(size)
        if size > MAX_BYTES or time.monotonic() > deadline:
            raise http.client.HTTPException("response too large or too slow")
    if answer.length:
        raise http.client.HTTPException("incomplete response")
    return b"".join(blocks)
