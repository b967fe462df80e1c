"""A hostile VM: in place of the provisioning VM's web server, with its certificate and keys, as root there has them.

It forwards requests to the real service, so that it knows the honest response, and answers with what an attack makes
of it.
``Attacker`` is for ``tests.bmcs.serve``.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bmcs import Request, answer, says
from tests.provd import ADMIN

HOSTILE = "a\x1b]0;title\x07b\x1b[31;5mc\x9b2Jd\u202ee\x00f\x85g\r\n; touch PWNED $(touch PWNED) `touch PWNED`"
"""Sets the title and colours, clears the screen, reverses text, begins a line, and is a command if it is not quoted."""
FORBIDDEN = ("\x1b", "\x07", "\x9b", "\u202e", "\0", "\x85", "\r")
ENDLESS = 80 << 20
"""Bytes of a response that does not end: more than any that the admin host reads."""


def alter(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return parsed JSON with each text, number and truth value replaced."""
    if isinstance(value, dict):
        return {key: alter(one, leaf) for key, one in value.items()}
    if isinstance(value, list):
        return [alter(one, leaf) for one in value]
    return leaf(value)


def alter_keys(value: Any) -> Any:
    """Return parsed JSON with hostile text in all keys that are data: paths, names of files."""
    if isinstance(value, dict):
        data = any("/" in key or "." in key for key in value)
        return {f"{key}{HOSTILE}" if data else key: alter_keys(one) for key, one in value.items()}
    return [alter_keys(one) for one in value] if isinstance(value, list) else value


def swap_kinds(value: Any) -> Any:
    """Return parsed JSON with a list for each object below the first, and an object for each list."""
    if isinstance(value, dict):
        return {key: list(one) if isinstance(one, dict) else swap_kinds(one) for key, one in value.items()}
    return dict.fromkeys(map(str, range(len(value))), 1) if isinstance(value, list) else value


def drop_keys(value: Any) -> Any:
    """Return parsed JSON without what is in the objects of its lists, but for names."""
    if isinstance(value, dict):
        return {key: drop_keys(one) for key, one in value.items() if isinstance(one, list | dict) or key == "name"}
    return [drop_keys(one) for one in value] if isinstance(value, list) else value


def _number(given: str) -> Callable[[Any], Any]:
    return lambda leaf: given if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf


def _only_text(change: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda leaf: change(leaf) if isinstance(leaf, str) else leaf


CHANGES: dict[str, Callable[[Any], Any]] = {
    "escape sequences in texts": lambda found: alter(found, _only_text(lambda text: f"{text}{HOSTILE}")),
    "only escape sequences": lambda found: alter(found, _only_text(lambda _: HOSTILE)),
    "escape sequences in keys": alter_keys,
    "paths out of a folder": lambda found: alter(found, _only_text(lambda _: "../../../../PWNED")),
    "absolute paths": lambda found: alter(found, _only_text(lambda _: "/PWNED")),
    "options": lambda found: alter(found, _only_text(lambda _: "--help")),
    "long texts": lambda found: alter(found, _only_text(lambda _: "9" * 100_000)),
    "objects for texts": lambda found: alter(found, _only_text(lambda _: {"x": [1]})),
    "null": lambda found: alter(found, lambda _: None),
    "lists for objects": swap_kinds,
    "missing keys": drop_keys,
    "no object": lambda _: [[]],
    "nothing": lambda _: None,
    "a text": lambda _: HOSTILE,
    "huge numbers": lambda found: alter(found, _number("@" + "9" * 400)),
    "largest numbers": lambda found: alter(found, _number("@1e308")),
    "negative numbers": lambda found: alter(found, _number("@-1e18")),
    "whole negative numbers": lambda found: alter(found, _number("@-9223372036854775807")),
    "no numbers": lambda found: alter(found, _number("@NaN")),
    "infinite numbers": lambda found: alter(found, _number("@-Infinity")),
}
"""Attacks by the content of a response that is JSON. A text after ``@`` is sent without its quotes."""


def _chunks(link: ssl.SSLSocket, head: bytes, block: bytes, count: int, pause_s: float = 0) -> None:
    link.sendall(head)
    for _ in range(count):
        link.sendall(block)
        time.sleep(pause_s)


def _refuse(status: int) -> Callable[[Request, ssl.SSLSocket], bytes]:
    problem = {"type": "about:blank", "title": HOSTILE, "status": status, "detail": HOSTILE * 1000, "hint": HOSTILE}
    return lambda _, __: answer(status, problem)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RAW: dict[str, Callable[[Request, ssl.SSLSocket], bytes | None]] = {
    "a refusal": _refuse(403),
    "an error": _refuse(500),
    "an error that is not JSON": lambda _, __: answer(409, HOSTILE.encode()),
    "deep JSON": lambda _, __: answer(200, b"[" * 200_000),
    "deep objects": lambda _, __: answer(200, b'{"nodes":' * 100_000),
    "a deep refusal": lambda _, __: answer(400, b"[" * 200_000),
    "half of JSON": lambda _, __: answer(200, b'{"nodes": [{"name": "node001", '),
    "bytes": lambda _, __: answer(200, bytes(range(256)) * 10),
    "no HTTP": says(f"{HOSTILE}\r\n\r\n".encode()),
    "a status with escape sequences": says(f"HTTP/1.1 599 {HOSTILE[:30]}\r\n\r\n".encode()),
    "a wrong length": says(HEAD + b"Content-Length: 9999\r\n\r\n{}"),
    "a negative length": says(HEAD + b"Content-Length: -1\r\n\r\n{}"),
    "a wrong chunk": says(HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFF\r\n{}"),
    "an endless header": lambda _, link: _chunks(link, HEAD, b"X-Long: " + b"x" * 60_000 + b"\r\n", 1000),
    "an endless line": lambda _, link: _chunks(link, HEAD + b"X-Long: ", b"x" * 65536, 1000),
    "an endless body": lambda _, link: _chunks(link, HEAD + b"\r\n", b" " * 65536, ENDLESS >> 16),
    "the end": lambda _, __: None,
}
"""Attacks by the response as a whole."""
SLOW: dict[str, Callable[[Request, ssl.SSLSocket], bytes | None]] = {
    "a slow header": lambda _, link: _chunks(link, HEAD + b"X-Slow: ", b"x", 1000, 0.1),
    "a slow body": lambda _, link: _chunks(link, HEAD + b"\r\n", b" ", 1000, 0.1),
    "interim responses": lambda _, link: _chunks(link, b"", b"HTTP/1.1 100 Continue\r\n\r\n", 1000, 0.1),
}
"""Attacks by a response that never ends, and is never silent."""


def redirect(status: int, to: str) -> Callable[[Request, ssl.SSLSocket], bytes]:
    """Return an attack that sends the client on to a URL."""
    return lambda request, _: answer(status, b"", f"Location: {to}{request.path}\r\n")


class Attacker:
    """Behaves as an attack says. ``backend`` is the port of the real service on this machine."""

    def __init__(self, backend: int) -> None:
        self.backend = backend
        self.attack: Callable[[Request, ssl.SSLSocket], bytes | None] | None = None
        self.change: Callable[[Any], Any] | None = None
        self.asked: list[tuple[str, str]] = []

    def __call__(self, request: Request, link: ssl.SSLSocket) -> bytes | None:
        self.asked.append((request.method, request.path))
        try:
            return self.attack(request, link) if self.attack else self._changed(request)
        except OSError:
            return None  # the client has ended it

    def _changed(self, request: Request) -> bytes:
        status, data = self._forward(request)
        if not self.change or not data:
            return answer(status, data)
        # json writes no numbers that Python cannot read again.
        text = re.sub(r'"@([^"]*)"', r"\1", json.dumps(self.change(json.loads(data))))
        return answer(status, text.encode(), "Content-Type: application/json\r\n")

    def _forward(self, request: Request) -> tuple[int, bytes]:
        headers = {**ADMIN, "X-Real-IP": "127.0.0.1", "Content-Type": request.headers.get("content-type", "")}
        service = http.client.HTTPConnection("127.0.0.1", self.backend, timeout=60)
        try:
            service.request(request.method, request.path, request.body or None, headers)
            honest = service.getresponse()
            return honest.status, honest.read()
        finally:
            service.close()


@contextmanager
def agent(path: Path, reply: Callable[[bytes], bytes]) -> Iterator[None]:
    """A guest agent on a socket: each line that it gets is answered by ``reply``."""
    listening = socket.socket(socket.AF_UNIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    listening.bind(str(path))
    listening.listen(8)

    def talk(link: socket.socket) -> None:
        with link, link.makefile("rb") as lines:
            try:
                for line in lines:
                    link.sendall(reply(line))
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                link, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        path.unlink()
