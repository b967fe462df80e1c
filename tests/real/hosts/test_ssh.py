"""A host over SSH, against a real sshd: as this machine itself, and what only a connection can do wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF

from appliance.errors import SmsError
from appliance.host import ssh
from appliance.host.base import CommandError, CommandTimeout, Host, TooMuchOutput, Unreachable
from appliance.host.local import Local
from appliance.host.ssh import Ssh
from appliance.operations.env import Env
from appliance.operations.image.copy import HostFile, copy_file
from appliance.tools.sha256 import find_digest
from tests.conftest import find_tool
from tests.copies import give
from tests.ownnet import own_network
from tests.real.sshd import Server, run_sshd
from tests.unit import test_host
from tests.unit.test_host import (  # noqa: F401  the same must be true over SSH
    names,
    test_a_caller_sets_the_limit_of_each_output,
    test_a_command_gives_both_its_outputs,
    test_a_lock_is_held_by_one,
    test_a_status_is_fine_or_an_error,
    test_endless_output_is_an_error_and_is_not_kept,
    test_half_a_file_never_gets_its_name,
    test_hold_does_not_keep_what_never_is_a_line,
    test_hold_does_not_wait_for_ever,
    test_hold_gives_the_first_line_and_ends_with_its_input,
    test_hold_lasts_longer_than_its_timeout,
    test_hold_tells_an_early_end,
    test_lines_come_while_the_command_runs,
    test_no_output_lasts_longer_than_the_time_limit,
    test_what_a_stream_prints_besides_is_not_kept,
    test_what_is_no_file_keeps_nobody_waiting,
    test_what_is_read_of_an_endless_file_is_bounded,
    test_write_returns_whether_anything_changed,
)
from tests.waiting import alive, soon

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that does not listen to TERM is killed soon; one on a busy machine has time to begin."""
    monkeypatch.setattr(ssh, "KILL_AFTER_S", 1)
    monkeypatch.setattr(ssh, "GRACE_S", 1)
    monkeypatch.setattr(ssh, "TERM_S", 2.0)
    monkeypatch.setattr(test_host, "FIRST_LINE_S", 3.0)


@pytest.fixture
def host(server: Server) -> Iterator[Host]:
    far = server.host()
    try:
        yield far
    finally:
        far.close()


@pytest.mark.parametrize("late", [MSG_CHANNEL_EOF, MSG_CHANNEL_DATA])
def test_what_comes_after_the_close_of_a_channel_is_not_sent(server: Server, late: int) -> None:
    """A thread that sends the end of input while the command ends: sshd would end the connection."""
    far = server.host()
    transport = far._transport()
    channel = transport.open_session()
    channel.exec_command("true")
    soon(lambda: bool(channel.closed))
    message = paramiko.Message()
    message.add_byte(bytes([late]))
    message.add_int(channel.remote_chanid)
    if late == MSG_CHANNEL_DATA:
        message.add_string(b"late")
    transport._send_user_message(message)  # type: ignore[attr-defined]
    assert far.run("echo", "there").text == "there"
    assert far._transport() is transport
    far.close()


@pytest.mark.parametrize(
    ("key", "known", "message", "hint"),
    [
        ("user", "no_hosts", "not found in known_hosts", "ssh-keyscan -p"),
        ("user", "wrong_hosts", "host key does not match", "known_hosts"),
        ("other_user", "known_hosts", "authentication failed", "key"),
    ],
    ids=["unknown host key", "wrong host key", "wrong user key"],
)
def test_only_the_right_keys_are_taken(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str, known: str, message: str, hint: str
) -> None:
    monkeypatch.setenv("HOME", str(server.folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    threads = threading.active_count()
    with pytest.raises(Unreachable, match=message) as caught:
        server.host(key=key, known=known).run("true")
    assert hint in caught.value.hint
    soon(lambda: threading.active_count() <= threads, "the connection's thread ends as well")


def test_a_machine_without_a_key_is_told_so(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not that sshd may be overloaded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    far = Ssh("far", server.address, port=server.port, known_hosts=server.folder / "known_hosts")
    with pytest.raises(Unreachable) as caught:
        far.run("true")
    assert "an SSH key" in caught.value.hint and "`key`" in caught.value.hint


def test_no_server_listens(server: Server) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        far = Ssh("far", "127.0.0.1", port=closed.getsockname()[1], key=server.folder / "user")
        with pytest.raises(Unreachable) as caught:
            far.run("true")
    assert "sshd running" in caught.value.hint


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(Unreachable) as caught:
        Ssh("nowhere", "nowhere.invalid").run("true")
    assert "/etc/hosts" in caught.value.hint


def test_very_much_comes_on_both_outputs(host: Host) -> None:
    result = host.run("sh", "-c", "head -c 5000000 /dev/zero >&2 & head -c 20000000 /dev/zero; wait", limit=20_000_000)
    assert (len(result.stdout), len(result.stderr)) == (20_000_000, 5_000_000)


def meet(host: Host, folder: Path, count: int) -> None:
    """Run commands side by side, each of which waits for all the others."""
    folder.mkdir()
    script = 'cd "$1"; : >$2; until [ "$(ls | wc -l)" = "$3" ]; do sleep 0.1; done; echo $2'
    words, seen = [f"c{number}" for number in range(count)], list[str]()

    def work(word: str) -> None:
        seen.append(host.run("sh", "-c", script, "meet", str(folder), word, str(count), timeout=60).text)

    threads = [threading.Thread(target=work, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(words)


def test_no_packet_waits_for_an_acknowledgement(server: Server) -> None:
    """Else each command on a fast network takes 40 ms more."""
    far = server.host()
    far.run("true")
    sock = far._transport().sock
    assert isinstance(sock, socket.socket) and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    far.close()


def test_commands_run_side_by_side(host: Host, tmp_path: Path) -> None:
    meet(host, tmp_path / "meet", 4)


@pytest.mark.parametrize(("sessions", "count"), [(1, 6), (2, 7), (10, 23)])
def test_more_commands_than_a_connection_has_sessions(tmp_path: Path, sessions: int, count: int) -> None:
    """H6. `MaxSessions` of sshd_config(5): 10 by default."""
    for server in run_sshd(tmp_path, "127.0.0.1", config=f"MaxSessions {sessions}\n"):
        far = server.host()
        for again in range(2):
            meet(far, tmp_path / f"meet{again}", count)
        with far.limit_silence(20):
            # The session of the check of the shell may not have ended when the first command begins.
            assert len(server.sessions()) - -(-count // sessions) in (0, 1)
        far.close()


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_signal_is_no_broken_connection(host: Host, timeout: float | None) -> None:
    for _ in range(5):
        assert host.run("sh", "-c", "kill -KILL $$", ok=None, timeout=timeout).status in (ssh.SIGNALLED, 137)
        with pytest.raises(CommandError) as caught:
            host.run("sh", "-c", "echo some words >&2; kill -KILL $$", timeout=timeout)
        assert not isinstance(caught.value, CommandTimeout)
        assert "some words" in str(caught.value)


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["ends", "ignores TERM"])
def test_a_timeout_ends_the_command_there(host: Host, tmp_path: Path, trap: str) -> None:
    script = f"{trap}echo $$ >{tmp_path}/parent; sh -c 'echo $$ >{tmp_path}/child; sleep 600; :'; :"
    began = time.monotonic()
    with pytest.raises(CommandTimeout):
        host.run("sh", "-c", script, timeout=1)
    assert time.monotonic() - began < 120
    soon(lambda: not any(alive(int((tmp_path / name).read_text())) for name in ("parent", "child")))
    assert host.run("sh", "-c", "exit 124", ok=None, timeout=30).status == 124, "a status of its own is not a timeout"


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ('echo Welcome to our cluster; exec sh -c "$SSH_ORIGINAL_COMMAND"', "prints 'Welcome to our cluster'"),
        ("echo This account is not available.; exit 1", "prints 'This account is not available.'"),
        ("exit 1", "ended with status 1"),
        ("exec yes", "prints 'y y"),
        ('exec 2>/dev/null; exec sh -c "$SSH_ORIGINAL_COMMAND"', ""),
    ],
    ids=["welcomes", "no account", "no shell", "floods", "good"],
)
def test_a_login_shell_that_does_not_just_run_commands(tmp_path: Path, forced: str, words: str) -> None:
    """Its text would be taken for output of commands, such as a path."""
    for server in run_sshd(tmp_path, "127.0.0.1", config=f"Banner {tmp_path}/config\nForceCommand {forced}\n"):
        far = server.host()
        if words:
            with pytest.raises(Unreachable, match=words):
                far.run("readlink", "-f", "/")
        else:
            assert far.run("readlink", "-f", "/").text == "/"
        far.close()


@pytest.mark.parametrize("forced", ["while :; do printf x; sleep 0.1; done", "exec yes"], ids=["trickles", "floods"])
def test_a_hostile_host_that_runs_another_program(tmp_path: Path, forced: str) -> None:
    """Its own time limit does not count: it runs what it likes, for ever."""
    error = TooMuchOutput if "yes" in forced else CommandTimeout
    later = f"case $SSH_ORIGINAL_COMMAND in true) exit;; esac; {forced}"
    for server in run_sshd(tmp_path, "127.0.0.1", config=f"ForceCommand {later}\n"):
        far, began = server.host(), time.monotonic()
        with pytest.raises(error, match="far: `true`"):
            far.run("true", timeout=1)
        if error is CommandTimeout:
            with pytest.raises(error), far.hold("true", timeout=1):
                pass
        assert time.monotonic() - began < 20
        far.close()


def test_a_broken_connection_is_reported_and_reopened(host: Host, server: Server) -> None:
    threading.Timer(0.5, server.signal, (signal.SIGKILL,)).start()
    with pytest.raises(Unreachable, match="connection broke") as caught:
        host.run("sh", "-c", "echo half; sleep 3")
    assert "again" in caught.value.hint
    assert host.run("echo", "back").text == "back"


def test_half_an_output_is_no_output(host: Host, server: Server) -> None:
    """The exit status may come before the last of the output does."""
    with pytest.raises(Unreachable, match="connection broke"), host.stream("cat", "/dev/zero") as stream:
        stream.read()
        server.signal(signal.SIGKILL)
        while stream.read():
            pass


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of 20 MB."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(20_000_000))
    return path


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_copy_that_breaks_leaves_the_file_as_it_was_and_is_resumed(
    host: Host, server: Server, tmp_path: Path, large: Path, before: bytes | None
) -> None:
    path = tmp_path / "there" / "file"
    path.parent.mkdir()
    if before is not None:
        path.write_bytes(before)
    moved: list[int] = []

    def cut(done: int) -> None:
        if done > 4_000_000 and not moved:
            server.signal(signal.SIGKILL)
            moved.append(done)

    with pytest.raises(Unreachable):
        give(host, large, str(path), cut)
    assert (path.read_bytes() if path.exists() else None) == before
    resumed: list[int] = []
    give(host, large, str(path), resumed.append)
    assert path.read_bytes() == large.read_bytes() and path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["file"]
    assert resumed[0] > 1 << 20, "it goes on where it was"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("of the caller's own")])
def test_a_copy_that_is_cancelled(
    host: Host, tmp_path: Path, large: Path, error: BaseException | type[BaseException]
) -> None:
    def cancel(done: int) -> None:
        if done > 1_000_000:
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        give(host, large, str(tmp_path / "file"), cancel)
    assert not (tmp_path / "file").exists()
    assert host.works("true"), "the connection serves on"
    give(host, large, str(tmp_path / "file"))
    assert names(tmp_path) == ["file", "large"]


def test_a_copy_that_finds_no_room_tells_why(host: Host, tmp_path: Path, large: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(SmsError, match="MiB free"):
            give(host, large, str(small / "file"))
        assert not (small / "file").exists()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_hold_that_breaks(host: Host, server: Server) -> None:
    threading.Timer(0.5, server.signal, (signal.SIGKILL,)).start()
    with pytest.raises(Unreachable, match="connection broke"), host.hold("sleep", "5"):
        pass
    with host.hold("sh", "-c", "echo ready; cat") as line:
        assert line == "ready"
        server.signal(signal.SIGKILL)
    assert host.works("true")


@pytest.mark.parametrize("work", ["run", "hold", "stream"])
def test_a_host_that_falls_silent_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setattr(ssh, "GRACE_S", 1)
    monkeypatch.setattr(ssh, "STALLED_S", 1)
    threads = threading.active_count()
    far = server.host()
    far.run("true")
    began = time.monotonic()
    pause = threading.Timer(0.5, server.signal, (signal.SIGSTOP,))
    try:
        pause.start()
        with pytest.raises(Unreachable, match="does not answer"):
            if work == "run":
                far.run("sleep", "3", timeout=1, input=bytes(30_000_000))
            elif work == "hold":
                with far.hold("sleep", "3", timeout=1):
                    pass
            else:
                with far.stream("sh", "-c", f"exec cat >{tmp_path}/file") as stream:
                    stream.write(bytes(1000))
                    pause.join()
                    stream.write(bytes(30_000_000))
        assert time.monotonic() - began < 60, "not for as long as it usually has patience"
        soon(lambda: threading.active_count() <= threads, "no thread goes on reading")
    finally:
        server.signal(signal.SIGKILL)
        far.close()


@pytest.fixture
def away(tmp_path: Path) -> Iterator[tuple[Server, Callable[[], None]]]:
    """An sshd behind a link of its own, and what cuts that link."""
    ip, name, net = find_tool("ip"), f"t-ssh-{token_hex(4)}", "198.18.0"

    def call(*words: str) -> None:
        subprocess.run([ip, *words], check=True)

    with own_network([]):
        call("netns", "add", name)
        try:
            call("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", name)
            call("addr", "add", f"{net}.1/30", "dev", "near")
            call("link", "set", "near", "up")
            call("-n", name, "addr", "add", f"{net}.2/30", "dev", "far")
            call("-n", name, "link", "set", "far", "up")
            enter = (find_tool("nsenter"), f"--net=/run/netns/{name}", "--")
            for server in run_sshd(tmp_path, f"{net}.2", *enter):
                yield server, lambda: call("-n", name, "link", "set", "far", "down")
        finally:
            subprocess.run([ip, "link", "del", "near"], check=False)  # what still runs there would keep it
            call("netns", "del", name)


def test_a_host_that_lost_its_power_is_noticed_without_a_timeout(
    away: tuple[Server, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "GONE_MS", 1000)
    server, cut = away
    far = server.host()
    assert far.run("echo", "there").text == "there"
    threading.Timer(0.5, cut).start()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        far.run("sleep", "400", timeout=None)
    assert time.monotonic() - began < 200
    far.close()


def test_another_user_works_through_sudo(
    server: Server, tmp_path: Path, large: Path, need: Callable[[str], str]
) -> None:
    """root may use sudo, too: no account has to be made for this."""
    need("sudo")
    far, back = server.host(), str(tmp_path / "back")
    far.run("true")
    far.user = "admin"
    try:
        assert far.run("sh", "-c", 'echo "$SUDO_USER $LC_ALL"; cat', input=b"in").stdout == b"root C.UTF-8\nin"
        give(far, large, str(tmp_path / "there"))
        there = HostFile(far, str(tmp_path / "there"), find_digest(far, str(large)))
        copy_file(Env(), there, Local(), back, "a file")
        assert Path(back).read_bytes() == large.read_bytes()
        with far.lock(str(tmp_path / "lock")), pytest.raises(CommandError), far.lock(str(tmp_path / "lock")):
            pass
        with pytest.raises(CommandTimeout):
            far.run("sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 60; :", timeout=1)
        soon(lambda: not alive(int((tmp_path / "pid").read_text())))
        with pytest.raises(CommandTimeout):
            far.run("sh", "-c", "trap '' TERM; while :; do sleep 1; done", timeout=1)
    finally:
        far.close()
