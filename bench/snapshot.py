"""How long a snapshot of a 2 GB overlay with 10 MB changed blocks writers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.rig import Rig, Samples, find_program, result, work_folder
from tests.real.overlays import Bed, bed, file_system

USED_MB = 2048
CHANGED_MB = 10
SIZE_MB = 3072
BORG = {"BORG_PASSPHRASE": "of a benchmark", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with cp, e2image and borg during a freeze, in turn on the same overlay."""
    with both_overlays(rig) as (folder, plain, reflink):
        yield from freezes(rig, folder, plain, reflink)


@contextmanager
def both_overlays(rig: Rig) -> Iterator[tuple[Path, Bed, Bed]]:
    """Create a folder, an overlay on this machine's file system, and one on a file system with reflinks."""
    find_program("mkfs.xfs", "xfsprogs")
    os.sync()  # flush earlier writes, so that they are not measured
    with work_folder() as name:
        folder = Path(name)
        with (
            file_system(folder, "xfs", 12000) as xfs,
            prepared(folder / "ext4", rig) as plain,
            prepared(xfs / "bed", rig) as reflink,
        ):
            yield folder, plain, reflink


@contextmanager
def prepared(folder: Path, rig: Rig) -> Iterator[Bed]:
    """Create a filled and mounted overlay with one snapshot."""
    with bed(folder, size_mb=SIZE_MB) as made, rig.progress.step(f"fill an overlay with {USED_MB} MiB"):
        for number in range(USED_MB // 64):
            (made.upper / f"file{number}").write_bytes(os.urandom(64 << 20))
        os.sync()
        made.take()
        yield made


def change(made: Bed) -> None:
    """Change ``CHANGED_MB``: rewrite a file, and overwrite the middle of another."""
    half = CHANGED_MB << 19
    (made.upper / "changing").write_bytes(os.urandom(half))
    with (made.upper / "file3").open("r+b") as stream:
        stream.seek(20 << 20)
        stream.write(os.urandom(half))


def freezes(rig: Rig, folder: Path, plain: Bed, reflink: Bed) -> Iterator[dict[str, Any]]:
    whole: dict[str, Samples] = {"delta": Samples(), "borg": Samples()}
    repository = folder / "borg"

    def ours(made: Bed, keep: Samples | None = None) -> Callable[[], float]:
        def once() -> float:
            change(made)
            began = time.monotonic()
            report = made.take()
            if keep is not None:
                keep.append(time.monotonic() - began)
            return float(report["frozen_ms"]) / 1000

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

    def first_borg() -> None:
        find_program("borg", "borgbackup")
        borg("init", "--encryption=repokey-blake2", str(repository))
        borg_create()  # the first run stores everything
        whole["borg"].clear()

    def borg_run() -> float:
        if not repository.exists():
            first_borg()
        return borg_create()

    copy = str(folder / "copy.img")
    borg_create = theirs(
        *("borg", "create", "--files-cache=disabled", f"{repository}::{{now:%H%M%S%f}}", str(plain.overlay)),
        keep=whole["borg"],
    )
    own = {"delta": ours(plain, whole["delta"]), "reflink": ours(reflink)}
    others = {
        "cp": theirs("cp", "--sparse=always", "--reflink=never", str(plain.overlay), copy),
        "e2image": theirs("e2image", "-raf", str(plain.overlay), copy),
        "borg": borg_run,
    }
    samples = rig.interleave(own, others)
    if samples["borg"].reason:
        whole["borg"] = samples["borg"]
    peers = {"cp": "cp --sparse", "e2image": "e2image -raf", "borg": "borg create"}
    for kind, limit in (("delta", 0.4), ("reflink", 0.06)):
        for peer, label in peers.items():
            yield result(
                f"snapshot/freeze, {kind}, {peer}",
                samples[kind],
                f"{label} under one freeze",
                samples[peer],
                below=limit,
            )
    yield result("snapshot/whole, delta", whole["delta"], "borg create", whole["borg"], ratio_below=1)


def frozen(made: Bed, argv: tuple[str, ...]) -> float:
    """Run ``argv`` with the overlay frozen; return the seconds that writers are blocked."""
    subprocess.run(["sync", "--file-system", str(made.tree)], check=True)
    began = time.monotonic()
    subprocess.run(["fsfreeze", "--freeze", str(made.tree)], check=True)
    try:
        subprocess.run(argv, check=True, capture_output=True, env={**os.environ, **BORG}, timeout=600)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(made.tree)], check=True)
    return time.monotonic() - began


def borg(*arguments: str) -> None:
    """Run borg."""
    subprocess.run(["borg", *arguments], check=True, capture_output=True, env={**os.environ, **BORG}, timeout=600)
