"""Shared resources of benchmarks: medians of interleaved runs, the lab, the peers. Created on demand."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from appliance.errors import SmsError
from appliance.progress import Progress
from bench.rig.bare import remove_bare
from bench.rig.bed import Bed, open_bed
from bench.rig.measure import Samples, Variants, find_program, interleave, result, wall, work_folder
from bench.rig.root import unpack

__all__ = ["Rig", "Samples", "Variants", "find_program", "result", "wall", "work_folder"]


class Rig:
    """One run of the benchmarks. Closing ``stack`` removes what it created."""

    def __init__(self, runs: int, *, stack: ExitStack, progress: Progress) -> None:
        self.runs = runs
        self.stack = stack
        self.progress = progress
        self.broken: SmsError | None = None

    @property
    def bed(self) -> Bed:
        """The lab with the image on host-a, the services container stopped, its overlay seeded."""
        bed = self._bed
        remove_bare()
        bed.stop()
        return bed

    @cached_property
    def _bed(self) -> Bed:
        if self.broken:  # do not retry a failure for every benchmark
            raise self.broken
        try:
            remove_bare()
            return self.stack.enter_context(open_bed(self.progress))
        except SmsError as error:
            self.broken = error
            raise

    @cached_property
    def root(self) -> Path:
        """The unpacked and seeded image: the root file system of peers without container."""
        with self.progress.step("unpack the image for the peers"):
            return unpack(self._bed)

    def interleave(self, own: Variants, peers: Variants | None = None, runs: int = 0) -> dict[str, Samples]:
        """Run all variants once per round; return their seconds. ``runs`` overrides the number of rounds.

        A failed peer has no samples but a reason.
        """
        with self.progress.step("measure") as step:
            return interleave(own, peers or {}, runs or self.runs, step.detail)
