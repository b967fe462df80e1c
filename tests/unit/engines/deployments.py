"""A deployment for tests: its bundle, its record, and states of it."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.deploy import Bundle, Item
from appliance.operations.deployed import APPLYING, Deployed
from appliance.operations.engines.engine import Instance, Part

BUNDLE = Bundle(
    "nomad",
    "sample",
    "default",
    "/i.sif",
    "b",
    (Item("b", "service", "job", after=("a",)), Item("a", "service", "job")),
)
RECORD = Deployed("nomad", APPLYING, 3, BUNDLE.digest, "", 1.0, "host-a")


GOOD_PART = Part("slurmctld", True, 0)
READY = Instance("slurmctld-0", "n1", True, True, (GOOD_PART,))


NODE_BUNDLE = replace(BUNDLE, items=(Item("slurm-cn", "node", "job", ("slurm-cn",)),))
