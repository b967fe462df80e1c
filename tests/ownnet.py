"""A network namespace for one thread of the tests, and for the threads and programs that it starts: root alone can."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _call(done: int) -> None:
    if done:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def own_network(addresses: Sequence[str]) -> Iterator[None]:
    """Be in a network where these addresses, with their prefixes, are our own, for as long as the context lasts.

    Without root the test skips.
    """
    if os.geteuid():
        pytest.skip("a network of one's own is root's")
    before = os.open(Path("/proc/thread-self/ns/net"), os.O_RDONLY)
    try:
        _call(_libc.unshare(CLONE_NEWNET))
        try:
            lines = "".join(f"addr add {address} dev lo\n" for address in addresses)
            subprocess.run(["ip", "-batch", "-"], input=f"link set lo up\n{lines}", text=True, check=True)
            yield
        finally:
            _call(_libc.setns(before, CLONE_NEWNET))
    finally:
        os.close(before)
