"""Benchmarks: each compares the product with a named peer measured in the same run.

Every module listed in ``BENCHMARKS`` has a function ``measure(rig)`` that yields results; ``rig`` has shared resources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """Duration on an idle machine with two cores, three runs; ``full``: only in the full set."""

    minutes: float
    full: bool = False


LIMIT_MIN = 20
"""Maximum duration of the default set, including the creation of lab and image (``MAKE_MIN``)."""
MAKE_MIN = 2.5

BENCHMARKS = {
    "cli": Benchmark(0.4),
    "status": Benchmark(1),
    "stop": Benchmark(1),
    "start": Benchmark(3),
    "migrate": Benchmark(4),
    "classify": Benchmark(1.5),
    "provision": Benchmark(1),
    "vm_start": Benchmark(2.5),
    "node_boot": Benchmark(3),
    "apply": Benchmark(3, full=True),
    "judge": Benchmark(4, full=True),
    "calibration": Benchmark(1.5, full=True),
    "snapshot": Benchmark(3, full=True),
    "build_unchanged": Benchmark(4, full=True),
    "snapshot_disk": Benchmark(5, full=True),
    "engines": Benchmark(6, full=True),
    "adopt": Benchmark(8, full=True),
    "classify_big": Benchmark(8, full=True),
}
"""All benchmarks in the order in which they run. The minutes are estimates from busy machines, rounded up."""
