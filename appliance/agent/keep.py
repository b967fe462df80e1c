"""What is done with snapshots that are there: told, read again and checked, put back."""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Set, Tuple

from appliance.agent import words
from appliance.agent.check import check, run_e2fsck, write_all
from appliance.agent.clone import share
from appliance.agent.freeze import find_loops
from appliance.agent.source import WORKERS
from appliance.agent.store import CHUNK, ZERO, Damage, Reader, Snapshot, Store, full
from appliance.agent.words import Problem, field
from appliance.shared.files import sync_folder

TOLD = 20
"""Damages of one snapshot that are named."""
BESIDE = ".restoring"


def tell(request: Dict[str, Any]) -> Dict[str, Any]:
    """All snapshots, the oldest first, and what their store takes."""
    store = Store(field(request, "store", str))
    if not os.path.isdir(store.root):
        return {"snapshots": [], "broken": {}, "stored_bytes": 0, "free_bytes": 0}
    found, broken = store.list()
    return {
        "snapshots": [one.told() for one in found],
        "broken": {str(number): why for number, why in sorted(broken.items())},
        "stored_bytes": store.stored_bytes(),
        "free_bytes": store.free_bytes(),
    }


def verify(request: Dict[str, Any]) -> Dict[str, Any]:
    """Read snapshots again, every byte, and check them; what was found is kept with each."""
    store = Store(field(request, "store", str))
    numbers = field(request, "numbers", list)
    with store.reading():
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        snapshots = [store.find(str(number)) for number in numbers] if numbers else store.list()[0]
        good: Set[bytes] = set()
        results = []
        for one in snapshots:
            words.step("verify", "verify snapshot %d" % one.number)
            damage = find_damage(store, one, good, request)
            store.set_health(one, damage)
            words.detail("damaged" if damage else "whole")
            results.append({"number": one.number, "ok": not damage, "damage": damage})
    return {"snapshots": results}


def reread(request: Dict[str, Any]) -> Dict[str, Any]:
    """Hold every byte of the newest verified snapshot against its digest, unless that was done ``every_s`` seconds ago.

    Later ones are built on its chunks. One that has changed is set aside, so that the next snapshot stores it anew.
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
        words.step("reread", "read snapshot %d again" % newest.number)
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
    """What is wrong with a snapshot; digests in ``good`` have been read before, and it grows."""
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
            found = check(reader, store.temporary, field(request, "state", list, []), field(request, "heads", dict, {}))
        except Damage as error:
            return [error.what]
        return ["e2fsck had to mend it"] if found.fixed else []


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
                if len(damage) < TOLD and wrong not in damage:
                    damage.append(wrong)
            else:
                good.add(reader.digest(number))
            if done % 1024 == 0:
                words.moved(done * CHUNK, len(todo) * CHUNK)
    return damage


def restore(request: Dict[str, Any]) -> Dict[str, Any]:
    """Lay a snapshot out as an overlay file: beside its name, checked, then renamed.

    With ``replace`` a file of that name gives way, else it must not be there. Whoever asks holds the host's lock.
    """
    store = Store(field(request, "store", str))
    target = field(request, "target", str)
    began = time.monotonic()
    if not field(request, "replace", bool, False) and os.path.lexists(target):
        raise Problem("%s is there already" % target, "give another name, or remove it", 3)
    with store.reading():
        snapshot = store.find(str(request["snapshot"]))
        beside = target + BESIDE
        try:
            os.makedirs(store.temporary, 0o700, exist_ok=True)
            try:
                with Reader(snapshot) as reader:
                    lay_out(reader, beside)
                words.step("check", "check the file system")
                status, said = run_e2fsck(beside, "-n", store.temporary)
                if status:
                    raise snapshot.damaged(said)
            except Damage as error:
                store.set_health(snapshot, [error.what])
                raise
            if os.path.exists(target):
                _widen(beside, os.stat(target).st_size)
            words.step("rename", "")
            if os.path.exists(target) and find_loops(target):
                # Who asked has been killed, its lock is gone, and somebody has started the appliance.
                raise Problem("%s has come into use meanwhile" % target, "sms stop, then run it again", 3)
            os.rename(beside, target)
            sync_folder(os.path.dirname(target))
        except BaseException:
            if os.path.lexists(beside):
                os.unlink(beside)
            raise
    return {"number": snapshot.number, "bytes": snapshot.manifest["used_bytes"], "seconds": time.monotonic() - began}


def _widen(path: str, size: int) -> None:
    """An overlay that has been grown since stays as large as it is."""
    if os.stat(path).st_size >= size:
        return
    os.truncate(path, size)
    # -f: it asks for a check made after the last mount, by the second; e2fsck has read this very image just now, and
    # wrote nothing down.
    done = subprocess.Popen(
        ["resize2fs", "-f", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = done.communicate()[0].decode(errors="replace").strip()
    if done.returncode:
        raise Problem("it cannot be made as large as the overlay is now: %s" % " / ".join(said.splitlines()[-2:]))
    words.note("note: it is as large as the overlay was, %d MiB" % (size >> 20))


def lay_out(reader: Reader, path: str) -> None:
    """Write a snapshot's image to a new sparse file at ``path``, every chunk held against its digest.

    Raises:
        Damage: one is not what it was.
        Problem: the file system is full.
    """
    words.step("write", "write the overlay")
    if not os.path.isdir(os.path.dirname(path)):
        raise Problem("there is no folder %s" % os.path.dirname(path), "make it first, or give another name", 3)
    if os.path.lexists(path):
        os.unlink(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        cloned = reader.image is not None and share(reader.image, descriptor)
        os.ftruncate(descriptor, reader.size)
        todo = [number for number in range(reader.count) if reader.digest(number) != ZERO]

        def write(number: int) -> None:
            data = reader.read(number)
            if not cloned:
                write_all(descriptor, data, number * CHUNK)

        with ThreadPoolExecutor(WORKERS) as pool:
            for done, _ in enumerate(pool.map(write, todo), 1):
                if done % 1024 == 0:
                    words.moved(done * CHUNK, len(todo) * CHUNK)
        os.fsync(descriptor)
    except OSError as error:
        raise full(error, path)
    finally:
        os.close(descriptor)
