"""A workload: a path that writes state.

``prepare`` makes a state that is on the disk, ``run`` changes it by the program's own functions and marks what it has
acknowledged, ``check`` recovers what a failure left and verifies it. With ``again``, ``run`` can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from appliance.agent.store import CHUNK

Mark = Callable[[str], None]
Marks = tuple[str, ...]


class Workload(NamedTuple):
    prepare: Callable[[Path], None]
    run: Callable[[Path, Mark], None]
    check: Callable[[Path, Marks], None]
    again: bool = True


def nothing(root: Path) -> None:
    """Nothing is prepared."""


def chunk(name: str) -> bytes:
    return random.Random(name).randbytes(CHUNK)
