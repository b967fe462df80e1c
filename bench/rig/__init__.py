"""What benchmarks share: medians of interleaved runs, the lab, the peers. Made when first asked for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from appliance.errors import SmsError
from appliance.progress import Progress
from bench.rig.bare import remove_bare
from bench.rig.bed import Bed, open_bed
from bench.rig.measure import Samples, Ways, interleave, need, result, wall, work_folder
from bench.rig.root import unpack

__all__ = ["Rig", "Samples", "Ways", "need", "result", "wall", "work_folder"]


class Rig:
    """One run of the benchmarks. What it makes goes when ``stack`` is closed."""

    def __init__(self, runs: int, *, install: bool, stack: ExitStack, progress: Progress) -> None:
        self.runs = runs
        self.install = install
        self.stack = stack
        self.progress = progress
        self.broken: SmsError | None = None

    @property
    def bed(self) -> Bed:
        """The lab with the image on host-a, the appliance stopped (whatever ran before), its overlay seeded."""
        bed = self._bed
        remove_bare()
        bed.stop()
        return bed

    @cached_property
    def _bed(self) -> Bed:
        if self.broken:  # what did not work a moment ago is not tried for every benchmark
            raise self.broken
        try:
            remove_bare()
            return self.stack.enter_context(open_bed(self.progress))
        except SmsError as error:
            self.broken = error
            raise

    @cached_property
    def root(self) -> Path:
        """The image, unpacked and seeded: the root of the peers that are no container."""
        with self.progress.step("unpack the image for the peers"):
            return unpack(self._bed)

    def interleave(self, own: Ways, peers: Ways | None = None, runs: int = 0) -> dict[str, Samples]:
        """Seconds of each way, one of each a round; as many rounds as were asked for, unless ``runs`` says.

        A peer that fails has no samples, but a reason.
        """
        with self.progress.step("measure") as step:
            return interleave(own, peers or {}, runs or self.runs, step.detail)
