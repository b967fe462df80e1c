"""Units of the old node: one waits until the one before it can be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from appliance.agent import adopt_units


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was done; this process stands for each unit, and listens after three looks."""
    did: list[Any] = []
    with ExitStack() as stack:

        def systemctl(*argv: str, **_: Any) -> str:
            if argv[0] == "start":
                did.append(argv[1])
            return f"ActiveState=active\nMainPID={os.getpid()}\n"

        def sleep(_: float) -> None:
            did.append("waits")
            if did.count("waits") == 3:
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        monkeypatch.setattr(adopt_units, "systemctl", systemctl)
        monkeypatch.setattr(adopt_units.time, "sleep", sleep)  # type: ignore[attr-defined]
        yield did


def test_the_controller_starts_once_the_accounting_listens(calls: list[Any]) -> None:
    adopt_units.start(["slurmdbd.service", "slurmctld.service"], 5)
    assert calls == ["slurmdbd.service", "waits", "waits", "waits", "slurmctld.service"]


def test_the_only_one_waits_for_nothing(calls: list[Any]) -> None:
    adopt_units.start(["slurmctld.service"], 5)
    assert calls == ["slurmctld.service"]
