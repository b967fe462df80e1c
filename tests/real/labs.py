"""Labs of one test or module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.lab import Lab
from appliance.operations.lab.lab import lab_down, lab_up
from appliance.progress import Silent


@contextmanager
def fresh_lab(name: str, nodes: int, *, metal: int = 0) -> Iterator[Lab]:
    """A lab without anything of an earlier run; nothing is left of it afterwards."""
    _remove(name)
    lab_up(name, nodes, Silent(), metal=metal)
    try:
        yield Lab.open(name)
    finally:
        _remove(name)


def _remove(name: str) -> None:
    lab_down(name, False, Silent())
    shutil.rmtree(f"/var/lib/sms-lab/{name}", ignore_errors=True)
