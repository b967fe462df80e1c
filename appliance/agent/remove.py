"""Remove snapshots, and the chunks that no other snapshot refers to."""

import os
from typing import Any, Dict, Iterator, List, Set

from appliance.agent import protocol
from appliance.agent.protocol import Problem, field
from appliance.agent.store import Damage, Snapshot, Store


def remove(request: Dict[str, Any]) -> Dict[str, Any]:
    """Remove snapshots by number, also damaged ones; then, with ``sweep``, unused chunks.

    Each snapshot is renamed before its files are removed, and chunks are removed last: an interrupted run leaves a
    consistent store, and any later run completes it. ``swept`` is false where a damaged snapshot does not list its
    chunks: then no chunk is removed. ``freed_bytes`` does not include what a snapshot taken by reflink shares with
    others.

    Raises:
        Problem: there is no such snapshot, or it is the newest verified one; nothing was changed.
    """
    store = Store(field(request, "store", str))
    numbers = field(request, "numbers", list)
    if not os.path.isdir(store.root):
        raise Problem("there are no snapshots in %s" % store.root, "`sms overlay snapshot` takes one", 3)
    freed = 0
    with store.removing():
        found, broken = store.list()
        check_numbers(numbers, found, set(broken))
        by_number = {one.number: one for one in found}
        for number in sorted(set(numbers)):
            protocol.step("remove", "remove snapshot %d" % number)
            freed += sum(own_sizes(os.path.join(store.root, "%06d" % number), by_number.get(number)))
            store.remove(number)
        swept, chunks = False, 0
        if field(request, "sweep", bool, True):
            protocol.step("sweep", "remove unused chunks")
            try:
                chunks, of_chunks = store.sweep()
                swept, freed = True, freed + of_chunks
                protocol.detail("%d chunks" % chunks)
            except Damage as error:
                protocol.note("note: no chunk was removed: " + error.message)
    return {"removed": sorted(set(numbers)), "swept": swept, "chunks": chunks, "freed_bytes": freed}


def check_numbers(numbers: List[int], found: List[Snapshot], broken: Set[int]) -> None:
    """Check the numbers before anything is removed.

    Raises:
        Problem: there is no such snapshot, or it is the newest verified one.
    """
    unknown = sorted(set(numbers) - {one.number for one in found} - broken)
    if unknown:
        raise Problem("there is no snapshot %s" % unknown[0], "`sms overlay list` shows all", 3)
    good = [one.number for one in found if one.verified]
    if good and good[-1] in numbers:
        raise Problem(
            "snapshot %d is the newest verified one, which is never removed" % good[-1],
            "`sms overlay snapshot` takes a newer one first",
            3,
        )


def own_sizes(folder: str, snapshot: Any) -> Iterator[int]:
    """Yield the bytes on disk of each file of a snapshot, without an image by reflink, which shares its blocks."""
    for name in os.listdir(folder):
        if name == "image" and snapshot is not None and snapshot.manifest.method == "reflink":
            continue
        yield os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks * 512
