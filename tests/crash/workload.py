"""A workload: a path that writes state.

``prepare`` makes a state that is on the disk, ``run`` changes it by the program's own functions and marks what it has
acknowledged, ``check`` recovers what a failure left and verifies it. With ``again``, ``run`` can be repeated; with
``memory``, the files are in memory: they are lost in a power failure, and recovered after the program was killed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from appliance.agent.store import CHUNK
from appliance.catalog import Base, read_bases
from appliance.config.model import Site
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.share import share
from tests.sites import make_site

Mark = Callable[[str], None]
Marks = tuple[str, ...]


class Workload(NamedTuple):
    prepare: Callable[[Path], None]
    run: Callable[[Path, Mark], None]
    check: Callable[[Path, Marks], None]
    again: bool = True
    memory: bool = False


@cache
def _read_site() -> tuple[Site, Base]:
    with tempfile.TemporaryDirectory() as folder:
        return make_site(Path(folder)), read_bases(share("definitions", "bases"))["debian-12"]


def cluster_in(root: Path) -> Cluster:
    """Return a cluster with a VM whose state is in ``root/var`` and whose site file is in ``root/etc``."""
    site, base = _read_site()
    return Cluster(site.model_copy(update={"state": root / "var"}), (), base, root / "etc" / "sms.yaml")


HERE = Local("a")
"""The only admin host of that cluster."""


def nothing(root: Path) -> None:
    """Nothing is prepared."""


def chunk(name: str) -> bytes:
    return random.Random(name).randbytes(CHUNK)
