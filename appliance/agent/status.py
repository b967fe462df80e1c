"""What `sms status` asks of snapshots: little, so that it takes no time."""

import os
import time
from typing import Any, Dict, List

from appliance.agent.store import Snapshot, Store
from appliance.agent.words import field

TOLD = ("number", "taken", "method", "frozen_ms", "host", "generation", "running", "reason", "new_bytes", "used_bytes")
"""What is told of the newest verified one."""


def brief(request: Dict[str, Any]) -> Dict[str, Any]:
    """How snapshots stand. Reads manifests and small files only: no chunk, no size of anything stored.

    ``texts`` has what the files of the request hold that are there, and when they were written.
    """
    store = Store(field(request, "store", str))
    found, broken = store.list()
    good = [one for one in found if one.verified]
    return {
        "now": time.time(),
        "count": len(found),
        "damaged": [one.number for one in found if not one.verified],
        "broken": sorted(broken),
        "newest": shorten(good[-1]) if good else None,
        "texts": read_texts(field(request, "files", list, [])),
    }


def shorten(snapshot: Snapshot) -> Dict[str, Any]:
    """What of a manifest is told."""
    told = snapshot.told()
    return {name: told[name] for name in TOLD if name in told}


def read_texts(paths: List[str]) -> Dict[str, Dict[str, Any]]:
    """Each file that is there, and its time."""
    texts = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                texts[path] = {"text": stream.read(1 << 16), "at": os.fstat(stream.fileno()).st_mtime}
        except OSError:
            continue
    return texts
