"""Duration of `sms start` until every service answers, and its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench.rig import Rig, Samples, find_program, result
from bench.rig.bare import bare_host
from bench.rig.kernel import make_files
from bench.rig.vm import boot


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the same daemons on a host without container, and with the same services in a booting VM."""
    bed = rig.bed
    parts: dict[str, Samples] = defaultdict(Samples)

    def appliance() -> float:
        took, reply = bed.start()
        bed.stop()
        for part, seconds in reply["parts"].items():
            parts[part].append(seconds)
        # The rest: interpreter, site file, catalogue, exit.
        parts["program"].append(took - sum(reply["parts"].values()))
        return took

    def bare() -> float:
        with bare_host(bed, rig.root) as host:
            took = host.start()
            host.stop()
        return took

    def machine() -> float:
        find_program("qemu-system-x86_64", "qemu-system-x86")
        return boot(bed, make_files(rig.root))

    samples = rig.interleave({"sms": appliance}, {"bare": bare, "vm": machine})
    made_of = {part: values.median for part, values in parts.items()}
    peer = "the same supervisord, gates and daemons, bare on a host"
    yield result("start/bare", samples["sms"], peer, samples["bare"], below=5, parts=made_of)
    peer = "the same root and services in a VM without systemd (QEMU, TCG without KVM)"
    yield result("start/vm", samples["sms"], peer, samples["vm"], ratio_below=1)
