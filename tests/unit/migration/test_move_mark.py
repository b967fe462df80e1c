"""The stored state of a migration: what is written is read again, also what older versions wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.host_state import HostState, read_mark
from appliance.agent.migration_resume import resume
from appliance.agent.migration_source import MigrationSource
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import Problem, read_request
from appliance.agent.system import System
from appliance.shared.migration import MoveMark, SourceRequest, TargetRequest
from tests.unit.migration.requests import SOURCE, TARGET

PORTS = {"eth0": "veth3"}
OLDER = [
    (
        {"side": "leave", "state": "stopping", "pid": 9, "request": SOURCE},
        MoveMark("leave", "stopping", 9, SOURCE),
    ),
    (
        {"ports": PORTS, "side": "leave", "state": "released", "pid": 9, "request": SOURCE},
        MoveMark("leave", "released", 9, SOURCE, PORTS),
    ),
    (
        {"side": "arrive", "state": "copy", "pid": 9, "request": TARGET},
        MoveMark("arrive", "copy", 9, TARGET),
    ),
    (
        {"ports": PORTS, "inode": 12, "side": "arrive", "state": "up", "pid": 9, "request": TARGET},
        MoveMark("arrive", "up", 9, TARGET, PORTS, 12),
    ),
]


@pytest.mark.parametrize(("written", "mark"), OLDER)
def test_marks_of_version_519381b(tmp_path: Path, written: dict[str, Any], mark: MoveMark) -> None:
    """As that version wrote them; the request has all that the state machine needs."""
    path = tmp_path / "c.move"
    path.write_text(json.dumps(written))
    assert read_mark(System(), str(path)) == mark
    if mark.side == "leave":
        assert MigrationSource(read_request(SourceRequest, mark.request), None).host_state.side == "leave"
    else:
        assert MigrationTarget(read_request(TargetRequest, mark.request), None).host_state.side == "arrive"


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "c.move"
    state = HostState(read_request(TargetRequest, {**TARGET, "mark": str(path)}), "arrive", System())
    state.save_state("started", ports=PORTS, inode=5)
    found = read_mark(System(), str(path))
    assert found and (found.side, found.state, found.ports, found.inode) == ("arrive", "started", PORTS, 5)
    assert read_request(TargetRequest, found.request) == state.request
    state.clear_state()
    assert read_mark(System(), str(path)) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b'{"side": "leave"', "it is not JSON"),
        (b"{}", "side is missing"),
        (b"[]", "it is not an object"),
        (b'{"side": "leave", "state": "read", "pid": "1", "request": {}}', "pid is not a int"),
        (b'{"side": "leave", "state": "read", "pid": 1, "request": {}, "ports": [1]}', "ports is not a dict"),
    ],
)
def test_an_invalid_one_is_reported(tmp_path: Path, data: bytes, error: str) -> None:
    """Ports may be detached: it does not count as none."""
    path = tmp_path / "c.move"
    path.write_bytes(data)
    with pytest.raises(Problem, match=error) as caught:
        read_mark(System(), str(path))
    assert str(path) in caught.value.hint
    with pytest.raises(Problem, match=error):
        resume({"mark": str(path), "lock": str(tmp_path / "lock")})
    assert path.read_bytes() == data


def test_one_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_mark(System(), str(tmp_path))
