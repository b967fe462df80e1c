"""Disk usage of 50 snapshots of a 2 GB overlay, with 10 MB changed before each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.rig import Rig, Samples, result
from bench.snapshot import CHANGED_MB, USED_MB, both_overlays, change
from tests.real.overlays import Bed

MANY = 50


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the data used plus the data changed."""
    with both_overlays(rig) as (_, plain, reflink):
        xfs = reflink.folder.parent
        yield disk_use("snapshot/disk, reflink", reflink, lambda: used_bytes(xfs))
        yield disk_use("snapshot/disk, delta", plain, lambda: tree_bytes(plain.store))


def disk_use(name: str, made: Bed, size: Callable[[], int]) -> dict[str, Any]:
    """Take ``MANY`` snapshots; compare their disk usage with the data used plus the data changed."""
    made.unmount()
    shutil.rmtree(made.store)
    made.mount()
    os.sync()
    before = size()
    for _ in range(MANY):
        change(made)
        made.take()
    os.sync()
    # Reflinks share blocks with the overlay, so count the overlay itself too.
    took = size() - before + (made.overlay.stat().st_blocks * 512 if "reflink" in name else 0)
    due = (USED_MB + MANY * CHANGED_MB) << 20
    return result(
        name, Samples([took / 2**30]), "what is used and what changed", Samples([due / 2**30]), ratio_below=1.3,
        unit="GiB",
    )  # fmt: skip


def used_bytes(folder: Path) -> int:
    """Return the bytes in use on a file system."""
    state = os.statvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def tree_bytes(folder: Path) -> int:
    """Return the bytes that a folder uses on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
