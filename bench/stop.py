"""Duration of `sms stop` until every daemon has ended cleanly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.rig import Rig, Samples, result
from bench.rig.bare import bare_host


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the same supervisor and daemons on a host without container."""
    bed, inside = rig.bed, Samples()

    def appliance() -> float:
        bed.start()
        took, reply = bed.stop()
        inside.append(reply["seconds"])
        return took

    def bare() -> float:
        with bare_host(bed, rig.root) as host:
            host.start()
            return host.stop()

    samples = rig.interleave({"sms": appliance}, {"bare": bare})
    peer = "the same supervisord and daemons, bare on a host"
    rest = round(samples["sms"].median - inside.median, 4)
    parts = {"daemons and overlay": inside.median, "the rest of the command": rest}
    yield result("stop", samples["sms"], peer, samples["bare"], ratio_below=1.5, parts=parts)
