"""Files of this machine that a command is given as its input or output, kept out of its reach.

A program in the services container can open what it has got once more, by /proc/self/fd, and root there may then change
the file itself, or its mode: pipes are between them.
"""

from __future__ import annotations

import array
import fcntl
import os
import stat
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

BLOCK = 4096
"""Bytes that a pipe takes at once (PIPE_BUF)."""


@contextmanager
def kept_apart() -> Iterator[tuple[int, int, int]]:
    """Yield the descriptors that stand for standard input, output and error."""
    with ExitStack() as stack:
        stdin = stack.enter_context(_reader(0)) if _is_file(0) else 0
        stdout = stack.enter_context(_writer(1)) if _is_file(1) else 1
        together = _is_file(1) and _is_file(2) and os.path.sameopenfile(1, 2)
        stderr = stdout if together else stack.enter_context(_writer(2)) if _is_file(2) else 2
        yield stdin, stdout, stderr


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


@contextmanager
def _writer(descriptor: int) -> Iterator[int]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=descriptor)
    assert process.stdin
    try:
        yield process.stdin.fileno()
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def _reader(descriptor: int) -> Iterator[int]:
    """What is not read stays for the next program: in a shell's loop, the file is also the input of `read`."""
    reader, writer = os.pipe()
    ended = threading.Event()

    def feed() -> None:
        while not ended.is_set() and (block := os.read(descriptor, BLOCK)):
            os.write(writer, block)  # whole: no more than PIPE_BUF
        os.close(writer)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield reader
    finally:
        ended.set()
        left = 0
        while thread.is_alive():  # it may wait for room
            left += _drain(reader)
            thread.join(0.01)
        os.lseek(descriptor, -left - _drain(reader), os.SEEK_CUR)
        os.close(reader)


def _drain(reader: int) -> int:
    """Return how many bytes are in a pipe, and take them out."""
    left = array.array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, left)
    return len(os.read(reader, left[0])) if left[0] else 0
