"""How long writers wait for a snapshot of a 2 GB overlay with 10 MB changed, and what 50 of them take on the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.rig import Rig, Samples, Skip, result
from tests.real.overlays import Bed, bed, file_system

USED_MB = 2048
CHANGED_MB = 10
SIZE_MB = 3072
MANY = 50
BORG = {"BORG_PASSPHRASE": "of a benchmark", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Against cp, e2image and borg under one freeze, all of them on the same overlay in turn."""
    for program in ("borg", "e2image", "mkfs.xfs"):
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
    os.sync()  # what others have written before is not ours to wait for
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="sms-bench-") as name:
        folder = Path(name)
        with file_system(folder, "xfs", 12000) as xfs, prepared(folder / "ext4", rig) as plain:
            with prepared(xfs / "bed", rig) as reflink:
                yield from freezes(rig, folder, plain, reflink)
                yield disk_use("snapshot/disk, reflink", reflink, lambda: used_bytes(xfs))
            yield disk_use("snapshot/disk, delta", plain, lambda: tree_bytes(plain.store))


@contextmanager
def prepared(folder: Path, rig: Rig) -> Iterator[Bed]:
    """An overlay with so much in it, mounted, and with one snapshot taken."""
    with bed(folder, size_mb=SIZE_MB) as made, rig.progress.step(f"fill an overlay with {USED_MB} MiB"):
        for number in range(USED_MB // 64):
            (made.upper / f"file{number}").write_bytes(os.urandom(64 << 20))
        os.sync()
        made.take()
        yield made


def change(made: Bed) -> None:
    """As much as changes between two snapshots: files anew, and a piece in the middle of an old one."""
    half = CHANGED_MB << 19
    (made.upper / "changing").write_bytes(os.urandom(half))
    with (made.upper / "file3").open("r+b") as stream:
        stream.seek(20 << 20)
        stream.write(os.urandom(half))


def freezes(rig: Rig, folder: Path, plain: Bed, reflink: Bed) -> Iterator[dict[str, Any]]:
    whole: dict[str, Samples] = {"delta": Samples(), "borg": Samples()}
    repository = folder / "borg"
    borg("init", "--encryption=repokey-blake2", str(repository))

    def ours(made: Bed, keep: Samples | None = None) -> Callable[[], float]:
        def once() -> float:
            change(made)
            began = time.monotonic()
            told = made.take()
            if keep is not None:
                keep.append(time.monotonic() - began)
            return float(told["frozen_ms"]) / 1000

        return once

    def theirs(*argv: str, keep: Samples | None = None) -> Callable[[], float]:
        def once() -> float:
            change(plain)
            began = time.monotonic()
            took = frozen(plain, argv)
            if keep is not None:
                keep.append(time.monotonic() - began)
            return took

        return once

    copy = str(folder / "copy.img")
    ways = {
        "delta": ours(plain, whole["delta"]),
        "reflink": ours(reflink),
        "cp": theirs("cp", "--sparse=always", "--reflink=never", str(plain.overlay), copy),
        "e2image": theirs("e2image", "-raf", str(plain.overlay), copy),
        "borg": theirs(
            *("borg", "create", "--files-cache=disabled", f"{repository}::{{now:%H%M%S%f}}", str(plain.overlay)),
            keep=whole["borg"],
        ),
    }
    ways["borg"]()  # what it has seen before it does not store again
    whole["borg"].clear()
    samples = rig.interleave(ways)
    peers = {"cp": "cp --sparse", "e2image": "e2image -raf", "borg": "borg create"}
    for way, limit in (("delta", 0.4), ("reflink", 0.06)):
        for peer, words in peers.items():
            yield result(
                f"snapshot/freeze, {way}, {peer}", samples[way], f"{words} under one freeze", samples[peer], below=limit
            )
    yield result("snapshot/whole, delta", whole["delta"], "borg create", whole["borg"], ratio_below=1)


def frozen(made: Bed, argv: tuple[str, ...]) -> float:
    """Seconds that writers wait while ``argv`` copies the overlay."""
    subprocess.run(["sync", "--file-system", str(made.tree)], check=True)
    began = time.monotonic()
    subprocess.run(["fsfreeze", "--freeze", str(made.tree)], check=True)
    try:
        subprocess.run(argv, check=True, capture_output=True, env={**os.environ, **BORG})
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(made.tree)], check=True)
    return time.monotonic() - began


def borg(*words: str) -> None:
    """Run borg."""
    subprocess.run(["borg", *words], check=True, capture_output=True, env={**os.environ, **BORG})


def disk_use(name: str, made: Bed, size: Callable[[], int]) -> dict[str, Any]:
    """What ``MANY`` snapshots take, over what is used and what changed."""
    made.unmount()
    shutil.rmtree(made.store)
    made.mount()
    os.sync()
    before = size()
    for _ in range(MANY):
        change(made)
        made.take()
    os.sync()
    # A reflink shares its blocks with the overlay, whose own copy counts too.
    took = size() - before + (made.overlay.stat().st_blocks * 512 if "reflink" in name else 0)
    due = (USED_MB + MANY * CHANGED_MB) << 20
    return result(
        name, Samples([took / 2**30]), "what is used and what changed", Samples([due / 2**30]), ratio_below=1.3,
        unit="GiB",
    )  # fmt: skip


def used_bytes(folder: Path) -> int:
    """Bytes in use on a file system."""
    state = os.statvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def tree_bytes(folder: Path) -> int:
    """Bytes on the disk below a folder."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
