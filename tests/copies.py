"""Files copied to and from hosts, as the product copies images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.env import Env
from appliance.operations.image.copy import HostFile, copy_file
from appliance.progress import Silent
from appliance.tools.sha256 import find_digest


class Watched(Silent):
    """Calls a function with the number of bytes that a copy has sent."""

    def __init__(self, on_moved: Callable[[int], None]) -> None:
        self.on_moved = on_moved

    def moved(self, done: int, total: int) -> None:
        self.on_moved(done)


def give(host: Host, source: Path | str, target: str, on_moved: Callable[[int], None] = lambda done: None) -> None:
    """Copy a file of this machine to a host."""
    found = HostFile(Local(), str(source), find_digest(Local(), str(source)))
    copy_file(Env(progress=Watched(on_moved)), found, host, target, "a file")
