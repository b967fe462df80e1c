"""What a container may print instead of the answer of a probe."""

from __future__ import annotations

import pytest

from appliance.plan.services.probes import ProbeAnswer, read_probe


def test_an_answer() -> None:
    line = '{"name": "munge", "ok": true, "detail": "encoded", "ms": 1.5, "after_s": 0.2, "new": 1}'
    assert read_probe(line) == ProbeAnswer("munge", True, "encoded", 1.5, 0.2)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "sudo: unable to resolve host",
        "[]",
        "1",
        '{"ok": true}',
        '{"name": 1, "ok": true}',
        '{"name": "munge", "ok": "yes"}',
        '{"name": "munge", "ok": true, "detail": {}}',
        '{"name": "munge", "ok": true, "ms": 1e999}',
        '{"name": "munge", "ok": true, "after_s": NaN}',
        "[" * 100_000,
    ],
)
def test_what_is_no_answer(line: str) -> None:
    assert read_probe(line) is None
