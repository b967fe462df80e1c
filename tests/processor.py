"""Processor time of tests with every program that they start: that of the cgroup of their process.

Where two cores are busy with four workers, it says what a test costs; seconds say how long it waited for the others.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

FOLDERS = (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup"))
seconds: Counter[str] = Counter()
"""Of each file of tests."""


@cache
def _own() -> Path | None:
    """Put this process into a cgroup of its own, on a machine of `tests/machine`, which removes it; return its folder.

    None where there is none: elsewhere, and where cgroups are read-only.
    """
    machine = os.environ.get("SMS_MACHINE", "")
    for folder in FOLDERS if machine else ():
        own = folder / f"sms-lab-{Path(machine).name}-tests"
        with suppress(OSError):
            (folder / "cgroup.procs").stat()
            own.mkdir(exist_ok=True)
            (own / "cgroup.procs").write_text("0")
            return own
    return None


def used() -> float:
    """Return the seconds so far; without a cgroup, those of this process and of programs that it has waited for."""
    if own := _own():
        nanoseconds = own / "cpuacct.usage"
        if nanoseconds.exists():
            return int(nanoseconds.read_text()) / 1e9
        return int((own / "cpu.stat").read_text().split()[1]) / 1e6
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)
