"""What benchmarks share: medians of interleaved runs, the lab, the peers. Made when first asked for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from bench.rig.bed import Bed, open_bed
from bench.rig.measure import Samples, Skip, interleave, result, wall
from bench.rig.root import unpack

__all__ = ["Rig", "Samples", "Skip", "interleave", "result", "wall"]


class Rig:
    """One run of the benchmarks. What it makes goes when ``stack`` is closed."""

    def __init__(self, runs: int, *, install: bool, stack: ExitStack) -> None:
        self.runs = runs
        self.install = install
        self.stack = stack

    @cached_property
    def bed(self) -> Bed:
        """The lab with the image on host-a, the appliance stopped, its overlay seeded."""
        return self.stack.enter_context(open_bed())

    @cached_property
    def root(self) -> Path:
        """The image, unpacked and seeded: the root of the peers that are no container."""
        return unpack(self.bed)
