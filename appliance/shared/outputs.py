"""Outputs of a child process (``subprocess.Popen``), within limits of size and time."""

import contextlib
import os
import selectors
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

MAX_OUTPUT = 16 << 20
"""Maximum size of each output of a command, in bytes: it is kept in memory, and what prints it may be hostile."""
BLOCK = 1 << 18
READ_BYTES = 1 << 16
"""What one read of a pipe returns at most: its usual capacity."""


class Overflow(Exception):
    """An output is larger than its limit."""


class TooLate(Exception):
    """A program did not end in time, or what it started holds its outputs open."""


class Outputs:
    """Both outputs of a child process, each of at most ``limit`` bytes, and its input."""

    def __init__(self, process: Any, limit: int, on_line: Optional[Callable[[str], None]] = None) -> None:
        self.process = process
        self.limit = limit
        self.on_line = on_line
        self._stdout, self._stderr, self._line = bytearray(), bytearray(), 0

    @property
    def of_stdout(self) -> bytes:
        """What was read of standard output."""
        return bytes(self._stdout)

    @property
    def of_stderr(self) -> bytes:
        """What was read of standard error."""
        return bytes(self._stderr)

    def exchange(self, input: Optional[bytes], timeout: Optional[float], *, first_line: bool = False) -> None:
        """Write the input, if any, read both outputs to their ends, and wait for the process.

        Args:
            first_line: return with the first line of standard output.

        Raises:
            Overflow: an output is too large.
            TooLate: it takes longer than ``timeout``.
        """
        process, end = self.process, time.monotonic() + timeout if timeout is not None else None
        rest = memoryview(input or b"")
        with selectors.PollSelector() as selector:
            for stream, kept in ((process.stdout, self._stdout), (process.stderr, self._stderr)):
                if stream:
                    selector.register(stream, selectors.EVENT_READ, kept)
            if input is not None and not self._closes_input(rest):
                assert process.stdin
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                if first_line and b"\n" in self._stdout:
                    return
                for key, _ in selector.select(_left(end)):
                    if key.data is None:
                        rest = self._write(rest)
                        if self._closes_input(rest):
                            selector.unregister(key.fileobj)
                    elif not self._read(key.fd, key.data):
                        selector.unregister(key.fileobj)
        if self.on_line and self._line < len(self._stdout):
            self.on_line(self._stdout[self._line :].decode(errors="replace"))
        pause = 0.0002
        while process.poll() is None:
            left = _left(end)
            time.sleep(pause if left is None else min(pause, left))
            pause = min(2 * pause, 0.05)

    def _closes_input(self, rest: memoryview) -> bool:
        """Close the input at its end; return whether it is closed."""
        assert self.process.stdin
        if not len(rest):
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return bool(self.process.stdin.closed)

    def _write(self, rest: memoryview) -> memoryview:
        """Write some of the input; return the rest, none where the process reads no more."""
        assert self.process.stdin
        try:
            return rest[os.write(self.process.stdin.fileno(), rest[:BLOCK]) :]
        except BlockingIOError:
            return rest
        except BrokenPipeError:
            return rest[:0]

    def _read(self, descriptor: int, kept: bytearray) -> bool:
        """Read some of an output; return whether there may be more."""
        block = os.read(descriptor, READ_BYTES)
        if len(kept) + len(block) > self.limit:
            kept += block[: self.limit - len(kept)]
            raise Overflow
        kept += block
        if self.on_line and kept is self._stdout:
            while (end := kept.find(b"\n", max(self._line, len(kept) - len(block)))) >= 0:
                line, self._line = kept[self._line : end], end + 1
                self.on_line(line.decode(errors="replace"))
        return bool(block)

    def close(self) -> None:
        """Close the pipes."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def _left(end: Optional[float]) -> Optional[float]:
    if end is None:
        return None
    left = end - time.monotonic()
    if left <= 0:
        raise TooLate
    return left


def begin(popen: Callable[..., Any], argv: Sequence[Any], **options: Any) -> Any:
    """Start a program with ``subprocess.Popen``, which an interrupt leaves with a program that nobody ends."""
    process = None
    try:
        with _uninterrupted():
            process = popen(argv, **options)
    except BaseException:
        if process is not None and process.poll() is None:
            leads = os.getpgid(process.pid) == process.pid
            end_group(process) if leads else process.kill()
        raise
    return process


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Handle the signals that end a verb after the block. A mask would be inherited by what starts in it."""
    if threading.current_thread() is not threading.main_thread():  # only that one handles signals
        yield
        return
    came: List[int] = []
    before: Dict[int, Any] = {}
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        for number in map(int, ending):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # no handler interrupts this
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came[:1]:
            before[number](number, None)


def end_group(process: Any) -> None:
    """Terminate the process group and wait until no member runs."""
    for signum, grace in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and (process.poll() is None or group_runs(process.pid)):
            time.sleep(0.02)


def group_runs(group: int) -> bool:
    """Return whether a member of the process group runs; a member that waits to be reaped does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, member_of = stat.read_bytes().rpartition(b")")[2].split()[:3]
            if int(member_of) == group and state not in b"ZX":
                return True
    return False
