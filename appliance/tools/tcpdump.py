"""tcpdump: capture the packets of an interface."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from appliance.errors import SmsError
from appliance.host.base import Host, Result
from appliance.host.local import Local, Running
from appliance.host.stream import Stream

BUFFER_KB = 64 << 10
"""Kernel buffer for packets while tcpdump is not scheduled: half a second at 1 Gbit/s.

With libpcap's default of 2 MiB the lab loses packets whenever both cores are busy.
"""
SNAP = 2048
"""Bytes captured of a frame, enough for an MTU of 1500. With offloading, network cards and the lab's veth pairs
deliver frames of up to 64 KiB, which would fill buffer and disk."""
BLOCK = 1 << 20
LAST_S = 1.1
"""The kernel delivers packets in blocks; a partial block only after a second (PACKET_MMAP, tcpdump's timeout)."""


@dataclass(frozen=True)
class Counts:
    """Statistics that tcpdump prints at its end.

    Attributes:
        packets: captured; these are in the file.
        received: passed the kernel's filter. More than ``packets`` if the last second was not read.
        dropped: lost for lack of buffer space, by the kernel or the interface.
    """

    packets: int
    received: int
    dropped: int


@dataclass(frozen=True)
class Recorded:
    """A finished capture; ``interrupted``: ended early by Ctrl-C or SIGTERM."""

    counts: Counts
    bytes: int
    interrupted: bool


def capture_argv(interface: str, seconds: float, only: str = "") -> tuple[str, ...]:
    """Return the command that captures an interface as pcap to standard output, unbuffered, for ``seconds``.

    Args:
        only: a filter (pcap-filter(7)).

    It ends by SIGINT, so that tcpdump flushes and prints its statistics. ``-Z root``: Debian's tcpdump switches to
    another user otherwise, which needs a capability that root lacks in some containers.
    """
    end = ("timeout", "--foreground", "--preserve-status", "--signal=INT", "--kill-after=10", f"{seconds:g}")
    return (
        *end,
        *("tcpdump", "-i", interface, "-n", "-s", str(SNAP), "-B", str(BUFFER_KB), "-U", "-Z", "root", "-w", "-"),
        *((only,) if only else ()),
    )


class Captured(Protocol):
    """A capture that runs; ``out`` is a descriptor with its output."""

    @property
    def out(self) -> int: ...

    def stop(self) -> None:
        """Terminate it; tcpdump writes what it has received."""

    def result(self) -> Result:
        """Wait for its end, after the end of its output."""


class Piped:
    """A capture on another host, whose output is copied to a pipe."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._failed: SmsError | None = None
        self.out, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        try:
            while rest := memoryview(self._stream.read()):
                while rest:
                    rest = rest[os.write(self._end, rest) :]
        except SmsError as error:
            self._failed = error
        except OSError:
            pass  # its reader has closed it
        finally:
            os.close(self._end)

    def stop(self) -> None:
        self._stream.close()

    def result(self) -> Result:
        """Wait for its end, after the end of its output.

        Raises:
            Unreachable: the connection broke.
        """
        self._thread.join()
        if self._failed:
            raise self._failed
        return self._stream.result(ok=None)

    def close(self) -> None:
        os.close(self.out)


@contextmanager
def capturing(host: Host, interface: str, seconds: float, only: str = "") -> Iterator[Captured]:
    """Capture an interface of a host, as ``capture_argv``; the capture ends when the context does."""
    argv = capture_argv(interface, seconds, only)
    if isinstance(host, Local):
        with host.running(*argv) as running:
            yield running
        return
    with host.stream(*argv) as stream:
        piped = Piped(stream)
        try:
            yield piped
        finally:
            piped.close()


def read_counts(result: Result) -> Counts:
    """Parse tcpdump's statistics.

    Raises:
        SmsError: there are none: tcpdump could not start, or was killed.
    """
    output = result.stderr.decode(errors="replace")
    pairs = re.findall(r"^(\d+) packets? (captured|received|dropped by \S+)", output, re.MULTILINE)
    found = {what: int(number) for number, what in pairs}
    if result.status or "captured" not in found:
        lines = [line for line in output.splitlines() if not line.startswith("tcpdump: listening on ")]
        reason = lines[0].removeprefix("tcpdump: ") if lines else f"ended with status {result.status}"
        raise SmsError(f"tcpdump on {result.host}: {reason}", hint=_hint(reason))
    dropped = sum(number for what, number in found.items() if what.startswith("dropped"))
    return Counts(found["captured"], found.get("received", 0), dropped)


def _hint(reason: str) -> str:
    if "ermission" in reason or "not permitted" in reason:
        return "capturing requires root or CAP_NET_RAW"
    return "`ip link` lists the interfaces" if "device" in reason else ""


def record(
    host: Local, interface: str, sink: int, *, seconds: float, moved: Callable[[int], None] | None = None
) -> Recorded:
    """Capture an interface to the descriptor ``sink``; Ctrl-C and SIGTERM end it early.

    Args:
        moved: called with the bytes written so far.

    Raises:
        SmsError: tcpdump could not start, or was killed.
        OSError: writing to the sink failed.
    """
    total = 0
    with host.running(*capture_argv(interface, seconds)) as running, _stopped_by_signals(running) as interrupted:
        while block := os.read(running.out, BLOCK):
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(sink, rest) :]
            total += len(block)
            if moved:
                moved(total)
        return Recorded(read_counts(running.result()), total, interrupted.is_set())


@contextmanager
def _stopped_by_signals(running: Running) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM only stop the command; the event is set when one arrived.

    After the first, the command runs until it has received all packets captured by then; the second stops it at once.
    """
    interrupted = threading.Event()
    late = threading.Timer(LAST_S, running.stop)

    def stop(*_: object) -> None:
        if interrupted.is_set():
            late.cancel()
            running.stop()
        else:
            interrupted.set()
            late.start()

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        late.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)
