"""How long `sms --help` takes: what every call of the program costs at least."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.rig import Rig, need, result, wall

SMS = str(Path(sys.prefix) / "bin" / "sms")


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Against the bare interpreter, and against the help of Apptainer."""
    peers = {
        "python": lambda: wall(sys.executable, "-c", "pass"),
        "apptainer": lambda: wall(need("apptainer", "apptainer"), "--help"),
    }
    samples = rig.interleave({"sms": lambda: wall(SMS, "--help")}, peers, max(rig.runs, 11))
    yield result("cli/python", samples["sms"], "python -c pass", samples["python"], below=0.2)
    yield result("cli/apptainer", samples["sms"], "apptainer --help", samples["apptainer"], below=0.2)
