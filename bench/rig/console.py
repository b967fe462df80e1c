"""Record a machine's serial console: the time of each line, and QEMU's CPU time at that moment."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
ESCAPES = re.compile(r"\x1b(\[[0-9;?=]*[A-Za-z]|[()][A-Z0-9]|c)")


def now() -> float:
    """Return the seconds since boot, the clock of process start times."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process with all threads in seconds; 0 if it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICK if fields else 0.0


def started_at(pid: int) -> float:
    """Return the start time of a process on the clock of ``now()``."""
    fields = _stat(pid)
    return int(fields[19]) / TICK if fields else now()


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True)
class Mark:
    """A moment of a boot."""

    at: float
    cpu: float
    line: str = ""


@dataclass
class Watch:
    """Follows a console's log.

    Attributes:
        find_pid: returns the machine's PID once it runs.
    """

    log: Path
    find_pid: Callable[[], int | None]
    pid: int = 0
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def mark(self) -> Mark:
        """Return the current moment."""
        return Mark(now(), cpu_seconds(self.pid))

    def _read(self) -> None:
        while not self._end.is_set():
            pid = self.find_pid()
            if pid and self.log.exists():
                self.pid = pid
                break
            time.sleep(0.1)
        self.marks.append(Mark(started_at(self.pid), 0.0, "power on"))
        with self.log.open("rb") as stream:
            left = ""
            while not self._end.wait(POLL_S):
                if data := stream.read():
                    left = self._record(left + data.decode(errors="replace"))

    def _record(self, text: str) -> str:
        """Record each line, also an incomplete one; return what follows the last newline."""
        here = self.mark()
        *lines, left = ESCAPES.sub("", text).replace("\r", "\n").split("\n")
        self.marks += [Mark(here.at, here.cpu, line.strip()) for line in (*lines, left) if line.strip()]
        return left


def phases(marks: Sequence[Mark], ends: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the phases of a boot in order, with wall-clock and CPU seconds up to the line that ends each.

    Args:
        ends: names of phases, and the regular expressions of the lines that end them; unmatched phases are left out.
    """
    table: list[dict[str, Any]] = []
    last, place = marks[0], 0
    for name, expression in ends:
        found = next((i for i in range(place, len(marks)) if re.search(expression, marks[i].line)), None)
        if found is None:
            continue
        mark, place = marks[found], found
        table.append({"phase": name, "s": round(mark.at - last.at, 2), "cpu_s": round(mark.cpu - last.cpu, 2)})
        last = mark
    return table
