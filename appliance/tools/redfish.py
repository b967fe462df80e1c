"""Redfish, DMTF's interface to management controllers: asked with bounds on all that comes back. Standard library.

What answers may be slow, broken, or somebody else: an answer has a size, a question a time, a conversation both, and
neither a redirection nor a link leads to another host.
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
from appliance.text import one_line

ROOT = "/redfish/v1"
SYSTEMS = f"{ROOT}/Systems"
ACTION = "#ComputerSystem.Reset"
OFF = "Off"
ANSWER_S = 15.0
"""Seconds until a controller that says nothing counts as silent; some take ten to wake up."""
LOOK_S = 1.0
MOST_BYTES = 1 << 20
"""Of an answer: it may be from somebody else."""
MOST_QUESTIONS = 400
"""Of one conversation: links may lead round and round."""
_PATH = re.compile(r"/(?!/)[!$%&'()*+,\-./0-9:;=@A-Z_a-z~?]{0,1000}")


class NoRedfish(SmsError):
    """What answers is no Redfish service."""


class Denied(SmsError):
    """It does not take the user and the password."""


class Untrusted(SmsError):
    """Its certificate is not to be trusted."""


class Silent(SmsError):
    """It does not answer, or not in time."""


class Missing(SmsError):
    """It answers that this resource is not there, or that it cannot give it: ``status`` of HTTP is in the message."""


class TimedSocket(ssl.SSLSocket):
    """Each read ends by ``until``: whoever sends a byte a second does not hold anybody for ever."""

    until = 0.0

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the read operation timed out")
        self.settimeout(left)
        return super().recv_into(buffer, nbytes, flags)


@dataclass(frozen=True)
class Controller:
    """A management controller. ``url`` may have the path of the one system that is meant.

    ``section`` is where the site file has what is said here, for hints.
    """

    url: str
    user: str
    password: str
    ca: Path | None = None
    insecure: bool = False
    section: str = "fence.redfish"

    @property
    def name(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.url).netloc

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON; an empty object where there is none.

        Raises:
            SmsError: it does not answer, not well, or is not to be trusted. The password is in no message.
        """
        with converse(self) as asked:
            return asked.ask(method, path, body)

    def trust(self) -> ssl.SSLContext:
        """What its certificate is held against."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except OSError as error:
            raise SmsError(f"{self.ca} cannot be read as a CA: {error}", hint=f"see {self.section}.ca") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.sslsocket_class = TimedSocket
        return context

    def find_system(self) -> str:
        """The path of the system: the URL's own, or that of the only one there.

        Raises:
            SmsError: there are none, or several.
        """
        with converse(self) as asked:
            return find_system(asked)


class Conversation:
    """Questions to one controller over a connection that is kept, until ``timeout_s`` are over."""

    def __init__(self, controller: Controller, *, timeout_s: float, answer_s: float, questions: int) -> None:
        self.controller = controller
        self.until = time.monotonic() + timeout_s
        self._answer_s = answer_s
        self._context = controller.trust()
        self._link: http.client.HTTPSConnection | None = None
        self._token, self._session = "", ""
        self._left = questions

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON; an empty object where there is none.

        Raises:
            Denied, Untrusted, Silent, NoRedfish, Missing: as they say.
            SmsError: another answer that is none. The password is in no message.
        """
        what = f"{self.controller.name}: {method} {path[:200]}"
        if not _PATH.fullmatch(path):
            raise NoRedfish(f"{self.controller.name}: a link leads to {path[:200]!r}", hint=self._address_hint())
        status, headers, said = self._send(method, path, body, {})
        if status == 401 and not self._token and not _takes_basic(headers):
            self._open_session()
            status, headers, said = self._send(method, path, body, {})
        if status == 428 and body is not None:
            # Some want to be told what it is that one changes.
            seen = self.ask("GET", path).get("@odata.etag")
            status, headers, said = self._send(method, path, body, {"If-Match": _tag(seen)})
        # A redirection is not followed: the password is for this controller alone.
        if status in (401, 403):
            raise Denied(f"{what}: {status}", hint=f"are {self.controller.section}.user and the password right?")
        if status in (404, 405, 410, 501):
            raise Missing(f"{what}: {status}", hint=self._address_hint())
        if 300 <= status < 400:
            raise NoRedfish(f"{what}: {status}: it leads elsewhere", hint=self._address_hint())
        if not 200 <= status < 300:
            raise SmsError(f"{what}: {status}{_reason(said)}")
        return _object(said, what, self._address_hint())

    def _address_hint(self) -> str:
        return "is it the controller's address?"

    def _open_session(self) -> None:
        """Log in for a token, where the password is not taken with each question."""
        login = {"UserName": self.controller.user, "Password": self.controller.password}
        status, headers, _ = self._send("POST", f"{ROOT}/SessionService/Sessions", login, {"Authorization": ""})
        token, place = headers.get("X-Auth-Token", ""), urlsplit(headers.get("Location", ""))
        if status not in (200, 201) or not re.fullmatch(r"[!-~]{1,1000}", token):
            raise Denied(
                f"{self.controller.name}: no session: {status}",
                hint=f"are {self.controller.section}.user and the password right?",
            )
        self._token, self._session = token, place.path if _PATH.fullmatch(place.path) else ""

    def close(self) -> None:
        """End the session, which a controller has few of, and the connection."""
        if self._session:
            self.until = min(self.until + 2, time.monotonic() + 5)
            with suppress(SmsError):
                self._send("DELETE", self._session, None, {})
        self._drop()

    def _drop(self) -> None:
        if self._link:
            self._link.close()
        self._link = None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and bytes of an answer."""
        self._left -= 1
        if self._left < 0:
            raise NoRedfish(f"{self.controller.name}: links without an end", hint=self._address_hint())
        now = time.monotonic()
        until = min(self.until, now + self._answer_s)
        name = self.controller.name
        try:
            if until <= now:
                raise TimeoutError("its time is over")
            try:
                kept = self._link is not None
                return self._exchange(method, path, body, more, until)
            except (http.client.RemoteDisconnected, ConnectionError):
                # It has ended a connection that was kept, as it may. What changes something is not said twice.
                self._drop()
                if not kept or method != "GET":
                    raise
                return self._exchange(method, path, body, more, until)
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(
                f"{name}: its certificate is not to be trusted: {error.verify_message}",
                hint=f"name the CA that signed it as {self.controller.section}.ca",
            ) from error
        except TimeoutError as error:
            raise Silent(f"{name} does not answer in time", hint=self._address_hint()) from error
        except (ssl.SSLError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, ConnectionError):
                raise Silent(f"{name} ends the connection", hint=self._address_hint()) from error
            raise NoRedfish(f"{name} is no Redfish: {_told(error)}", hint=self._address_hint()) from error
        except OSError as error:
            raise Silent(f"{name} does not answer: {_told(error)}", hint=self._address_hint()) from error

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: Mapping[str, str], until: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        whole = False
        try:
            link = self._connect(until)
            link.request(method, path, json.dumps(body) if body is not None else None, self._headers(body, more))
            answer = link.getresponse()
            said = answer.read(MOST_BYTES + 1)
            if len(said) > MOST_BYTES:
                raise http.client.HTTPException(f"an answer of more than {MOST_BYTES >> 20} MiB")
            if answer.length:
                raise http.client.HTTPException("half an answer")
            whole = not answer.will_close
            return answer.status, answer.headers, said
        finally:
            if not whole:
                self._drop()

    def _connect(self, until: float) -> http.client.HTTPSConnection:
        if not self._link:
            where = urlsplit(self.controller.url)
            host, port = where.hostname or "", where.port or 443
            plain = socket.create_connection((host, port), timeout=until - time.monotonic())
            try:
                plain.settimeout(max(until - time.monotonic(), 0.001))
                safe = self._context.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
            self._link = http.client.HTTPSConnection(host, port)
            self._link.sock = safe
        assert isinstance(self._link.sock, TimedSocket)
        self._link.sock.until = until
        return self._link

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
def converse(
    controller: Controller, *, timeout_s: float = 60, answer_s: float = ANSWER_S, questions: int = MOST_QUESTIONS
) -> Iterator[Conversation]:
    """A conversation that lasts as long as the context, and ``timeout_s`` at most."""
    asked = Conversation(controller, timeout_s=timeout_s, answer_s=answer_s, questions=questions)
    try:
        yield asked
    finally:
        asked.close()


def _told(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return one_line(text, 200)


def _takes_basic(headers: http.client.HTTPMessage) -> bool:
    """Whether who says no would take a password as we have sent it: then it is the wrong one."""
    ways = headers.get_all("WWW-Authenticate")
    return not ways or any(way.lower().startswith("basic") for way in ways)


def _tag(seen: Any) -> str:
    return seen if isinstance(seen, str) and re.fullmatch(r"[!-~]{1,200}", seen) else "*"


def _reason(said: bytes) -> str:
    """What a Redfish error says, in a few words."""
    with suppress(ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        error = json.loads(said)["error"]
        more = error.get("@Message.ExtendedInfo") or [{}]
        text = str(more[0].get("Message") or error.get("message") or "")
        return f": {one_line(text, 300)}" if text else ""
    return ""


def _object(said: bytes, what: str, hint: str) -> dict[str, Any]:
    try:
        found = json.loads(said or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NoRedfish(f"{what}: the answer is no Redfish", hint=hint)
    return found


def members(found: Mapping[str, Any]) -> list[str]:
    """The links of a collection that lead anywhere on this host."""
    listed = found.get("Members")
    links = [link_of(one) for one in listed] if isinstance(listed, list) else []
    return [link for link in links if link]


def link_of(one: Any) -> str:
    """Where a link leads on this host; empty where it does not."""
    path = one.get("@odata.id") if isinstance(one, Mapping) else None
    path = path.partition("#")[0] if isinstance(path, str) else ""
    return path if _PATH.fullmatch(path) else ""


def find_system(asked: Conversation) -> str:
    """The path of the system: the URL's own, or that of the only one there.

    Raises:
        SmsError: there are none, or several.
    """
    url = asked.controller.url
    path = urlsplit(url).path.rstrip("/")
    if path.startswith(f"{SYSTEMS}/"):
        return path
    paths = members(asked.ask("GET", SYSTEMS))
    if len(paths) != 1:
        raise SmsError(
            f"{url} has {len(paths)} systems: {', '.join(paths)[:300]}",
            hint="name the one that is meant behind the URL: https://bmc/redfish/v1/Systems/1",
        )
    return paths[0]


def power_off(controller: Controller, *, timeout_s: float) -> None:
    """Switch it off, at once, and wait until the controller says that it is.

    Raises:
        SmsError: it is not known to be off.
    """
    from appliance.tools.redfish_power import switch

    switch(controller, "off", timeout_s=timeout_s)
