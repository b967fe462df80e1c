"""Duration of a full `sms build`, and of one without changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.operations.image.build import plan
from bench.rig import Rig, Samples, result, wall, work_folder
from bench.rig.bed import Bed

SMS = str(Path(sys.prefix) / "bin" / "sms")


class Builds:
    """Builds of one image in a separate state folder, so that the lab's images are not affected."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.site = str(bed.site_file)
        self.folder = folder
        self.lock = folder / "sms.lock"
        self.made = plan(bed.cluster, lock=self.lock, locked=False)

    def sms(self, *arguments: str) -> float:
        """Run `sms build`; return its seconds."""
        state = ("--state", str(self.folder / "state"))
        return wall(SMS, "--quiet", "--site", self.site, *state, "build", "--lock", str(self.lock), *arguments)

    def plain(self) -> float:
        """Run `apptainer build` of the same definition; return its seconds."""
        work = self.folder / "plain"
        for name, data in self.made.context().items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
        arguments = ("--force", "--build-arg", f"files={work}", str(work / "image.sif"), str(work / "services.def"))
        return wall("apptainer", "build", *arguments)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare a full build with plain `apptainer build`, and an unchanged one with a full one.

    A build takes more than a minute, so only a fifth of the runs is made, at least one.
    """
    with work_folder() as folder:
        builds = Builds(rig.bed, Path(folder))
        own = {"full": lambda: builds.sms("--force")}
        samples = rig.interleave(own, {"plain": builds.plain}, max(1, rig.runs // 5))
        unchanged = Samples(builds.sms() for _ in range(rig.runs))
    yield result("build/full", samples["full"], "apptainer build, by hand", samples["plain"], ratio_below=1.15)
    yield result("build/unchanged", unchanged, "sms build --force", samples["full"], below=5)
