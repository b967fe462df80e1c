"""Snapshot stores for tests: small ones, made by the agent's own store."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import yaml

from appliance.agent.manifest import FORMAT
from appliance.agent.source import Source
from appliance.agent.store import CHUNK, ZERO, Reader, Snapshot, Store
from appliance.lab import Lab
from appliance.shared.manifest import Manifest
from appliance.shared.records import from_value
from tests.conftest import find_tool


def make_manifest(number: int, facts: dict[str, Any]) -> Manifest:
    usual = {
        "format": FORMAT,
        "number": number,
        "digests": "",
        "uuid": f"{number:032x}",
        "cluster": "lab",
        "host": "host-a",
        "image": {"key": "k", "sha256": "s"},
        "slurm_cluster": "lab",
        "running": True,
        "frozen_ms": 21.5,
        "method": "delta",
        "found_by": "trace",
        "checks": {"e2fsck": "clean"},
        "notes": [],
        "reason": "",
    }
    return from_value(Manifest, {**usual, **facts})


def add_snapshot(
    store: Store, chunks: list[bytes], *, taken: float | None = None, generation: int = 1, **facts: Any
) -> Snapshot:
    """Commit a verified snapshot of these chunks (an empty one is a chunk of zeros)."""
    with store.writing():
        number, folder = store.begin()
        digests = b"".join(store.put(chunk) if chunk else ZERO for chunk in chunks)
        manifest = make_manifest(
            number,
            {
                "generation": generation,
                "taken": time.time() if taken is None else taken,
                "size": CHUNK * len(chunks),
                "used_bytes": sum(map(len, chunks)),
                "new_bytes": store.new_bytes,
                **facts,
            },
        )
        snapshot = store.commit(folder, manifest, digests)
    store.new_bytes = 0
    store.new = []
    return snapshot


def make_image(path: Path, *, seed: int = 1, size_mb: int = 8, files: int = 4) -> Path:
    """An ext3 file system with some files, as an overlay has them."""
    tree = path.with_suffix(".tree")
    chance = random.Random(seed)
    (tree / "upper").mkdir(parents=True)
    for number in range(files):
        (tree / "upper" / f"f{number}").write_bytes(chance.randbytes(200_000))
    (tree / "upper" / "text").write_text("the same again and again\n" * 20_000)
    path.unlink(missing_ok=True)
    argv = [find_tool("mke2fs"), "-q", "-t", "ext3", "-d", str(tree), str(path), f"{size_mb}M"]
    subprocess.run(argv, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1"})
    shutil.rmtree(tree)
    return path


def keep_image(store: Store, path: Path, *, generation: int = 1, method: str = "delta", **facts: Any) -> Snapshot:
    """Commit a snapshot of an image file."""
    with store.writing():
        number, folder = store.begin()
        source = Source(str(path))
        if method == "delta":
            source.read_chunks(source.data_chunks(), lambda _, data: store.put(data))
        else:
            shutil.copy(path, Path(folder, "image"))
            source.read_chunks(source.data_chunks(), store.count_only)
        manifest = make_manifest(
            number,
            {
                "uuid": str(uuid.uuid4()),
                "generation": generation,
                "taken": 1_800_000_000.0 + number,
                "method": method,
                "size": source.size,
                "used_bytes": source.used_bytes(),
                "new_bytes": store.new_bytes,
                "checks": {"e2fsck": "clean", "state_files": 0, "heads": []},
                **facts,
            },
        )
        snapshot = store.commit(folder, manifest, bytes(source.digests))
        source.close()
    store.new_bytes, store.new = 0, []
    return snapshot


def read_all(store: Store, number: int) -> bytes:
    with Reader(store.find(str(number))) as reader:
        return b"".join(reader.read(at) for at in range(reader.count))


def fill(
    root: Path, count: int, *, chunks: int = 6, shared: int = 3, start: float | None = None, every_s: float = 900
) -> Store:
    """Create a store of ``count`` snapshots, which have ``shared`` of their chunks in common."""
    chance = random.Random(count)
    store = Store(str(root))
    common = [chance.randbytes(CHUNK) for _ in range(shared)]
    at = (time.time() if start is None else start) - every_s * (count - 1)
    for number in range(count):
        own = [chance.randbytes(CHUNK) for _ in range(chunks - shared)]
        add_snapshot(store, [*common, *own, b""], taken=at + number * every_s)
    return store


def damage(store: Store, number: int) -> None:
    """Mark a snapshot as damaged, as a check does."""
    store.set_health(store.find(str(number)), ["chunk 1 has changed"])


def tear_manifest(store: Store, number: int) -> None:
    """Damage a manifest."""
    path = Path(store.root, f"{number:06d}", "manifest.json")
    path.write_text(path.read_text().replace('"delta"', '"dElta"'))


def stored_chunks(root: Path) -> set[str]:
    """Return the digests of the stored chunks, complete or not."""
    return {Path(folder).name + name for folder, _, names in os.walk(root / "chunks") for name in names}


def named_chunks(store: Store) -> set[str]:
    """Return the digests that snapshots refer to."""
    found, _ = store.list()
    lists = [one.digests() for one in found]
    named = {data[at : at + 32].hex() for data in lists for at in range(0, len(data), 32)}
    return named - {ZERO.hex()}


def assert_whole(store: Store) -> None:
    """Check that every committed snapshot can be read completely."""
    found, broken = store.list()
    assert broken == {}
    for one in found:
        with Reader(one) as reader:
            for number in range(reader.count):
                reader.read(number)


def numbers(store: Store) -> list[int]:
    """Return the numbers of the committed snapshots, the oldest first."""
    return [one.number for one in store.list()[0]]


def last_line(text: str) -> dict[str, Any]:
    """Return the agent's last message."""
    message: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return message


BORG = {
    "repository": "ssh://root@host-b/var/lib/sms/repo",
    "passphrase": "keys/borg.pass",
    "ssh_key": "keys/id_ed25519",
    "known_hosts": "known_hosts",
}
"""A repository on host-b of a lab, as in its site file; ``write_passphrase`` writes its passphrase."""


def write_passphrase(lab: Lab) -> None:
    """Write that of ``BORG``."""
    (lab.etc / "keys" / "borg.pass").write_text("lab\n")
    (lab.etc / "keys" / "borg.pass").chmod(0o600)


def write_site(lab: Lab, name: str) -> None:
    """A site file of a lab whose snapshots go to a Borg repository on host-b, and to both admin hosts."""
    site = yaml.safe_load((lab.etc / "sms.yaml").read_text())
    site["services"] = ["munge", "nat"]  # no compute node is there for slurmctld
    site["snapshots"] = {"borg": BORG, "standby": ["host-a", "host-b"]}
    (lab.etc / name).write_text(yaml.safe_dump(site))
    write_passphrase(lab)
