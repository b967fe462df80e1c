"""Counts of the native core in the same form as tshark's counts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from analysis import _core
from analysis.signatures import SCTP, TCP, UDP
from tests.captures import packets as p
from tests.captures.sharks import Counted, End

PORTS = [
    *((TCP, port) for port in (22, 25, 80, 443, 2049, 6817, 6818)),
    *((UDP, port) for port in (53, 67, 69, 123, 514, 8649)),
]
"""Service ports for tests that need no catalogue."""


def run_core(*files: bytes | Path, keep: int = 1 << 16, **options: Any) -> Any:
    """Read files one after the other with a new counter."""
    counter = _core.Counter(PORTS, options.pop("first", []), options.pop("samples", []), keep_flows=keep, **options)
    for one in files:
        with tempfile.TemporaryFile() if isinstance(one, bytes) else one.open("rb") as file:
            if isinstance(one, bytes):
                _fill(file, one)
            counter.read(file.fileno())
    counter.finish()
    return counter


def _fill(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()
    file.seek(0)


def by_core(*files: bytes | Path, **options: Any) -> Counted:
    """Count with the core."""
    counter = run_core(*files, **options)
    totals = counter.totals()
    counted = Counted(totals["packets"], totals["bytes"])
    for client, own, server, port, protocol, packets, size, packets_back, size_back in counter.flows():
        there, back = (client, own), (server, port)
        counted.add((protocol, there, back), packets, size)
        counted.add((protocol, back, there), packets_back, size_back)
        if protocol in (TCP, UDP, SCTP):
            counted.connections[protocol] = counted.connections.get(protocol, 0) + 1
    return counted


def pairs(counted: Counted, protocol: int) -> dict[frozenset[End], int]:
    """The core's flows of a protocol as conversations."""
    frames: dict[frozenset[End], int] = {}
    for (number, sender, receiver), (packets, _) in counted.ways.items():
        if number == protocol:
            ends = frozenset((sender, receiver))
            frames[ends] = frames.get(ends, 0) + packets
    return frames


def differences(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Iterable[str]:
    """Describe the differences between two counts, one per line."""
    for key in sorted(ours.keys() | theirs.keys(), key=repr):
        if ours.get(key) != theirs.get(key):
            yield f"{_shown(key)}: core {ours.get(key)}, tshark {theirs.get(key)}"


def _shown(key: Any) -> str:
    if isinstance(key, bytes):
        return p.ip_text(key)
    return f"({', '.join(map(_shown, key))})" if isinstance(key, tuple | frozenset) else str(key)
