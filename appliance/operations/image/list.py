"""``sms image``: list, find and prune built images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.operations.context import Cluster

SUFFIXES = (".sif", ".json", ".cdx.json", ".packages")
"""Files of an image: the image, its manifest, its bill of materials, its package list."""

SHORT = 12
"""Characters of a key that name an image in an export."""


@dataclass(frozen=True)
class Stored:
    """An image in the store; ``built`` is Unix time."""

    key: str
    path: str
    bytes: int
    built: float
    current: bool
    base: str
    services: list[str]


def list_images(cluster: Cluster) -> list[Stored]:
    """Return the images in this machine's store, newest first."""
    folder = Path(cluster.places.images)
    current = Path(cluster.places.current).resolve()
    found = []
    for path in folder.glob("*.sif"):
        manifest = path.with_suffix(".json")
        if path.is_symlink() or not manifest.is_file():
            continue
        content = json.loads(manifest.read_text())
        state = path.stat()
        services, base = content["services"], content["base"]["name"]
        found.append(Stored(path.stem, str(path), state.st_size, state.st_mtime, path == current, base, services))
    return sorted(found, key=lambda stored: -stored.built)


def find_image(cluster: Cluster, key: str | None) -> Stored:
    """Return the image whose key starts with ``key``; the current one without it.

    Raises:
        Refused: there is none, or more than one.
    """
    images = list_images(cluster)
    matches = [one for one in images if (one.key.startswith(key) if key else one.current)]
    if len(matches) != 1:
        what = f"{len(matches)} images have a key that starts with {key}" if key else "there is no current image"
        raise Refused(what, hint="`sms image list` lists them, `sms build` creates one")
    return matches[0]


def prune_images(cluster: Cluster, keep: int, *, dry_run: bool) -> list[Stored]:
    """Remove all but the newest ``keep`` images; return the removed ones.

    A cluster's current image stays, and what was deployed to an engine: its next start, or a rollback, needs it.
    """
    # Several clusters may share the folder; each has its own link.
    used = {path.resolve() for path in Path(cluster.places.images).glob("*.sif") if path.is_symlink()}
    deployed = [path.read_text() for path in Path(cluster.places.deployments).parent.glob("*/*.json")]
    old = [
        one
        for one in list_images(cluster)[keep:]
        if Path(one.path) not in used and not any(one.key[:SHORT] in text for text in deployed)
    ]
    for one in [] if dry_run else old:
        # The image last, so that a partly removed one is still listed.
        for suffix in reversed(SUFFIXES):
            Path(one.path).with_suffix(suffix).unlink(missing_ok=True)
    return old
