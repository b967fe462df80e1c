"""How long services are away, as a compute node sees it: questions every 10 ms, from before to after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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
    echo.sendto(*echo.recvfrom(2048))
"""
FOLDER = "/tmp"


@dataclass
class Seen:
    """What a node saw: seconds that each service was away, and the second-longest time besides, which is the noise."""

    away: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    lost_lines: int = 0
    tag: str = ""
    sent: list[float] = field(default_factory=list)


@contextmanager
def watching(node: Host, outside: Host) -> Iterator[Seen]:
    """Ask from the node for as long as the context lasts; what was seen is there when it is left."""
    seen = Seen()
    node.write(f"{FOLDER}/prober.py", PROBER.read_bytes())
    with ExitStack() as stack:
        stack.enter_context(outside.hold("python3", "-c", ECHO))
        with node.hold("python3", f"{FOLDER}/prober.py", FOLDER):
            yield seen
    told = json.loads(node.read(f"{FOLDER}/asked.json") or b"{}")
    seen.tag = told["tag"]
    seen.sent = [row[0] for row in told["asked"].pop("rsyslog")]
    for service, rows in told["asked"].items():
        # Who has not answered by the end is away until then at least.
        moments = [row[1] for row in rows if row[1] is not None]
        seen.away[service], seen.noise[service] = gaps([*moments, rows[-1][0]])


def gaps(moments: Iterable[float]) -> tuple[float, float]:
    """The longest time between two of them, and the second-longest."""
    found = sorted((later - sooner for sooner, later in pairwise(sorted(moments))), reverse=True)
    return (round(found[0], 4), round(found[1], 4)) if len(found) > 1 else (float("inf"), float("inf"))


def read_log(seen: Seen, text: str) -> None:
    """Find the numbered lines in a log: the longest time from which none came, and how many are missing."""
    there = {int(number) for number in re.findall(rf"{seen.tag}: (\d+)\.", text)}
    seen.lost_lines = len(seen.sent) - len(there)
    seen.away["rsyslog"], seen.noise["rsyslog"] = gaps([*(seen.sent[number] for number in there), seen.sent[-1]])
