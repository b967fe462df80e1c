"""How long `sms build` takes in full, and when nothing changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.operations.image.build import plan
from appliance.progress import Silent
from bench.rig import Rig, Samples, result, wall, work_folder
from bench.rig.bed import Bed

SMS = str(Path(sys.prefix) / "bin" / "sms")


class Builds:
    """The builds of one image in a state folder of their own, so that the lab's images stay."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.site = str(bed.site_file)
        self.folder = folder
        self.lock = folder / "sms.lock"
        self.made = plan(bed.cluster, Silent(), lock=self.lock, locked=False)

    def sms(self, *words: str) -> float:
        """Seconds of `sms build`."""
        state = ("--state", str(self.folder / "state"))
        return wall(SMS, "--quiet", "--site", self.site, *state, "build", "--lock", str(self.lock), *words)

    def plain(self) -> float:
        """Seconds of `apptainer build` of the very same definition."""
        work = self.folder / "plain"
        for name, data in self.made.context().items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
        words = ("--force", "--build-arg", f"files={work}", str(work / "image.sif"), str(work / "services.def"))
        return wall("apptainer", "build", *words)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """In full against the plain `apptainer build`; unchanged against in full.

    A build takes more than a minute: each way runs once, or as often as every fifth of the runs.
    """
    with work_folder() as folder:
        builds = Builds(rig.bed, Path(folder))
        own = {"full": lambda: builds.sms("--force")}
        samples = rig.interleave(own, {"plain": builds.plain}, max(1, rig.runs // 5))
        unchanged = Samples(builds.sms() for _ in range(rig.runs))
    yield result("build/full", samples["full"], "apptainer build, by hand", samples["plain"], ratio_below=1.15)
    yield result("build/unchanged", unchanged, "sms build --force", samples["full"], below=5)
