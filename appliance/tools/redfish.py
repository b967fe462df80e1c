"""Client of Redfish, DMTF's interface to management controllers, with limits on all responses. Standard library.

The peer may be slow, broken or not a controller: responses have a maximum size, requests and sessions a time limit, and
neither redirections nor links to other hosts are followed.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.errors import SmsError
from appliance.host.base import without_secrets
from appliance.text import one_line

ROOT = "/redfish/v1"
SYSTEMS = f"{ROOT}/Systems"
ACTION = "#ComputerSystem.Reset"
OFF = "Off"
ANSWER_S = 15.0
"""Time limit of a response in seconds; some controllers take ten to wake up."""
POLL_S = 1.0
MAX_BYTES = 1 << 20
"""Maximum size of a response, which is untrusted."""
ADDRESS_HINT = "is it the controller's address?"
MAX_REQUESTS = 400
"""Maximum number of requests of one session: links may form cycles."""
_OTHER_NAME = (62, 64)
"""OpenSSL's codes for a certificate of another host name or address: its CA is the right one."""
_PATH = re.compile(r"/(?!/)[!$%&'()*+,\-./0-9:;=@A-Z_a-z~?]{0,1000}")


class NoRedfish(SmsError):
    """The peer is not a Redfish service."""


class Denied(SmsError):
    """The controller rejects user and password."""


class Untrusted(SmsError):
    """The controller's certificate cannot be verified."""


class Silent(SmsError):
    """The controller does not answer, or not in time."""


class Missing(SmsError):
    """The controller does not have or support this resource; the message has the HTTP status."""


class TimedSocket(ssl.SSLSocket):
    """A socket whose reads end at ``until``, so that a peer cannot extend the time limit by sending slowly."""

    until = 0.0

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the read operation timed out")
        self.settimeout(left)
        return super().recv_into(buffer, nbytes, flags)


@dataclass(frozen=True)
class Controller:
    """A management controller. ``url`` may contain the path of one system.

    ``section`` is the section of the site file with these settings, for hints; ``address``: where to connect to, if the
    name in the URL was resolved and checked before.
    """

    url: str
    user: str
    password: str
    ca: Path | None = None
    insecure: bool = False
    section: str = "fence.redfish"
    address: str = ""

    @property
    def name(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, object]:
        """Send one request; return the JSON of the response, or an empty object.

        Raises:
            SmsError: no answer, an error, or an untrusted certificate. Messages never contain the password.
        """
        with connect(self) as client:
            return client.request(method, path, body)

    def trust(self) -> ssl.SSLContext:
        """Return the TLS context that verifies the controller's certificate."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise SmsError(
                f"cannot read CA certificates from {self.ca}: {error}", hint=f"see {self.section}.ca"
            ) from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.sslsocket_class = TimedSocket
        return context


class RedfishClient:
    """Requests to one controller over a persistent connection, for at most ``timeout_s``."""

    def __init__(self, controller: Controller, *, timeout_s: float, answer_s: float, max_requests: int) -> None:
        self.controller = controller
        self.until = time.monotonic() + timeout_s
        self._answer_s = answer_s
        self._context = controller.trust()
        self._connection: http.client.HTTPSConnection | None = None
        self._token, self._session = "", ""
        self._left = max_requests

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, object]:
        """Send a request; return the JSON of the response, or an empty object.

        Raises:
            Denied, Untrusted, Silent, NoRedfish, Missing: see there.
            SmsError: another error status. Messages never contain the password, even if the controller quotes it.
        """
        try:
            return self._request(method, path, body)
        except SmsError as error:
            raise without_secrets(error, (self.controller.password, self._token)) from None

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, object]:
        what = f"{self.controller.name}: {method} {path[:200]}"
        if not _PATH.fullmatch(path):
            raise NoRedfish(f"{self.controller.name}: a link leads to {path[:200]!r}", hint=ADDRESS_HINT)
        status, headers, data = self._send(method, path, body, {})
        if status == 401 and not self._token and not _accepts_basic(headers):
            self._open_session()
            status, headers, data = self._send(method, path, body, {})
        if status == 428 and body is not None:
            # Some controllers require the ETag of the resource.
            seen = self.request("GET", path).get("@odata.etag")
            status, headers, data = self._send(method, path, body, {"If-Match": _tag(seen)})
        # Redirections are not followed: the password is only for this controller.
        if status in (401, 403):
            raise Denied(f"{what}: {status}", hint=f"check {self.controller.section}.user and the password")
        if status in (404, 405, 410, 501):
            raise Missing(f"{what}: {status}", hint=ADDRESS_HINT)
        if 300 <= status < 400:
            raise NoRedfish(f"{what}: {status}: redirected", hint=ADDRESS_HINT)
        if not 200 <= status < 300:
            raise SmsError(f"{what}: {status}{_reason(data)}")
        return _object(data, what)

    def _open_session(self) -> None:
        """Log in for a token, if the controller does not accept basic authentication."""
        login = {"UserName": self.controller.user, "Password": self.controller.password}
        status, headers, _ = self._send("POST", f"{ROOT}/SessionService/Sessions", login, {"Authorization": ""})
        token, place = headers.get("X-Auth-Token", ""), urlsplit(headers.get("Location", ""))
        if status not in (200, 201) or not re.fullmatch(r"[!-~]{1,1000}", token):
            raise Denied(
                f"{self.controller.name}: no session: {status}",
                hint=f"check {self.controller.section}.user and the password",
            )
        self._token, self._session = token, place.path if _PATH.fullmatch(place.path) else ""

    def close(self) -> None:
        """Delete the session, since controllers allow only few, and close the connection."""
        if self._session:
            self.until = min(self.until + 2, time.monotonic() + 5)
            with suppress(SmsError):
                self._send("DELETE", self._session, None, {})
        self._drop()

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request; return status, headers and body of the response."""
        self._left -= 1
        if self._left < 0:
            raise NoRedfish(f"{self.controller.name}: too many links", hint=ADDRESS_HINT)
        now = time.monotonic()
        until = min(self.until, now + self._answer_s)
        name = self.controller.name
        try:
            if until <= now:
                raise TimeoutError("time limit exceeded")
            try:
                kept = self._connection is not None
                return self._exchange(method, path, body, more, until)
            except (http.client.RemoteDisconnected, ConnectionError):
                # It may close a persistent connection at any time. Requests that change something are not repeated.
                self._drop()
                if not kept or method != "GET":
                    raise
                return self._exchange(method, path, body, more, until)
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(
                f"{name}: certificate verification failed: {error.verify_message}",
                hint="use a name or an address that its certificate has"
                if error.verify_code in _OTHER_NAME
                else f"set {self.controller.section}.ca to the CA that signed it",
            ) from error
        except TimeoutError as error:
            raise Silent(f"{name} does not answer in time", hint=ADDRESS_HINT) from error
        except (ssl.SSLError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, ConnectionError):
                raise Silent(f"{name} closed the connection", hint=ADDRESS_HINT) from error
            raise NoRedfish(f"{name} is not a Redfish service: {_describe(error)}", hint=ADDRESS_HINT) from error
        except OSError as error:
            raise Silent(f"{name} does not answer: {_describe(error)}", hint=ADDRESS_HINT) from error

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: Mapping[str, str], until: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        reusable = False
        try:
            connection = self._connect(until)
            connection.request(method, path, json.dumps(body) if body is not None else None, self._headers(body, more))
            response = connection.getresponse()
            data = response.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise http.client.HTTPException(f"a response of more than {MAX_BYTES >> 20} MiB")
            if response.length:
                raise http.client.HTTPException("incomplete response")
            reusable = not response.will_close
            return response.status, response.headers, data
        finally:
            if not reusable:
                self._drop()

    def _connect(self, until: float) -> http.client.HTTPSConnection:
        if not self._connection:
            where = urlsplit(self.controller.url)
            host, port = where.hostname or "", where.port or 443
            plain = socket.create_connection((self.controller.address or host, port), timeout=until - time.monotonic())
            try:
                plain.settimeout(max(until - time.monotonic(), 0.001))
                safe = self._context.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
            self._connection = http.client.HTTPSConnection(host, port)
            self._connection.sock = safe
        assert isinstance(self._connection.sock, TimedSocket)
        self._connection.sock.until = until
        return self._connection

    def _headers(self, body: Mapping[str, Any] | None, more: Mapping[str, str]) -> dict[str, str]:
        headers = {"Accept": "application/json", "OData-Version": "4.0"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token:
            headers["X-Auth-Token"] = self._token
        else:
            login = f"{self.controller.user}:{self.controller.password}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return {name: value for name, value in {**headers, **more}.items() if value}


@contextmanager
def connect(
    controller: Controller, *, timeout_s: float = 60, answer_s: float = ANSWER_S, max_requests: int = MAX_REQUESTS
) -> Iterator[RedfishClient]:
    """Open a session for the duration of the context, at most ``timeout_s``."""
    client = RedfishClient(controller, timeout_s=timeout_s, answer_s=answer_s, max_requests=max_requests)
    try:
        yield client
    finally:
        client.close()


def _describe(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return one_line(text, 200)


def _accepts_basic(headers: http.client.HTTPMessage) -> bool:
    """Return whether the controller accepts basic authentication: then the password is wrong."""
    schemes = headers.get_all("WWW-Authenticate")
    return not schemes or any(scheme.lower().startswith("basic") for scheme in schemes)


def _tag(seen: Any) -> str:
    return seen if isinstance(seen, str) and re.fullmatch(r"[!-~]{1,200}", seen) else "*"


def _reason(data: bytes) -> str:
    """Return the message of a Redfish error."""
    with suppress(ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        error = json.loads(data)["error"]
        more = error.get("@Message.ExtendedInfo") or [{}]
        text = str(more[0].get("Message") or error.get("message") or "")
        return f": {one_line(text, 300)}" if text else ""
    return ""


def _object(data: bytes, what: str) -> Mapping[str, object]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NoRedfish(f"{what}: not a Redfish response", hint=ADDRESS_HINT)
    return found


def members(found: Mapping[str, Any]) -> list[str]:
    """Return the valid links of a collection."""
    listed = found.get("Members")
    links = [link_of(one) for one in listed] if isinstance(listed, list) else []
    return [link for link in links if link]


def link_of(one: Any) -> str:
    """Return the path of a link; empty if it is invalid or leads to another host."""
    path = one.get("@odata.id") if isinstance(one, Mapping) else None
    path = path.partition("#")[0] if isinstance(path, str) else ""
    return path if _PATH.fullmatch(path) else ""


def part_of(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object within another; empty if it is missing or not an object."""
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def find_system(client: RedfishClient) -> str:
    """Return the path of the system in the URL, or of the only one.

    Raises:
        SmsError: there are none, or several.
    """
    url = client.controller.url
    path = urlsplit(url).path.rstrip("/")
    if path.startswith(f"{SYSTEMS}/"):
        return path
    paths = members(client.request("GET", SYSTEMS))
    if len(paths) != 1:
        raise SmsError(
            f"{url} has {len(paths)} systems: {', '.join(paths)[:300]}",
            hint="append the path of one to the URL: https://bmc/redfish/v1/Systems/1",
        )
    return paths[0]
