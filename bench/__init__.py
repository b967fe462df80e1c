"""Benchmarks: what the product takes, against a named peer measured in the same run.

Every module named in ``BENCHMARKS`` has a function ``measure(rig)`` that yields results; ``rig`` holds what they share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """How long it takes on a quiet machine with two cores, three runs; ``full``: in the full set only."""

    minutes: float
    full: bool = False


LIMIT_MIN = 20
"""All that are not in the full set only take at most so long, with the lab and its image made first (``MAKE_MIN``)."""
MAKE_MIN = 2.5

BENCHMARKS = {
    "cli": Benchmark(0.3),
    "status": Benchmark(1),
    "stop": Benchmark(1),
    "start": Benchmark(3),
    "migrate": Benchmark(4),
    "classify": Benchmark(1.5),
    "provision": Benchmark(1),
    "vm_start": Benchmark(2.5),
    "node_boot": Benchmark(3),
    "snapshot": Benchmark(3, full=True),
    "build_unchanged": Benchmark(4, full=True),
    "snapshot_disk": Benchmark(5, full=True),
    "classify_big": Benchmark(8, full=True),
}
"""The one list of them, in the order in which they run. The minutes are estimates from busy machines, rounded up."""
