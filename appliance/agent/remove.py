"""Takes snapshots away, and the chunks that no other one names."""

import os
from typing import Any, Dict, Iterator, List, Set

from appliance.agent import words
from appliance.agent.store import Damage, Snapshot, Store
from appliance.agent.words import Problem, field


def remove(request: Dict[str, Any]) -> Dict[str, Any]:
    """Remove snapshots by number, those too that no longer tell what they are; then, with ``sweep``, chunks.

    Each is renamed away before anything of it goes, and chunks go last: whatever ends this in the middle leaves
    a whole store, and the next run goes on, also one that removes nothing. ``swept`` is false where a snapshot does
    not tell which chunks it needs: then none goes. ``freed_bytes`` does not count what a snapshot taken by reflink
    shares with others.

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
            words.step("remove", "remove snapshot %d" % number)
            freed += sum(own_sizes(os.path.join(store.root, "%06d" % number), by_number.get(number)))
            store.remove(number)
        swept, chunks = False, 0
        if field(request, "sweep", bool, True):
            words.step("sweep", "remove chunks that no snapshot needs")
            try:
                chunks, of_chunks = store.sweep()
                swept, freed = True, freed + of_chunks
                words.detail("%d chunks" % chunks)
            except Damage as error:
                words.note("note: no chunk was removed: " + error.message)
    return {"removed": sorted(set(numbers)), "swept": swept, "chunks": chunks, "freed_bytes": freed}


def check_numbers(numbers: List[int], found: List[Snapshot], broken: Set[int]) -> None:
    """Refuse what must not be removed, before anything is.

    Raises:
        Problem: there is no such snapshot, or it is the newest verified one.
    """
    unknown = sorted(set(numbers) - {one.number for one in found} - broken)
    if unknown:
        raise Problem("there is no snapshot %s" % unknown[0], "`sms overlay list` shows all", 3)
    good = [one.number for one in found if one.verified]
    if good and good[-1] in numbers:
        raise Problem(
            "snapshot %d is the newest verified one, and stays" % good[-1],
            "`sms overlay snapshot` takes a newer one first",
            3,
        )


def own_sizes(folder: str, snapshot: Any) -> Iterator[int]:
    """Bytes on the disk of each file of a snapshot's folder; an image that is shared with others counts nothing."""
    for name in os.listdir(folder):
        if name == "image" and snapshot is not None and snapshot.manifest["method"] == "reflink":
            continue
        yield os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks * 512
