"""Lock files: flock(2), which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_S = 0.05
"""Between two tries."""


class Locked(Exception):
    """Another process holds the lock, and went on holding it."""


@contextmanager
def hold_lock(path: str, *, wait_s: float = 0.0, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a file for as long as the context lasts; its folder is made where it is missing.

    Args:
        wait_s: seconds to wait for another process that holds it.
        shared: beside others that hold it shared.

    Raises:
        Locked: another process holds it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise Locked(path) from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)
