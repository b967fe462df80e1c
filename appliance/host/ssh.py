"""A host over SSH. Its key must be known; nothing is asked, nothing is accepted on trust."""

from __future__ import annotations

import contextlib
import logging
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
from pathlib import Path
from typing import Any, BinaryIO

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF

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
    Stuck,
    Unreachable,
    check_written,
    count_bytes,
)
from appliance.host.stream import KILL_S, LATE_S, TERM_S, Ears, Stream

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
WINDOW_BYTES = 1 << 24
"""What the far side of a stream may send before we have read it: with paramiko's own 2 MiB it waits for us often."""
PACKET_BYTES = 1 << 15
"""What a channel sends at a time (OpenSSH's limit)."""
TELL_PID = 'echo "sms-pid:$$" >&2; exec "$@"'
"""Shell: a command that says its process id on standard error before all else."""
PID_LINE = re.compile(rb"(?:^|\n)sms-pid:([0-9]{1,10})\n")
"""What ``TELL_PID`` says. Before it may come words of sudo (`unable to resolve host`), or of a shell's start files."""
LATEST_PID = 1 << 16
"""Bytes of such words, after which no process id is waited for."""
END_GROUP = """\
group=$(ps -o pgid= -p "$1" | tr -d " ") && [ -n "$group" ] || exit 0
for name in TERM KILL; do
    kill -s "$name" -- "-$group" 2>/dev/null
    for tenth in $(seq "$2"); do kill -s 0 -- "-$group" 2>/dev/null || exit 0; sleep 0.1; done
    shift
done
"""
"""Shell: SIGTERM to the group of process $1; SIGKILL to what is left after $2 tenths of a second, which has $3."""
OF_INPUT = (MSG_CHANNEL_DATA, MSG_CHANNEL_EOF)
BROKEN = (OSError, EOFError, paramiko.SSHException)
AGAIN = "run the command again"


class Transport(paramiko.Transport):
    """paramiko's Transport without two faults that end a whole connection.

    It can send the end of a command's input, or more of it, after it has closed the channel: its own thread answers the
    close of a command that has ended. sshd closes the connection then: `ieof packet referred to nonexistent channel`.

    After each 512 MiB it makes new keys. If a command ends in that moment, its own thread, which is to make them, waits
    for them to answer the close: `Key-exchange timed out` (paramiko issue 822). What it sends meanwhile is sent later.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._deferred: list[paramiko.Message] = []
        super().__init__(*arguments, **options)

    def _send_user_message(self, data: paramiko.Message) -> None:
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
        # One message at a time comes here, and a channel counts as closed before its close does.
        raw = data.asbytes()
        if raw[0] in OF_INPUT:
            number = int.from_bytes(raw[1:5], "big")
            channels = self._channels.values()  # type: ignore[attr-defined]
            if not any(one.remote_chanid == number and not one.closed for one in channels):
                return
        super()._send_message(data)  # type: ignore[misc]


def _make_transport(sock: Any, /, **options: Any) -> paramiko.Transport:
    """A connection that asks for AES-GCM first, where paramiko has it: twice the bytes a second of its own choice."""
    transport = Transport(sock, **options)
    choice = transport.get_security_options()
    choice.ciphers = tuple(sorted(choice.ciphers, key=lambda name: "gcm" not in name))
    return transport


class SshStream(Stream):
    """A command behind a channel of its own."""

    def __init__(self, host: Ssh, channel: paramiko.Channel, argv: tuple[str, ...], ears: Ears) -> None:
        self.host = host
        self.channel = channel
        self.argv = argv
        self.ears = ears
        self.pid = ""
        self._begun = threading.Event()
        self._told = False
        channel.settimeout(STALLED_S)
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        first: bytes | None = b""
        with contextlib.suppress(*BROKEN):
            while True:
                try:
                    block = heard = self.channel.recv_stderr(BLOCK)
                except TimeoutError:
                    continue  # it has nothing to say
                if first is not None:
                    first += block
                    found = PID_LINE.search(first)
                    if block and not found and len(first) < LATEST_PID:
                        continue
                    if found:
                        self.pid = found[1].decode()
                        first = first[: found.start()] + (b"\n" if found.start() else b"") + first[found.end() :]
                    heard, first = first, None
                    self._begun.set()
                if heard:
                    self.ears.hear(heard)
                if not block:
                    break
        self._begun.set()
        self.ears.hear(b"")

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            try:
                view = view[self.channel.send(bytes(view[:PACKET_BYTES])) :]
            except TimeoutError as error:
                self._still_there(error)
            except BROKEN:
                # It ended, or the connection did: its status tells.
                raise CommandError(self.result(ok=None), hint="it ended before it had read all") from None
        return len(data)

    def _still_there(self, error: TimeoutError) -> None:
        """Nothing moved for long: a slow command may go on, a silent host may not."""
        why = self.host._silent(self.channel, self.argv, STALLED_S)
        if isinstance(why, Unreachable):
            raise why from error

    def end(self) -> None:
        with contextlib.suppress(*BROKEN):
            self.channel.shutdown_write()

    def read(self, size: int = BLOCK) -> bytes:
        while True:
            try:
                block = self.channel.recv(size)
            except TimeoutError as error:
                self._still_there(error)
                continue
            except BROKEN as error:
                raise self.host._broken(self.argv, error) from error
            if not block and not self.channel.eof_received:
                # A connection that broke looks like an end as well.
                self.channel.get_transport().join(0.2)
                if not self.channel.get_transport().is_active():
                    raise self.host._broken(self.argv)
            return block

    def _status(self) -> int:
        while True:
            try:
                return self.host._status(self.channel, self.argv)
            except CommandTimeout:
                continue  # the host answers: the command takes its time

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        self.end()
        while self.read():
            pass
        status = self._status()
        self._thread.join(LATE_S)
        self._told = True
        result = Result(self.host.name, self.argv, status, b"", self.ears.said)
        if ok is not None and status not in ok:
            raise CommandError(result)
        return result

    def close(self) -> None:
        """End it, if it has not ended.

        sshd tells a command without a terminal nothing when its channel closes: one that neither reads nor
        writes would go on.
        """
        if self._told or self.channel.status_event.is_set():
            return
        self.end()
        self._begun.wait(LATE_S)  # left at once, its process id is still on the way
        if self.pid:
            tenths = (f"{grace * 10:.0f}" for grace in (TERM_S, KILL_S))
            self.host.run("sh", "-c", END_GROUP, "end", self.pid, *tenths, ok=None, timeout=30)


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
                transport_factory=_make_transport,
            )
        except paramiko.BadHostKeyException as error:
            raise Unreachable(
                f"{self.name}: {where} shows another host key than the known one",
                hint="someone may be in between; if the host was reinstalled, update the known_hosts file",
            ) from error
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error).lower():
                raise Stuck(f"{self.name}: {where}: {error}", hint="is it overloaded?") from error
            raise Unreachable(
                f"{self.name}: {where} refuses the login: {error}", hint="check the user and the key"
            ) from error
        except BROKEN as error:
            unknown = "not found in known_hosts" in str(error)
            if not isinstance(error, OSError) and not unknown:
                raise Stuck(f"{self.name}: {where}: {error}", hint="is it overloaded, or sshd at its limit?") from error
            hint = (
                f"compare its fingerprint on the host, then: ssh-keyscan -p {self.port} {self.address}"
                if unknown
                else "is the host up, and sshd running?"
            )
            said = str(error).removeprefix("[Errno None] ")  # paramiko's, of several refusals at once
            raise Unreachable(f"{self.name}: {where}: {said}", hint=hint) from error

    @contextmanager
    def _start(self, argv: tuple[str, ...], *, window: int | None = None) -> Iterator[paramiko.Channel]:
        """A channel that ``argv`` runs behind, closed in the end however that comes."""
        sudo = () if self.user == "root" else ("sudo", "-n", "--")
        transport = self._transport()
        try:
            channel = transport.open_session(window_size=window, timeout=10)
        except paramiko.ChannelException as error:
            raise Unreachable(f"{self.name}: it takes no further session: {error}", hint=AGAIN) from error
        except BROKEN as error:
            transport.close()
            raise self._broken(argv, error) from error
        try:
            try:
                channel.exec_command(shlex.join([*sudo, "env", "LC_ALL=C.UTF-8", *argv]))
            except BROKEN as error:
                raise self._broken(argv, error) from error
            yield channel
        finally:
            with contextlib.suppress(*BROKEN):
                channel.close()

    def _broken(self, argv: tuple[str, ...], error: BaseException | None = None) -> Unreachable:
        """What to raise; with the reason, where the connection's own thread or ``error`` has one."""
        transport = self._client.get_transport() if self._client else None
        why = str((transport and transport.get_exception()) or error or "")
        command = shlex.join(argv)[:200]
        return Unreachable(f"{self.name}: the connection broke during `{command}`{why and f': {why}'}", hint=AGAIN)

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
                raise self._broken(argv, error) from error
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

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        with self._start(("sh", "-c", TELL_PID, "stream", *argv), window=WINDOW_BYTES) as channel:
            stream = SshStream(self, channel, argv, Ears(on_line))
            try:
                yield stream
            finally:
                with contextlib.suppress(SmsError):  # there is a better reason for its end
                    stream.close()

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
