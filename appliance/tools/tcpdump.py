"""tcpdump: what passes an interface, as a capture."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from appliance.errors import SmsError
from appliance.host.base import Result
from appliance.host.local import Local, Running

BUFFER_KB = 64 << 10
"""What the kernel keeps for tcpdump while that does not get to run: half a second of 1 Gbit/s.

libpcap's own 2 MiB lose packets of the lab whenever both cores are busy.
"""
SNAP = 2048
"""Bytes kept of a frame: all of one that a network of 1500 has. Network cards, and the lab's cables, hand over up to
64 KiB in one piece when data flows fast; whole, these alone would fill buffer and disk."""
BLOCK = 1 << 20
LAST_S = 1.1
"""The kernel hands packets over in blocks, a block that is not full after a second (PACKET_MMAP, tcpdump's timeout)."""


@dataclass(frozen=True)
class Counts:
    """What tcpdump said at its end.

    Attributes:
        packets: captured; these are in the file.
        received: seen by the kernel's filter. More than ``packets`` where the last second's were not read any more.
        dropped: lost for want of room, by the kernel or the interface.
    """

    packets: int
    received: int
    dropped: int


@dataclass(frozen=True)
class Recorded:
    """A capture that has ended: ``interrupted`` before its time, by Ctrl-C or SIGTERM."""

    counts: Counts
    bytes: int
    interrupted: bool


def capture_argv(interface: str, seconds: float) -> tuple[str, ...]:
    """What passes an interface as pcap on standard output, each frame as soon as it is there, for so long.

    It ends by SIGINT, at which tcpdump writes what it has and counts. ``-Z root``: Debian's tcpdump becomes another
    user otherwise, which takes a capability that root lacks in some containers.
    """
    end = ("timeout", "--foreground", "--preserve-status", "--signal=INT", "--kill-after=10", f"{seconds:g}")
    return (
        *end,
        *("tcpdump", "-i", interface, "-n", "-s", str(SNAP), "-B", str(BUFFER_KB), "-U", "-Z", "root", "-w", "-"),
    )


def read_counts(result: Result) -> Counts:
    """What tcpdump said.

    Raises:
        SmsError: it said nothing of the kind: it could not begin, or was killed.
    """
    said = result.stderr.decode(errors="replace")
    pairs = re.findall(r"^(\d+) packets? (captured|received|dropped by \S+)", said, re.MULTILINE)
    found = {what: int(number) for number, what in pairs}
    if result.status or "captured" not in found:
        lines = [line for line in said.splitlines() if not line.startswith("tcpdump: listening on ")]
        reason = lines[0].removeprefix("tcpdump: ") if lines else f"it was ended with status {result.status}"
        raise SmsError(f"tcpdump on {result.host}: {reason}", hint=_hint(reason))
    dropped = sum(number for what, number in found.items() if what.startswith("dropped"))
    return Counts(found["captured"], found.get("received", 0), dropped)


def _hint(reason: str) -> str:
    if "ermission" in reason or "not permitted" in reason:
        return "capturing takes root, or CAP_NET_RAW"
    return "`ip link` lists the interfaces" if "device" in reason else ""


def record(
    host: Local, interface: str, sink: int, *, seconds: float, moved: Callable[[int], None] | None = None
) -> Recorded:
    """Capture an interface into the descriptor ``sink``; Ctrl-C and SIGTERM end it before its time.

    Args:
        moved: called with the bytes written so far.

    Raises:
        SmsError: tcpdump could not begin, or was killed.
        OSError: the sink takes no more.
    """
    total = 0
    with host.running(*capture_argv(interface, seconds)) as running, _stopped_by_signals(running) as came:
        while block := os.read(running.out, BLOCK):
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(sink, rest) :]
            total += len(block)
            if moved:
                moved(total)
        return Recorded(read_counts(running.result()), total, came.is_set())


@contextmanager
def _stopped_by_signals(running: Running) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM stop the command and nothing else; the event tells that one has come.

    The first lets it run on until it has been handed what was there by then, the next one does not.
    """
    came = threading.Event()
    late = threading.Timer(LAST_S, running.stop)

    def stop(*_: object) -> None:
        if came.is_set():
            late.cancel()
            running.stop()
        else:
            came.set()
            late.start()

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        late.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)
