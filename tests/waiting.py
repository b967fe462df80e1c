"""Wait for what other threads, programs and hosts do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from appliance.lab import waiting

Answer = TypeVar("Answer")


def wait_until(ask: Callable[[], Answer], what: str = "it", timeout_s: float = 150, every_s: float = 0.1) -> Answer:
    """As that of labs, for as long as tests have patience."""
    return waiting.wait_until(ask, what, timeout_s, every_s)


def soon(ask: Callable[[], Answer], what: str = "it") -> Answer:
    """As ``wait_until``, for what takes less than 5 s."""
    return wait_until(ask, what, 5)


def alive(pid: int) -> bool:
    """Whether it runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False
