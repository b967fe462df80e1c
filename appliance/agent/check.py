"""Whether a snapshot is whole: its file system, and the state files of the services in it.

Only the metadata is laid out for e2fsck: it reads no contents of files, and an image has few percent of metadata.
"""

import os
import subprocess
from collections import OrderedDict
from typing import Any, Dict, List, NamedTuple, Set, Tuple

from appliance.agent import ext
from appliance.agent.store import CHUNK, ZERO, Damage, Reader
from appliance.agent.words import Problem

KEPT_CHUNKS = 512
"""Chunks of metadata held in memory."""
STATE_BYTES = 256 << 20
"""So much of the state files is read; a database may be larger, and has a dump besides."""
OPERATIONAL = 8 | 16 | 32 | 128
"""Bits of e2fsck's exit status that say nothing of the image: it could not do its work (e2fsck(8))."""
CLOCK = "[options]\nbroken_system_clock = true\n"
"""e2fsck.conf(5): a clock that jumped is no damage of the file system."""


class Checked(NamedTuple):
    """What was found, and chunks that e2fsck had to mend: files deleted while open, a journal not replayed."""

    told: Dict[str, Any]
    fixed: Dict[int, bytes]


class ByBytes:
    """A snapshot read by offset and size; the last chunks are kept."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.kept: "OrderedDict[int, bytes]" = OrderedDict()

    def chunk(self, number: int) -> bytes:
        """The bytes of a chunk."""
        data = self.kept.get(number)
        if data is None:
            data = self.kept[number] = self.reader.read(number)
            if len(self.kept) > KEPT_CHUNKS:
                self.kept.popitem(last=False)
        return data

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes from an offset on."""
        first, last = offset // CHUNK, (offset + size - 1) // CHUNK
        if first == last:
            return self.chunk(first)[offset % CHUNK : offset % CHUNK + size]
        data = b"".join(self.chunk(number) for number in range(first, min(last, self.reader.count - 1) + 1))
        return data[offset % CHUNK : offset % CHUNK + size]


def open_image(reader: Reader) -> ext.Image:
    """The ext3 file system in a snapshot.

    Raises:
        Problem: it is none.
    """
    try:
        return ext.Image(ByBytes(reader).read)
    except ext.Unknown as error:
        raise Damage("its file system cannot be read: %s" % error)


def metadata_chunks(image: ext.Image) -> Set[int]:
    """Numbers of the chunks that hold any metadata.

    Raises:
        Problem: the file system is damaged.
    """
    block = image.layout.block
    if image.layout.recover:
        # What the journal's replay will write is not known before.
        return set(range(-(-image.layout.blocks * block // CHUNK)))
    chunks: Set[int] = set()
    try:
        for first, count in image.metadata():
            chunks.update(range(first * block // CHUNK, ((first + count) * block - 1) // CHUNK + 1))
    except ext.Unknown as error:
        raise Damage("its file system is damaged: %s" % error)
    return chunks


def write_metadata_image(reader: Reader, path: str) -> Set[int]:
    """Lay out a sparse image at ``path`` that has a snapshot's metadata and nothing else; give its chunks."""
    chunks = metadata_chunks(open_image(reader))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, reader.size)
        for number in sorted(chunks):
            if reader.digest(number) != ZERO:
                write_all(descriptor, reader.read(number), number * CHUNK)
    finally:
        os.close(descriptor)
    return chunks


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """pwrite(2) to the end."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def run_e2fsck(path: str, mode: str, folder: str) -> Tuple[int, str]:
    """e2fsck's exit status and its last words; ``folder`` is for its configuration."""
    config = os.path.join(folder, "e2fsck-%d.conf" % os.getpid())
    with open(config, "w") as stream:
        stream.write(CLOCK)
    environment = dict(os.environ, E2FSCK_CONFIG=config, LC_ALL="C.UTF-8")
    done = subprocess.Popen(
        ["e2fsck", "-f", mode, path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    said = done.communicate()[0].decode(errors="replace").strip()
    os.unlink(config)
    words = " / ".join(said.splitlines()[-4:])[-400:]
    if done.returncode < 0 or (done.returncode & OPERATIONAL and "superblock" not in said.replace("-", "")):
        raise Problem("e2fsck could not check %s: %s" % (path, words), "is the machine out of memory or room?")
    return done.returncode, words


def check(reader: Reader, folder: str, state: List[str], heads: Dict[str, str]) -> Checked:
    """Check a snapshot's file system, and that its state files can be read.

    Args:
        folder: where a temporary image may lie.
        state: paths in the container whose files must be readable.
        heads: paths in the container, and what must stand in the first bytes there, where there is such a file.

    Raises:
        Damage: it is damaged.
        Problem: it could not be checked.
    """
    image = open_image(reader)
    told: Dict[str, Any] = {}
    path = os.path.join(folder, "check-%d.img" % os.getpid())
    try:
        chunks = write_metadata_image(reader, path)
        mend = image.layout.orphans or image.layout.recover
        status, words = run_e2fsck(path, "-p" if mend else "-n", folder)
        if status & ~1 or (status and not mend):
            raise Damage("its file system is damaged: %s" % words)
        fixed = _changed_chunks(reader, path, chunks) if mend else {}
        told["e2fsck"] = "clean"
        if fixed:
            told["e2fsck"] = "journal replayed" if image.layout.recover else "deleted files let go"
    finally:
        if os.path.exists(path):
            os.unlink(path)
    told.update(_check_state(image, state, heads))
    return Checked(told, fixed)


def _changed_chunks(reader: Reader, path: str, chunks: Set[int]) -> Dict[int, bytes]:
    """What e2fsck has changed."""
    fixed: Dict[int, bytes] = {}
    with open(path, "rb", 0) as stream:
        for number in sorted(chunks):
            data = os.pread(stream.fileno(), reader.length(number), number * CHUNK)
            if data != reader.read(number):
                fixed[number] = data
    return fixed


def _check_state(image: ext.Image, state: List[str], heads: Dict[str, str]) -> Dict[str, Any]:
    files = size = 0
    whole = True
    try:
        for path in state:
            found = image.lookup("/upper" + path)
            for raw in image.files_below(found) if found else []:
                files += 1
                if size + ext.size_of(raw) > STATE_BYTES:
                    whole = False
                    continue
                size += ext.size_of(raw)
                for _, block in image.file(raw).data:
                    image.blocks(block)
        there = []
        for path, text in heads.items():
            raw_head = image.lookup("/upper" + path)
            if raw_head:
                there.append(path)
                if text.encode() not in image.contents(raw_head, 64):
                    raise Damage("%s in it is not what its service writes" % path)
    except ext.Unknown as error:
        raise Damage("its state files cannot be read: %s" % error)
    told: Dict[str, Any] = {"state_files": files, "state_bytes": size, "heads": there}
    if not whole:
        told["state_unread"] = True
    return told
