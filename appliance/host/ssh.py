"""A host over SSH. Its key must be known; nothing is asked, nothing is accepted on trust."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import paramiko

from appliance.errors import SmsError
from appliance.host.base import (
    BLOCK,
    WRITE_BESIDE,
    CommandError,
    CommandTimeout,
    Host,
    OnLine,
    Progress,
    Result,
    Unreachable,
    check_written,
    count_bytes,
)

# It writes tracebacks of its threads to standard error where nobody has set up logging.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

TIMED_OUT = 124
"""Exit status of timeout(1) when it ended the command."""
SIGNALLED = -1
"""Status of a command that a signal ended: paramiko does not tell which one."""
KILLED = (TIMED_OUT, SIGNALLED, 128 + signal.SIGKILL)
"""What a command can end with once its time is over: the last resort of timeout(1) ends itself, too."""
KILL_AFTER_S = 5
GRACE_S = 15
"""How much later than the far side this one gives up."""
STALLED_S = 120
"""Seconds without one byte moved until a copy is given up."""
GONE_MS = 60_000
"""How long the far side's kernel may leave what was sent unacknowledged, the keepalives included."""
BROKEN = (OSError, EOFError, paramiko.SSHException)
AGAIN = "run the command again"


class Ssh(Host):
    """Commands run over one SSH connection, each in a channel of its own."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        user: str = "root",
        port: int = 22,
        key: Path | None = None,
        known_hosts: Path | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.user = user
        self.port = port
        self.key = key
        self.known_hosts = known_hosts
        self._client: paramiko.SSHClient | None = None

    def _transport(self) -> paramiko.Transport:
        """The open connection; made anew where it broke."""
        if self._client:
            transport = self._client.get_transport()
            if transport and transport.is_active():
                return transport
            self._client.close()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        try:
            self._connect(client)
            transport = client.get_transport()
            assert transport
        except BaseException:
            client.close()
            raise
        transport.set_keepalive(5)
        # Keepalives wait for no answer; without this a host that lost its power is noticed after a quarter of an hour.
        if isinstance(transport.sock, socket.socket):
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
        self._client = client
        return transport

    def _connect(self, client: paramiko.SSHClient) -> None:
        where = f"{self.user}@{self.address}:{self.port}"
        try:
            if self.known_hosts:
                client.load_host_keys(str(self.known_hosts))
            else:
                client.load_system_host_keys()
            client.connect(
                self.address,
                self.port,
                self.user,
                key_filename=str(self.key) if self.key else None,
                timeout=5,
                banner_timeout=10,
                auth_timeout=10,
            )
        except paramiko.BadHostKeyException as error:
            raise Unreachable(
                f"{self.name}: {where} shows another host key than the known one",
                hint="someone may be in between; if the host was reinstalled, update the known_hosts file",
            ) from error
        except paramiko.AuthenticationException as error:
            raise Unreachable(
                f"{self.name}: {where} refuses the login: {error}", hint="check the user and the key"
            ) from error
        except BROKEN as error:
            unknown = "not found in known_hosts" in str(error)
            hint = (
                f"compare its fingerprint on the host, then: ssh-keyscan -p {self.port} {self.address}"
                if unknown
                else "is the host up, and sshd running?"
            )
            raise Unreachable(f"{self.name}: {where}: {error}", hint=hint) from error

    @contextmanager
    def _start(self, argv: tuple[str, ...]) -> Iterator[paramiko.Channel]:
        """A channel that ``argv`` runs behind, closed in the end however that comes."""
        sudo = () if self.user == "root" else ("sudo", "-n", "--")
        transport = self._transport()
        try:
            channel = transport.open_session(timeout=10)
        except paramiko.ChannelException as error:
            raise Unreachable(f"{self.name}: it takes no further session: {error}", hint=AGAIN) from error
        except BROKEN as error:
            transport.close()
            raise self._broken(argv) from error
        try:
            try:
                channel.exec_command(shlex.join([*sudo, "env", "LC_ALL=C.UTF-8", *argv]))
            except BROKEN as error:
                raise self._broken(argv) from error
            yield channel
        finally:
            with contextlib.suppress(*BROKEN):
                channel.close()

    def _broken(self, argv: tuple[str, ...]) -> Unreachable:
        return Unreachable(f"{self.name}: the connection broke during `{shlex.join(argv)[:200]}`", hint=AGAIN)

    def _silent(self, channel: paramiko.Channel, argv: tuple[str, ...], waited: float) -> SmsError:
        """What to raise when nothing came in time: the command hangs, or the host does not answer."""
        transport = channel.get_transport()
        try:
            transport.open_session(timeout=5).close()
        except paramiko.ChannelException:
            pass  # even a refusal is an answer
        except BROKEN:
            transport.close()
            return Unreachable(f"{self.name} does not answer", hint="is it up? Then run the command again")
        hint = f"nothing came from it within {waited:g} s"
        return CommandTimeout(Result(self.name, argv, TIMED_OUT, b"", b""), hint=hint)

    def _blocks(
        self, channel: paramiko.Channel, argv: tuple[str, ...], recv: Callable[[int], bytes]
    ) -> Iterator[bytes]:
        """What comes from one output of the command until its end, or the connection's."""
        while True:
            try:
                block = recv(BLOCK)
            except TimeoutError as error:
                raise self._silent(channel, argv, channel.gettimeout() or 0) from error
            except BROKEN as error:
                raise self._broken(argv) from error
            if not block:
                return
            yield block

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
    ) -> Result:
        # Closing a channel does not end what runs behind it: the far side keeps the time itself.
        timed = ("timeout", f"--kill-after={KILL_AFTER_S}", f"{timeout:g}", *argv) if timeout else argv
        began = time.monotonic()
        with self._start(timed) as channel:
            channel.settimeout(timeout + KILL_AFTER_S + GRACE_S if timeout else None)
            stdout, stderr = self._read(channel, argv, input, on_line)
            status = self._status(channel, argv)
        result = Result(self.name, argv, status, stdout, stderr)
        if timeout and status in KILLED and time.monotonic() - began >= timeout:
            raise CommandTimeout(result, hint=f"it did not end within {timeout:g} s and was ended")
        if ok is not None and status not in ok:
            raise CommandError(result)
        return result

    def _read(
        self, channel: paramiko.Channel, argv: tuple[str, ...], input: bytes | None, on_line: OnLine | None
    ) -> tuple[bytes, bytes]:
        """Read both outputs together: one after the other hangs once the other's window is full."""
        outputs: list[bytes] = []
        errors: list[bytes] = []

        def read_errors() -> None:
            with contextlib.suppress(*BROKEN):
                while block := channel.recv_stderr(BLOCK):
                    errors.append(block)

        def feed() -> None:
            with contextlib.suppress(*BROKEN):
                if input:
                    channel.sendall(input)
                channel.shutdown_write()

        threads = [threading.Thread(target=work, daemon=True) for work in (read_errors, feed)]
        for thread in threads:
            thread.start()
        rest = b""
        for block in self._blocks(channel, argv, channel.recv):
            outputs.append(block)
            if on_line:
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    on_line(line.decode(errors="replace"))
        if on_line and rest:
            on_line(rest.decode(errors="replace"))
        for thread in threads:
            thread.join()
        return b"".join(outputs), b"".join(errors)

    def _status(self, channel: paramiko.Channel, argv: tuple[str, ...]) -> int:
        """Exit status of the command, or ``SIGNALLED``.

        Raises:
            Unreachable: the connection broke, and nobody knows.
        """
        timeout = channel.gettimeout()
        if not channel.status_event.wait(timeout):
            raise self._silent(channel, argv, timeout or 0)
        status = channel.recv_exit_status()
        if status == SIGNALLED or not channel.eof_received:
            # A dying transport closes its channels just before it says that it is dead.
            transport = channel.get_transport()
            transport.join(0.2)
            if not transport.is_active():
                raise self._broken(argv)
        return status

    def send(self, source: BinaryIO, path: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        size = count_bytes(source)
        argv = ("write", path)
        done = 0
        # Left early, the channel is closed, and the far side refuses what it has by its size.
        with self._start(("sh", "-c", WRITE_BESIDE, "send", path, f"{mode:o}", str(size))) as channel:
            channel.settimeout(STALLED_S)
            while block := source.read(BLOCK):
                try:
                    channel.sendall(block)
                except TimeoutError as error:
                    raise self._silent(channel, argv, STALLED_S) from error
                except BROKEN:
                    break  # it ended, or the connection did: its status tells
                done += len(block)
                if progress:
                    progress(done)
            channel.settimeout(None)  # flushing to a slow disk takes as long as it takes
            with contextlib.suppress(*BROKEN):
                channel.shutdown_write()
            stderr = b"".join(self._blocks(channel, argv, channel.recv_stderr))
            status = self._status(channel, argv)
        check_written(self.name, path, status, stderr)

    def fetch(self, path: str, sink: BinaryIO, *, progress: Progress | None = None) -> None:
        argv = ("cat", "--", path)
        done = 0
        with self._start(argv) as channel:
            channel.settimeout(STALLED_S)
            for block in self._blocks(channel, argv, channel.recv):
                sink.write(block)
                done += len(block)
                if progress:
                    progress(done)
            stderr = b"".join(self._blocks(channel, argv, channel.recv_stderr))
            status = self._status(channel, argv)
        if status:
            raise CommandError(Result(self.name, argv, status, b"", stderr))

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        with self._start(argv) as channel:
            channel.settimeout(timeout)
            said = b""
            for block in self._blocks(channel, argv, channel.recv):
                said += block
                if b"\n" in said:
                    break
            if not said:
                stderr = b"".join(self._blocks(channel, argv, channel.recv_stderr))
                raise CommandError(Result(self.name, argv, self._status(channel, argv), b"", stderr))
            channel.settimeout(None)
            try:
                yield said.partition(b"\n")[0].decode(errors="replace")
            finally:
                with contextlib.suppress(*BROKEN):
                    channel.shutdown_write()
                channel.status_event.wait(5)

    def interact(self, *argv: str) -> int:
        options = ["-o", "StrictHostKeyChecking=yes", "-p", str(self.port)]
        if self.known_hosts:
            options += ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        if self.key:
            options += ["-i", str(self.key)]
        sudo = [] if self.user == "root" else ["sudo", "-n", "--"]
        # A terminal there only where there is one here: it would turn line ends and swallow stderr.
        terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else ["-T"]
        command = ["ssh", *terminal, *options, f"{self.user}@{self.address}", shlex.join([*sudo, *argv])]
        return subprocess.run(command, check=False).returncode

    def close(self) -> None:
        """End the connection."""
        if self._client:
            self._client.close()
            self._client = None
