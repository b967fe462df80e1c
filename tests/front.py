"""What nginx does in the VM, in a few lines of Python: TLS with client certificates before the service."""

from __future__ import annotations

import hashlib
import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.servers import server_context

PORT = 8443


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    backend = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # who shows a wrong certificate ends here


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def forward(self) -> None:
        assert isinstance(self.connection, ssl.SSLSocket)
        parts: Any = (self.connection.getpeercert() or {}).get("subject", ())
        subject = [pair for part in parts for pair in part]
        short = {"commonName": "CN", "organizationalUnitName": "OU", "serialNumber": "serialNumber"}
        headers = {
            "X-SMS-Scheme": "https",
            "X-SMS-Verify": "SUCCESS" if subject else "NONE",
            "X-SMS-Subject": ",".join(f"{short.get(key, key)}={value}" for key, value in reversed(subject)),
            "X-SMS-Fingerprint": hashlib.sha1(self.connection.getpeercert(True) or b"").hexdigest(),
            "X-SMS-Serial": str((self.connection.getpeercert() or {}).get("serialNumber", "")),
            "X-Real-IP": self.client_address[0],
        }
        if kind := self.headers.get("Content-Type"):
            headers["Content-Type"] = kind
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        link = http.client.HTTPConnection("127.0.0.1", self.server.backend, timeout=60)
        link.request(self.command, self.path, body or None, headers)
        answer = link.getresponse()
        said = answer.read()
        link.close()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        if answer.status != 204:
            self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = forward  # noqa: N815

    def log_message(self, *words: Any) -> None:
        pass


@dataclass
class Front:
    """Where verbs find the VM: its address, and the folder of the site's certificates."""

    address: str
    tls: Path
    backend: int
    server: _Server | None = None

    def start(self) -> None:
        """Answer from now on."""
        context = server_context(self.tls, self.tls.parent, [self.address], clients=ssl.CERT_OPTIONAL)
        server = _Server((self.address, PORT), _Handler)
        server.backend = self.backend
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.server = server

    def stop(self) -> None:
        """It no longer answers."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
        self.server = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """The VM is off for as long as the context lasts."""
        self.stop()
        try:
            yield
        finally:
            self.start()


@contextmanager
def front(folder: Path, address: str, backend: int) -> Iterator[Front]:
    """Stand before the service at a port of 127.0.0.1, with an authority in ``folder/tls``, made where there is none.

    Args:
        address: one of this machine's.
    """
    made = Front(address, folder / "tls", backend)
    made.start()
    try:
        yield made
    finally:
        made.stop()
