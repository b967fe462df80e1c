"""Answers of ``sms-probe``, a line of JSON per service; root in the container can replace that program."""

from __future__ import annotations

import json
from dataclasses import dataclass

from appliance.shared.records import RecordError, from_value


@dataclass(frozen=True)
class ProbeAnswer:
    """Answer of a service's probe. ``ms``: duration of the probe; ``after_s``: seconds until it answered."""

    name: str
    ok: bool
    detail: str = ""
    ms: float = 0.0
    after_s: float = 0.0


def read_probe(line: str) -> ProbeAnswer | None:
    """Return the answer in a line of output; None if it is of another program, or invalid."""
    try:
        return from_value(ProbeAnswer, json.loads(line))
    except (ValueError, RecursionError, RecordError):
        return None
