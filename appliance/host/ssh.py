"""A host over SSH. Its key must be known; nothing is asked, nothing is accepted on trust."""

from __future__ import annotations

import contextlib
import logging
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import paramiko

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
)

# It writes tracebacks of its threads to standard error where nobody has set up logging.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

TIMED_OUT = 124
"""Exit status of timeout(1) when it ended the command."""


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
                timeout=10,
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
        except (paramiko.SSHException, OSError) as error:
            unknown = "not found in known_hosts" in str(error)
            hint = (
                f"compare its fingerprint on the host, then: ssh-keyscan -p {self.port} {self.address}"
                if unknown
                else "is the host up, and sshd running?"
            )
            raise Unreachable(f"{self.name}: {where}: {error}", hint=hint) from error
        self._client = client
        transport = client.get_transport()
        assert transport
        transport.set_keepalive(5)
        return transport

    def _start(self, argv: tuple[str, ...]) -> paramiko.Channel:
        sudo = () if self.user == "root" else ("sudo", "-n", "--")
        try:
            channel = self._transport().open_session(timeout=10)
            channel.exec_command(shlex.join([*sudo, "env", "LC_ALL=C.UTF-8", *argv]))
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise Unreachable(f"{self.name}: the connection broke: {error}", hint="run the command again") from error
        return channel

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
    ) -> Result:
        # Closing a channel does not end what runs behind it: the far side keeps the time itself.
        timed = ("timeout", "--kill-after=5", f"{timeout:g}", *argv) if timeout else argv
        channel = self._start(timed)
        lines: list[bytes] = []

        def take(line: bytes) -> None:
            lines.append(line)
            if on_line:
                on_line(line.decode(errors="replace").rstrip("\n"))

        stderr = self._drain(channel, input, channel.makefile("rb"), take)
        status = self._status(channel, argv)
        result = Result(self.name, argv, status, b"".join(lines), stderr)
        if timeout and status == TIMED_OUT:
            raise CommandTimeout(result, hint=f"it did not end within {timeout:g} s and was ended")
        if ok is not None and status not in ok:
            raise CommandError(result)
        return result

    def _drain(
        self,
        channel: paramiko.Channel,
        input: bytes | None,
        stdout: paramiko.ChannelFile,
        take: Callable[[bytes], None],
    ) -> bytes:
        """Read both outputs together: one after the other hangs once the other's window is full."""
        errors: list[bytes] = []

        def read_errors() -> None:
            while block := channel.recv_stderr(BLOCK):
                errors.append(block)

        def feed() -> None:
            with contextlib.suppress(OSError):
                if input:
                    channel.sendall(input)
                channel.shutdown_write()

        threads = [threading.Thread(target=work, daemon=True) for work in (read_errors, feed)]
        for thread in threads:
            thread.start()
        for line in stdout:
            take(line if isinstance(line, bytes) else line.encode())
        for thread in threads:
            thread.join()
        return b"".join(errors)

    def _status(self, channel: paramiko.Channel, argv: tuple[str, ...]) -> int:
        status = channel.recv_exit_status()
        channel.close()
        if status == -1:
            raise Unreachable(
                f"{self.name}: the connection broke during `{shlex.join(argv)[:200]}`", hint="run the command again"
            )
        return status

    def send(self, source: BinaryIO, path: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        argv = ("sh", "-c", WRITE_BESIDE, "send", path, f"{mode:o}")
        channel = self._start(argv)
        done = 0
        try:
            while block := source.read(BLOCK):
                channel.sendall(block)
                done += len(block)
                if progress:
                    progress(done)
            channel.shutdown_write()
        except OSError as error:
            if not channel.exit_status_ready():
                # No end of input was sent: the far side must not take half a file for a whole one.
                channel.close()
                raise Unreachable(
                    f"{self.name}: the connection broke while sending {path}", hint="run it again"
                ) from error
        stderr = channel.makefile_stderr("rb").read()
        status = self._status(channel, argv)
        if status:
            raise CommandError(Result(self.name, ("write", path), status, b"", stderr))

    def fetch(self, path: str, sink: BinaryIO, *, progress: Progress | None = None) -> None:
        argv = ("cat", "--", path)
        channel = self._start(argv)
        done = 0
        while block := channel.recv(BLOCK):
            sink.write(block)
            done += len(block)
            if progress:
                progress(done)
        stderr = channel.makefile_stderr("rb").read()
        status = self._status(channel, argv)
        if status:
            raise CommandError(Result(self.name, argv, status, b"", stderr))

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        channel = self._start(argv)
        channel.settimeout(timeout)
        try:
            try:
                line = channel.makefile("rb").readline()
            except TimeoutError:
                raise CommandTimeout(Result(self.name, argv, TIMED_OUT, b"", b"")) from None
            if not line:
                stderr = channel.makefile_stderr("rb").read()
                raise CommandError(Result(self.name, argv, channel.recv_exit_status(), b"", stderr))
            yield (line.decode(errors="replace") if isinstance(line, bytes) else line).rstrip("\n")
        finally:
            with contextlib.suppress(OSError, EOFError):
                channel.shutdown_write()
            channel.close()

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
