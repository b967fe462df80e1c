"""Duration of `sms status`, on the host itself and over SSH."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from typing import Any

from appliance.host.base import Host
from appliance.plan.machine import inside_argv
from bench.rig import Rig, result
from bench.rig.bed import CARRIER, Bed


def manual(bed: Bed) -> list[tuple[str, ...]]:
    """Return the commands that an administrator would run, one per service; sms-probe if there is no other client."""
    argvs = []
    for name, service in _services(bed).items():
        probe = service["probe"]
        if probe["kind"] == "exec":
            line = " | ".join(shlex.join(argv) for argv in probe["exec"])
            argvs.append(inside_argv(bed.cluster.site, bed.cluster.services, "sh", "-c", line))
        else:
            argvs.append(inside_argv(bed.cluster.site, bed.cluster.services, "/opt/sms/bin/sms-probe", name))
    return argvs


def _services(bed: Bed) -> dict[str, Any]:
    text = bed.carrier.run(*inside_argv(bed.cluster.site, bed.cluster.services, "cat", "/etc/sms/services.json")).stdout
    services: dict[str, Any] = json.loads(text)["services"]
    return services


def one_by_one(host: Host, argvs: list[tuple[str, ...]]) -> float:
    """Run the commands in sequence; return their seconds."""
    began = time.monotonic()
    for argv in argvs:
        host.run(*argv)
    return time.monotonic() - began


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with running every probe manually with `apptainer exec`, in sequence."""
    bed = rig.bed
    with bed.running():
        argvs = manual(bed)
        over_ssh: list[tuple[str, ...]] = [("ssh", CARRIER, shlex.join(argv)) for argv in argvs]
        own = {
            "here": lambda: bed.timed(bed.carrier, "status", "--json")[0],
            "ssh": lambda: bed.timed(bed.admin, "status", "--host", CARRIER, "--json")[0],
        }
        peers = {
            "here by hand": lambda: one_by_one(bed.carrier, argvs),
            "ssh by hand": lambda: one_by_one(bed.admin, over_ssh),
        }
        samples = rig.interleave(own, peers)
    peer = f"{len(argvs)} probes by hand"
    yield result("status/host", samples["here"], f"{peer}: apptainer exec", samples["here by hand"], ratio_below=1)
    yield result("status/ssh", samples["ssh"], f"{peer}: ssh, apptainer exec", samples["ssh by hand"], ratio_below=1)
