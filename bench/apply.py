"""Outage of NAT and of the controller, as seen by a node, while `sms apply` or `sms upgrade` switches instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

from bench.rig import Rig, Samples, result
from bench.rig.bed import Bed, open_bed
from tests.real.images import make_variant
from tests.real.outage import Seen, watching

LAB = "bench-apply"
GOAL_S = 0.5
PEER = "sms stop, sms start"
SITES = ("/etc/sms/one.yaml", "/etc/sms/two.yaml")
"""Two site files that differ in the name server: each change needs a new instance."""


class Switched:
    """A lab whose site file or image changes with every run, and what a node saw of it, by variant and service."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.seen: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(Samples))
        self.parts: dict[str, Samples] = defaultdict(Samples)
        self.exceeded = 0
        self._sites = cycle(SITES)
        self._images = cycle(
            [make_variant(bed.built, bed.lab, "good"), f"{bed.cluster.places.images}/{Path(bed.built.image).name}"]
        )
        document = yaml.safe_load(bed.site_file.read_text())
        for number, path in enumerate(SITES, start=1):
            document["networks"]["dns"] = [f"172.30.0.{number}"]
            (bed.lab.etc / path.rpartition("/")[2]).write_text(yaml.safe_dump(document))

    def switch(self) -> None:
        """Apply the other site file, by a second instance."""
        _, done = self.bed.timed(self.bed.carrier, "--site", next(self._sites), "apply", "--json")
        self.exceeded += bool(done["switched"]["exceeded"])
        for part, seconds in done["switched"]["parts"].items():
            self.parts[part].append(seconds)

    def upgrade(self) -> None:
        """Switch to the other image, by a second instance."""
        image = next(self._images)
        _, done = self.bed.timed(self.bed.carrier, "upgrade", "--image", image, "--no-rehearsal", "--json")
        self.exceeded += bool(done["exceeded"])

    def restart(self) -> None:
        """Stop the instance, and start it with the other site file."""
        self.bed.stop()
        self.bed.timed(self.bed.carrier, "--site", next(self._sites), "start", "--json")

    def watched(self, variant: str, work: Callable[[], None]) -> Callable[[], float]:
        """Return a variant for ``Rig.interleave``: the outage of NAT while ``work`` runs."""

        def once() -> float:
            with watching(self.bed.lab.host("node1"), self.bed.lab.host("outside")) as seen:
                work()
            self._add(variant, seen)
            return seen.away["nat"]

        return once

    def _add(self, variant: str, seen: Seen) -> None:
        for service, seconds in seen.away.items():
            self.seen[variant][service].append(seconds)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Change site file and image by a switch, and by stop and start, in turn; a node probes every 10 ms."""
    with ExitStack() as stack:
        bed = stack.enter_context(open_bed(rig.progress, LAB))
        stack.enter_context(bed.running())
        lab = Switched(bed)
        own = {"switch": lab.watched("switch", lab.switch), "upgrade": lab.watched("upgrade", lab.upgrade)}
        peer = {"restart": lab.watched("restart", lab.restart)}
        samples = rig.interleave(own, peer)
    failed = samples["restart"].reason
    facts: dict[str, Any] = {
        "exceeded": lab.exceeded,
        "parts": {part: values.median for part, values in lab.parts.items()},
    }
    theirs = Samples.failed(failed) if failed else lab.seen["restart"]["slurmctld"]
    for verb, variant in (("apply", "switch"), ("upgrade", "upgrade")):
        yield result(f"{verb}/away, nat", samples[variant], PEER, samples["restart"], below=GOAL_S, **facts)
        yield result(f"{verb}/away, slurmctld", lab.seen[variant]["slurmctld"], PEER, theirs, ratio_below=1)
