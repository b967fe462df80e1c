"""``sms image``: the images that builds left, with what is in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.operations.context import Cluster

SUFFIXES = (".sif", ".json", ".cdx.json", ".packages")
"""Files of one image: itself, its manifest, its bill of materials, its package list."""


@dataclass(frozen=True)
class Stored:
    """An image of the store; ``built`` is Unix time."""

    key: str
    path: str
    bytes: int
    built: float
    current: bool
    base: str
    services: list[str]


def list_images(cluster: Cluster) -> list[Stored]:
    """Images of this machine's store, the newest first."""
    folder = Path(cluster.places.images)
    current = Path(cluster.places.current).resolve()
    found = []
    for path in folder.glob("*.sif"):
        manifest = path.with_suffix(".json")
        if path.is_symlink() or not manifest.is_file():
            continue
        told = json.loads(manifest.read_text())
        state = path.stat()
        services, base = told["services"], told["base"]["name"]
        found.append(Stored(path.stem, str(path), state.st_size, state.st_mtime, path == current, base, services))
    return sorted(found, key=lambda stored: -stored.built)


def find_image(cluster: Cluster, key: str | None) -> Stored:
    """The image whose key begins so; the current one without a key.

    Raises:
        Refused: there is none, or more than one.
    """
    images = list_images(cluster)
    fits = [one for one in images if (one.key.startswith(key) if key else one.current)]
    if len(fits) != 1:
        what = f"{len(fits)} images have a key that begins with {key}" if key else "there is no current image"
        raise Refused(what, hint="`sms image list` shows them, `sms build` makes one")
    return fits[0]


def prune_images(cluster: Cluster, keep: int, *, dry_run: bool) -> list[Stored]:
    """Remove all but the newest ``keep`` images, never a cluster's current one; give those removed."""
    # Several clusters may share the folder; each has a link of its own.
    used = {path.resolve() for path in Path(cluster.places.images).glob("*.sif") if path.is_symlink()}
    old = [one for one in list_images(cluster)[keep:] if Path(one.path) not in used]
    for one in [] if dry_run else old:
        # The image last: what is half removed is still listed.
        for suffix in reversed(SUFFIXES):
            Path(one.path).with_suffix(suffix).unlink(missing_ok=True)
    return old
