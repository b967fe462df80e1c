"""A proxy in the outside of a lab, by which hosts of the lab reach the mirrors that this machine reaches."""

from __future__ import annotations

import ctypes
import http.client
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from appliance.lab import Lab
from appliance.lab.layout import GATEWAY, PUBLIC

ADDRESS = (GATEWAY[PUBLIC], 3128)
CLONE_NEWNET = 0x40000000
HOPS = {"connection", "keep-alive", "proxy-connection", "transfer-encoding"}


class Forward(BaseHTTPRequestHandler):
    """Fetches what a client of the lab requests, from this machine's network."""

    def do_GET(self) -> None:
        """One request, then the connection ends."""
        url = urlsplit(self.path)
        server = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOPS}
        try:
            server.request(self.command, url._replace(scheme="", netloc="").geturl(), headers=headers)
            answer = server.getresponse()
        except OSError as error:
            self.send_error(502, str(error))
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOPS:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        shutil.copyfileobj(answer, self.wfile)
        server.close()

    do_HEAD = do_GET  # noqa: N815 # the name that the server calls

    def log_message(self, *words: object) -> None:
        """Nothing."""


@contextmanager
def mirrors_for(lab: Lab) -> Iterator[tuple[str, ...]]:
    """Variables with which programs on hosts of the lab reach mirrors."""
    listener: list[socket.socket] = []
    thread = threading.Thread(target=lambda: listener.append(_listen(lab)))
    thread.start()
    thread.join()
    server = ThreadingHTTPServer(ADDRESS, Forward, bind_and_activate=False)
    server.socket.close()
    (server.socket,) = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield (f"http_proxy=http://{ADDRESS[0]}:{ADDRESS[1]}",)
    finally:
        server.shutdown()
        server.server_close()


def _listen(lab: Lab) -> socket.socket:
    """A socket of the network namespace of the outside; the thread that calls this stays in it."""
    space = os.open(f"/run/netns/{lab.layout.namespace('outside')}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)
    found = socket.create_server(ADDRESS)
    found.listen(64)
    return found
