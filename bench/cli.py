"""Duration of `sms --help`: the minimum cost of every call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.rig import Rig, find_program, result, wall

SMS = str(Path(sys.prefix) / "bin" / "sms")


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the bare interpreter and with the help of Apptainer."""
    peers = {
        "python": lambda: wall(sys.executable, "-c", "pass"),
        "apptainer": lambda: wall(find_program("apptainer", "apptainer"), "--help"),
    }
    samples = rig.interleave({"sms": lambda: wall(SMS, "--help")}, peers, max(rig.runs, 11))
    yield result("cli/python", samples["sms"], "python -c pass", samples["python"], below=0.2)
    yield result("cli/apptainer", samples["sms"], "apptainer --help", samples["apptainer"], below=0.2)
