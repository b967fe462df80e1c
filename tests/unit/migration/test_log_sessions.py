"""TCP sessions of log senders end before a switch so that senders notice, and nothing that they have sent is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.instance import Instance
from appliance.agent.log_sessions import LogSessions
from appliance.agent.migration_source import MigrationSource
from appliance.agent.protocol import read_request
from appliance.shared.migration import SourceRequest
from tests.ownnet import own_network
from tests.support.system import BridgeChange, FakeInstance, FakeSystem
from tests.unit.migration.requests import SOURCE

ADDRESS = ("127.0.0.1", 514)
SERVER = """\
import select, socket
server = socket.create_server(("127.0.0.1", 514))
print("listens", flush=True)
open_ones = []
while True:
    for one in select.select([server, *open_ones], [], [])[0]:
        if one is server:
            open_ones.append(one.accept()[0])
            print("accepted", flush=True)
        else:
            try:
                data = one.recv(4096)
            except ConnectionResetError:
                data = b""
            print(data.decode().rstrip("\\n") or "closed", flush=True)
            if not data:
                open_ones.remove(one)
                one.close()
"""


@dataclass
class Server:
    """A log server, which prints what it reads."""

    process: subprocess.Popen[str]

    def __post_init__(self) -> None:
        self.sessions = LogSessions(self.process.pid, [514])

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def connect(self) -> socket.socket:
        """A sender's connection."""
        one = socket.create_connection(ADDRESS, timeout=5)
        assert self.line() == "accepted"
        return one


@pytest.fixture
def server() -> Iterator[Server]:
    with own_network(()), running() as made:
        yield made


@contextmanager
def running() -> Iterator[Server]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        made = Server(process)
        assert made.line() == "listens"
        try:
            yield made
        finally:
            process.kill()


def test_a_sender_sees_the_end_before_its_next_line_and_what_it_wrote_is_read(server: Server) -> None:
    with server.connect() as sender:
        sender.sendall(b"before\n")
        server.sessions.close()
        assert sender.recv(1) == b"", "rsyslogd looks for that before each line"
        assert server.sessions.wait_until_noticed(5)
        sender.sendall(b"written before it looked\n")
        assert [server.line(), server.line()] == ["before", "written before it looked"]
    assert server.line() == "closed"


def test_a_sender_that_repeats_lines_is_reset(server: Server) -> None:
    """A FIN would be noticed by rsyslogd's sender over RELP only after its next line."""
    sessions = LogSessions(server.process.pid, [514], [514])
    with server.connect() as sender:
        sessions.close()
        with pytest.raises(ConnectionResetError):
            sender.sendall(b"to be sent again\n")
        assert server.line() == "closed"
    sessions.close()
    sessions.reopen()
    with server.connect() as sender:
        sender.sendall(b"again\n")
        assert server.line() == "again"


def test_new_connections_are_neither_accepted_nor_refused(server: Server) -> None:
    server.sessions.close()
    with socket.socket() as sender:
        sender.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sender.connect(ADDRESS)
    # Another process resumes a killed run.
    LogSessions(server.process.pid, [514]).reopen()
    with server.connect() as sender:
        sender.sendall(b"again\n")
        assert server.line() == "again"
    server.sessions.reopen()


def test_what_was_received_is_waited_for(server: Server) -> None:
    with server.connect() as sender:
        server.sessions.close()
        os.kill(server.process.pid, signal.SIGSTOP)
        sender.sendall(b"late\n")
        assert not server.sessions.wait_until_read(0.05)
        os.kill(server.process.pid, signal.SIGCONT)
        assert server.sessions.wait_until_read(5)
        assert server.line() == "late"


def test_sessions_that_began_meanwhile_are_closed_the_second_time(server: Server) -> None:
    with server.connect() as first:
        server.sessions.close()
        LogSessions(server.process.pid, [514]).reopen()
        with server.connect() as second:
            second.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.recv(1)
            server.sessions.close()
            assert server.sessions.wait_until_noticed(5)
            assert (first.recv(1), second.recv(1)) == (b"", b"")


class BesideAnother(LogSessions):
    """Sessions in whose network there is another process, which cannot be reached."""

    def _processes(self) -> list[int]:
        return [0, self.pid]

    def _sockets(self, pid: int, known: set[int]) -> Iterator[tuple[int, socket.socket, bool]]:
        if pid == 0:
            raise PermissionError(1, "not permitted")
        return super()._sockets(pid, known)


def test_senders_may_connect_again_although_another_process_cannot_be_reached(server: Server) -> None:
    server.sessions.close()
    with pytest.raises(PermissionError):
        BesideAnother(server.process.pid, [514]).reopen()
    server.connect().close()


def test_other_ports_stay_as_they_are(server: Server) -> None:
    with server.connect() as sender:
        for sessions in (LogSessions(server.process.pid, [515]), LogSessions(server.process.pid, [])):
            sessions.close()
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            sender.recv(1)


def test_without_log_ports_nothing_is_read() -> None:
    sessions = LogSessions(0, [])
    sessions.close()
    sessions.reopen()
    assert sessions.wait_until_noticed(0) and sessions.wait_until_read(0)


class Ordered(FakeSystem):
    """A host that keeps the order of what is done to sessions, ports and services; some of it may fail."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(77)
        self.done = done
        self.fault: Exception | None = None
        """Of announcements and bridges."""

    def instance(self, pid: int) -> Instance:
        return OrderedInstance(pid, self)

    def read_connections(self, instance: Instance) -> list[str]:
        self.done.append("connections")
        return []

    def set_bridges(self, ports: BridgeChange, *, timeout: float = 60) -> None:
        if self.fault:
            raise self.fault
        self.done.append(f"bridge {ports['veth0']}")


class OrderedInstance(FakeInstance):
    """Its instance."""

    system: Ordered

    def stop_services(self, names: Sequence[str], patience_s: float) -> None:
        self.system.done.append("stop_services")

    def start_services(self, names: Sequence[str]) -> None:
        self.system.done.append("start_services")

    def announce(self, addresses: dict[str, str]) -> None:
        if self.system.fault:
            raise self.system.fault
        self.system.done.append("announce")


class Recorder:
    """The source of a migration, and the order of what it does to sessions, ports and services."""

    def __init__(self, folder: Path, fault: Exception | None = None) -> None:
        self.done: list[str] = []
        self.fault = fault
        self.system = Ordered(self.done)
        paths = {name: str(folder / name) for name in ("overlay", "lease", "history", "mark", "lock")}
        request = read_request(SourceRequest, {**SOURCE, **paths, "mac": "", "tails": []})
        channel: Any = self
        self.source = MigrationSource(request, channel, self.system)
        self.source.sessions = channel
        self.source.ports = {"eth0": "veth0"}

    def close(self) -> None:
        self.done.append("close")
        if self.fault:
            raise self.fault

    def wait_until_noticed(self, patience_s: float) -> None:
        self.done.append("noticed")

    def wait_until_read(self, patience_s: float) -> None:
        self.done.append("read")

    def reopen(self) -> None:
        self.done.append("reopen")
        if self.fault:
            raise self.fault

    def send(self, kind: str, body: bytes = b"", **facts: object) -> None:
        self.done.append(f"sent {kind}")


def test_sessions_end_while_the_network_is_up(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.source.send_connections({})
    assert recorder.done == ["close", "noticed", "connections", "sent connections"]
    del recorder.done[:]
    recorder.source.release({})
    assert recorder.done == ["close", "noticed", "bridge None", "connections", "sent released"]
    del recorder.done[:]
    recorder.source.send_log_tails({})
    assert recorder.done == ["read", "stop_services", "sent tails"]


def test_a_rollback_lets_senders_connect_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.source.release({})
    del recorder.done[:]
    recorder.source.restore_service("a test")
    assert recorder.done == ["bridge br-prov", "announce", "reopen", "start_services"]


@pytest.mark.parametrize("fault", [PermissionError(1, "not permitted"), AttributeError("pidfd_open: not permitted")])
def test_a_kernel_that_does_not_allow_it_does_not_stop_the_migration(tmp_path: Path, fault: Exception) -> None:
    recorder = Recorder(tmp_path, fault)
    recorder.source.release({})
    assert recorder.done == ["close", "bridge None", "connections", "sent released"]
    (note,) = recorder.system.notes
    assert "lines may be lost: " in note and "not permitted" in note
    recorder.source.restore_service("a test")
    assert recorder.done[-1] == "start_services"


def test_services_start_again_whatever_else_fails(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, RuntimeError("no thread"))
    recorder.source.release({})
    recorder.system.fault = FileNotFoundError(2, "no arping")
    recorder.source.restore_service("a test")
    assert recorder.done[-2:] == ["reopen", "start_services"] and not (tmp_path / "mark").exists()
    assert (tmp_path / "history").read_text().count("trouble") == 4
