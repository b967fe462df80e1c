"""Paths below the root of a container: its links lead nowhere outside of it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import threading
import xmlrpc.client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.agent.in_root import by_descriptor, open_in_root
from appliance.agent.instance import Instance
from appliance.agent.migration_source import TAIL_BYTES, MigrationSource
from appliance.agent.protocol import read_request
from appliance.shared.migration import SourceRequest
from tests.support.system import FakeInstance, FakeSystem
from tests.unit.migration.requests import SOURCE

SECRET = b"of the host"
LINE = b"a line\n"


class Sent:
    """The coordinator's end of a channel."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes, dict[str, Any]]] = []

    def send(self, kind: str, body: bytes = b"", **facts: Any) -> None:
        self.messages.append((kind, bytes(body), facts))


class Refusal:
    """Stands for syscall(2) where the kernel has not the call, or a seccomp filter refuses it."""

    restype: object = None

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *arguments: object) -> int:
        ctypes.set_errno(self.number)
        return -1


class OwnHost(FakeSystem):
    """The host of a container with that root."""

    less = 0
    """How many bytes less than otherwise are read of its logs."""

    def __init__(self, root: Path) -> None:
        super().__init__(77)
        self.root = str(root)

    def instance(self, pid: int) -> Instance:
        return Logs(pid, self)


class Logs(FakeInstance):
    """An instance whose logs are read up to another limit."""

    system: OwnHost

    def read_from(self, path: str, offset: int, limit: int) -> tuple[bytes, bool]:
        return super().read_from(path, offset, limit - self.system.less)


@pytest.fixture(params=["openat2", "ENOSYS", "EPERM"])
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The root of a container; beside it a folder of the host, with a file and an entry to get at.

    For kernels with openat2(2), and without it.
    """
    if request.param != "openat2":
        refusal = Refusal(getattr(errno, request.param))
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=refusal))
    made = tmp_path / "root"
    for folder in (made / "var/log", made / "run/sms", tmp_path / "host"):
        folder.mkdir(parents=True)
    (tmp_path / "host/messages").write_bytes(SECRET)
    return made


def source_of(folder: Path, *, less: int = 0) -> tuple[MigrationSource, Sent]:
    """The source of a migration, whose log server has ended, and what it sends."""
    paths = {name: str(folder / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    channel = Sent()
    request = read_request(SourceRequest, {**SOURCE, **paths, "loggers": [], "tails": ["/var/log/messages"]})
    system = OwnHost(folder / "root")
    system.less = less
    return MigrationSource(request, channel, system), channel  # type: ignore[arg-type]


def sent_tail(folder: Path) -> bytes:
    """What the source of a migration sends as the end of the log."""
    source, channel = source_of(folder)
    source.send_log_tails({})
    (_, body, facts), *_ = channel.messages
    assert json.loads(json.dumps(facts["files"])) == [{"path": "/var/log/messages", "bytes": len(body)}]
    return body


def escapes(root: Path) -> dict[str, str]:
    """Targets of a link, by the kind of link, that lead to the host's file if they are followed on the host."""
    outside = root.parent / "host/messages"
    return {"absolute": str(outside), "dots": f"../../../host/{outside.name}", "many dots": "../" * 40 + str(outside)}


@pytest.mark.parametrize("kind", ["absolute", "dots", "many dots"])
def test_a_log_that_is_a_link_to_a_file_of_the_host_is_not_sent(root: Path, kind: str) -> None:
    (root / "var/log/messages").symlink_to(escapes(root)[kind])
    assert sent_tail(root.parent) == b""


def test_a_log_in_a_folder_that_is_a_link_to_one_of_the_host_is_not_sent(root: Path) -> None:
    (root / "var/log").rmdir()
    (root / "var/log").symlink_to(root.parent / "host")
    assert sent_tail(root.parent) == b""


def test_a_log_behind_an_absolute_link_inside_is_sent(root: Path) -> None:
    (root / "srv").mkdir()
    (root / "srv/messages").write_bytes(LINE)
    (root / "var/log/messages").symlink_to("/srv/messages")
    assert sent_tail(root.parent) == LINE


def test_only_what_follows_the_freeze_is_sent(root: Path) -> None:
    (root / "var/log/messages").write_bytes(b"before\n" + LINE)
    source, channel = source_of(root.parent)
    source.lengths = {"/var/log/messages": len(b"before\n")}
    assert source.instance.file_size("/var/log/messages") == len(b"before\n" + LINE)
    source.send_log_tails({})
    assert channel.messages[0][1] == LINE


def test_a_log_of_any_size_does_not_stop_the_migration(root: Path) -> None:
    """Whole lines within the limit are sent. A process inside may make a file larger than memory, such as a hole."""
    log = root / "var/log/messages"
    for content, size, sent in ((3, 0, 3), (5, 0, 3), (2, 1 << 40, 2), (0, 1 << 40, 0)):
        log.write_bytes(LINE * content)
        if size:
            os.truncate(log, size)
        source, channel = source_of(root.parent, less=TAIL_BYTES - 3 * len(LINE))
        source.send_log_tails({})
        (_, body, facts), *_ = channel.messages
        assert body == LINE * sent
        assert facts["cut"] == (["/var/log/messages"] if size or content > sent else [])


def test_a_log_that_is_a_pipe_does_not_stop_the_migration(root: Path) -> None:
    os.mkfifo(root / "var/log/messages")
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(sent_tail(root.parent)), daemon=True)
    reading.start()
    reading.join(5)
    assert found == [b""]


def listen(path: Path) -> socket.socket:
    """A server that counts as a supervisor until somebody connects."""
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    one.settimeout(0)
    return one


def test_the_socket_of_the_supervisor_is_not_one_of_the_host(root: Path) -> None:
    with listen(root.parent / "host/sock") as server:
        (root / "run/sms/supervisor.sock").symlink_to(root.parent / "host/sock")
        with pytest.raises(FileNotFoundError):
            OwnHost(root).instance(77).supervisor().getAllProcessInfo()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_supervisor_is_reached_through_a_link_inside(root: Path) -> None:
    with listen(root / "run/real") as server:
        server.settimeout(5)
        (root / "run/sms/supervisor.sock").symlink_to("/run/real")

        def answer() -> None:
            with server.accept()[0] as one:
                asked = b""
                while b"</methodCall>" not in asked:
                    asked += one.recv(65536)
                value = xmlrpc.client.dumps((7,), methodresponse=True).encode()
                head = b"HTTP/1.0 200 OK\r\nContent-Type: text/xml\r\nContent-Length: %d\r\n\r\n" % len(value)
                one.sendall(head + value)

        threading.Thread(target=answer, daemon=True).start()
        assert OwnHost(root).instance(77).supervisor().getPID() == 7


def test_every_name_is_taken_below_the_root(root: Path) -> None:
    (root / "var/log/messages").write_bytes(LINE)
    for path in ("/var/log/messages", "var/log/messages", "//../../var/log/../log/messages"):
        with open_in_root(str(root), path) as descriptor:
            assert Path(by_descriptor(descriptor)).read_bytes() == LINE
    (root / "fds").symlink_to("/proc/self/fd")
    (root / "loop").symlink_to("loop")
    before = sorted(Path("/proc/self/fd").iterdir())
    for path, why in (("/fds/0", errno.ENOENT), ("/loop/x", errno.ELOOP), ("/var/log/messages/x", errno.ENOTDIR)):
        with pytest.raises(OSError) as caught, open_in_root(str(root), path):
            pass
        assert caught.value.errno == why
    with open_in_root(str(root), "/var/../var/./log/../../../") as descriptor:
        assert os.fstat(descriptor).st_ino == root.stat().st_ino
    assert sorted(Path("/proc/self/fd").iterdir()) == before
