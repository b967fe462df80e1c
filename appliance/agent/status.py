"""The data of `sms status` on snapshots: little, so that it is fast."""

import os
import time
from typing import Any, Dict, List

from appliance.agent.identity import read_identity
from appliance.agent.protocol import field
from appliance.agent.store import Snapshot, Store
from appliance.shared.lease import LAST_RAISING

FIELDS = (
    "number",
    "taken",
    "method",
    "frozen_ms",
    "host",
    "generation",
    "sequence",
    "running",
    "reason",
    "new_bytes",
    "used_bytes",
)
"""Manifest fields reported of the newest verified snapshot."""


def brief(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return a summary of the snapshots. Reads manifests and small files only, no chunks and no sizes.

    ``texts`` has the content and the modification time of each requested file that exists; ``generations`` are
    those of all snapshots; ``identity``: the cluster's, and ``unnamed``: the highest plausible generation of snapshots
    without a UUID. The rest is about this cluster's snapshots.
    """
    store = Store(field(request, "store", str))
    every, broken = store.list()
    identity = read_identity(request, every)
    older = [one.manifest.generation for one in every if not one.manifest.cluster_uuid]
    found = [one for one in every if identity.owns(vars(one.manifest))]
    good = [one for one in found if one.verified]
    return {
        "now": time.time(),
        "count": len(found),
        "generations": sorted({one.manifest.generation for one in every}),
        "identity": identity.to_dict(),
        "unnamed": max((one for one in older if one <= LAST_RAISING), default=0),
        "damaged": [one.number for one in found if not one.verified],
        "broken": sorted(broken),
        "newest": summarize(good[-1]) if good else None,
        "texts": read_texts(field(request, "files", list, [])),
    }


def summarize(snapshot: Snapshot) -> Dict[str, Any]:
    """Return the reported fields of a snapshot."""
    values = snapshot.to_dict()
    return {name: values[name] for name in FIELDS if name in values}


def read_texts(paths: List[str]) -> Dict[str, Dict[str, Any]]:
    """Return the text and modification time of each file that exists."""
    texts = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                texts[path] = {"text": stream.read(1 << 16), "at": os.fstat(stream.fileno()).st_mtime}
        except OSError:
            continue
    return texts
