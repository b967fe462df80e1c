"""Two admin hosts with real stores, and a clock, for tests of schedules in simulated time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.pairs import AgentsInFolders, Pair
from tests.support.env import NOW, FakeClock

START = NOW


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time of this test, also for agents, which run in this process."""
    clock = FakeClock()
    monkeypatch.setattr(time, "time", clock.time)
    return clock


@pytest.fixture
def make_pair(clock: FakeClock) -> Iterator[Callable[[], Pair]]:
    """Returns a function that makes two hosts; the agent runs in this process."""
    # In memory: a store flushes its file system for each snapshot.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        numbers = count()
        yield lambda: Pair(Path(folder, str(next(numbers))), shared=False, agents=AgentsInFolders(), clock=clock)


@pytest.fixture
def pair(make_pair: Callable[[], Pair]) -> Pair:
    return make_pair()
