"""Wait for what programs and hosts do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from appliance.errors import SmsError

Answer = TypeVar("Answer")
LONGEST_S = 2.0
"""Seconds between two calls at most, unless more are asked for."""


def wait_until(query: Callable[[], Answer], what: str, timeout_s: float, every_s: float = 0.1) -> Answer:
    """Call ``query`` until its result is true, and return that.

    A call by `sms`, `kubectl` or `nomad` takes a second of a processor: it leaves twice as much to what it waits for.

    Args:
        every_s: the least time between two calls.

    Raises:
        SmsError: it is not, after ``timeout_s`` seconds.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    while not (found := query()):
        ended = time.monotonic()
        if ended > deadline:
            raise SmsError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(max(every_s, min(2 * (ended - began), LONGEST_S)))
        began = time.monotonic()
    return found
