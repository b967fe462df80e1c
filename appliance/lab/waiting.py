"""Wait for what programs and hosts do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from appliance.errors import SmsError

Answer = TypeVar("Answer")
LONGEST_S = 2.0


def pause_s(took_s: float, every_s: float = 0.1) -> float:
    """Return for how long to wait after a look that took so long.

    A verb of `sms`, `kubectl` and `nomad` take a second of a processor: looks leave it to what they wait for.
    """
    return max(every_s, min(2 * took_s, LONGEST_S))


def wait_until(query: Callable[[], Answer], what: str, timeout_s: float, every_s: float = 0.1) -> Answer:
    """Call ``query`` until its result is true, and return that.

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
        time.sleep(pause_s(ended - began, every_s))
        began = time.monotonic()
    return found
