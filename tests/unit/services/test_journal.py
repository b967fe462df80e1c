"""``sms journal``: the text of history lines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from appliance.cli.services.journal import text_of
from appliance.cli.vm.snapshot import line
from appliance.operations.services.journal import _time_of
from appliance.operations.vm.snapshots import VmSnapshot
from appliance.units import format_age

AT = time.mktime((2026, 11, 21, 9, 8, 7, 0, 0, -1))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            {"at": AT, "host": "host-a", "verb": "stop", "event": "stopped", "seconds": 0.9},
            "2026-11-21 09:08:07  host-a stop stopped: seconds=0.9",
        ),
        (
            {"at": AT, "host": "a", "verb": "start", "event": "started", "peer": ""},
            "2026-11-21 09:08:07  a start started",
        ),
        ({"at": "soon", "host": "a"}, "???????????????????  a ? ?"),
        ({}, "???????????????????  ? ? ?"),
        (
            {"at": AT, "host": "a", "verb": "v", "event": "e", "why": "one\n\x1b[31mtwo"},
            "2026-11-21 09:08:07  a v e: why=one \\x1b[31mtwo",
        ),
    ],
)
def test_text_of_a_line(line: dict[str, Any], text: str) -> None:
    assert text_of(line) == text


def test_long_values_are_truncated() -> None:
    assert len(text_of({"at": AT, "host": "a", "verb": "v", "event": "e", "why": "x" * 5000})) < 300


@pytest.mark.parametrize("at", [1e300, -1e300, float("nan"), float("inf"), 10**400, True, None, "x", [1]])
def test_a_time_of_another_machine_may_be_anything(at: Any) -> None:
    assert text_of({"at": at, "host": "a"}).endswith("  a ? ?")
    assert 0 <= _time_of({"at": at}) < 1e12
    if isinstance(at, float):
        assert "at an unknown time" in line(VmSnapshot("one", at, frozen_ms=at))
        assert format_age(at) == "an unknown time"
