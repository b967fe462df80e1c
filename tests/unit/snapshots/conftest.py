"""Two admin hosts with real stores, and a clock, for tests of schedules in simulated time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.main import find_command
from appliance.agent.store import Store
from appliance.host.base import Host, Unreachable
from appliance.tools import agent
from tests.pairs import STATE, HostInFolder, Pair

START = 1_795_000_000.0


class Clock:
    """The time of this test."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(START)
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture
def make_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Pair]:
    """Returns a function that makes two hosts; the agent runs in this process."""

    def call(host: Host, command: str, request: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        assert isinstance(host, HostInFolder)
        if host.cut:
            raise Unreachable(f"{host.name}: interrupted")
        asked = json.loads(json.dumps(request).replace(STATE, str(host.folder)))
        reply: dict[str, Any] = json.loads(json.dumps(find_command(command)(asked)))
        return reply

    monkeypatch.setattr(agent, "call", call)
    monkeypatch.setattr(agent, "query", call)
    monkeypatch.setattr(Store, "sync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    numbers = count()
    return lambda: Pair(tmp_path / str(next(numbers)), shared=False)


@pytest.fixture
def pair(make_pair: Callable[[], Pair]) -> Pair:
    return make_pair()
