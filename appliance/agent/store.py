"""The snapshot store: a folder per snapshot, and the chunks that they share, each named by its digest.

    ROOT/000042/manifest.json   description of the snapshot; manifest.sha256 is its checksum
    ROOT/000042/digests         32 bytes per chunk, SHA-256 of its bytes; zeros for a chunk of zeros
    ROOT/000042/image           the overlay itself, if it was taken by reflink or in full
    ROOT/000042/health.json     result of the last check
    ROOT/chunks/ab/cdef...      a chunk of snapshots taken as a delta
    ROOT/000042.partial/        a snapshot that is not committed

A snapshot is committed by renaming its folder, after all its data was flushed to the disk.
"""

import dataclasses
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
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from appliance.agent.manifest import FORMAT
from appliance.agent.protocol import IMMUTABLE_HINT, Busy, Problem
from appliance.shared.files import free_bytes, open_regular, remove_file, replace_file, sync_folder, write_at
from appliance.shared.locks import Locked, hold_lock
from appliance.shared.manifest import Manifest
from appliance.shared.order import Place, order
from appliance.shared.records import from_value

CHUNK = 1 << 16
"""Bytes of a chunk."""
ZERO = bytes(32)
"""Used as the digest of a chunk of zeros."""
FOLDER_NAME = "%06d"
PARTIAL = ".partial"
HEALTH_WAIT_S = 30.0
"""Seconds to wait while another run stores the result of a check."""
MAX_MANIFEST, MAX_HEALTH = 1 << 20, 64 << 20
"""Bytes of these files at most."""
KEPT = "before restore"
"""Prefix of the reason of snapshots that a restore takes of the overlay before it is replaced."""


def digest_of(data: Any) -> bytes:
    """Return the digest that names a chunk."""
    return hashlib.sha256(data).digest()


def open_stored(path: str) -> int:
    """Open a file of a store, whose disk may be another machine's: links, pipes and devices are none."""
    return open_regular(path, follow=False)


def read_stored(path: str, limit: int) -> bytes:
    """Return the content of a file of a store; raise OSError, too, if it has more than ``limit`` bytes."""
    with open(open_stored(path), "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, "it is too large", path)
    return data


def count_chunks(size: int) -> int:
    """Return the number of chunks of an image of ``size`` bytes."""
    return -(-size // CHUNK)


class Damage(Problem):
    """Stored data is missing or has changed."""

    @property
    def what(self) -> str:
        """The damage, without the number of the snapshot."""
        return self.message.partition(" is damaged: ")[2] or self.message


class Snapshot(NamedTuple):
    """A committed snapshot."""

    root: str
    number: int
    manifest: Manifest
    health: Dict[str, Any]

    @property
    def folder(self) -> str:
        """Path of its folder."""
        return os.path.join(self.root, FOLDER_NAME % self.number)

    @property
    def order(self) -> Place:
        """Sort key."""
        return order(vars(self.manifest))

    @property
    def verified(self) -> bool:
        """Whether the last check found no damage."""
        return bool(self.health.get("ok"))

    def to_dict(self) -> Dict[str, Any]:
        """Return its manifest, number and health."""
        return dict(self.manifest.to_dict(), number=self.number, health=self.health)

    def digests(self) -> bytes:
        """Return its list of digests.

        Raises:
            Damage: it cannot be read or has changed.
        """
        try:
            data = read_stored(os.path.join(self.folder, "digests"), count_chunks(self.manifest.size) * len(ZERO))
        except OSError as error:
            raise self.damaged("its list of digests cannot be read: %s" % error.strerror)
        if hashlib.sha256(data).hexdigest() != self.manifest.digests:
            raise self.damaged("its list of digests has changed")
        return data

    def chunks(self) -> Set[bytes]:
        """Return the digests of its chunks; raises as ``digests``."""
        data = self.digests()
        return {data[at : at + 32] for at in range(0, len(data), 32)}

    def damaged(self, what: str) -> Damage:
        """Return the error that reports damage."""
        return Damage(
            "snapshot %d is damaged: %s" % (self.number, what),
            "`sms overlay list` shows others; `sms overlay verify` checks which are undamaged",
        )


class ChunkList:
    """The chunks of an image of ``size`` bytes, of which ``list`` has the digests."""

    size: int
    list: bytes

    @property
    def count(self) -> int:
        """Number of chunks of the image."""
        return count_chunks(self.size)

    def digest(self, number: int) -> bytes:
        """Return the digest of a chunk."""
        return self.list[number * 32 : number * 32 + 32]

    def length(self, number: int) -> int:
        """Return the size of a chunk in bytes; the last one may be short."""
        return min(CHUNK, self.size - number * CHUNK)


class Reader(ChunkList):
    """Reads a snapshot's chunks; each is verified against its digest."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.size = snapshot.manifest.size
        self.list = snapshot.digests()
        self.image: Optional[int] = None
        if snapshot.manifest.method != "delta":
            try:
                self.image = open_stored(os.path.join(snapshot.folder, "image"))
            except OSError as error:
                raise snapshot.damaged("its image cannot be opened: %s" % error.strerror)

    def close(self) -> None:
        """Close the image."""
        if self.image is not None:
            os.close(self.image)
            self.image = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, number: int) -> bytes:
        """Return the bytes of a chunk.

        Raises:
            Damage: they are missing or have changed.
        """
        wanted = self.digest(number)
        if wanted == ZERO:
            return bytes(self.length(number))
        if self.image is None:
            where = chunk_path(self.snapshot.root, wanted)
            try:
                with open(open_stored(where), "rb", 0) as stream:
                    data = stream.read(CHUNK + 1)
            except OSError as error:
                raise self.snapshot.damaged("chunk %s cannot be read: %s" % (wanted.hex()[:16], error.strerror))
        else:
            data = os.pread(self.image, self.length(number), number * CHUNK)
        if digest_of(data) != wanted:
            raise self.snapshot.damaged("chunk %d (%s) has changed" % (number, wanted.hex()[:16]))
        return data


def chunk_path(root: str, digest: bytes) -> str:
    """Return the path of a chunk."""
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
        self._known: Set[bytes] = set()
        """Digests of undamaged chunks: a verified snapshot names them, or this run has read or written them."""
        self._names = itertools.count()
        self._guard = threading.Lock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock for adding snapshots; remove what a killed run left.

        Raises:
            Problem: another run holds it.
        """
        for folder in (self.root, self.chunks, self.temporary):
            os.makedirs(folder, 0o700, exist_ok=True)
        os.chmod(self.root, 0o700)
        with self._lock("write.lock", "another run is at work on the snapshots in %s" % self.root):
            self._clear_partials()
            with self._lock("sweep.lock", "snapshots in %s are being removed" % self.root, shared=True):
                self._known = self._newest_verified()
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock that prevents removal.

        Raises:
            Problem: there is no store, or another run is removing snapshots.
        """
        if not os.path.isdir(self.root):
            raise Problem("there are no snapshots in %s" % self.root, "`sms overlay snapshot` takes one", 3)
        with self._lock("sweep.lock", "snapshots in %s are being removed" % self.root, shared=True):
            yield

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Hold the locks that prevent reading and adding.

        Raises:
            Problem: another run is reading or adding.
        """
        with self._lock("write.lock", "another run is at work on the snapshots in %s" % self.root):
            self._clear_partials()
            with self._lock("sweep.lock", "snapshots in %s are being read" % self.root):
                yield

    @contextmanager
    def _lock(self, name: str, taken: str, *, shared: bool = False, wait_s: float = 0) -> Iterator[None]:
        try:
            with hold_lock(os.path.join(self.root, name), shared=shared, wait_s=wait_s):
                yield
        except Locked:
            raise Busy(taken)

    def _clear_partials(self) -> None:
        for name in os.listdir(self.root):
            if name.endswith(PARTIAL):
                shutil.rmtree(os.path.join(self.root, name))
        for name in os.listdir(self.temporary) if os.path.isdir(self.temporary) else []:
            owner = re.search(r"-(\d+)\.", name)  # a running verify holds no write lock
            if not owner or not os.path.exists("/proc/" + owner.group(1)):
                _remove(os.path.join(self.temporary, name))

    def list(self) -> Tuple[List[Snapshot], Dict[int, str]]:
        """Return the snapshots, the oldest first; and those with a damaged manifest, with the reason."""
        found = []
        broken = {}
        names = os.listdir(self.root) if os.path.isdir(self.root) else []
        for name in names:
            if not (name.isdigit() and len(name) >= 6):
                continue
            try:
                found.append(self._load(int(name)))
            except FileNotFoundError:
                # A snapshot that is removed at this moment is not damaged: then its folder is gone as well.
                if os.path.isdir(os.path.join(self.root, name)):
                    broken[int(name)] = "it has no manifest"
            except (OSError, ValueError, KeyError, TypeError) as error:
                broken[int(name)] = str(error)
        return sorted(found, key=lambda one: one.order), broken

    def _load(self, number: int) -> Snapshot:
        folder = os.path.join(self.root, FOLDER_NAME % number)
        data = read_stored(os.path.join(folder, "manifest.json"), MAX_MANIFEST)
        seal = read_stored(os.path.join(folder, "manifest.sha256"), MAX_MANIFEST).decode(errors="replace").split()[:1]
        if seal != [hashlib.sha256(data).hexdigest()]:
            raise ValueError("its manifest has changed")
        manifest = json.loads(data.decode())
        if manifest["format"] != FORMAT:
            raise ValueError("unknown format %r" % manifest["format"])
        return Snapshot(self.root, number, from_value(Manifest, manifest), self.read_health(number))

    def read_health(self, number: int) -> Dict[str, Any]:
        """Return the result of a snapshot's last check; empty if it has none that can be read."""
        try:
            health = json.loads(read_stored(os.path.join(self.root, FOLDER_NAME % number, "health.json"), MAX_HEALTH))
        except (OSError, ValueError, RecursionError):
            return {}
        return health if isinstance(health, dict) else {}

    def find(self, wanted: str) -> Snapshot:
        """Return the snapshot of a number, or the ``latest``, which is the newest verified one.

        Raises:
            Problem: there is none, or it is damaged.
        """
        found, broken = self.list()
        if wanted == "latest":
            good = [one for one in found if one.verified]
            if not good:
                raise Problem("there is no verified snapshot", "`sms overlay snapshot` takes one", 3)
            # A restore has kept the state that somebody wanted to undo.
            candidates = [one for one in good if not one.manifest.reason.startswith(KEPT)]
            return (candidates or good)[-1]
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
        """Create the folder of a new snapshot; return a number that was never used, and the folder."""
        taken = [int(name) for name in os.listdir(self.root) if name.isdigit()]
        number = max([self._last(), *taken]) + 1
        folder = os.path.join(self.root, FOLDER_NAME % number) + PARTIAL
        os.mkdir(folder, 0o700)
        return number, folder

    def _last(self) -> int:
        """Return the highest number used so far."""
        try:
            return int(read_stored(os.path.join(self.root, "counter"), 100))
        except (OSError, ValueError):
            return 0

    def _newest_verified(self) -> Set[bytes]:
        """Return the digests of the newest verified snapshot: the next one shares most of its chunks.

        Those that only older ones name are read again, which costs less than to read the lists of all snapshots.
        """
        for one in reversed(self.list()[0]):
            if one.verified and one.manifest.method == "delta":
                with suppress(Damage):
                    found: Set[bytes] = one.chunks()
                    return found
        return set()

    def put(self, data: Any, *, flush: bool = False) -> bytes:
        """Store a chunk, unless it is stored already; return its digest.

        A run that was interrupted by a power failure may have left a file of that name and size with other content:
        unless a verified snapshot names it, it is read again.

        Args:
            flush: it replaces a damaged one.
        """
        digest = digest_of(data)
        path = chunk_path(self.root, digest)
        known = digest in self._known
        try:
            if os.stat(path).st_size == len(data) and (known or _digest_of_file(path) == digest):
                self._known.add(digest)
                return digest
            flush = True
        except OSError:
            # A verified snapshot names it: from the rename on its content must be on the disk.
            flush = flush or known
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, 0o700, exist_ok=True)
            self._folders.add(folder)
        beside = "%s.%d-%d.new" % (path, os.getpid(), next(self._names))
        self.write_file(beside, data, flush=flush)
        os.rename(beside, path)
        self._known.add(digest)
        with self._guard:
            self.new.append(digest)
            self.new_bytes += len(data)
        return digest

    def put_into(self, image: int, number: int, data: Any) -> bytes:
        """Store a chunk in a snapshot's own image; return its digest."""
        write_at(image, data, number * CHUNK)
        return self.count_only(number, data)

    def count_only(self, number: int, data: Any) -> bytes:
        """Count a chunk that is in place already; return its digest."""
        with self._guard:
            self.new_bytes += len(data)
        return digest_of(data)

    def write_file(self, path: str, data: Any, *, flush: bool = False) -> None:
        """Write a file of mode 0600; without ``flush``, ``sync`` flushes it to the disk."""
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", 0) as stream:
                view = memoryview(data)
                while len(view):
                    view = view[stream.write(view) or 0 :]
                if flush:
                    os.fsync(stream.fileno())
        except OSError as error:
            remove_file(path)
            raise disk_error(error, path)

    def commit(self, folder: str, manifest: Manifest, digests: bytes) -> Snapshot:
        """Commit a snapshot: flush all its data to the disk, then rename its folder."""
        manifest = dataclasses.replace(manifest, digests=hashlib.sha256(digests).hexdigest())
        text = (json.dumps(manifest.to_dict(), indent=1, sort_keys=True) + "\n").encode()
        self.write_file(os.path.join(folder, "digests"), digests)
        self.write_file(os.path.join(folder, "manifest.json"), text)
        self.write_file(os.path.join(folder, "manifest.sha256"), (hashlib.sha256(text).hexdigest() + "\n").encode())
        self.write_file(os.path.join(folder, "health.json"), json.dumps({"ok": True, "at": time.time()}).encode())
        self.sync()
        os.rename(folder, os.path.join(self.root, FOLDER_NAME % manifest.number))
        # A received snapshot may have a number above the counter.
        self.replace("counter", b"%d\n" % max(manifest.number, self._last()))
        sync_folder(self.root)
        return self._load(manifest.number)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small file of the store atomically."""
        path = os.path.join(self.root, name)
        with disk_errors(path):
            replace_file(path, data)

    def sync(self) -> None:
        """Flush everything written so far to the disk.

        Raises:
            Problem: writing failed.
        """
        with disk_errors(self.root):
            sync_system(self.root)

    def set_health(self, snapshot: Snapshot, damage: List[str]) -> None:
        """Store the result of a snapshot's check. Damage that another run has stored since ``snapshot`` was read stays.

        Raises:
            Problem: it cannot be written.
        """
        name = os.path.join(FOLDER_NAME % snapshot.number, "health.json")
        taken = "another run stores the result of a check in %s" % self.root
        with disk_errors(self.root), self._lock("health.lock", taken, wait_s=HEALTH_WAIT_S):
            stored = self.read_health(snapshot.number)
            if stored != snapshot.health:
                damage = damage + [one for one in stored.get("damage") or [] if one not in damage]
            self.replace(name, json.dumps({"ok": not damage, "at": time.time(), "damage": damage}).encode())

    def drop_new(self, folder: str) -> None:
        """Remove what this run has stored: an incomplete snapshot only fills the disk."""
        shutil.rmtree(folder, ignore_errors=True)
        try:
            used = self.used_chunks() if self.new else set()  # another snapshot may refer to the same chunk
        except Damage:
            used = set(self.new)  # a damaged snapshot may need them: leave them to the sweep
        for digest in self.new:
            if digest not in used:
                remove_file(chunk_path(self.root, digest))
        self.new = []

    def used_chunks(self) -> Set[bytes]:
        """Return the digests of all chunks that snapshots refer to.

        Raises:
            Damage: the list of one cannot be read.
        """
        found, broken = self.list()
        if broken:
            number, why = sorted(broken.items())[0]
            raise Damage(
                "snapshot %d is damaged: %s; which chunks it needs is unknown" % (number, why),
                "nothing is removed; `sms overlay prune %d` removes this snapshot" % number,
            )
        used: Set[bytes] = set()
        for one in found:
            if one.manifest.method == "delta":
                used |= one.chunks()
        return used

    def remove(self, number: int) -> None:
        """Remove a snapshot: rename its folder first, then remove it. Its chunks stay until ``sweep``."""
        path = os.path.join(self.root, FOLDER_NAME % number)
        os.rename(path, path + PARTIAL)
        sync_folder(self.root)
        shutil.rmtree(path + PARTIAL)

    def sweep(self) -> Tuple[int, int]:
        """Remove unused chunks; return their number and their bytes on disk."""
        used = self.used_chunks()
        count = freed = 0
        for folder, _, names in os.walk(self.chunks):
            prefix = os.path.basename(folder)
            for name in names:
                try:
                    known = bytes.fromhex(prefix + name) in used
                except ValueError:  # an incomplete chunk of a killed run
                    known = False
                if not known:
                    path = os.path.join(folder, name)
                    freed += os.stat(path).st_blocks * 512
                    os.unlink(path)
                    count += 1
        return count, freed

    def set_aside(self, digest: bytes) -> bool:
        """Move a damaged chunk away: the next snapshot with its content stores it again. Return whether it existed."""
        try:
            os.rename(chunk_path(self.root, digest), os.path.join(self.temporary, digest.hex() + ".bad"))
        except FileNotFoundError:
            return False
        return True

    def stored_bytes(self) -> int:
        """Return the size of the store on disk in bytes."""
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
        """Return the free bytes of its file system."""
        return free_bytes(self.root)


def disk_error(error: OSError, path: str) -> Problem:
    """Return the error to report for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(
            "the file system of %s is full" % path, "`sms overlay prune` makes room; no committed snapshot is lost"
        )
    hints = {errno.EPERM: IMMUTABLE_HINT, errno.EIO: "is a disk failing? `dmesg` shows it"}
    return Problem("%s: %s" % (path, (error.strerror or str(error)).lower()), hints.get(error.errno or 0, ""))


@contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Report a failed write to ``path`` as a problem."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path)


def sync_system(path: str) -> None:
    """Flush the file system of a folder to its disk."""
    from appliance.agent.freeze import sync_file_system  # imports ctypes, which is slow and needed only here

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def _digest_of_file(path: str) -> bytes:
    with open(open_stored(path), "rb", 0) as stream:
        return digest_of(stream.read(CHUNK + 1))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        remove_file(path)
