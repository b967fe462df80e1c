"""Take a snapshot of an overlay, in use or not.

In use: most chunks are read before the file system is frozen, and during the freeze only those that changed since.
These are found by a block trace of the loop device; where the kernel has none, by the ctimes of the inodes; where the
file system's format is not known, by comparing everything.
"""

import dataclasses
import errno
import fcntl
import os
import struct
import time
import uuid
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from appliance.agent import protocol
from appliance.agent.changes import Changes
from appliance.agent.check import check
from appliance.agent.clone import reflink
from appliance.agent.freeze import Frozen, find_loops, mounted_again, private_mounts
from appliance.agent.manifest import FORMAT
from appliance.agent.protocol import Busy, Problem, field, read_request
from appliance.agent.source import Sink, Source, free_chunks
from appliance.agent.store import Reader, Snapshot, Store, disk_error
from appliance.shared.identity import own_uuid
from appliance.shared.lease import advance_sequence
from appliance.shared.locks import Locked, hold_lock
from appliance.shared.manifest import Manifest
from appliance.shared.order import last_place
from appliance.shared.overlay import frozen_mark

FICLONERANGE = 0x4020940D
"""ioctl of linux/fs.h."""
LOCK_WAIT_S = 10
PASSES = 5
"""Rounds of reading changed chunks before the freeze, at most."""
FREEZE_CHUNKS = 128
"""Changed chunks that are few enough for the freeze."""


def take(request: Dict[str, Any]) -> Dict[str, Any]:
    """Take a snapshot, check it, and commit it.

    Raises:
        Problem: it could not be taken; nothing of it is left.
    """
    store = Store(field(request, "store", str))
    overlay = field(request, "overlay", str)
    if not os.path.isfile(overlay):
        raise Problem("there is no overlay %s" % overlay, "`sms start` or `sms overlay create` makes one", 3)
    with store.writing():
        private_mounts()
        number, folder = store.begin()
        try:
            snapshot = SnapshotRun(store, number, folder, overlay, request).run()
        except BaseException as error:
            store.drop_new(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_error(error, store.root)
            raise
    return {"snapshot": snapshot.to_dict()}


class Pending(Reader):
    """Reads a snapshot that is not committed yet."""

    def __init__(self, store: Store, manifest: Manifest, digests: bytes, image: Optional[int]) -> None:
        self.snapshot = Snapshot(store.root, manifest.number, manifest, {})
        self.size = manifest.size
        self.list = digests
        self.image = image


class SnapshotRun:
    """Takes one snapshot."""

    def __init__(self, store: Store, number: int, folder: str, overlay: str, request: Dict[str, Any]) -> None:
        self.store = store
        self.number = number
        self.folder = folder
        self.overlay = overlay
        self.request = request
        self.lock = field(request, "lock", str)
        self.limit_s = float(field(request, "freeze_limit_s", (int, float), 5))  # type: ignore[arg-type]
        self.mark = frozen_mark(overlay)
        self.image: Optional[int] = None
        self.method = ""
        self.found_by = ""
        self.frozen_s = 0.0
        self.taken = 0.0
        self.running = False
        self.generation = self.sequence = 0

    def run(self) -> Snapshot:
        """Take the snapshot; return it committed."""
        with host_locked(self.lock):
            self.generation, self.sequence = assign_place(self.store, self.request)
        self.method = choose_method(field(self.request, "method", str, "auto"), self.overlay, self.folder)
        if self.method != "delta":
            self.image = os.open(
                os.path.join(self.folder, "image"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            os.ftruncate(self.image, os.stat(self.overlay).st_size)
        try:
            source = self._take_running() or self._take_stopped()
            try:
                return self._finish(source)
            finally:
                source.close()
        finally:
            if self.image is not None:
                os.close(self.image)

    @property
    def sink(self) -> Sink:
        """Where chunks are stored: as shared chunk files, or in this snapshot's own image."""
        image = self.image
        if image is None:
            return lambda number, data: self.store.put(data)
        return lambda number, data: self.store.put_into(image, number, data)

    def _take_running(self) -> Optional[Source]:
        """Take it of a mounted overlay; return None where it is not mounted."""
        loops = find_loops(self.overlay)
        if not loops:
            return None
        if len(loops) > 1:
            raise Problem(
                "%s is in use by %s at once" % (self.overlay, " and ".join(loops)),
                "two writers destroy it: stop one, `losetup -l` shows them",
                3,
            )
        loop = loops[0]
        if self.method == "reflink":
            return self._clone_running(loop)
        with ExitStack() as stack:
            source = Source(self.overlay)
            changes = Changes(source, loop, stack, self.limit_s, self.mark)
            protocol.step("read", "read the overlay")
            changes.start()
            source.read_chunks(set(source.data_chunks()) - changes.free, self.sink, show=True)
            for _ in range(PASSES):
                found = changes.collect()
                if found:
                    source.read_chunks(found, self.sink)
                if found is None or len(found) <= FREEZE_CHUNKS:
                    break
            protocol.step("freeze", "freeze the file system")
            with host_locked(self.lock):
                self._check_still_running(loops)
                held, self.frozen_s = self._freeze(loop, lambda: changes.final(self.sink))
            self.found_by = changes.found_by
            protocol.detail("%.0f ms" % (self.frozen_s * 1000))
            protocol.step("store", "store the last changes")
            source.put(held, self.sink)
            source.blank(changes.free)
        self.running = True
        return source

    def _check_still_running(self, loops: List[str]) -> None:
        if find_loops(self.overlay) != loops:
            # With a shared overlay, it may be running on another host by now.
            raise Problem("the services container was stopped meanwhile", "run it again", 3)

    def _clone_running(self, loop: str) -> Source:
        protocol.step("freeze", "freeze the file system")
        with host_locked(self.lock):
            self._check_still_running([loop])
            _, self.frozen_s = self._freeze(loop, self._clone)
        protocol.detail("%.0f ms" % (self.frozen_s * 1000))
        self.running, self.found_by = True, "clone"
        return self._read_clone()

    def _clone(self) -> List[Tuple[int, bytes]]:
        assert self.image is not None
        with open(self.overlay, "rb", 0) as stream:
            if not reflink(stream.fileno(), self.image):
                raise Problem("%s can no longer be cloned" % self.overlay, "take it with --method delta")
        return []

    def _read_clone(self) -> Source:
        protocol.step("read", "read the clone")
        source = Source(os.path.join(self.folder, "image"))
        source.read_chunks(source.data_chunks(), self.store.count_only, show=True)
        return source

    def _freeze(self, loop: str, work: Any) -> Tuple[List[Tuple[int, bytes]], float]:
        with mounted_again(loop) as folder, closing(Frozen(folder, self.limit_s, self.mark)) as frozen:
            self.taken = time.time()
            frozen.hold()
            protocol.step("frozen", "")
            held = work()
            frozen.release()
        protocol.step("thawed", "")
        return held, frozen.seconds

    def _take_stopped(self) -> Source:
        with host_locked(self.lock):
            if find_loops(self.overlay):
                raise Problem("the services container was started meanwhile", "run it again", 3)
            self.taken, self.found_by, self.running = time.time(), "stopped", False
            before = file_identity(os.stat(self.overlay))
            if self.method == "reflink":
                self._clone()
                self._check_unused(before)
                return self._read_clone()
            protocol.step("read", "read the overlay")
            source = Source(self.overlay)
            source.find_structures()
            free: Set[int] = set()
            if source.image and not source.image.layout.recover:
                source.mask()
                free = free_chunks(source.image)
            source.read_chunks(set(source.data_chunks()) - free, self.sink, show=True)
            self._check_unused(before)
        return source

    def _check_unused(self, before: List[int]) -> None:
        # The caller, and with it its lock, may have been killed.
        if find_loops(self.overlay) or file_identity(os.stat(self.overlay)) != before:
            raise Problem("the overlay came into use while it was read", "run it again", 3)

    def _finish(self, source: Source) -> Snapshot:
        protocol.step("check", "check the file system and the state files")
        request, manifest = self.request, self._describe(source)
        pending = Pending(self.store, manifest, bytes(source.digests), self.image)
        found = check(pending, self.store.temporary, request)
        source.put(sorted(found.fixed.items()), self.sink)
        files = "" if found.report.state_files is None else "; %d state files" % found.report.state_files
        protocol.detail("e2fsck: %s%s" % (found.report.e2fsck, files))
        protocol.step("commit", "commit the snapshot")
        manifest = dataclasses.replace(
            manifest, used_bytes=source.used_bytes(), new_bytes=self.store.new_bytes, checks=found.report
        )
        return self.store.commit(self.folder, manifest, bytes(source.digests))

    def _describe(self, source: Source) -> Manifest:
        """Return the manifest without what only the check and ``commit`` can fill in."""
        values = dict(
            field(self.request, "facts", dict),
            cluster_uuid=find_cluster(self.store, self.request),
            generation=self.generation,
            sequence=self.sequence,
            format=FORMAT,
            uuid=str(uuid.uuid4()),
            number=self.number,
            taken=self.taken,
            running=self.running,
            frozen_ms=round(self.frozen_s * 1000, 1),
            method=self.method,
            found_by=self.found_by,
            size=source.size,
            used_bytes=0,
            new_bytes=0,
            digests="",
            checks={},
            notes=field(self.request, "notes", list, []),
            reason=field(self.request, "reason", str, ""),
        )
        # The overlay of the request may be a copy that the caller has made: only it knows when, and of what.
        values.update(field(self.request, "copied", dict, {}))
        return read_request(Manifest, values)


def find_cluster(store: Store, request: Dict[str, Any]) -> Optional[str]:
    """Return the cluster's UUID: that of the lease, else of the snapshots that this host took; None without any."""
    facts = field(request, "facts", dict)
    own, _ = own_uuid(facts["host"], [vars(one.manifest) for one in store.list()[0]])
    return facts.get("cluster_uuid") or own or None


def assign_place(store: Store, request: Dict[str, Any]) -> Tuple[int, int]:
    """Return generation and sequence number of a new snapshot; the lease has the number before the snapshot begins.

    A crash leaves a gap. A full disk of the lease does not prevent a snapshot: its store has the number as well.

    Raises:
        Problem: another run holds the lease's lock, or the lease is unreadable.
    """
    facts, lease = field(request, "facts", dict), field(request, "lease", str, "")
    generation, used = last_place(facts["host"], facts["generation"], [vars(one.manifest) for one in store.list()[0]])
    if not lease:
        return generation, used + 1
    try:
        # Without a lock of the host to take, the caller holds that one and the lease's.
        locked = not field(request, "lock", str)
        return generation, advance_sequence(lease, used, wait_s=LOCK_WAIT_S, locked=locked)
    except Locked:
        raise Busy("another run is at work on the lease")
    except (ValueError, TypeError) as error:
        raise Problem("the lease file %s cannot be read: %s" % (lease, error), "sms status", 3)
    except OSError as error:
        protocol.note("note: the lease does not have the snapshot's sequence number: %s" % error)
        return generation, used + 1


def file_identity(state: os.stat_result) -> List[int]:
    """Return values that change when the file is written or replaced."""
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns]


@contextmanager
def host_locked(path: str) -> Iterator[None]:
    """Hold the host's lock, which prevents starts and stops; an empty path means that the caller holds it.

    Raises:
        Problem: another run holds it.
    """
    if not path:
        yield
        return
    try:
        with hold_lock(path, wait_s=LOCK_WAIT_S):
            yield
    except Locked:
        raise Busy("another sms is at work on this host")


def choose_method(wanted: str, overlay: str, folder: str) -> str:
    """Return the method: reflink where overlay and store are on one file system that supports it, else delta.

    Raises:
        Problem: reflink was requested and is not possible.
    """
    if wanted in ("delta", "full"):
        return wanted
    if wanted not in ("auto", "reflink"):
        raise Problem("invalid method %s" % wanted, "auto, reflink, delta, full", 2)
    probe = os.path.join(folder, "probe")
    with open(overlay, "rb", 0) as stream, open(probe, "wb", 0) as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONERANGE, struct.pack("=qQQQ", stream.fileno(), 0, 4096, 0))
            supported = True
        except OSError:
            supported = False
    os.unlink(probe)
    if wanted == "reflink" and not supported:
        raise Problem(
            "no reflink from %s to %s" % (overlay, os.path.dirname(folder)),
            "both must be on the same XFS or Btrfs: set snapshots.directory, or take it with --method auto",
            3,
        )
    return "reflink" if supported else "delta"
