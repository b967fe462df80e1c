"""Lock files: flock(2), which the kernel releases when the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

RETRY_S = 0.05
"""Seconds between two attempts."""
PORTS_WAIT_S = 5
"""Seconds to wait for the lock of ports: to attach or detach some takes a moment."""
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Locked(Exception):
    """Another process holds the lock, and did not release it in time."""


@contextmanager
def hold_lock(path: str, *, wait_s: float = 0.0, shared: bool = False) -> Iterator[None]:
    """Hold a lock file while the context lasts; create its folder if it is missing.

    Args:
        wait_s: seconds to wait while another process holds it.
        shared: take a shared lock instead of an exclusive one.

    Raises:
        Locked: another process holds it.
    """
    try:
        descriptor = os.open(path, FLAGS, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, FLAGS, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Locked(path) from None
                time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)


def ports_lock(lock: str) -> str:
    """Return the path of the lock under which the container's ports are attached to bridges and detached.

    It is not ``lock``, that of the host: a run holds that one for as long as it waits for services, or copies. A caller
    that needs both takes that one first, or does not wait for it.
    """
    return f"{lock}.ports"
