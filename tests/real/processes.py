"""`sms` in a lab host as a process of this machine: begun, followed by its steps, killed."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.real.conftest import Playground


def begin(playground: Playground, *words: str, on: str = "host-a") -> subprocess.Popen[bytes]:
    """`sms` in a lab host, not waited for. The process is nsenter's child of this one."""
    host = playground.lab.host(on)
    return subprocess.Popen([*host.prefix, "sms", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def below(pid: int) -> list[int]:
    """A process and its descendants, the youngest first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in below(int(child))] + [pid]


def sms_pids(parent: int) -> list[int]:
    """The sms process below nsenter, by pid."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]


def kill_sms(parent: int) -> None:
    """SIGKILL of the sms process and of nsenter."""
    for pid in [*sms_pids(parent), parent]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_step(process: subprocess.Popen[bytes], step: str) -> None:
    """Return as soon as the step has been said to be done."""
    assert process.stderr
    said = []
    for line in process.stderr:
        said.append(line.decode())
        if step in said[-1]:
            return
    pytest.fail(f"it never came to {step!r}: {''.join(said)}")
