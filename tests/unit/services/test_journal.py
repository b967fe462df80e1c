"""``sms journal``: the text of history lines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from appliance.cli.services.journal import text_of

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
