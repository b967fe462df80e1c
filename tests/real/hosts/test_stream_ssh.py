"""A stream over SSH, against a real sshd: as on this machine, and what a connection can do wrong."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.host import ssh
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.host.ssh import Ssh
from tests.real.hosts.test_ssh import away, host, impatient  # noqa: F401
from tests.real.sshd import Server, run_sshd
from tests.unit.test_stream import (  # noqa: F401  the same must be true over SSH
    drain,
    feed,
    soon,
    test_a_result_waits_and_leaves_the_rest,
    test_bytes_pass_both_ways_and_messages_are_received,
    test_it_waits_for_its_reader,
    test_its_standard_error_never_blocks_it,
    test_left_early_it_is_ended_with_all_it_started,
    test_left_early_it_may_clean_up,
    test_left_to_itself_it_goes_on,
    test_much_goes_both_ways_at_once,
    test_one_that_ends_early_reports_why,
    test_too_few_bytes_are_an_error,
)
from tests.waiting import alive, wait_until
from tests.waiting import soon as soon_true

pytestmark = pytest.mark.real

GIGABYTE = 1 << 30
"""After half of it SSH makes new keys."""


@pytest.mark.parametrize("size", [GIGABYTE >> 4, pytest.param(GIGABYTE, marks=pytest.mark.full)], ids=["part", "whole"])
@pytest.mark.parametrize("far", [False, True], ids=["here", "over SSH"])
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_gigabyte_flows(server: Server, way: str, far: bool, size: int) -> None:
    one: Host = server.host() if far else Local()
    script = f"head -c {size} /dev/zero" if way == "out" else "cat >/dev/null"
    with one.stream("sh", "-c", script) as stream:
        if way == "out":
            assert drain(stream) == size
        else:
            feed(stream, size).join()
        assert stream.result().status == 0
    if isinstance(one, Ssh):
        one.close()


def test_commands_end_while_new_keys_are_made(server: Server) -> None:
    """It failed at once: paramiko's own thread, which makes the keys, waited for them to answer a close."""
    one = server.host()
    one.run("true")
    failures: list[BaseException] = []

    def run_some() -> None:
        try:
            for _ in range(40):
                one.run("true")
        except SmsError as error:
            failures.append(error)

    thread = threading.Thread(target=run_some)
    thread.start()
    try:
        while thread.is_alive():
            one._transport().renegotiate_keys()
    finally:
        thread.join()
        one.close()
    assert failures == []


@pytest.mark.parametrize("way", ["read", "write", "result"])
def test_a_connection_that_breaks_in_the_middle(host: Ssh, server: Server, way: str) -> None:  # noqa: F811
    with pytest.raises(Unreachable, match="connection broke"), host.stream("sh", "-c", "cat; sleep 20") as stream:
        threading.Timer(0.5, server.signal, (signal.SIGKILL,)).start()
        if way == "result":
            stream.result()
        elif way == "read":
            drain(stream)
        else:
            thread = threading.Thread(target=lambda: suppressed(lambda: drain(stream)), daemon=True)
            thread.start()
            while True:
                stream.write(bytes(1 << 20))
    assert host.run("echo", "back").text == "back"


def test_the_far_side_sees_the_end_of_a_connection(host: Ssh, server: Server, tmp_path: Path) -> None:  # noqa: F811
    script = f"echo $$ >{tmp_path}/pid; cat >/dev/null; echo over >{tmp_path}/end"
    with pytest.raises(Unreachable), host.stream("sh", "-c", script) as stream:
        assert soon(tmp_path / "pid")
        server.signal(signal.SIGKILL)
        while True:
            stream.write(bytes(1 << 20))
    assert soon(tmp_path / "end")


def test_a_host_that_falls_silent_is_given_up(
    host: Ssh,  # noqa: F811
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "STALLED_S", 1)
    with pytest.raises(Unreachable, match="does not answer"), host.stream("cat") as stream:
        stream.write(b"x")
        assert stream.read_exactly(1) == b"x"
        server.signal(signal.SIGSTOP)
        stream.read()
    server.signal(signal.SIGKILL)


def test_a_slow_command_is_waited_for(host: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(ssh, "STALLED_S", 0.3)
    with host.stream("sh", "-c", "sleep 1; echo a; sleep 1; exit 5") as stream:
        assert stream.read_exactly(2) == b"a\n"
        assert stream.result(ok=None).status == 5
    with host.stream("sh", "-c", "sleep 1; wc -c") as stream:
        stream.write(bytes(30 << 20))
        stream.end()
        assert stream.read_exactly(8) == b"31457280"
        stream.result()


def test_the_far_side_closes_the_connection(
    away: tuple[Server, Callable[[], None]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link goes down in the middle: nothing comes back, not even a refusal."""
    monkeypatch.setattr(ssh, "GONE_MS", 1000)
    far_server, cut = away
    far = far_server.host()
    began = time.monotonic()
    with pytest.raises(Unreachable), far.stream("cat") as stream:
        thread = threading.Thread(target=lambda: suppressed(lambda: drain(stream)), daemon=True)
        thread.start()
        threading.Timer(0.5, cut).start()
        while True:
            stream.write(bytes(1 << 20))
    assert time.monotonic() - began < 200
    far.close()


def suppressed(work: Callable[[], object]) -> None:
    with contextlib.suppress(CommandError, Unreachable):
        work()


@pytest.fixture
def threads() -> Iterator[None]:
    """None is left."""
    before = threading.active_count()
    yield
    wait_until(lambda: threading.active_count() <= before, "no thread is left", 30)


def test_no_thread_is_left(threads: None, server: Server) -> None:
    far = server.host()
    for one in (Local(), far):
        with one.stream("cat") as stream:
            stream.write(b"x")
            assert stream.read_exactly(1) == b"x"
            stream.result()
        with pytest.raises(ValueError), one.stream("sleep", "60"):
            raise ValueError
    far.close()


def test_left_early_what_it_left_behind_is_ended(host: Ssh, tmp_path: Path) -> None:  # noqa: F811
    """The command ends by SIGTERM, what it has started does not."""
    script = (
        f"(trap '' TERM; echo $BASHPID >{tmp_path}/child; while :; do sleep 1; done) & echo $$ >{tmp_path}/pid; wait"
    )
    with pytest.raises(ValueError), host.stream("bash", "-c", script):
        assert soon(tmp_path / "pid") and soon(tmp_path / "child")
        raise ValueError
    assert not any(alive(int((tmp_path / name).read_text())) for name in ("pid", "child"))


@pytest.fixture
def chatty(tmp_path: Path) -> Iterator[Server]:
    """As sudo on a host whose name cannot be resolved, or a start file of a shell: a message before every command."""
    words = """ForceCommand echo "unable to resolve host" >&2; eval "exec $SSH_ORIGINAL_COMMAND"\n"""
    yield from run_sshd(tmp_path, "127.0.0.1", config=words)


def test_words_before_the_command_do_not_hide_it(chatty: Server, tmp_path: Path) -> None:
    far = chatty.host()
    far.run("true")
    heard: list[str] = []
    with pytest.raises(ValueError), far.stream("sh", "-c", "echo ready >&2; sleep 60; :", on_line=heard.append) as left:
        assert soon_true(lambda: "ready" in heard)
        raise ValueError
    assert isinstance(left, ssh.SshStream) and not alive(int(left.pid))
    assert heard[:2] == ["unable to resolve host", "ready"]
    far.close()


def test_through_sudo_it_is_ended_as_well(
    server: Server,
    tmp_path: Path,
    need: Callable[[str], str],
) -> None:
    need("sudo")
    far = server.host()
    far.run("true")
    far.user = "admin"
    with pytest.raises(ValueError), far.stream("sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 60; :"):
        assert soon(tmp_path / "pid")
        raise ValueError
    # sudo reaps what it ran; we do not wait for sudo.
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())), "it has ended", 30)
    far.close()
