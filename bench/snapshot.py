"""How long writers wait for a snapshot of a 2 GB overlay with 10 MB changed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.rig import Rig, Samples, need, result, work_folder
from tests.real.overlays import Bed, bed, file_system

USED_MB = 2048
CHANGED_MB = 10
SIZE_MB = 3072
BORG = {"BORG_PASSPHRASE": "of a benchmark", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Against cp, e2image and borg under one freeze, all of them on the same overlay in turn."""
    with both_kinds(rig) as (folder, plain, reflink):
        yield from freezes(rig, folder, plain, reflink)


@contextmanager
def both_kinds(rig: Rig) -> Iterator[tuple[Path, Bed, Bed]]:
    """A folder, an overlay beside others on this machine's file system, and one on a file system with reflinks."""
    need("mkfs.xfs", "xfsprogs")
    os.sync()  # what others have written before is not ours to wait for
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

    def first_borg() -> None:
        need("borg", "borgbackup")
        borg("init", "--encryption=repokey-blake2", str(repository))
        borg_create()  # what it has seen before it does not store again
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
        subprocess.run(argv, check=True, capture_output=True, env={**os.environ, **BORG}, timeout=600)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(made.tree)], check=True)
    return time.monotonic() - began


def borg(*words: str) -> None:
    """Run borg."""
    subprocess.run(["borg", *words], check=True, capture_output=True, env={**os.environ, **BORG}, timeout=600)
