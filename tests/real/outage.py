"""How long services are away, as a compute node sees it: questions every 10 ms, from before to after."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from appliance.host.base import Host

PROBER = Path(__file__).with_name("prober.py")
ECHO = """\
import select, socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("", 7007))
print("echoing", flush=True)
while True:
    ready = select.select([0, echo], [], [])[0]
    if 0 in ready:
        break
    try:
        echo.sendto(*echo.recvfrom(2048))
    except OSError:
        pass
"""
FOLDER = "/tmp"


IN_TIME_S = {"slurmctld": 0.9, "scontrol ping": 2.0}
"""A connection whose first packet was lost is tried again after a second (RFC 6298); a datagram is not."""


@dataclass
class Seen:
    """What a node saw: seconds that each service was away, and the longest time that it did not get to ask itself.

    ``lost_lines``: those sent to the system log that are not in it.
    """

    away: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    lost_lines: int = 0
    tag: str = ""
    sent: list[float] = field(default_factory=list)


@contextmanager
def watching(node: Host, outside: Host, controller: str = "") -> Iterator[Seen]:
    """Ask from the node for as long as the context lasts; what was seen is there when it is left.

    ``controller``: address of Slurm's controller, if it is not that of the services container.
    """
    seen = Seen()
    node.write(f"{FOLDER}/prober.py", PROBER.read_bytes())
    with ExitStack() as stack:
        stack.enter_context(outside.hold("python3", "-c", ECHO))
        with node.hold("python3", f"{FOLDER}/prober.py", FOLDER, *filter(None, [controller])):
            yield seen
    reported = json.loads(node.read(f"{FOLDER}/asked.json") or b"{}")
    seen.tag = reported["tag"]
    seen.sent = [row[0] for row in reported["asked"].pop("rsyslog")]
    seen.stalled_s = round(max(later - sooner for sooner, later in pairwise(seen.sent)), 4)
    for service, rows in reported["asked"].items():
        in_time = IN_TIME_S.get(service, math.inf)
        seen.away[service] = longest(
            [(sent, answered is not None and answered < sent + in_time) for sent, answered in rows]
        )


def longest(asked: list[tuple[float, bool]]) -> float:
    """The longest time from a question that was answered to the next that was, with others in between.

    Who has not answered by the end is away until then at least. Where nothing was asked for a while nothing is known: a
    machine that does all this on two cores does not always get to ask.
    """
    away, last = 0.0, 0
    for number, (sent, answered) in enumerate(asked):
        if answered or number == len(asked) - 1:
            if number > last + 1 or not answered:
                away = max(away, sent - asked[last][0])
            last = number
    return round(away, 4)


def read_log(seen: Seen, text: str) -> None:
    """Find the numbered lines in a log: the longest time from which none came, and how many are missing."""
    there = {int(number) for number in re.findall(rf"{seen.tag}: (\d+)\.", text)}
    seen.lost_lines = len(seen.sent) - len(there)
    seen.away["rsyslog"] = longest([(sent, number in there) for number, sent in enumerate(seen.sent)])
