"""This machine as a host: what comes back, what is ended, what is refused.

tests/real/hosts/test_ssh.py runs most of these over SSH.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from appliance.errors import SmsError
from appliance.host.base import (
    WRITE_ATOMIC,
    CommandError,
    CommandTimeout,
    Host,
    Result,
    TooMuchOutput,
    Unreachable,
    check_written,
    write_argv,
)
from appliance.host.local import Local, LocalStream
from appliance.host.ssh import GONE_MS, Ssh
from appliance.host.transport import make_transport
from appliance.shared.outputs import MAX_OUTPUT, group_runs
from tests.ownnet import own_network
from tests.waiting import alive, soon

BOTH = "head -c 5000000 /dev/zero >&2 & head -c 5000000 /dev/zero; wait"


@pytest.fixture
def host() -> Host:
    return Local()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("on_line", [False, True], ids=["whole", "by line"])
@pytest.mark.parametrize(
    ("script", "given", "out", "errors"),
    [
        ("cat", b"a\nb", b"a\nb", b""),
        ("cat", None, b"", b""),
        ("cat; echo oops >&2", b"\xff\n", b"\xff\n", b"oops\n"),
        ("true", b"x" * 1_000_000, b"", b""),
        (BOTH, None, bytes(5_000_000), bytes(5_000_000)),
        ("cat | tr a b", b"a" * 3_000_000, b"b" * 3_000_000, b""),
    ],
    ids=["input", "empty input", "bytes", "unread input", "much on both", "much through"],
)
def test_a_command_gives_both_its_outputs(
    host: Host, on_line: bool, script: str, given: bytes | None, out: bytes, errors: bytes
) -> None:
    lines: list[str] = []
    result = host.run("sh", "-c", script, input=given, on_line=lines.append if on_line else None)
    assert (result.status, result.stdout == out, result.stderr == errors) == (0, True, True)
    if on_line:
        assert lines == out.decode(errors="replace").splitlines()


def test_lines_come_while_the_command_runs(host: Host) -> None:
    seen: list[tuple[str, float]] = []
    host.run("sh", "-c", "echo a; sleep 0.5; printf b", on_line=lambda line: seen.append((line, time.monotonic())))
    assert [line for line, _ in seen] == ["a", "b"]
    assert seen[1][1] - seen[0][1] > 0.3


def test_a_status_is_fine_or_an_error(host: Host) -> None:
    assert host.run("sh", "-c", "exit 3", ok=(0, 3)).status == 3
    assert host.run("sh", "-c", "exit 4", ok=None).status == 4
    with pytest.raises(CommandError, match=r"(?s)status 5.*what went wrong"):
        host.run("sh", "-c", "echo what went wrong >&2; exit 5")


def test_a_program_that_is_missing_has_a_hint(host: Host) -> None:
    with pytest.raises(SmsError, match="no such program: no-such-thing") as caught:
        host.run("no-such-thing")
    assert "sms doctor" in caught.value.hint


def test_a_program_that_cannot_be_executed_is_an_error(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "fence"
    path.write_text("#!/bin/sh")
    with pytest.raises(SmsError, match="Permission denied"):
        host.run(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("on_line", [False, True], ids=["whole", "by line"])
@pytest.mark.parametrize("stubborn", [False, True], ids=["ends", "ignores TERM"])
def test_a_timeout_ends_all_that_was_started(host: Host, tmp_path: Path, on_line: bool, stubborn: bool) -> None:
    trap = "trap '' TERM; " if stubborn else ""
    script = f"({trap}sh -c 'echo $$ >{tmp_path}/grandchild; sleep 60; :') & echo $! >{tmp_path}/child; wait"
    began = time.monotonic()
    with pytest.raises(CommandTimeout) as caught:
        host.run("sh", "-c", script, timeout=2, on_line=print if on_line else None)
    assert "within 2 s" in caught.value.hint
    assert time.monotonic() - began < 40, "it waited for the sleep"
    assert not any(alive(int((tmp_path / name).read_text())) for name in ("child", "grandchild"))


def test_a_processgroup_runs_until_its_last_member_has_ended() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!"], stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as leader:
        assert leader.stdout
        member = int(leader.stdout.readline())
        leader.wait()
        assert group_runs(leader.pid), "its leader has ended, a member has not"
        os.kill(member, signal.SIGKILL)
        soon(lambda: not group_runs(leader.pid))
    with subprocess.Popen(["true"], start_new_session=True) as unreaped:
        soon(lambda: not alive(unreaped.pid))
        assert not group_runs(unreaped.pid), "it only waits to be reaped"


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail if more is kept than both outputs, and a copy of them."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_OUTPUT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("on_line", [False, True], ids=["whole", "by line"])
@pytest.mark.parametrize(
    "script",
    [
        "exec head -c 4G /dev/zero",
        "exec head -c 4G /dev/zero >&2",
        f"trap '' TERM PIPE; yes {'y' * 200} & yes {'y' * 200} >&2; wait",
    ],
    ids=["stdout", "stderr", "both"],
)
def test_endless_output_is_an_error_and_is_not_kept(host: Host, on_line: bool, script: str) -> None:
    seen = [0]

    def count(line: str) -> None:
        seen[0] += len(line)

    with bounded_memory(), pytest.raises(TooMuchOutput) as caught:
        host.run("sh", "-c", script, ok=None, on_line=count if on_line else None)
    assert f"{host.name}: `sh -c" in caught.value.message and "more than 16 MiB" in caught.value.message
    assert caught.value.hint and len(caught.value.message) < 5000 and seen[0] <= MAX_OUTPUT
    assert host.run("echo", "on").text == "on", "the host serves on"


def test_what_is_read_of_an_endless_file_is_bounded(host: Host, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with bounded_memory(), pytest.raises(TooMuchOutput):
        host.read(str(tmp_path / "file"))


def test_what_is_no_file_keeps_nobody_waiting(host: Host, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "zero", "link", "."):
        with pytest.raises(CommandError, match="not a regular file"):
            host.read(str(tmp_path / name))


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_caller_sets_the_limit_of_each_output(host: Host, stream: str) -> None:
    argv = ("sh", "-c", f"head -c $1 /dev/zero >&{stream}", "print")
    result = host.run(*argv, "1000", limit=1000)
    assert len(result.stdout or result.stderr) == 1000
    with pytest.raises(TooMuchOutput, match="more than 1000 bytes"):
        host.run(*argv, "1001", limit=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; while :; do echo x; sleep 0.1; done", "setsid sleep 8 & :", "setsid sleep 8 >/dev/null & :"],
    ids=["ignores TERM", "its child keeps stdout", "its child keeps stderr"],
)
def test_no_output_lasts_longer_than_the_time_limit(host: Host, script: str) -> None:
    began = time.monotonic()
    with pytest.raises(CommandTimeout):
        host.run("sh", "-c", script, timeout=1)
    assert time.monotonic() - began < 7


def test_hold_does_not_keep_what_never_is_a_line(host: Host) -> None:
    with (
        bounded_memory(),
        pytest.raises(TooMuchOutput),
        host.hold("head", "-c", "4G", "/dev/zero", timeout=60),
    ):
        pass


def test_what_a_stream_prints_besides_is_not_kept(host: Host) -> None:
    """Of an endless line parts are passed on."""
    longest = [0]

    def note(line: str) -> None:
        longest[0] = max(longest[0], len(line))

    with bounded_memory(), host.stream("sh", "-c", "head -c 50000000 /dev/zero >&2; exec cat", on_line=note) as stream:
        stream.end()
        result = stream.result()
    assert longest[0] < 2 * MAX_OUTPUT and len(result.stderr) < MAX_OUTPUT


@pytest.mark.slow
def test_what_holds_stderr_open_does_not_outlast_the_timeout(host: Host) -> None:
    with pytest.raises(CommandTimeout):
        host.run("sh", "-c", "sleep 60 >/dev/null &", timeout=1, on_line=print)


def test_hold_gives_the_first_line_and_ends_with_its_input(host: Host, tmp_path: Path) -> None:
    with host.hold("sh", "-c", f"echo ready; cat; touch {tmp_path}/ended") as line:
        assert line == "ready"
        assert not (tmp_path / "ended").exists()
    assert (tmp_path / "ended").exists()


FIRST_LINE_S = 0.5
"""Over SSH, and with other tests beside it, it takes longer."""


@pytest.mark.slow
def test_hold_lasts_longer_than_its_timeout(host: Host, tmp_path: Path) -> None:
    with host.hold("sh", "-c", f"echo ready; cat; touch {tmp_path}/ended", timeout=FIRST_LINE_S):
        time.sleep(FIRST_LINE_S + 0.3)
    assert (tmp_path / "ended").exists()


def test_hold_tells_an_early_end(host: Host) -> None:
    with (
        pytest.raises(CommandError, match=r"(?s)status 3.*busy") as caught,
        host.hold("sh", "-c", "echo busy >&2; exit 3"),
    ):
        pass
    assert not isinstance(caught.value, CommandTimeout)


@pytest.mark.parametrize("script", ["sleep 60", "exec >&-; sleep 60"], ids=["says nothing", "closes its output"])
def test_hold_does_not_wait_for_ever(host: Host, script: str) -> None:
    began = time.monotonic()
    with pytest.raises(CommandTimeout), host.hold("sh", "-c", script, timeout=0.5):
        pass
    assert time.monotonic() - began < 5


def test_a_lock_is_held_by_one(host: Host, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "lock")
    for _ in range(2):
        with host.lock(path), pytest.raises(CommandError, match="status 75"), Local().lock(path):
            pass


def test_a_lock_is_waited_for(host: Host, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with host.lock(path), pytest.raises(CommandError, match="status 75"), Local().lock(path, wait_s=0.3):
        pass
    begun, done = tmp_path / "begun", tmp_path / "done"
    first = subprocess.Popen(["flock", path, "sh", "-c", 'touch "$1"; sleep 0.5; touch "$2"', "sh", begun, done])
    while not begun.exists():
        time.sleep(0.01)
    with host.lock(path, wait_s=30):
        assert done.exists()
    assert first.wait(30) == 0


def test_write_returns_whether_anything_changed(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    steps = [(b"a", 0o644, True), (b"a", 0o644, False), (b"a", 0o600, True), (b"b", 0o600, True), (b"", 0o600, True)]
    for data, mode, changed in steps:
        assert host.write(str(path), data, mode=mode) is changed
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (data, mode)
    assert names(path.parent) == ["file"]
    assert host.read(str(path)) == b""
    host.remove(str(path))
    assert host.read(str(path)) is None


@pytest.mark.parametrize("before", [None, b"old"])
def test_half_a_file_never_gets_its_name(host: Host, tmp_path: Path, before: bytes | None) -> None:
    """A broken connection looks like the end of the input."""
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    argv = write_argv(str(path), 0o600, 1_000_000)
    with pytest.raises(CommandError, match="status 77") as caught:
        check_written("here", str(path), host.run(*argv, input=bytes(999_999), ok=None).status, b"")
    assert "run the command again" in caught.value.hint
    assert (path.read_bytes() if path.exists() else None) == before
    assert names(tmp_path) == (["file"] if before is not None else [])


def test_a_signal_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    argv = ["sh", "-c", WRITE_ATOMIC, "write", str(tmp_path / "file"), "644", "3"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as process:
        while not list(tmp_path.glob(".file.new~")):
            pass  # at once: it may not even have locked it
        # More than once: a child of the shell that is about to become `cat` may lose a signal.
        for _ in range(100):
            if process.poll() is not None:
                break
            os.killpg(process.pid, 15)
            time.sleep(0.05)
        process.wait(5)
    assert names(tmp_path) == []


def test_commands_do_not_see_what_a_site_exports_for_containers(
    host: Host, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("BIND", "TMPDIR", "CACHEDIR", "KEYSDIR"):
        monkeypatch.setenv(f"APPTAINER_{name}", "x")
        monkeypatch.setenv(f"SINGULARITY_{name}", "x")
    seen = {"APPTAINER_TMPDIR=x", "APPTAINER_CACHEDIR=x", "SINGULARITY_TMPDIR=x", "SINGULARITY_CACHEDIR=x"}

    def tools(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith(("APPTAINER_", "SINGULARITY_"))}

    assert tools(host.run("env").text) == seen
    assert tools(host.run("env", "APPTAINER_KEYSDIR=y", "env").text) == {*seen, "APPTAINER_KEYSDIR=y"}
    host.interact("env")
    assert tools(capfd.readouterr().out) == seen


def test_how_long_a_silent_host_is_waited_for() -> None:
    """Over SSH, also for connections that are open already; elsewhere there is nothing to wait for."""
    far = Ssh("far", "192.0.2.1")
    with socket.socket() as one, Local().limit_silence(10):
        transport = SimpleNamespace(sock=one, is_active=lambda: True)
        far._client = SimpleNamespace(get_transport=lambda: transport)  # type: ignore[assignment]

        def milliseconds() -> int:
            return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        with far.limit_silence(10):
            assert milliseconds() == 10_000
            with far.limit_silence(3):
                assert milliseconds() == 3000
            far._set_user_timeout(transport)  # type: ignore[arg-type]  # of a new connection
            assert milliseconds() == 10_000
        assert milliseconds() == GONE_MS


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        (b"cat: write error: No space left on device\n", "df -h"),
        (b"mv: Disk quota exceeded\n", "quota"),
        (b"sync: Input/output error\n", "dmesg"),
        (b"mv: cannot stat x\n", ""),
    ],
)
def test_the_error_of_a_full_or_failing_disk_has_a_hint(output: bytes, hint: str) -> None:
    error = CommandError(Result("a", ("mv",), 1, b"", output))
    assert hint in error.hint and bool(error.hint) == bool(hint)
    assert CommandError(Result("a", ("mv",), 1, b"", output), hint="its own").hint == "its own"


def test_a_stream_that_another_thread_has_closed() -> None:
    """Its descriptors may be those of other files by then."""
    with Local().stream("cat") as stream:
        assert isinstance(stream, LocalStream)
        stream.write(b"x")
        stream.close()
        with pytest.raises(CommandError):
            stream.write(b"y")
        with pytest.raises(CommandError):
            stream.read()


@pytest.mark.parametrize(
    "sent",
    [b"SSH-2.0-other\r\n\xff\xff\xff\xf0" + bytes(4), b"x"],
    ids=["a packet of 4 GiB", "no version"],
)
def test_a_server_that_sends_without_end_before_it_is_known(sent: bytes) -> None:
    ended = threading.Event()

    def serve() -> None:
        with sshd.accept()[0] as link, suppress(OSError):
            link.sendall(sent)
            while not ended.is_set():
                link.sendall(sent[-1:] * 100_000)

    with socket.create_server(("127.0.0.1", 0)) as sshd:
        (thread := threading.Thread(target=serve)).start()
        began = time.monotonic()
        try:
            with bounded_memory(), pytest.raises(Unreachable):
                Ssh("far", "127.0.0.1", port=sshd.getsockname()[1]).run("true")
            assert time.monotonic() - began < 8
        finally:
            ended.set()
            thread.join(30)


def test_a_network_without_a_route_is_named_without_the_number_of_the_error() -> None:
    with own_network(["10.91.0.1/24"]), pytest.raises(Unreachable, match="Network is unreachable") as caught:
        Ssh("far", "192.0.2.1").run("true")
    assert "Errno" not in caught.value.message


class Flooding(paramiko.ServerInterface):
    """Accepts anybody, and prints without end whatever the client's window permits."""

    def check_auth_none(self, username: str) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def flood() -> None:
            with suppress(OSError, EOFError):
                while True:
                    channel.out_window_size = 1 << 30
                    channel.sendall(bytes(1 << 15))

        threading.Thread(target=flood, daemon=True).start()
        return True


def test_a_server_that_sends_more_than_the_window_permits() -> None:
    """It is not read: what a stream's caller has not taken yet stays bounded."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far = listening.accept()[0]
    server, client = paramiko.Transport(far), make_transport(near)
    try:
        server.add_server_key(paramiko.ECDSAKey.generate())
        server.start_server(threading.Event(), Flooding())
        client.start_client(timeout=30)
        client.auth_none("root")
        with bounded_memory():
            channel, said = client.open_session(timeout=30), ""
            try:
                channel.exec_command("true")
            except paramiko.SSHException as error:  # the flood may be faster than the reply
                said = str(error)  # Paramiko tells it once
            soon(lambda: not client.is_active())
        assert "window" in said or "window" in str(client.get_exception())
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize(
    ("next_one", "closes"), [("", True), ("pending", True), ("open", True), ("", False), ("pending", False)]
)
def test_the_end_of_input_of_a_closed_channel_is_not_sent(next_one: str, *, closes: bool) -> None:
    """It waits for the end of a key exchange; the number of its channel, 0, is given again meanwhile."""
    near, far = socket.socketpair()
    client: Any = make_transport(near)
    sent: list[int] = []
    client.packetizer.send_message = lambda message: sent.append(message.asbytes()[0])
    client.active = True

    def add(number: int, *, active: bool) -> Any:
        channel = paramiko.Channel(number)
        channel._set_transport(client)  # type: ignore[attr-defined]
        client._channels.put(number, channel)
        if active:
            channel._set_remote_channel(0, 1 << 16, 1 << 15)  # type: ignore[attr-defined]
        return channel

    try:
        first = add(1, active=True)
        thread = threading.Thread(target=first.shutdown_write)
        thread.start()
        soon(lambda: first.eof_sent)
        time.sleep(0.05)
        if closes:
            first.closed = True
            client._channels.delete(1)
        second = add(2, active=next_one == "open") if next_one else None
        client.clear_to_send.set()
        thread.join(10)
        assert second is None or not second.eof_sent
        assert sent == ([] if closes else [paramiko.common.MSG_CHANNEL_EOF])
    finally:
        client.close()
        near.close()
        far.close()


def test_a_machine_that_accepts_connections_and_does_not_respond_is_on() -> None:
    with socket.socket() as sshd:
        sshd.bind(("127.0.0.1", 0))
        far = Ssh("far", "127.0.0.1", port=sshd.getsockname()[1])
        assert not far.accepts_connections()
        sshd.listen()
        assert far.accepts_connections()
    assert Local().accepts_connections()


@pytest.mark.parametrize("what", ["key", "known_hosts"])
@pytest.mark.parametrize("content", [None, b"\xff\x00"], ids=["missing", "binary"])
def test_a_file_of_this_machine_that_cannot_be_read_is_named(tmp_path: Path, what: str, content: bytes | None) -> None:
    """The other host is healthy: no hint at a failover."""
    path = tmp_path / what
    if content is not None:
        path.write_bytes(content)
    ssh = Ssh("host-b", "127.0.0.1", **{what: path})  # type: ignore[arg-type]
    ssh.failed = "sms failover"
    with pytest.raises(Unreachable) as caught:
        ssh.run("true")
    assert str(path) in caught.value.message and what in str(caught.value.hint)
    assert "failover" not in str(caught.value.hint)
