"""Log lines that rsyslogd has discarded because a queue was full."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

COLLECTOR = "collector"
"""Name of the queue to the site's collector, in the template of rsyslog.conf."""
LINE = re.compile(
    r"(\d{4}-\d\d-\d\dT[0-9:.+-]{8,24}) \S{1,255} rsyslogd-pstats: (.{1,60}?)(?: queue)?(?:\[DA\])?: "
    r"origin=core\.queue .{0,200}\bdiscarded\.full=(\d{1,15}) discarded\.nf=(\d{1,15})\b"
)
"""A line of rsyslog's impstats on a queue; that on disk of a queue in memory has the same name, and ``[DA]``."""


@dataclass(frozen=True)
class Discarded:
    """How many lines a queue has discarded since the log of it was begun, which is once a day at most.

    ``since``, ``last``: local times of the first and the last minute in which it did, as rsyslogd writes them.
    """

    queue: str
    lines: int
    since: str
    last: str

    def describe(self, collector: str) -> str:
        """Return a warning. ``collector``: its address in the site file."""
        where = f"the collector {collector}" if self.queue == COLLECTOR else f"its queue {self.queue!r}"
        hint = "is it up? The log here has them" if self.queue == COLLECTOR else "more arrive than it can write"
        times = f"between {self.since[:16]} and {self.last[:16]}"
        return f"rsyslogd has discarded {self.lines} lines for {where}, {times}, as the queue was full: {hint}"


def read_discarded(lines: Iterable[str]) -> tuple[Discarded, ...]:
    """Return the sums by queue; what does not have the form of ``LINE`` is ignored."""
    sums: dict[str, Discarded] = {}
    for line in lines:
        if found := LINE.match(line):
            when, queue = found[1], found[2]
            before = sums.get(queue, Discarded(queue, 0, when, when))
            sums[queue] = replace(before, lines=before.lines + int(found[3]) + int(found[4]), last=when)
    return tuple(sums.values())
