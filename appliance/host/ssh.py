"""A host over SSH. Its host key must be known: no key is accepted on first use. Only ``interact`` may prompt."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import paramiko

from appliance.errors import SmsError
from appliance.host.base import (
    BLOCK,
    CommandError,
    CommandTimeout,
    Host,
    OnLine,
    Result,
    Stuck,
    TooMuchOutput,
    Unreachable,
)
from appliance.host.stream import KILL_S, LATE_S, MAX_ERRORS, TERM_S, LineReader, Stream, expires_after
from appliance.host.transport import CONNECTION_ERRORS, check_shell, close_channel, make_transport, need_files
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.secret import secrets_of

TIMED_OUT = 124
"""Exit status of timeout(1) when it ended the command."""
SIGNALLED = -1
"""Status of a command that a signal ended; paramiko does not report which one."""
KILLED = (TIMED_OUT, SIGNALLED, 128 + signal.SIGKILL)
"""Statuses after a timeout: with --kill-after, timeout(1) also kills itself."""
KILL_AFTER_S = 5
GRACE_S = 15
"""Seconds that the local timeout exceeds the remote one."""
CONNECT_S = 5
"""Seconds until an address that does not answer counts as unreachable."""
MOST_CONNECTIONS = 32
"""Besides the first one, where a host has few sessions on each."""
STALLED_S = 120
"""Seconds without progress until a copy is aborted."""
GONE_MS = 60_000
"""TCP_USER_TIMEOUT: how long sent data, keepalives included, may stay unacknowledged; see ``limit_silence``."""
WINDOW_BYTES = 1 << 24
"""Receive window of a stream. Paramiko's default of 2 MiB often stalls the sender."""
PACKET_BYTES = 1 << 15
"""Maximum packet size (OpenSSH's limit)."""
PRINT_PID = 'echo "sms-pid:$$" >&2; exec "$@"'
"""Shell script: print the process ID on standard error, then exec the command."""
PID_LINE = re.compile(rb"(?:^|\n)sms-pid:([0-9]{1,10})\n")
"""Output of ``PRINT_PID``. Messages of sudo (`unable to resolve host`) or of shell start-up files may precede it."""
PID_SEARCH_BYTES = 1 << 16
"""Bytes of standard error that are searched for the process ID."""
END_GROUP = """\
group=$(ps -o pgid= -p "$1" | tr -d " ") && [ -n "$group" ] || exit 0
for name in TERM KILL; do
    kill -s "$name" -- "-$group" 2>/dev/null
    for tenth in $(seq "$2"); do kill -s 0 -- "-$group" 2>/dev/null || exit 0; sleep 0.1; done
    shift
done
"""
"""Shell script: SIGTERM to the group of process $1, $2 tenths of a second later SIGKILL, then wait $3 tenths."""
START_S = 30
"""Seconds until a server that does not start a command is given up."""
RETRY_HINT = "run the command again"


class SshStream(Stream):
    """A command in its own channel."""

    def __init__(self, host: Ssh, channel: paramiko.Channel, argv: tuple[str, ...], stderr: LineReader) -> None:
        self.host = host
        self.channel = channel
        self.argv = argv
        self.stderr = stderr
        self.pid = ""
        self._started = threading.Event()
        self._finished = False
        channel.settimeout(STALLED_S)
        self._thread = threading.Thread(target=self._read_stderr, daemon=True)
        self._thread.start()

    def _read_stderr(self) -> None:
        first: bytes | None = b""
        with contextlib.suppress(*CONNECTION_ERRORS):
            while True:
                try:
                    block = output = self.channel.recv_stderr(BLOCK)
                except TimeoutError:
                    continue  # no output yet
                if first is not None:
                    first += block
                    found = PID_LINE.search(first)
                    if block and not found and len(first) < PID_SEARCH_BYTES:
                        continue
                    if found:
                        self.pid = found[1].decode()
                        first = first[: found.start()] + (b"\n" if found.start() else b"") + first[found.end() :]
                    output, first = first, None
                    self._started.set()
                if output:
                    self.stderr.feed(output)
                if not block:
                    break
                if self.stderr.size > MAX_ERRORS:
                    self.abort()
                    break
        self._started.set()
        self.stderr.feed(b"")

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            try:
                view = view[self.channel.send(bytes(view[:PACKET_BYTES])) :]
            except TimeoutError as error:
                self._check_responsive(error)
            except CONNECTION_ERRORS:
                # The command ended, or the connection broke: the status shows which.
                raise CommandError(
                    self.result(ok=None), hint="the command ended before it had read all its input"
                ) from None
        return len(data)

    def _check_responsive(self, error: TimeoutError) -> None:
        """Raise Unreachable if the host does not respond; return if only the command is slow."""
        why = self.host._silent(self.channel, self.argv, STALLED_S)
        if isinstance(why, Unreachable):
            raise why from error

    def end(self) -> None:
        with contextlib.suppress(*CONNECTION_ERRORS):
            self.channel.shutdown_write()

    def read(self, size: int = BLOCK) -> bytes:
        while True:
            try:
                block = self.channel.recv(size)
            except TimeoutError as error:
                self._check_responsive(error)
                continue
            except CONNECTION_ERRORS as error:
                raise self.host._broken(error) from error
            if not block and not self.channel.eof_received:
                # A broken connection looks like the end of the output.
                self.channel.get_transport().join(0.2)
                if not self.channel.get_transport().is_active():
                    raise self.host._broken()
            return block

    def _status(self) -> int:
        while True:
            try:
                return self.host._status(self.channel, self.argv)
            except CommandTimeout:
                continue  # the host responds: the command is slow

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        self.end()
        while self.read():
            pass
        status = self._status()
        self._thread.join(LATE_S)
        self._finished = True
        return Result(self.host.name, self.argv, status, b"", self.stderr.tail).expect(ok)

    def close(self) -> None:
        """Terminate the command if it still runs, unless it was left.

        sshd does not signal a command without a terminal when its channel closes: one that neither reads nor
        writes would keep running.
        """
        if self._finished or self.channel.status_event.is_set():
            return
        self.end()
        if self.left:
            return
        self._started.wait(LATE_S)  # the process ID may not have arrived yet
        if self.pid:
            tenths = (f"{grace * 10:.0f}" for grace in (TERM_S, KILL_S))
            self.host.run("sh", "-c", END_GROUP, "end", self.pid, *tenths, ok=None, timeout=30)

    def abort(self) -> None:
        close_channel(self.channel)


class SshOutputs:
    """Both outputs of a command, each of at most ``limit`` bytes, and its input."""

    def __init__(self, channel: paramiko.Channel, limit: int, on_line: OnLine | None) -> None:
        self.channel = channel
        self.limit = limit
        self.overflow = False
        self._on_line = on_line
        self._stdout, self._stderr, self._line = bytearray(), bytearray(), 0

    def result(self, host: str, argv: tuple[str, ...], status: int, input: bytes | None) -> Result:
        """Return the result with a status; ``input``: that of the command."""
        return Result(host, argv, status, bytes(self._stdout), bytes(self._stderr), secrets_of(input))

    def exchange(self, input: bytes | None) -> None:
        """Write the input, and read both outputs to their ends; all end early once the channel is closed.

        At once: reading one output after the other blocks once the other's window is full.
        """

        def read_errors() -> None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                while self._keep(self._stderr, self.channel.recv_stderr(BLOCK)):
                    pass

        def feed() -> None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                if input:
                    self.channel.sendall(input)
                self.channel.shutdown_write()

        reader, feeder = (threading.Thread(target=work, daemon=True) for work in (read_errors, feed))
        reader.start()
        feeder.start()
        while self._keep(self._stdout, self.channel.recv(BLOCK)):
            self._pass_lines()
        if self._on_line and not self.overflow and self._line < len(self._stdout):
            self._on_line(self._stdout[self._line :].decode(errors="replace"))
        reader.join()
        while feeder.is_alive() and not self.channel.closed:
            feeder.join(0.1)

    def _pass_lines(self) -> None:
        while self._on_line and (end := self._stdout.find(b"\n", self._line)) >= 0:
            line, self._line = self._stdout[self._line : end], end + 1
            self._on_line(line.decode(errors="replace"))

    def _keep(self, kept: bytearray, block: bytes) -> bool:
        """Add a block; return whether there may be more. What is too large closes the channel."""
        if len(kept) + len(block) > self.limit:
            self.overflow = True
            self.channel.close()
            return False
        kept += block
        return bool(block) and not self.overflow


class Ssh(Host):
    """Commands run over one SSH connection, in a channel each; on more where sshd's ``MaxSessions`` are used up."""

    remote = True

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
        self.failed = ""
        """What to do if the host has failed, as part of a hint."""
        self.address = address
        self.user = user
        self.port = port
        self.key = key
        self.known_hosts = known_hosts
        self._client: paramiko.SSHClient | None = None
        self._further: list[paramiko.SSHClient] = []
        self._connecting = threading.Lock()
        self._opening = threading.Lock()
        """Paramiko gives the refusal of one session to any thread that opens one."""
        self._gone_ms = 0
        """Set by ``limit_silence``, in milliseconds; 0: ``GONE_MS``."""

    def _transport(self) -> paramiko.Transport:
        """Return the open connection; reconnect if it broke."""
        with self._connecting:
            return self._connected()

    def _connected(self) -> paramiko.Transport:
        if self._client:
            transport = self._client.get_transport()
            if transport and transport.is_active():
                return transport
            self._client.close()
        self._client, transport = self._open_client(first=True)
        return transport

    def _open_client(self, *, first: bool = False) -> tuple[paramiko.SSHClient, paramiko.Transport]:
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        try:
            self._connect(client)
            transport = client.get_transport()
            assert transport
            if first:
                check_shell(transport, self.name, f"{self.user}@{self.address}:{self.port}")
        except BaseException:
            client.close()
            raise
        transport.set_keepalive(5)
        # Keepalives wait for no reply; without this a power failure of the host is noticed only after 15 minutes.
        self._set_user_timeout(transport)
        return client, transport

    def _open_session(self, window: int | None) -> paramiko.Channel:
        """Open a channel on the first connection that has one left, or on a further one.

        Raises:
            Unreachable: the host refuses sessions, or the connection broke.
        """
        transport, full = self._transport(), 0
        for _ in range(MOST_CONNECTIONS):
            try:
                with self._opening:
                    return transport.open_session(window_size=window, timeout=10)
            except paramiko.ChannelException as error:
                refused = error
                full += 1
            except CONNECTION_ERRORS as error:
                transport.close()
                if not full:
                    raise self._broken(error) from error
            transport = self._further_transport(full - 1)
        raise Unreachable(f"{self.name}: session refused: {refused}", hint=RETRY_HINT) from refused

    def _further_transport(self, number: int) -> paramiko.Transport:
        """Return one of the further connections, by its number; a new one where there is none."""
        with self._connecting:
            transports = [found for one in self._further if (found := one.get_transport()) and found.is_active()]
            if number < len(transports):
                return transports[number]
            self._further = [one for one in self._further if one.get_transport() in transports]
            client, transport = self._open_client()
            self._further.append(client)
            return transport

    @property
    def peer(self) -> str:
        """The address of the host to which this connection goes; empty if that is not known."""
        sock = self._transport().sock
        return str(sock.getpeername()[0]) if isinstance(sock, socket.socket) else ""

    def _set_user_timeout(self, transport: paramiko.Transport) -> None:
        if isinstance(transport.sock, socket.socket):
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._gone_ms or GONE_MS)

    def accepts_connections(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), timeout=CONNECT_S).close()
        except OSError:
            return False
        return True

    @contextmanager
    def limit_silence(self, seconds: float) -> Iterator[None]:
        before = self._gone_ms
        self._change_user_timeout(round(seconds * 1000))
        try:
            yield
        finally:
            self._change_user_timeout(before)

    def _change_user_timeout(self, milliseconds: int) -> None:
        with self._connecting:
            self._gone_ms = milliseconds
            for client in filter(None, (self._client, *self._further)):
                if transport := client.get_transport():
                    with contextlib.suppress(OSError):  # it is closed
                        self._set_user_timeout(transport)

    def _connect(self, client: paramiko.SSHClient) -> None:
        where = f"{self.user}@{self.address}:{self.port}"
        need_files(self.name, {"key": self.key, "known_hosts": self.known_hosts})
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
                timeout=CONNECT_S,
                banner_timeout=10,
                auth_timeout=10,
                transport_factory=make_transport,
            )
        except paramiko.BadHostKeyException as error:
            raise Unreachable(
                f"{self.name}: {where}: host key does not match known_hosts",
                hint="possible man-in-the-middle attack; if the host was reinstalled, update the known_hosts file",
            ) from error
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error).lower():
                raise Stuck(f"{self.name}: {where}: {error}", hint="is it overloaded?") from error
            raise Unreachable(
                f"{self.name}: {where}: authentication failed: {error}", hint="check the user and the key"
            ) from error
        except CONNECTION_ERRORS as error:
            unknown = "not found in known_hosts" in str(error)
            if not isinstance(error, OSError) and not unknown:
                hint = "is it overloaded, or has sshd reached MaxStartups?"
                if re.search("private key|authentication methods", str(error)):
                    hint = f"is {self.key or 'an SSH key'} there, and whole? `key` in the site file names it"
                raise Stuck(f"{self.name}: {where}: {error}", hint=hint) from error
            hint = f"is the host up, and sshd running?{self.failed and f' {self.failed}'}"
            if unknown:
                known = self.known_hosts or "~/.ssh/known_hosts"
                hint = f"compare its fingerprint on the host, then: ssh-keyscan -p {self.port} {self.address} >>{known}"
            elif isinstance(error, socket.gaierror):
                hint = "correct its name, add it to DNS or /etc/hosts, or use its address"
            reason = re.sub(r"^\[Errno (None|-?\d+)\] ", "", str(error))  # of Paramiko, getaddrinfo, or the system
            raise Unreachable(f"{self.name}: {where}: {reason}", hint=hint) from error

    @contextmanager
    def _start(self, argv: tuple[str, ...], *, window: int | None = None) -> Iterator[paramiko.Channel]:
        """Run ``argv`` in a new channel, which is closed when the context ends."""
        sudo = () if self.user == "root" else ("sudo", "-n", "--")
        channel = self._open_session(window)
        try:
            try:
                with expires_after(START_S, partial(close_channel, channel)):
                    channel.exec_command(shlex.join([*sudo, "env", "LC_ALL=C.UTF-8", *argv]))
            except CONNECTION_ERRORS as error:
                raise self._broken(error) from error
            yield channel
        finally:
            with contextlib.suppress(*CONNECTION_ERRORS):
                channel.close()

    def _broken(self, error: BaseException | None = None) -> Unreachable:
        """Return the error to raise, with the reason if the transport or ``error`` has one.

        It does not show the command, which may be a script or a request.
        """
        transport = self._client.get_transport() if self._client else None
        why = str((transport and transport.get_exception()) or error or "")
        return Unreachable(f"{self.name}: the connection broke{why and f': {why}'}", hint=RETRY_HINT)

    def _silent(self, channel: paramiko.Channel, argv: tuple[str, ...], waited: float) -> SmsError:
        """Return the error to raise when nothing arrived in time: the command hangs, or the host does not respond."""
        try:
            self._check_answers(channel)
        except Unreachable as error:
            return error
        hint = f"no output within {waited:g} s"
        return CommandTimeout(Result(self.name, argv, TIMED_OUT, b"", b""), hint=hint)

    def _check_answers(self, channel: paramiko.Channel) -> None:
        """Raise Unreachable if the host does not respond."""
        transport = channel.get_transport()
        try:
            with self._opening:
                transport.open_session(timeout=5).close()
        except paramiko.ChannelException:
            pass  # even a refusal is a response
        except CONNECTION_ERRORS as error:
            transport.close()
            raise Unreachable(
                f"{self.name} does not answer", hint="check that the host is up, then run the command again"
            ) from error

    def _blocks(
        self, channel: paramiko.Channel, argv: tuple[str, ...], recv: Callable[[int], bytes]
    ) -> Iterator[bytes]:
        """Yield blocks from one output of the command until it ends.

        Raises:
            TooMuchOutput: it is larger than ``MAX_OUTPUT``.
        """
        size = 0
        while True:
            try:
                block = recv(BLOCK)
            except TimeoutError as error:
                raise self._silent(channel, argv, channel.gettimeout() or 0) from error
            except CONNECTION_ERRORS as error:
                raise self._broken(error) from error
            if not block:
                return
            size += len(block)
            if size > MAX_OUTPUT:
                raise TooMuchOutput(Result(self.name, argv, SIGNALLED, b"", b""), MAX_OUTPUT)
            yield block

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
        limit: int = MAX_OUTPUT,
    ) -> Result:
        # Closing a channel does not end its command: the remote side enforces the limit, and this side a later one.
        timed = ("timeout", f"--kill-after={KILL_AFTER_S}", f"{timeout:g}", *argv) if timeout else argv
        total = timeout + KILL_AFTER_S + GRACE_S if timeout else None
        start = time.monotonic()
        with self._start(timed) as channel, expires_after(total, partial(close_channel, channel)) as expired:
            outputs, status = SshOutputs(channel, limit, on_line), SIGNALLED
            try:
                outputs.exchange(input)
                if not outputs.overflow:
                    status = self._status(channel, argv)
            except (*CONNECTION_ERRORS, Unreachable) as error:
                if not expired.is_set():
                    raise error if isinstance(error, Unreachable) else self._broken(error) from error
            if expired.is_set():
                self._check_answers(channel)
                late = f"neither the command ended within {total:g} s, nor did the host end it"
                raise CommandTimeout(outputs.result(self.name, argv, status, input), hint=late)
            if outputs.overflow:
                raise TooMuchOutput(outputs.result(self.name, argv, status, input), limit)
        result = outputs.result(self.name, argv, status, input)
        if timeout and status in KILLED and time.monotonic() - start >= timeout:
            raise CommandTimeout(result, hint=f"the command did not end within {timeout:g} s and was terminated")
        return result.expect(ok)

    def _status(self, channel: paramiko.Channel, argv: tuple[str, ...]) -> int:
        """Return the exit status of the command, or ``SIGNALLED``.

        Raises:
            Unreachable: the connection broke, so the status is unknown.
        """
        timeout = channel.gettimeout()
        if not channel.status_event.wait(timeout):
            raise self._silent(channel, argv, timeout or 0)
        status = channel.recv_exit_status()
        if status == SIGNALLED or not channel.eof_received:
            # A dying transport closes its channels just before it becomes inactive.
            transport = channel.get_transport()
            transport.join(0.2)
            if not transport.is_active():
                raise self._broken()
        return status

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        with self._start(argv) as channel:
            channel.settimeout(timeout)
            output = bytearray()
            with expires_after(2 * timeout, partial(close_channel, channel)) as expired:
                for block in self._blocks(channel, argv, channel.recv):
                    output += block
                    if b"\n" in block:
                        break
                if not output and not expired.is_set():
                    stderr = b"".join(self._blocks(channel, argv, channel.recv_stderr))
                    raise CommandError(Result(self.name, argv, self._status(channel, argv), b"", stderr))
                if expired.is_set():
                    raise self._silent(channel, argv, timeout)
            channel.settimeout(None)
            try:
                yield bytes(output).partition(b"\n")[0].decode(errors="replace")
            finally:
                with contextlib.suppress(*CONNECTION_ERRORS):
                    channel.shutdown_write()
                channel.status_event.wait(5)

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        with self._start(("sh", "-c", PRINT_PID, "stream", *argv), window=WINDOW_BYTES) as channel:
            stream = SshStream(self, channel, argv, LineReader(on_line))
            try:
                yield stream
            finally:
                with contextlib.suppress(SmsError):  # do not mask the original exception
                    stream.close()

    def interact(self, *argv: str) -> int:
        options = ["-o", "StrictHostKeyChecking=yes", "-p", str(self.port)]
        if self.known_hosts:
            options += ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        if self.key:
            options += ["-i", str(self.key)]
        sudo = [] if self.user == "root" else ["sudo", "-n", "--"]
        # Allocate a remote terminal only for a local one: it converts line ends and merges stderr into stdout.
        terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else ["-T"]
        command = ["ssh", *terminal, *options, f"{self.user}@{self.address}", shlex.join([*sudo, *argv])]
        return subprocess.run(command, check=False).returncode

    def close(self) -> None:
        """Close the connections."""
        for client in filter(None, (self._client, *self._further)):
            client.close()
        self._client, self._further = None, []
