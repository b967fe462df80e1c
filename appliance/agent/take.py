"""Takes a snapshot of an overlay, while the appliance writes it or while nobody does.

While it is written: most is read before the writers are held, and while they wait only what has changed
since. What that is, the block trace of the loop device tells; where the kernel has none, the inodes do
(their ctime); where the file system is not known, everything is compared.
"""

import errno
import fcntl
import os
import struct
import time
import uuid
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from appliance.agent import words
from appliance.agent.changes import Changes
from appliance.agent.check import check
from appliance.agent.clone import share
from appliance.agent.freeze import Frozen, find_loops, joined, private_mounts
from appliance.agent.source import Sink, Source, free_chunks
from appliance.agent.store import Reader, Snapshot, Store, full
from appliance.agent.words import Busy, Problem, field
from appliance.shared.locks import Locked, hold_lock

FICLONERANGE = 0x4020940D
"""ioctl of linux/fs.h."""
LOCK_WAIT_S = 10
PASSES = 5
"""Looks at what changed before writers are held."""
SMALL = 128
"""Chunks: so little is left to the freeze."""


def take(request: Dict[str, Any]) -> Dict[str, Any]:
    """Take one, check it, and only then let it count.

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
            snapshot = Taking(store, number, folder, overlay, request).run()
        except BaseException as error:
            store.drop_new(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise full(error, store.root)
            raise
    return {"snapshot": snapshot.told()}


class Pending(Reader):
    """A snapshot under way, read as one that counts."""

    def __init__(self, store: Store, number: int, size: int, digests: bytes, image: Optional[int]) -> None:
        self.snapshot = Snapshot(store.root, number, {}, {})
        self.size = size
        self.list = digests
        self.image = image


class Taking:
    """One snapshot under way."""

    def __init__(self, store: Store, number: int, folder: str, overlay: str, request: Dict[str, Any]) -> None:
        self.store = store
        self.number = number
        self.folder = folder
        self.overlay = overlay
        self.request = request
        self.lock = field(request, "lock", str)
        self.limit_s = float(field(request, "freeze_limit_s", (int, float), 5))  # type: ignore[arg-type]
        self.mark = os.path.join(store.root, "frozen")
        self.image: Optional[int] = None
        self.method = ""
        self.found_by = ""
        self.frozen_s = 0.0
        self.taken = 0.0
        self.running = False

    def run(self) -> Snapshot:
        """All of it."""
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
        """Where chunks go: into the shared ones, or into an image of this snapshot's own."""
        image = self.image
        if image is None:
            return lambda number, data: self.store.put(data)
        return lambda number, data: self.store.put_into(image, number, data)

    def _take_running(self) -> Optional[Source]:
        """Of an overlay that is mounted; None where it is not."""
        loops = find_loops(self.overlay)
        if not loops:
            return None
        if len(loops) > 1:
            raise Problem(
                "%s is in use by %s at once" % (self.overlay, " and ".join(loops)),
                "two writers destroy it: stop one, `losetup -l` tells who",
                3,
            )
        loop = loops[0]
        if self.method == "reflink":
            return self._clone_running(loop)
        with ExitStack() as stack:
            source = Source(self.overlay)
            changes = Changes(source, loop, stack, self.limit_s, self.mark)
            words.step("read", "read the overlay")
            changes.remember()
            source.take(set(source.data_chunks()) - changes.free, self.sink, show=True)
            for _ in range(PASSES):
                found = changes.so_far()
                if found is None or len(found) <= SMALL:
                    if found:
                        source.take(found, self.sink)
                    break
                source.take(found, self.sink)
            words.step("freeze", "hold the writers for a moment")
            with locked(self.lock):
                self._still(loops)
                held, self.frozen_s = self._freeze(loop, lambda: changes.final(self.sink))
            self.found_by = changes.found_by
            words.detail("%.0f ms" % (self.frozen_s * 1000))
            words.step("store", "store what had changed")
            source.put(held, self.sink)
            source.blank(changes.free)
        self.running = True
        return source

    def _still(self, loops: List[str]) -> None:
        if find_loops(self.overlay) != loops:
            # Where hosts share the folder, it may run on another one by now.
            raise Problem("the appliance was stopped meanwhile", "run it again", 3)

    def _clone_running(self, loop: str) -> Source:
        words.step("freeze", "hold the writers for a moment")
        with locked(self.lock):
            self._still([loop])
            _, self.frozen_s = self._freeze(loop, self._clone)
        words.detail("%.0f ms" % (self.frozen_s * 1000))
        self.running, self.found_by = True, "clone"
        return self._read_clone()

    def _clone(self) -> List[Tuple[int, bytes]]:
        assert self.image is not None
        with open(self.overlay, "rb", 0) as stream:
            if not share(stream.fileno(), self.image):
                raise Problem("%s can no longer be cloned" % self.overlay, "take it with --method delta")
        return []

    def _read_clone(self) -> Source:
        words.step("read", "read the clone")
        source = Source(os.path.join(self.folder, "image"))
        source.take(source.data_chunks(), self.store.count_only, show=True)
        return source

    def _freeze(self, loop: str, work: Any) -> Tuple[List[Tuple[int, bytes]], float]:
        with joined(loop) as folder:
            frozen = Frozen(folder, self.limit_s, self.mark)
            try:
                self.taken = time.time()
                frozen.hold()
                words.step("frozen", "")
                held = work()
                frozen.release()
            finally:
                frozen.close()
        words.step("thawed", "")
        return held, frozen.seconds

    def _take_stopped(self) -> Source:
        with locked(self.lock):
            if find_loops(self.overlay):
                raise Problem("the appliance has started meanwhile", "run it again", 3)
            self.taken, self.found_by, self.running = time.time(), "stopped", False
            before = identity(self.overlay)
            if self.method == "reflink":
                self._clone()
                self._untouched(before)
                return self._read_clone()
            words.step("read", "read the overlay")
            source = Source(self.overlay)
            source.understand()
            free: Set[int] = set()
            if source.image and not source.image.layout.recover:
                source.mask()
                free = free_chunks(source.image)
            source.take(set(source.data_chunks()) - free, self.sink, show=True)
            self._untouched(before)
        return source

    def _untouched(self, before: Tuple[int, ...]) -> None:
        # Who asked may have been killed, and its lock with it.
        if find_loops(self.overlay) or identity(self.overlay) != before:
            raise Problem("the overlay came into use while it was read", "run it again", 3)

    def _finish(self, source: Source) -> Snapshot:
        words.step("check", "check the file system and the state files")
        digests = bytes(source.digests)
        request = self.request
        found = check(
            Pending(self.store, self.number, source.size, digests, self.image),
            self.store.temporary,
            field(request, "state", list, []),
            field(request, "heads", dict, {}),
        )
        source.put(sorted(found.fixed.items()), self.sink)
        words.detail("e2fsck: %s; %d state files" % (found.told["e2fsck"], found.told["state_files"]))
        words.step("commit", "let it count")
        manifest = dict(
            field(request, "facts", dict),
            uuid=str(uuid.uuid4()),
            taken=self.taken,
            running=self.running,
            frozen_ms=round(self.frozen_s * 1000, 1),
            method=self.method,
            found_by=self.found_by,
            size=source.size,
            used_bytes=source.used_bytes(),
            new_bytes=self.store.new_bytes,
            checks=found.told,
            notes=field(request, "notes", list, []),
            reason=field(request, "reason", str, ""),
        )
        return self.store.commit(self.number, self.folder, manifest, bytes(source.digests))


def identity(path: str) -> Tuple[int, ...]:
    """What changes when anybody writes a file, or puts another in its place."""
    state = os.stat(path)
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the host's lock, so that nobody starts or stops the appliance; without a path the caller holds it.

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
    """How to take it: by reflink where the overlay and the store share a file system that can, else as a delta.

    Raises:
        Problem: reflink is wanted and cannot be.
    """
    if wanted in ("delta", "full"):
        return wanted
    if wanted not in ("auto", "reflink"):
        raise Problem("no method %s" % wanted, "auto, reflink, delta, full", 2)
    probe = os.path.join(folder, "probe")
    with open(overlay, "rb", 0) as stream, open(probe, "wb", 0) as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONERANGE, struct.pack("=qQQQ", stream.fileno(), 0, 4096, 0))
            can = True
        except OSError:
            can = False
    os.unlink(probe)
    if wanted == "reflink" and not can:
        raise Problem(
            "no reflink from %s to %s" % (overlay, os.path.dirname(folder)),
            "both must lie on one XFS or Btrfs: set snapshots.directory, or take it with --method auto",
            3,
        )
    return "reflink" if can else "delta"
