"""How long `sms stop` takes until every daemon has ended cleanly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.rig import Rig, Samples, result
from bench.rig.bare import bare_host


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Against the same supervisor with the same daemons, on a host and without a container."""
    bed, inside = rig.bed, Samples()

    def appliance() -> float:
        bed.start()
        took, said = bed.stop()
        inside.append(said["seconds"])
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
