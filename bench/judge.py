"""What it takes to judge a change on a cluster of 450 nodes and 5,000 jobs, beside squeue alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml

from appliance.plan.machine import inside_argv
from bench.rig import Rig, result
from bench.rig.bed import Bed, open_bed
from tests.real import many

LAB = "bench-judge"
JOBS = 5000
SUBMIT = "seq $1 | xargs -P 4 -I @ sbatch --quiet --begin=now+1day -o /dev/null --wrap 'exit @'"
ON_TOP_S = 2
"""Seconds that the judgement may take besides squeue."""
PLAIN, JUDGED = "/etc/sms/plain.yaml", "/etc/sms/judged.yaml"
"""Site files of two changes: of the mail alone, and of a partition, too."""


def write_sites(bed: Bed) -> None:
    """Write both beside the site file."""
    document = yaml.safe_load(bed.site_file.read_text())
    document["mail"]["root"] = "other@example.test"
    (bed.lab.etc / "plain.yaml").write_text(yaml.safe_dump(document))
    document["slurm"]["partitions"][0]["max_time"] = "1-00:00:00"
    (bed.lab.etc / "judged.yaml").write_text(yaml.safe_dump(document))


def plan(bed: Bed, site: str) -> float:
    """Plan an apply on the carrier; return its seconds."""
    return bed.timed(bed.carrier, "--site", site, "apply", "-n", "--json")[0]


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """An apply is planned with and without a change of slurm.conf, in turn with squeue."""
    with open_bed(rig.progress, LAB) as bed:
        many.change_site(bed.lab)
        write_sites(bed)
        inside = partial(inside_argv, bed.cluster.site, bed.cluster.services)
        bed.timed(bed.carrier, "start", "--force", "--json")  # nodes and their settings are others
        bed.carrier.run(*inside("sh", "-c", SUBMIT, "submit", str(JOBS)), timeout=900)
        squeue = inside("squeue", "--all", "--noheader")
        assert len(bed.carrier.run(*squeue).text.splitlines()) >= JOBS

        def queue() -> float:
            began = time.monotonic()
            bed.carrier.run(*squeue)
            return time.monotonic() - began

        own: dict[str, Callable[[], float]] = {"judged": lambda: plan(bed, JUDGED) - plan(bed, PLAIN)}
        samples = rig.interleave(own, {"squeue": queue})
        bed.stop()
    limit = samples["squeue"].median + ON_TOP_S
    what = f"squeue; {many.NODES} nodes, {JOBS} jobs"
    yield result("judge/apply", samples["judged"], what, samples["squeue"], below=round(limit, 2))
