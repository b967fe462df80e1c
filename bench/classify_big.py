"""`sms classify` with a capture of 10 GB, and compared with tshark, which takes minutes for 1.6 GB."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from appliance.errors import SmsError
from bench.classify import SIZE, Watched, capture, variants
from bench.rig import Rig, Samples, result, traffic

BIG = 10 << 30
BIG_TIMES, BIG_MB, TSHARK_TIMES = 3.5, 150, 1 / 80


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare once with tshark; check that 10 GB are as fast as 1.6 GB, with the same memory."""
    watched = Watched()
    small = capture(rig, SIZE)
    ours, _ = variants(watched, small)

    def tshark() -> float:
        return watched.run("tshark", "tshark", "-n", "-q", "-r", str(small), "-z", "conv,tcp")

    samples = rig.interleave(ours, {"tshark": tshark}, 1)
    yield result(
        "classify/tshark", samples["sms"], "tshark -q -z conv,tcp", samples["tshark"], ratio_below=TSHARK_TIMES,
        peer_memory_mb=watched.memory.get("tshark"),
    )  # fmt: skip
    yield from _big(rig, watched)


def _big(rig: Rig, watched: Watched) -> Iterator[dict[str, Any]]:
    free = shutil.disk_usage(traffic.FOLDER).free
    if free < BIG * 2 and not traffic.path_of(BIG).exists():
        raise SmsError(f"{free >> 30} GB are free below {traffic.FOLDER}; 20 are needed")
    file = capture(rig, BIG)
    ours, cat = variants(watched, file, "sms-big")
    watched.run("cat", "cat", str(file))
    samples = rig.interleave(ours, cat, max(1, rig.runs // 2))
    memory, small = (Samples([watched.memory[name]]) for name in ("sms-big", "sms"))
    yield result("classify/10 GB", samples["sms"], "cat FILE", samples["cat"], ratio_below=BIG_TIMES)
    yield result("classify/10 GB memory", memory, "the same, 1.6 GB", small, below=BIG_MB, unit="MiB")
