"""A command whose two ends are ours: GBs both ways, its words, its end.

tests/real/hosts/test_stream_ssh.py runs most of these over SSH.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from appliance.host.base import CommandError, Host
from appliance.host.local import Local
from appliance.host.stream import Stream
from tests.support.fake import Fake
from tests.waiting import alive

MUCH = 64 << 20
BOTH = "head -c 5000000 /dev/zero >&2 & cat; wait"


@pytest.fixture
def host() -> Host:
    return Local()


def feed(stream: Stream, size: int) -> threading.Thread:
    """Write so many bytes from another thread, then close."""

    def work() -> None:
        for _ in range(size // (1 << 20)):
            stream.write(bytes(1 << 20))
        stream.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def drain(stream: Stream) -> int:
    """Bytes until its end."""
    total = 0
    while block := stream.read():
        total += len(block)
    return total


def soon(path: Path) -> bool:
    deadline = time.monotonic() + 5
    while not (path.exists() and path.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def test_bytes_pass_both_ways_and_messages_are_received(host: Host) -> None:
    heard: list[str] = []
    with host.stream("sh", "-c", "echo ready >&2; cat; printf 'no end' >&2; exit 3", on_line=heard.append) as stream:
        stream.write(b"a\0b")
        assert stream.read_exactly(2) == b"a\0"
        stream.write(memoryview(b"\xff"))
        assert stream.read_exactly(2) == b"b\xff"
        stream.end()
        assert stream.read() == b""
        result = stream.result(ok=(3,))
    assert (result.status, result.stdout, result.stderr) == (3, b"", b"ready\nno end")
    assert heard == ["ready", "no end"]


def test_much_goes_both_ways_at_once(host: Host) -> None:
    with host.stream("cat") as stream:
        thread = feed(stream, MUCH)
        assert drain(stream) == MUCH
        thread.join()
        assert stream.result().status == 0


def test_its_standard_error_never_blocks_it(host: Host) -> None:
    with host.stream("sh", "-c", BOTH) as stream:
        thread = feed(stream, 8 << 20)
        assert drain(stream) == 8 << 20
        thread.join()
        assert stream.result().status == 0


def test_it_waits_for_its_reader(host: Host, tmp_path: Path) -> None:
    """Flow control: what is not read is not produced."""
    script = f"head -c 400000000 /dev/zero; echo done >{tmp_path}/done"
    with host.stream("sh", "-c", script) as stream:
        stream.read_exactly(1)
        time.sleep(0.5)
        assert not (tmp_path / "done").exists()
        assert drain(stream) == 399_999_999
        stream.result()


def test_one_that_ends_early_reports_why(host: Host) -> None:
    with host.stream("sh", "-c", "head -c 10 >/dev/null; echo full >&2; exit 7") as stream:
        with pytest.raises(CommandError, match=r"(?s)status 7.*full") as caught:
            for _ in range(1000):
                stream.write(bytes(1 << 20))
        assert "before it had read all" in caught.value.hint


def test_too_few_bytes_are_an_error(host: Host) -> None:
    with (
        host.stream("sh", "-c", "printf abc; echo cut >&2; exit 1") as stream,
        pytest.raises(CommandError, match=r"(?s)status 1.*cut") as caught,
    ):
        stream.read_exactly(10)
    assert "7 bytes too early" in caught.value.hint


def test_a_result_waits_and_leaves_the_rest(host: Host) -> None:
    script = "head -c 3000000 /dev/zero; cat >/dev/null; exit 2"
    with host.stream("sh", "-c", script) as stream, pytest.raises(CommandError, match="status 2"):
        stream.result()


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["ends", "ignores TERM"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_left_early_it_is_ended_with_all_it_started(
    host: Host, tmp_path: Path, trap: str, error: type[BaseException]
) -> None:
    """Neither reading nor writing: closing its ends alone would not do."""
    script = f"{trap}sh -c 'echo $$ >{tmp_path}/child; sleep 60; :' & echo $$ >{tmp_path}/parent; sleep 61; :"
    with pytest.raises(error), host.stream("sh", "-c", script):
        assert soon(tmp_path / "parent") and soon(tmp_path / "child")
        raise error
    pids = [int((tmp_path / name).read_text()) for name in ("parent", "child")]
    assert not any(alive(pid) for pid in pids)


def test_left_early_it_may_clean_up(host: Host, tmp_path: Path) -> None:
    script = f"trap 'echo >{tmp_path}/cleaned; exit 1' TERM; echo on; sleep 60 & wait"
    with pytest.raises(ValueError), host.stream("sh", "-c", script) as stream:
        stream.read_exactly(3)
        raise ValueError
    assert (tmp_path / "cleaned").exists()


def test_left_to_itself_it_goes_on(host: Host, tmp_path: Path) -> None:
    """Like an agent that waits until its network works: to its own end, its output pipe closed."""
    script = f"trap '' PIPE; echo on; sleep 1; echo words; echo words >&2; echo done >{tmp_path}/done"
    with host.stream("sh", "-c", script) as stream:
        stream.read_exactly(3)
        stream.leave()
    assert not (tmp_path / "done").exists()
    assert soon(tmp_path / "done")


def test_the_fake_one_answers_from_its_table() -> None:
    host = Fake({("tr",): lambda argv, given: (0, (given or b"").decode().upper()), ("bad",): (4, "why")})
    with host.stream("tr", "a-z") as stream:
        stream.write(b"abc")
        stream.end()
        assert stream.read(2) + stream.read() + stream.read() == b"ABC"
        assert stream.result().status == 0
    heard: list[str] = []
    with host.stream("bad", on_line=heard.append) as stream, pytest.raises(CommandError, match="why"):
        stream.result()
    assert heard == ["why"]
    assert host.asked == [("tr", "a-z"), ("bad",)]
