"""What benchmarks share: medians of interleaved runs, the lab, the peers. Made when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from appliance.errors import SmsError
from appliance.progress import Progress
from bench.rig.bed import Bed, open_bed
from bench.rig.measure import Samples, Skip, interleave, result, wall
from bench.rig.root import unpack

__all__ = ["Rig", "Samples", "Skip", "result", "wall"]


class Rig:
    """One run of the benchmarks. What it makes goes when ``stack`` is closed."""

    def __init__(self, runs: int, *, install: bool, stack: ExitStack, progress: Progress) -> None:
        self.runs = runs
        self.install = install
        self.stack = stack
        self.progress = progress
        self.broken: SmsError | None = None

    @cached_property
    def bed(self) -> Bed:
        """The lab with the image on host-a, the appliance stopped, its overlay seeded."""
        if self.broken:  # what did not work a moment ago is not tried for every benchmark
            raise self.broken
        try:
            return self.stack.enter_context(open_bed(self.progress))
        except SmsError as error:
            self.broken = error
            raise

    @cached_property
    def root(self) -> Path:
        """The image, unpacked and seeded: the root of the peers that are no container."""
        with self.progress.step("unpack the image for the peers"):
            return unpack(self.bed)

    def interleave(self, ways: Mapping[str, Callable[[], float]], runs: int = 0) -> dict[str, Samples]:
        """Seconds of each way, one of each a round; as many rounds as were asked for, unless ``runs`` says."""
        with self.progress.step("measure") as step:
            return interleave(ways, runs or self.runs, step.detail)
