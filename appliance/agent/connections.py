"""Connections and neighbours of an instance, as text: what conntrack and ip print, and read again elsewhere."""

import re
from typing import List

MAPPED = re.compile(r" -n (\S+)")
ORIGINAL = re.compile(r" --sport (\d+)")
LEFT = re.compile(r" -t \d+")
REPLIED = re.compile(r" --reply-port-dst (\d+)")
CONNECTION = re.compile(
    r"-A(?: (?:-[a-z]|--[sd]port|--(?:orig|reply)-[a-z-]+|--icmp-[a-z]+|--(?:src|dst)key|--state)"
    r" [A-Za-z0-9.:,_\[\]]+)+\s*"
)
"""A line of ``conntrack -o save``. Another one could be any command of conntrack(8), such as to forget all."""
NEIGHBOUR = re.compile(r"^[0-9a-fA-F.:]+ eth[0-9]+ [0-9a-f:]+\Z")


def parse_translated(saved: str) -> List[str]:
    """Return the source-translated connections of ``conntrack -o save``, in the form for ``conntrack -R``.

    The output has the translated address only: where the port was translated too, the kernel would choose another one.
    """
    found = []
    for line in saved.splitlines():
        if " -n " not in line:
            continue
        before, after = ORIGINAL.search(line), REPLIED.search(line)
        if before and after and before.group(1) != after.group(1):
            line = MAPPED.sub(r" -n \1:" + after.group(1), line, count=1)
        found.append(line)
    return found


def translated_to(line: str) -> str:
    """Return the address that a connection of ``read_connections`` is translated to."""
    found = MAPPED.search(line)
    return found.group(1).partition(":")[0] if found else ""


def without_timeout(line: str) -> str:
    """Return a connection without its remaining seconds, which differ in every query."""
    return LEFT.sub("", line)
