"""The history: complete lines, in order, also with concurrent writers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from tests.support.env import fake_env


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    places = SimpleNamespace(history=tmp_path / "journal" / "lab.history")
    return cast(Cluster, SimpleNamespace(places=places, env=fake_env()))


def test_round_trip(cluster: Cluster, tmp_path: Path) -> None:
    host = Local("host-a")
    assert read_history(cluster, host) == []
    facts: dict[str, Any] = {"generation": 3, "said": 'two\nlines, "quoted", ä', "none": None}
    note(cluster, host, "guard", "stale", **facts)
    note(cluster, host, "guard", "stopped")
    events: list[Any] = read_history(cluster, host)
    first, second = events
    assert {key: first[key] for key in facts} == facts
    assert (first["host"], first["verb"], first["event"]) == ("host-a", "guard", "stale")
    assert second["event"] == "stopped" and second["at"] >= first["at"]
    assert (tmp_path / "journal" / "lab.history").stat().st_mode & 0o777 == 0o600


def test_truncated_line_is_skipped(cluster: Cluster) -> None:
    host = Local("host-a")
    note(cluster, host, "start", "started")
    path = Path(cluster.places.history)
    path.write_bytes(path.read_bytes() + b'{"at": 1, "ev')
    note(cluster, host, "start", "again")
    assert [line["event"] for line in read_history(cluster, host)] == ["started", "again"]


def test_concurrent_writers_never_mix_lines(cluster: Cluster) -> None:
    def write(name: str) -> None:
        for number in range(10):
            note(cluster, Local(name), "test", f"event {number}", filler=name * 2000)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_history(cluster, Local("a"))) == 30
