"""The snapshot store: a folder a snapshot, and beside them the chunks that they share, each named by its digest.

    ROOT/000042/manifest.json   what it is; manifest.sha256 tells that it is whole
    ROOT/000042/digests         32 bytes a chunk, SHA-256 of its bytes; zeros for a chunk of zeros
    ROOT/000042/image           the overlay itself, where it was taken by reflink or in full
    ROOT/000042/health.json     what the last check of it found
    ROOT/chunks/ab/cdef...      a chunk, where it was taken as a delta
    ROOT/000042.partial/        one under way: it does not count

A snapshot appears by the renaming of its folder, when all it needs is on the disk.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import threading
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from appliance.agent.words import Busy, Problem
from appliance.shared.files import free_bytes, replace_file, sync_folder
from appliance.shared.locks import Locked, hold_lock

CHUNK = 1 << 16
"""Bytes of a chunk."""
ZERO = bytes(32)
"""Stands for the digest of a chunk of zeros."""
FORMAT = 1
ORDER = "%06d"
PARTIAL = ".partial"
KEPT = "before restore"
"""How the reason begins of those that a restore has made of what it replaced."""


def digest_of(data: Any) -> bytes:
    """What names a chunk."""
    return hashlib.sha256(data).digest()


def count_chunks(size: int) -> int:
    """Chunks of an image of ``size`` bytes."""
    return -(-size // CHUNK)


class Damage(Problem):
    """Something stored is not what was stored."""

    @property
    def what(self) -> str:
        """What is wrong, without the number of the snapshot."""
        return self.message.partition(" is damaged: ")[2] or self.message


class Snapshot(NamedTuple):
    """One that counts."""

    root: str
    number: int
    manifest: Dict[str, Any]
    health: Dict[str, Any]

    @property
    def folder(self) -> str:
        """Where it lies."""
        return os.path.join(self.root, ORDER % self.number)

    @property
    def order(self) -> Tuple[int, int]:
        """What comes after what: generations of the lease first, for clocks jump and hosts differ."""
        return (self.manifest["generation"], self.number)

    @property
    def verified(self) -> bool:
        """Whether nothing was wrong with it when it was looked at last."""
        return bool(self.health.get("ok"))

    def told(self) -> Dict[str, Any]:
        """Its manifest and health, for people and programs."""
        return dict(self.manifest, number=self.number, health=self.health)

    def digests(self) -> bytes:
        """Its list of digests.

        Raises:
            Damage: it is not the one that was stored.
        """
        try:
            with open(os.path.join(self.folder, "digests"), "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise self.damaged("its list of digests cannot be read: %s" % error.strerror)
        if hashlib.sha256(data).hexdigest() != self.manifest["digests"]:
            raise self.damaged("its list of digests has changed")
        return data

    def damaged(self, what: str) -> Damage:
        """The error that says so."""
        return Damage(
            "snapshot %d is damaged: %s" % (self.number, what),
            "`sms overlay list` shows others; `sms overlay verify` tells which are whole",
        )


class Reader:
    """Reads a snapshot's chunks; each is held against its digest."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.size: int = snapshot.manifest["size"]
        self.list = snapshot.digests()
        self.image: Optional[int] = None
        if snapshot.manifest["method"] != "delta":
            try:
                self.image = os.open(os.path.join(snapshot.folder, "image"), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise snapshot.damaged("its image cannot be opened: %s" % error.strerror)

    def close(self) -> None:
        """Done with it."""
        if self.image is not None:
            os.close(self.image)
            self.image = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def count(self) -> int:
        """Chunks of the image."""
        return count_chunks(self.size)

    def digest(self, number: int) -> bytes:
        """The digest of a chunk."""
        return self.list[number * 32 : number * 32 + 32]

    def length(self, number: int) -> int:
        """Bytes of a chunk; the last one may be short."""
        return min(CHUNK, self.size - number * CHUNK)

    def read(self, number: int) -> bytes:
        """The bytes of a chunk.

        Raises:
            Damage: they are missing, or others than were stored.
        """
        wanted = self.digest(number)
        if wanted == ZERO:
            return bytes(self.length(number))
        if self.image is None:
            where = chunk_path(self.snapshot.root, wanted)
            try:
                with open(where, "rb", 0) as stream:
                    data = stream.read(CHUNK + 1)
            except OSError as error:
                raise self.snapshot.damaged("chunk %s cannot be read: %s" % (wanted.hex()[:16], error.strerror))
        else:
            data = os.pread(self.image, self.length(number), number * CHUNK)
        if digest_of(data) != wanted:
            raise self.snapshot.damaged("chunk %d (%s) has changed" % (number, wanted.hex()[:16]))
        return data


def chunk_path(root: str, digest: bytes) -> str:
    """Where a chunk lies."""
    name = digest.hex()
    return os.path.join(root, "chunks", name[:2], name[2:])


class Store:
    """The snapshots of one cluster's overlay on this host."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.chunks = os.path.join(root, "chunks")
        self.temporary = os.path.join(root, "tmp")
        self.new_bytes = 0
        self.new: List[bytes] = []
        self._folders: Set[str] = set()
        self._names = itertools.count()
        self._guard = threading.Lock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one that adds; what a killed one left is cleared away first.

        Raises:
            Problem: another run adds.
        """
        for folder in (self.root, self.chunks, self.temporary):
            os.makedirs(folder, 0o700, exist_ok=True)
        os.chmod(self.root, 0o700)
        with self._lock("write.lock", "another run is at work on the snapshots in %s" % self.root):
            self._clear_partials()
            with self._lock("sweep.lock", "snapshots in %s are being removed" % self.root, shared=True):
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is removed meanwhile.

        Raises:
            Problem: there is no store, or another run is removing.
        """
        if not os.path.isdir(self.root):
            raise Problem("there are no snapshots in %s" % self.root, "`sms overlay snapshot` takes one", 3)
        with self._lock("sweep.lock", "snapshots in %s are being removed" % self.root, shared=True):
            yield

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Nobody reads or adds meanwhile.

        Raises:
            Problem: somebody does.
        """
        with self._lock("write.lock", "another run is at work on the snapshots in %s" % self.root):
            self._clear_partials()
            with self._lock("sweep.lock", "snapshots in %s are being read" % self.root):
                yield

    @contextmanager
    def _lock(self, name: str, taken: str, *, shared: bool = False) -> Iterator[None]:
        try:
            with hold_lock(os.path.join(self.root, name), shared=shared):
                yield
        except Locked:
            raise Busy(taken)

    def _clear_partials(self) -> None:
        for name in os.listdir(self.root):
            if name.endswith(PARTIAL):
                shutil.rmtree(os.path.join(self.root, name))
        for name in os.listdir(self.temporary) if os.path.isdir(self.temporary) else []:
            owner = re.search(r"-(\d+)\.", name)  # a verify may be at work: it only reads
            if not owner or not os.path.exists("/proc/" + owner.group(1)):
                _remove(os.path.join(self.temporary, name))

    def list(self) -> Tuple[List[Snapshot], Dict[int, str]]:
        """All that count, the oldest first; and those whose manifest is damaged, with why."""
        found = []
        broken = {}
        names = os.listdir(self.root) if os.path.isdir(self.root) else []
        for name in names:
            if not (name.isdigit() and len(name) >= 6):
                continue
            try:
                found.append(self._load(int(name)))
            except FileNotFoundError:
                # Removed while we looked: then the folder is on its way out as well.
                if os.path.isdir(os.path.join(self.root, name)):
                    broken[int(name)] = "it has no manifest"
            except (OSError, ValueError, KeyError, TypeError) as error:
                broken[int(name)] = str(error)
        return sorted(found, key=lambda one: one.order), broken

    def _load(self, number: int) -> Snapshot:
        folder = os.path.join(self.root, ORDER % number)
        with open(os.path.join(folder, "manifest.json"), "rb") as stream:
            data = stream.read()
        with open(os.path.join(folder, "manifest.sha256")) as text:
            seal = text.read().split()[:1]
        if seal != [hashlib.sha256(data).hexdigest()]:
            raise ValueError("its manifest has changed")
        manifest = json.loads(data.decode())
        if manifest["format"] != FORMAT:
            raise ValueError("its format %r is not known here" % manifest["format"])
        health: Dict[str, Any] = {}
        try:
            with open(os.path.join(folder, "health.json")) as text:
                health = json.load(text)
        except (OSError, ValueError):
            pass
        return Snapshot(self.root, number, manifest, health)

    def find(self, wanted: str) -> Snapshot:
        """The snapshot of a number, or the ``latest``, which is the newest verified one.

        Raises:
            Problem: there is none.
        """
        found, broken = self.list()
        if wanted == "latest":
            good = [one for one in found if one.verified]
            if not good:
                raise Problem("there is no verified snapshot", "`sms overlay snapshot` takes one", 3)
            # What a restore has kept is the state that somebody wanted to get away from.
            wanted_ones = [one for one in good if not str(one.manifest.get("reason", "")).startswith(KEPT)]
            return (wanted_ones or good)[-1]
        if wanted.isdigit() and int(wanted) in broken:
            raise Damage(
                "snapshot %s is damaged: %s" % (wanted, broken[int(wanted)]), "`sms overlay list` shows others"
            )
        for one in found:
            if wanted.isdigit() and one.number == int(wanted):
                return one
        numbers = ", ".join(str(one.number) for one in found[-5:]) or "none"
        raise Problem("there is no snapshot %s" % wanted, "the newest are: %s" % numbers, 3)

    def begin(self) -> Tuple[int, str]:
        """A number that no snapshot has had, and a folder for what belongs to it."""
        taken = [int(name) for name in os.listdir(self.root) if name.isdigit()]
        number = max([self._last(), *taken]) + 1
        folder = os.path.join(self.root, ORDER % number) + PARTIAL
        os.mkdir(folder, 0o700)
        return number, folder

    def _last(self) -> int:
        """The highest number that a snapshot has had."""
        try:
            with open(os.path.join(self.root, "counter")) as stream:
                return int(stream.read())
        except (OSError, ValueError):
            return 0

    def put(self, data: Any) -> bytes:
        """Store a chunk; give its digest. One that is there already is not written again."""
        digest = digest_of(data)
        path = chunk_path(self.root, digest)
        try:
            # A machine that lost its power may have left an empty file of that name.
            if os.stat(path).st_size == len(data):
                return digest
        except OSError:
            pass
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, 0o700, exist_ok=True)
            self._folders.add(folder)
        beside = "%s.%d-%d.new" % (path, os.getpid(), next(self._names))
        self.write_file(beside, data)
        os.rename(beside, path)
        with self._guard:
            self.new.append(digest)
            self.new_bytes += len(data)
        return digest

    def put_into(self, image: int, number: int, data: Any) -> bytes:
        """Store a chunk in an image of a snapshot's own; give its digest."""
        offset, view = number * CHUNK, memoryview(data)
        while len(view):
            done = os.pwrite(image, view, offset)
            view, offset = view[done:], offset + done
        return self.count_only(number, data)

    def count_only(self, number: int, data: Any) -> bytes:
        """A chunk that lies where it should already; give its digest."""
        with self._guard:
            self.new_bytes += len(data)
        return digest_of(data)

    def write_file(self, path: str, data: Any) -> None:
        """A new file of mode 0600; not on the disk yet."""
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", 0) as stream:
                view = memoryview(data)
                while len(view):
                    view = view[stream.write(view) or 0 :]
        except OSError as error:
            if os.path.exists(path):
                os.unlink(path)
            raise full(error, path)

    def commit(self, number: int, folder: str, manifest: Dict[str, Any], digests: bytes) -> Snapshot:
        """Make it count: all of it goes to the disk, then its folder gets its name."""
        manifest = dict(manifest, format=FORMAT, number=number, digests=hashlib.sha256(digests).hexdigest())
        text = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
        self.write_file(os.path.join(folder, "digests"), digests)
        self.write_file(os.path.join(folder, "manifest.json"), text)
        self.write_file(os.path.join(folder, "manifest.sha256"), (hashlib.sha256(text).hexdigest() + "\n").encode())
        self.write_file(os.path.join(folder, "health.json"), json.dumps({"ok": True, "at": time.time()}).encode())
        self.sync()
        final = os.path.join(self.root, ORDER % number)
        os.rename(folder, final)
        # One that comes from elsewhere has its number from there.
        self.replace("counter", b"%d\n" % max(number, self._last()))
        sync_folder(self.root)
        return self._load(number)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file of the store anew, whole or not at all."""
        path = os.path.join(self.root, name)
        try:
            replace_file(path, data)
        except OSError as error:
            raise full(error, path)

    def sync(self) -> None:
        """Everything written so far goes to the disk.

        Raises:
            Problem: the disk refused some of it.
        """
        try:
            sync_system(self.root)
        except OSError as error:
            raise full(error, self.root)

    def set_health(self, snapshot: Snapshot, damage: List[str]) -> None:
        """Write down what a check of it has found."""
        told = {"ok": not damage, "at": time.time(), "damage": damage}
        self.replace(os.path.join(ORDER % snapshot.number, "health.json"), json.dumps(told).encode())

    def drop_new(self, folder: str) -> None:
        """Give back what this run has stored: what is half a snapshot only fills the disk."""
        shutil.rmtree(folder, ignore_errors=True)
        try:
            used = self.used_chunks() if self.new else set()  # another list may name the same chunk
        except Damage:
            used = set(self.new)  # it may need any of them: the sweep sees to it
        for digest in self.new:
            if digest not in used:
                _unlink(chunk_path(self.root, digest))
        self.new = []

    def used_chunks(self) -> Set[bytes]:
        """Digests of all chunks that snapshots name.

        Raises:
            Damage: a snapshot does not tell its own.
        """
        found, broken = self.list()
        if broken:
            number, why = sorted(broken.items())[0]
            raise Damage(
                "snapshot %d is damaged: %s; what it needs is not known" % (number, why),
                "nothing is removed; `sms overlay prune %d` removes it by name" % number,
            )
        used: Set[bytes] = set()
        for one in found:
            if one.manifest["method"] == "delta":
                data = one.digests()
                used.update(data[at : at + 32] for at in range(0, len(data), 32))
        return used

    def remove(self, number: int) -> None:
        """Take a snapshot away; from the first moment on it does not count. Its chunks stay until ``sweep``."""
        path = os.path.join(self.root, ORDER % number)
        os.rename(path, path + PARTIAL)
        sync_folder(self.root)
        shutil.rmtree(path + PARTIAL)

    def sweep(self) -> Tuple[int, int]:
        """Remove the chunks that no snapshot names; give how many, and their bytes."""
        used = self.used_chunks()
        count = freed = 0
        for folder, _, names in os.walk(self.chunks):
            prefix = os.path.basename(folder)
            for name in names:
                try:
                    known = bytes.fromhex(prefix + name) in used
                except ValueError:  # half a chunk that a killed run left
                    known = False
                if not known:
                    path = os.path.join(folder, name)
                    freed += os.stat(path).st_blocks * 512
                    os.unlink(path)
                    count += 1
        return count, freed

    def set_aside(self, digest: bytes) -> None:
        """Take a chunk that has changed out of the way: the next snapshot with its contents stores it anew."""
        path = chunk_path(self.root, digest)
        if os.path.exists(path):
            os.rename(path, os.path.join(self.temporary, digest.hex() + ".bad"))

    def stored_bytes(self) -> int:
        """Bytes on the disk that the store takes."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    state = os.stat(os.path.join(folder, name), follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(state.st_mode):
                    total += state.st_blocks * 512
        return total

    def free_bytes(self) -> int:
        """Room on its file system."""
        return free_bytes(self.root)


def full(error: OSError, path: str) -> Problem:
    """What the system said, as a person reads it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(
            "the file system of %s is full" % path, "`sms overlay prune` makes room; nothing that counted is lost"
        )
    return Problem("%s: %s" % (path, (error.strerror or str(error)).lower()))


def sync_system(path: str) -> None:
    """All that is written on the file system of a folder goes to its disk."""
    from appliance.agent.freeze import sync_file_system  # ctypes takes long, and who only reads needs none

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        _unlink(path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
