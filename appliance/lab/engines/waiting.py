"""Wait for what programs of an engine do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from appliance.errors import SmsError

Answer = TypeVar("Answer")


def wait_until(query: Callable[[], Answer], what: str, timeout_s: float, every_s: float = 0.1) -> Answer:
    """Call ``query`` until its result is true, and return that.

    Raises:
        SmsError: it is not, after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := query()):
        if time.monotonic() > deadline:
            raise SmsError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(every_s)
    return found
