"""Ports and certificates of the servers that tests run."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from appliance.operations.site.ca import issue_server, make_ca

LOOPBACK = ("127.0.0.1",)
_given: set[int] = set()
"""Of this process: a port that nobody listens on yet is not given again."""


def free_port(addresses: Sequence[str] = LOOPBACK, kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port that is free at all of them, and that this process has not been given before."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket(type=kind))
            first.bind((addresses[0], 0))
            port = int(first.getsockname()[1])
            try:
                for address in addresses[1:]:
                    stack.enter_context(socket.socket(type=kind)).bind((address, port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


def server_files(tls: Path, folder: Path, addresses: Sequence[str] = LOOPBACK) -> tuple[Path, Path]:
    """Certificate and key, in ``folder``, of a server at these addresses.

    Args:
        tls: folder of the authority, which is made where there is none.
    """
    if not (tls / "ca.pem").exists():
        make_ca(tls)
    pair = issue_server(tls, hostname="sms-provision", addresses=addresses)
    (folder / "server.pem").write_bytes(pair.certificate)
    (folder / "server.key").write_bytes(pair.key)
    return folder / "server.pem", folder / "server.key"


def server_context(
    tls: Path, folder: Path, addresses: Sequence[str] = LOOPBACK, *, clients: ssl.VerifyMode = ssl.CERT_NONE
) -> ssl.SSLContext:
    """A server's side of TLS, with ``server_files``; ``clients``: whether they need a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*server_files(tls, folder, addresses))
    context.load_verify_locations(tls / "ca.pem")
    context.verify_mode = clients
    return context


@contextmanager
def accepting(listening: socket.socket, talk: Callable[[socket.socket], None]) -> Iterator[None]:
    """Talk with each client in a thread of its own as long as the context lasts; nothing listens afterwards."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
