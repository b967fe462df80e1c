"""Commands in a container through an exec that loses the end of an output if the command ends first."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from appliance.errors import SmsError
from appliance.host.base import CommandError, CommandTimeout, TooMuchOutput
from appliance.host.local import Local
from appliance.operations.engines.owners import Command
from appliance.operations.engines.transfer import transfer
from appliance.tools.held import HeldStream, hold_argv, new_mark, run_held
from tests.support.fake import Fake

MANY = ("seq", "1", "200000")
LOSSY = """
import os, subprocess, sys, threading, time
child = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.PIPE)
def relay():
    while block := os.read(child.stdout.fileno(), 4096):
        time.sleep(0.001)
        os.write(1, block)
threading.Thread(target=relay, daemon=True).start()
status = child.wait()
os._exit(status)
"""
"""As `kubectl exec`: a slow connection, and its end when the command has ended."""


def lossy(*argv: str) -> tuple[str, ...]:
    return (sys.executable, "-c", LOSSY, *argv)


def run(*argv: str, timeout: float = 60, limit: int = 1 << 24, ok: tuple[int, ...] = (0,)) -> bytes:
    mark = new_mark()
    return run_held(Local("here"), lossy(*hold_argv(mark, *argv)), mark, ok=ok, timeout=timeout, limit=limit).stdout


def test_the_output_is_whole() -> None:
    lost = Local("here").run(*lossy(*MANY)).text.splitlines()
    assert not lost or lost[-1] != "200000", "this exec loses nothing, so that it proves nothing"
    assert run(*MANY).split()[-1] == b"200000"
    assert run("true") == b""
    assert run("printf", "x") == b"x"
    assert run("cat") == b"", "it has no input"


def test_a_transfer_is_whole() -> None:
    mark, here = new_mark(), Local("here")
    found: list[int] = []
    reader = Command(here, lossy(*hold_argv(mark, *MANY)), mark)
    writer = Command(here, ("sh", "-c", "wc -l | grep -qx 200000"))
    transfer(reader, writer, found.append)
    assert found[-1] == len("".join(f"{number}\n" for number in range(1, 200001)))


def test_its_status_is_that_of_the_command() -> None:
    with pytest.raises(CommandError) as failed:
        run("sh", "-c", "echo out; echo why >&2; exit 3")
    assert failed.value.result.status == 3 and b"why" in failed.value.result.stderr
    assert failed.value.result.stdout == b"out\n"
    assert run("sh", "-c", "echo out; exit 3", ok=(0, 3)) == b"out\n"


def test_an_output_without_its_end() -> None:
    """The engine ends it: with status 0, and with another one."""
    with pytest.raises(SmsError, match="ended too early"):
        run_held(Local("here"), ("seq", "1", "9"), new_mark(), ok=(0,), timeout=9, limit=1 << 20)
    with pytest.raises(CommandError, match="status 1"):
        run_held(Local("here"), ("sh", "-c", "echo 1; exit 1"), new_mark(), ok=(0,), timeout=9, limit=1 << 20)
    done = run_held(Local("here"), ("sh", "-c", "echo 1; exit 1"), new_mark(), ok=None, timeout=9, limit=1 << 20)
    assert done.status == 1


def test_limits() -> None:
    with pytest.raises(TooMuchOutput):
        run(*MANY, limit=1000)
    with pytest.raises(CommandTimeout):
        run("sleep", "30", timeout=0.3)


@pytest.mark.parametrize("size", [1, 7, 40, 41, 42, 1 << 20])
def test_blocks_of_any_size(size: int) -> None:
    mark = new_mark()
    answer: Callable[..., tuple[int, str]] = lambda *_: (0, f"abc{mark[:-1].decode()}\n{mark.decode()}")  # noqa: E731
    with Fake({("exec",): answer}).stream("exec") as stream:
        held, found = HeldStream(stream, mark), b""
        while block := held.read(size):
            found += block
    assert found == b"abc%s\n" % mark[:-1] and held.whole
