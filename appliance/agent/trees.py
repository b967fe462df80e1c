"""Open the file tree of an overlay, as the container sees it: of a snapshot, or of the current overlay.

Of a snapshot the metadata is written to an unnamed sparse file and mounted read-only. The contents of single files are
read from the store (to compare them), or written to that file as well (to copy them); each chunk is verified.
"""

import os
import stat
import tempfile
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

from appliance.agent import ext, protocol
from appliance.agent.check import metadata_chunks, open_image, write_chunks
from appliance.agent.clone import copy_into
from appliance.agent.freeze import find_loops, mounted_again
from appliance.agent.loops import image_mounted
from appliance.agent.names import DirCursor
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, ZERO, Reader, Snapshot, Store, disk_errors
from appliance.agent.take import host_locked
from appliance.shared.files import data_units, free_bytes

Token = Tuple[Tuple[int, int, bytes], ...]
"""Identifies the content of a window of a file: its blocks, and the digests of the chunks that contain them."""


class Contents:
    """The bytes of a regular file, by windows of ``CHUNK`` bytes."""

    size = 0

    def windows(self) -> Iterator[int]:
        """Yield the numbers of the windows that may contain data, in order."""
        raise NotImplementedError

    def window(self, number: int) -> bytes:
        """Return the bytes of a window, up to the end of the file."""
        raise NotImplementedError

    def token(self, number: int) -> Optional[Token]:
        """Return a token of a window's content, or None; windows with equal tokens have equal bytes."""
        return None

    def close(self) -> None:
        """Close the file."""


class OpenFile(Contents):
    """A file of a mounted tree."""

    def __init__(self, folder: int, name: bytes) -> None:
        # O_NONBLOCK: the file may have been replaced by a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = os.open(name, flags, dir_fd=folder)
        state = os.fstat(self.descriptor)
        self.size = state.st_size
        if not stat.S_ISREG(state.st_mode):
            self.close()
            raise FileNotFoundError("no longer a file")

    def windows(self) -> Iterator[int]:
        return data_units(self.descriptor, self.size, CHUNK)

    def window(self, number: int) -> bytes:
        wanted = max(0, min(CHUNK, self.size - number * CHUNK))
        return os.pread(self.descriptor, wanted, number * CHUNK).ljust(wanted, b"\0")

    def close(self) -> None:
        os.close(self.descriptor)


class StoredFile(Contents):
    """A file of a snapshot."""

    def __init__(self, image: ext.Image, reader: Reader, number: int) -> None:
        self.image = image
        self.reader = reader
        raw = image.inode(number)
        self.size = ext.size_of(raw)
        self.each = CHUNK // image.layout.block
        self.blocks: Dict[int, List[Tuple[int, int]]] = {}
        for at, block in image.file(raw).data:
            self.blocks.setdefault(at // self.each, []).append((at % self.each, block))

    def windows(self) -> Iterator[int]:
        return iter(sorted(self.blocks))

    def window(self, number: int) -> bytes:
        found = bytearray(CHUNK)
        size = self.image.layout.block
        for at, block in self.blocks.get(number, ()):
            found[at * size : (at + 1) * size] = self.image.blocks(block)
        return bytes(found[: max(0, self.size - number * CHUNK)])

    def token(self, number: int) -> Optional[Token]:
        size = self.image.layout.block
        found = self.blocks.get(number, ())
        return tuple((at, block, self.reader.digest(block * size // CHUNK)) for at, block in found)


class Tree:
    """A tree as the container sees it, at ``root``; ``taken`` is its time in Unix seconds, None for the current one."""

    def __init__(self, root: int, taken: Optional[float] = None) -> None:
        self.root = root
        self.taken = taken

    def contents(self, folder: int, name: bytes, state: os.stat_result) -> Contents:
        """Open the regular file ``name`` in an open folder of this tree."""
        return OpenFile(folder, name)

    def cursor(self) -> DirCursor:
        """Return a cursor at the root."""
        return DirCursor(self.root)


class SnapshotTree(Tree):
    """The tree of a snapshot; ``file`` is the sparse file that is mounted."""

    def __init__(self, root: int, reader: Reader, image: ext.Image, file: int) -> None:
        Tree.__init__(self, root, reader.snapshot.manifest.taken)
        self.reader = reader
        self.image = image
        self.file = file

    def contents(self, folder: int, name: bytes, state: os.stat_result) -> Contents:
        return StoredFile(self.image, self.reader, state.st_ino)

    def lay_out(self, inodes: Iterable[int]) -> None:
        """Write the contents of files to the mounted file; before, they must not have been read through the mount.

        Raises:
            Problem: there is not enough space, or a chunk is damaged.
        """
        each = CHUNK // self.image.layout.block
        numbers = {block // each for inode in inodes for _, block in self.image.file(self.image.inode(inode)).data}
        needed = CHUNK * sum(self.reader.digest(number) != ZERO for number in numbers)
        root, free = self.reader.snapshot.root, free_bytes(self.file)
        if needed > free:
            raise Problem(
                "no room in %s for the files: they need %d MiB, %d are free" % (root, needed >> 20, free >> 20),
                "`sms overlay prune` makes room",
                3,
            )
        with disk_errors(root):
            write_chunks(self.reader, self.file, numbers)


@contextmanager
def open_root(folder: str) -> Iterator[int]:
    """Open the container's root below the root of an overlay's file system.

    Raises:
        Problem: there is none.
    """
    try:
        root = os.open(os.path.join(folder, "upper"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise Problem("it is not an overlay of a container: it has no folder /upper")
    try:
        yield root
    finally:
        os.close(root)


@contextmanager
def open_snapshot_tree(store: Store, snapshot: Snapshot) -> Iterator[SnapshotTree]:
    """Open the tree of a snapshot. Needs ``private_mounts`` and the store's lock for reading.

    Raises:
        Problem: it is damaged; also where that is found while the tree is used.
    """
    os.makedirs(store.temporary, 0o700, exist_ok=True)
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(snapshot))
        image = open_image(reader)
        if image.layout.recover:
            raise snapshot.damaged("its journal was not replayed")
        file = stack.enter_context(temporary_file(store))
        write_chunks(reader, file.fileno(), metadata_chunks(image))
        folder = stack.enter_context(image_mounted(file.fileno(), read_only=True))
        try:
            yield SnapshotTree(stack.enter_context(open_root(folder)), reader, image, file.fileno())
        except ext.Unknown as error:
            raise Problem("its file system is damaged: %s" % error, "`sms overlay verify` shows which are undamaged")


@contextmanager
def open_current_tree(store: Store, overlay: str, lock: str) -> Iterator[Tree]:
    """Open the tree of the current overlay, in use or not. Needs ``private_mounts``.

    Args:
        lock: the host's lock, which prevents starts and stops meanwhile; empty: the caller holds it.

    Raises:
        Problem: there is no overlay, or it is in use but not mounted once.
    """
    if not os.path.isfile(overlay):
        raise Problem("there is no overlay %s" % overlay, "`sms overlay list` shows snapshots to compare", 3)
    with ExitStack() as stack:
        stack.enter_context(host_locked(lock))
        loops = find_loops(overlay)
        if len(loops) > 1 or (loops and not _is_mounted(loops[0])):
            raise Problem("%s is in use by %s" % (overlay, " and ".join(loops)), "`losetup -l` shows the users", 3)
        if loops:
            folder = stack.enter_context(mounted_again(loops[0]))
        else:
            folder = stack.enter_context(_open_stopped(store, overlay))
        yield Tree(stack.enter_context(open_root(folder)))


def _is_mounted(loop: str) -> bool:
    """Whether an ext3 is mounted from it; else our mount would be the first one, and write to it."""
    return os.path.isdir("/sys/fs/ext4/" + os.path.basename(loop))


@contextmanager
def _open_stopped(store: Store, overlay: str) -> Iterator[str]:
    with ExitStack() as stack:
        file: BinaryIO = stack.enter_context(open(overlay, "rb", 0))
        try:
            recover = ext.read_layout(lambda offset, size: os.pread(file.fileno(), size, offset)).recover
        except ext.Unknown as error:
            raise Problem("%s cannot be read: %s" % (overlay, error), "`e2fsck -n` on it shows details")
        if recover:
            # It was not unmounted cleanly: replay its journal in a copy, since the overlay itself must not be changed.
            protocol.step("replay", "replay the journal in a copy")
            copy = stack.enter_context(temporary_file(store))
            copy_into(file.fileno(), copy.fileno(), store.root)
            yield stack.enter_context(image_mounted(copy.fileno(), read_only=False))
        else:
            yield stack.enter_context(image_mounted(file.fileno(), read_only=True))


@contextmanager
def temporary_file(store: Store) -> Iterator[BinaryIO]:
    """Open an unnamed temporary file in the store; it is removed when the process ends."""
    os.makedirs(store.temporary, 0o700, exist_ok=True)
    with tempfile.TemporaryFile(dir=store.temporary, buffering=0) as file:
        yield file
