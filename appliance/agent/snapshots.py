"""List, verify and restore the snapshots of a store."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Set, Tuple

from appliance.agent import protocol
from appliance.agent.check import check, run_e2fsck, run_merged, write_chunks
from appliance.agent.clone import reflink
from appliance.agent.freeze import find_loops
from appliance.agent.identity import read_identity
from appliance.agent.protocol import Problem, field
from appliance.agent.source import WORKERS
from appliance.agent.store import CHUNK, ZERO, Damage, Reader, Snapshot, Store, disk_errors
from appliance.shared.files import create_file, remove_file, sync_folder

MAX_DAMAGE = 20
"""Kinds of damage of one snapshot that are listed."""
BESIDE = ".restoring"


def list_snapshots(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return all snapshots, the oldest first, the cluster's identity, and the store's size and free bytes."""
    store = Store(field(request, "store", str))
    found, broken = store.list()
    about: Dict[str, Any] = {"identity": read_identity(request, found).to_dict()}
    if not os.path.isdir(store.root):
        return dict(about, snapshots=[], broken={}, stored_bytes=0, free_bytes=0)
    return {
        **about,
        "snapshots": [one.to_dict() for one in found],
        "broken": {str(number): why for number, why in sorted(broken.items())},
        "stored_bytes": store.stored_bytes(),
        "free_bytes": store.free_bytes(),
    }


def verify(request: Dict[str, Any]) -> Dict[str, Any]:
    """Read snapshots completely and check them; store the result with each."""
    store = Store(field(request, "store", str))
    numbers = field(request, "numbers", list)
    with store.reading():
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        snapshots = [store.find(str(number)) for number in numbers] if numbers else store.list()[0]
        good: Set[bytes] = set()
        results = []
        for one in snapshots:
            protocol.step("verify", "verify snapshot %d" % one.number)
            begun = one._replace(health=store.read_health(one.number))  # those before took their time
            damage = find_damage(store, one, good, request)
            store.set_health(begun, damage)
            protocol.detail("damaged" if damage else "undamaged")
            results.append({"number": one.number, "ok": not damage, "damage": damage})
    return {"snapshots": results}


def reread(request: Dict[str, Any]) -> Dict[str, Any]:
    """Verify every chunk of the newest verified snapshot, unless that was done less than ``every_s`` seconds ago.

    Later snapshots share its chunks. A damaged chunk is moved away, so that the next snapshot stores it again.
    """
    store = Store(field(request, "store", str))
    good = [one for one in store.list()[0] if one.verified]
    path = os.path.join(store.root, "reread")
    age = time.time() - os.stat(path).st_mtime if os.path.exists(path) else -1.0
    if not good or 0 <= age < field(request, "every_s", int):
        return {"number": 0, "damage": []}
    newest = good[-1]
    with store.reading():
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        protocol.step("reread", "read snapshot %d again" % newest.number)
        try:
            with Reader(newest) as reader:
                damage = _read_all(store, reader, set())
        except Damage as error:
            damage = [error.what]
        if damage:
            store.set_health(newest, damage)
        store.replace("reread", b"")
    return {"number": newest.number, "damage": damage}


def find_damage(store: Store, snapshot: Snapshot, good: Set[bytes], request: Dict[str, Any]) -> List[str]:
    """Return the damage of a snapshot. Digests in ``good`` have been verified before; new ones are added."""
    try:
        reader = Reader(snapshot)
    except Damage as error:
        return [error.what]
    with reader:
        if reader.image is not None:
            good = set()
        damage = _read_all(store, reader, good)
        if damage:
            return damage
        try:
            found = check(reader, store.temporary, request)
        except Damage as error:
            return [error.what]
        return ["e2fsck had to repair it"] if found.fixed else []


def _read_all(store: Store, reader: Reader, good: Set[bytes]) -> List[str]:
    todo = [number for number in range(reader.count) if reader.digest(number) != ZERO]
    if reader.image is None:
        todo = [number for number in todo if reader.digest(number) not in good]
    damage: List[str] = []

    def read(number: int) -> Tuple[int, str]:
        try:
            reader.read(number)
        except Damage as error:
            return number, error.what
        return number, ""

    with ThreadPoolExecutor(WORKERS) as pool:
        for done, (number, wrong) in enumerate(pool.map(read, todo, chunksize=1), 1):
            if wrong:
                if reader.image is None:
                    store.set_aside(reader.digest(number))
                if len(damage) < MAX_DAMAGE and wrong not in damage:
                    damage.append(wrong)
            else:
                good.add(reader.digest(number))
            if done % 1024 == 0:
                protocol.progress(done * CHUNK, len(todo) * CHUNK)
    return damage


def restore(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write a snapshot to a new overlay file, check it, then rename it to ``target``.

    With ``replace`` an existing file is replaced, else there must be none. The caller holds the host's lock.
    """
    store = Store(field(request, "store", str))
    target = field(request, "target", str)
    began = time.monotonic()
    if not field(request, "replace", bool, False) and os.path.lexists(target):
        raise Problem("%s already exists" % target, "give another name, or remove it", 3)
    with store.reading():
        snapshot = store.find(str(request["snapshot"]))
        beside = target + BESIDE
        try:
            os.makedirs(store.temporary, 0o700, exist_ok=True)
            try:
                with Reader(snapshot) as reader:
                    write_image(reader, beside)
                protocol.step("check", "check the file system")
                status, output = run_e2fsck(beside, "-n", store.temporary)
                if status:
                    raise snapshot.damaged(output)
            except Damage as error:
                store.set_health(snapshot, [error.what])
                raise
            if os.path.exists(target):
                _widen(beside, os.stat(target).st_size)
            protocol.step("rename", "")
            if find_loops(target):
                # The caller was killed, its lock is gone, and the services container was started.
                raise Problem("%s came into use meanwhile" % target, "sms stop, then run it again", 3)
            os.rename(beside, target)
            sync_folder(os.path.dirname(target))
        except BaseException:
            remove_file(beside)
            raise
    return {"number": snapshot.number, "bytes": snapshot.manifest.used_bytes, "seconds": time.monotonic() - began}


def _widen(path: str, size: int) -> None:
    """Enlarge the image to ``size`` bytes: an overlay that was grown since the snapshot keeps its size."""
    if os.stat(path).st_size >= size:
        return
    os.truncate(path, size)
    # -f: resize2fs requires a check newer than the last mount. e2fsck -n has just checked this image, but does not
    # record that.
    status, output = run_merged(["resize2fs", "-f", path])
    if status:
        raise Problem("it cannot be enlarged to the overlay's size: %s" % " / ".join(output.splitlines()[-2:]))
    protocol.note("note: it was enlarged to the overlay's size, %d MiB" % (size >> 20))


def write_image(reader: Reader, path: str) -> None:
    """Write a snapshot's image to a new sparse file at ``path``; verify every chunk.

    Raises:
        Damage: a chunk has changed.
        Problem: the file system is full.
    """
    protocol.step("write", "write the overlay")
    if not os.path.isdir(os.path.dirname(path)):
        raise Problem("there is no folder %s" % os.path.dirname(path), "create it first, or give another name", 3)
    with create_file(path) as file, disk_errors(path):
        cloned = reader.image is not None and reflink(reader.image, file.fileno())
        write_chunks(reader, file.fileno(), range(reader.count), present=cloned)
        os.fsync(file.fileno())
