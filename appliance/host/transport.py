"""Paramiko's connection, without its races, and with limits of what it keeps for a server that may be hostile."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF, MSG_CHANNEL_EXTENDED_DATA

from appliance.host.base import Stuck, Unreachable
from appliance.text import one_line

# Without a handler paramiko's threads write tracebacks to standard error.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

MAX_PACKET = 1 << 18
"""Maximum size of a packet of the server (that of OpenSSH), and of what it sends before its version."""
CONNECTION_ERRORS = (OSError, EOFError, paramiko.SSHException)
SHELL_S = 30
"""Seconds that a login shell may take to run a command."""
SHOWN_BYTES = 1 << 10
INPUT_MESSAGES = (MSG_CHANNEL_DATA, MSG_CHANNEL_EOF)


class Packets(paramiko.packet.Packetizer):
    """Paramiko's reader of packets, which would keep any size that a server announces."""

    _greeting = 0

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > MAX_PACKET:
            raise paramiko.SSHException(f"a packet of {n} bytes")
        data: bytes = super().read_all(n, check_rekey)
        return data

    def _read_timeout(self, timeout: float) -> bytes:
        data: bytes = super()._read_timeout(timeout)  # type: ignore[misc]
        self._greeting += len(data)
        if self._greeting > MAX_PACKET:
            raise paramiko.SSHException("no version of SSH")
        return data


def _within_window(feed: Callable[[paramiko.Channel, paramiko.Message], None]) -> Callable[..., None]:
    """Return what takes output of a command, with an end for a server that sends more than the window permits."""

    def take(channel: Any, message: paramiko.Message) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("more output than the window of the channel permits")
        feed(channel, message)

    return take


class Transport(paramiko.Transport):
    """Paramiko's transport without two races that end a whole connection, and with limits of what it keeps.

    It drops input, and the end of input, for channels already closed. Paramiko's reader thread answers a channel close
    while another thread may still send input, above all one that waits for the end of a key exchange; sshd then closes
    the connection with `ieof packet referred to nonexistent channel`. The message has only the number that sshd has
    given the channel, which the next one gets again: it would be the end of that one's input. So it keeps its channel.

    It defers what the reader thread sends during a key exchange, which follows each 512 MiB. If a command ended then,
    the reader thread, which performs the exchange, waited for it to answer the close: `Key-exchange timed out`
    (paramiko issue 822).
    """

    _channel_handler_table: ClassVar[dict[int, Callable[..., None]]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _within_window(paramiko.Channel._feed),  # type: ignore[attr-defined]
        MSG_CHANNEL_EXTENDED_DATA: _within_window(paramiko.Channel._feed_extended),  # type: ignore[attr-defined]
    }

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._deferred: list[paramiko.Message] = []
        super().__init__(*arguments, **{**options, "packetizer_class": Packets})

    def _send_user_message(self, data: paramiko.Message) -> None:
        raw = data.asbytes()
        if raw[0] in INPUT_MESSAGES:
            data.channel = self._find_open(int.from_bytes(raw[1:5], "big"))  # type: ignore[attr-defined]
        if threading.current_thread() is not self:
            super()._send_user_message(data)  # type: ignore[misc]
            return
        with self.clear_to_send_lock:
            if self.clear_to_send.is_set():
                self._send_message(data)
            else:
                self._deferred.append(data)

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]
        deferred, self._deferred = self._deferred, []
        for data in deferred:
            self._send_user_message(data)

    def _send_message(self, data: paramiko.Message) -> None:
        # Calls are serialized, and a channel is marked closed before its close message is sent.
        if data.asbytes()[0] in INPUT_MESSAGES:
            channel = data.channel  # type: ignore[attr-defined]
            if channel is None or channel.closed:
                return
        super()._send_message(data)  # type: ignore[misc]

    def _find_open(self, number: int) -> paramiko.Channel | None:
        """Return the open channel to which the server has given this number; one that is being opened has 0."""
        channels = self._channels.values()  # type: ignore[attr-defined]
        found = (one for one in channels if one.remote_chanid == number and one.active and not one.closed)
        return next(found, None)


def make_transport(sock: Any, /, **options: Any) -> paramiko.Transport:
    """Return a transport that prefers AES-GCM, if available: twice the throughput of paramiko's default.

    Small packets are sent at once (TCP_NODELAY, tcp(7)): those of a command would wait for an acknowledgement, which
    the other side delays by 40 ms.
    """
    transport = Transport(sock, **options)
    if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    choice = transport.get_security_options()
    choice.ciphers = tuple(sorted(choice.ciphers, key=lambda name: "gcm" not in name))
    return transport


def close_channel(channel: paramiko.Channel) -> None:
    """Close it, also where the connection is gone."""
    with contextlib.suppress(*CONNECTION_ERRORS):
        channel.close()


def need_files(name: str, files: Mapping[str, Path | None]) -> None:
    """Check that this machine can read the files that a connection needs, by their keys in the site file.

    Raises:
        Unreachable: it cannot.
    """
    for what, path in files.items():
        try:
            if path:
                path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "is not text"
            hint = f"it is `{what}` in the site file, and has to be readable on this machine"
            raise Unreachable(f"{name} was not asked: {path}: {why}", hint=hint) from error


def check_shell(transport: paramiko.Transport, name: str, where: str) -> None:
    """Check that the login shell on a host runs commands, and that their output is the only one.

    Args:
        name: of the host, for messages.
        where: user and address.

    Raises:
        Unreachable: it prints something itself, or runs something else.
    """
    try:
        channel = transport.open_session(timeout=SHELL_S)
        try:
            channel.settimeout(SHELL_S)
            channel.exec_command("true")
            printed = channel.recv(SHOWN_BYTES)
            status = 0 if printed else channel.recv_exit_status()
        finally:
            close_channel(channel)
    except CONNECTION_ERRORS as error:
        raise Stuck(
            f"{name}: {where}: {error or 'the login shell does not answer'}", hint="is it overloaded?"
        ) from error
    if printed:
        text = one_line(printed.decode(errors="replace"), 80)
        raise Unreachable(
            f"{name}: {where}: the login shell there prints {text!r} besides the output of commands",
            hint="a start file such as ~/.bashrc is to print only where `[ -t 1 ]`; or it is a ForceCommand",
        )
    if status:
        raise Unreachable(
            f"{name}: {where}: the login shell there runs no commands: `true` ended with status {status}",
            hint="sms needs a user whose shell runs any command: `ssh` to it, and try `true`",
        )
