"""Units of the old node: one waits until the one before it can be reached."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.agent import adopt_units

SYSTEMCTL = """\
#!/bin/sh
[ "$1" != start ] || echo "$2" >>{done}
printf 'ActiveState=active\\nMainPID={pid}\\n'
"""

Calls = Callable[[], list[str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Return what was done; this process stands for each unit, and listens after three looks."""
    done, program = tmp_path / "done", tmp_path / "systemctl"
    done.touch()
    program.write_text(SYSTEMCTL.format(done=done, pid=os.getpid()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with ExitStack() as stack:
        before = time.sleep

        def sleep(seconds: float) -> None:
            if seconds != adopt_units.POLL_S:
                before(seconds)  # subprocess waits so for a program that has closed its output
                return
            with done.open("a") as stream:
                stream.write("waits\n")
            if done.read_text().count("waits") == 3:
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        monkeypatch.setattr(time, "sleep", sleep)
        yield lambda: done.read_text().split()


def test_the_controller_starts_once_the_accounting_listens(calls: Calls) -> None:
    adopt_units.start(["slurmdbd.service", "slurmctld.service"], 5)
    assert calls() == ["slurmdbd.service", "waits", "waits", "waits", "slurmctld.service"]


def test_the_only_one_waits_for_nothing(calls: Calls) -> None:
    adopt_units.start(["slurmctld.service"], 5)
    assert calls() == ["slurmctld.service"]
