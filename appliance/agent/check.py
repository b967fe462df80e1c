"""Check a snapshot: its file system, and the state files of the services in it.

e2fsck runs on a sparse image of the metadata only: it does not read file contents, and metadata is a few percent.
"""

import os
import stat
import subprocess
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from appliance.agent import ext, protocol
from appliance.agent.protocol import Problem, field
from appliance.agent.source import WORKERS
from appliance.agent.store import CHUNK, ZERO, Damage, Reader, disk_errors
from appliance.shared.files import create_file, remove_file, write_at
from appliance.shared.manifest import Checks
from appliance.shared.outputs import begin
from appliance.shared.overlay import LAYERS

CACHED_CHUNKS = 512
"""Chunks of metadata cached in memory."""
STATE_BYTES = 256 << 20
"""Bytes of state files that are read at most; a larger database has a dump as well."""
MAX_LOG = 1 << 20
"""Bytes of a log that are kept, from its end: that of e2fsck may have a line for each of millions of blocks."""
OPERATIONAL = 8 | 16 | 32 | 128
"""Bits of e2fsck's exit status for operational errors, which say nothing about the image (e2fsck(8))."""
CLOCK = "[options]\nbroken_system_clock = true\n"
"""e2fsck.conf(5): timestamps in the future are not damage."""


class Checked(NamedTuple):
    """Result of a check, and chunks that e2fsck repaired: files deleted while open, a journal not replayed."""

    report: Checks
    fixed: Dict[int, bytes]


class ByteReader:
    """Reads a snapshot by offset and size; caches the last chunks."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.cache: "OrderedDict[int, bytes]" = OrderedDict()

    def chunk(self, number: int) -> bytes:
        """Return the bytes of a chunk."""
        data = self.cache.get(number)
        if data is None:
            data = self.cache[number] = self.reader.read(number)
            if len(self.cache) > CACHED_CHUNKS:
                self.cache.popitem(last=False)
        return data

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from an offset on; none where the snapshot ends before them."""
        if offset + size > self.reader.size:
            return b""
        first, last = offset // CHUNK, (offset + size - 1) // CHUNK
        if first == last:
            return self.chunk(first)[offset % CHUNK : offset % CHUNK + size]
        data = b"".join(self.chunk(number) for number in range(first, last + 1))
        return data[offset % CHUNK : offset % CHUNK + size]


def open_image(reader: Reader) -> ext.Image:
    """Return the ext3 file system in a snapshot.

    Raises:
        Damage: it has none that can be read.
    """
    try:
        image = ext.Image(ByteReader(reader).read)
    except ext.Unknown as error:
        raise Damage("its file system cannot be read: %s" % error)
    if image.layout.blocks * image.layout.block > reader.size:
        raise Damage("its file system is larger than it")
    return image


def metadata_chunks(image: ext.Image) -> Set[int]:
    """Return the numbers of the chunks that contain metadata.

    Raises:
        Damage: the file system is damaged.
    """
    block = image.layout.block
    if image.layout.recover:
        # Which blocks the replay of the journal writes is not known.
        return set(range(-(-image.layout.blocks * block // CHUNK)))
    chunks: Set[int] = set()
    try:
        for first, count in image.metadata():
            chunks.update(range(first * block // CHUNK, ((first + count) * block - 1) // CHUNK + 1))
    except ext.Unknown as error:
        raise Damage("its file system is damaged: %s" % error)
    return chunks


def write_chunks(reader: Reader, descriptor: int, numbers: Iterable[int], *, present: bool = False) -> None:
    """Write chunks of a snapshot to their places in a file, each verified; zeros stay holes.

    Args:
        present: they are in the file already, such as by reflink: only verify them.

    Raises:
        Damage: a chunk is missing or has changed.
    """
    os.ftruncate(descriptor, reader.size)
    todo = [number for number in sorted(numbers) if reader.digest(number) != ZERO]

    def write(number: int) -> None:
        data = reader.read(number)
        if not present:
            write_at(descriptor, data, number * CHUNK)

    with ThreadPoolExecutor(WORKERS) as pool:
        for done, _ in enumerate(pool.map(write, todo), 1):
            if done % 1024 == 0:
                protocol.progress(done * CHUNK, len(todo) * CHUNK)


def run_merged(
    argv: Sequence[Union[str, bytes]], *, env: Optional[Mapping[str, str]] = None, pass_fds: Sequence[int] = ()
) -> Tuple[int, str]:
    """Run a program, and kill it if this process is interrupted; return its exit status and the end of its output."""
    output = b""
    with begin(
        subprocess.Popen,
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
    ) as process:
        assert process.stdout
        try:
            while block := process.stdout.read1(MAX_LOG):
                output = (output + block)[-MAX_LOG:]
        except BaseException:
            process.kill()
            raise
    return process.returncode, output.decode(errors="replace").strip()


def run_e2fsck(path: str, mode: str, folder: str) -> Tuple[int, str]:
    """Run e2fsck; return its exit status and last lines. Its configuration is written to ``folder``."""
    config = os.path.join(folder, "e2fsck-%d.conf" % os.getpid())
    with open(config, "w") as stream:
        stream.write(CLOCK)
    environment = dict(os.environ, E2FSCK_CONFIG=config, LC_ALL="C.UTF-8")
    status, output = run_merged(["e2fsck", "-f", mode, path], env=environment)
    os.unlink(config)
    last = " / ".join(output.splitlines()[-4:])[-400:]
    if status < 0 or (status & OPERATIONAL and "superblock" not in output.replace("-", "")):
        raise Problem("e2fsck could not check %s: %s" % (path, last), "is the machine out of memory or disk space?")
    return status, last


def check(reader: Reader, folder: str, request: Dict[str, Any]) -> Checked:
    """Check a snapshot's file system, and that its state files are readable.

    Args:
        folder: folder for a temporary image.
        request: may have ``state``: paths in the container whose files must be readable; ``heads``: paths in the
            container, and the text that the first bytes of that file must contain if it exists; ``whole``: the file
            system is another one than ext3, such as the VM's ext4, and e2fsck needs all of it.

    Raises:
        Damage: it is damaged.
        Problem: it could not be checked.
    """
    if field(request, "whole", bool, False):
        return _check_whole(reader, folder)
    state, heads = field(request, "state", list, []), field(request, "heads", dict, {})
    image = open_image(reader)
    _check_layers(image)
    path = os.path.join(folder, "check-%d.img" % os.getpid())
    try:
        chunks = metadata_chunks(image)
        with create_file(path) as metadata:
            write_chunks(reader, metadata.fileno(), chunks)
        repair = image.layout.orphans or image.layout.recover
        status, output = run_e2fsck(path, "-p" if repair else "-n", folder)
        if status & ~1 or (status and not repair):
            raise Damage("its file system is damaged: %s" % output)
        fixed = _changed_chunks(reader, path, chunks) if repair else {}
        verdict = "clean"
        if fixed:
            verdict = "journal replayed" if image.layout.recover else "deleted files let go"
    finally:
        remove_file(path)
    return Checked(_check_state(image, state, heads, verdict), fixed)


def _check_layers(image: ext.Image) -> None:
    """Check that neither layer of the overlay is a link, which would lead its mount elsewhere."""
    try:
        for name in LAYERS:
            raw = image.lookup("/" + name)
            if raw and not stat.S_ISDIR(ext.mode_of(raw)):
                raise Damage("its /%s is not a folder" % name)
    except ext.Unknown as error:
        raise Damage("its file system is damaged: %s" % error)


def _check_whole(reader: Reader, folder: str) -> Checked:
    """Check the file system in a temporary copy of the whole image: ext.py cannot tell what is metadata."""
    path = os.path.join(folder, "check-%d.img" % os.getpid())
    try:
        with create_file(path) as copy, disk_errors(path):
            write_chunks(reader, copy.fileno(), range(reader.count))
        status, output = run_e2fsck(path, "-n", folder)
        if status:
            raise Damage("its file system is damaged: %s" % output)
    finally:
        remove_file(path)
    return Checked(Checks("clean"), {})


def _changed_chunks(reader: Reader, path: str, chunks: Set[int]) -> Dict[int, bytes]:
    """Return the chunks that e2fsck has changed."""
    fixed: Dict[int, bytes] = {}
    with open(path, "rb", 0) as stream:
        for number in sorted(chunks):
            data = os.pread(stream.fileno(), reader.length(number), number * CHUNK)
            if data != reader.read(number):
                fixed[number] = data
    return fixed


def _check_state(image: ext.Image, state: List[str], heads: Dict[str, str], verdict: str) -> Checks:
    files = size = 0
    complete = True
    try:
        for path in state:
            found = image.lookup("/upper" + path)
            for raw in image.files_below(found) if found else []:
                files += 1
                if size + ext.size_of(raw) > STATE_BYTES:
                    complete = False
                    continue
                size += ext.size_of(raw)
                for _, block in image.file(raw).data:
                    image.blocks(block)
        present = []
        for path, text in heads.items():
            raw_head = image.lookup("/upper" + path)
            if raw_head:
                present.append(path)
                if text.encode() not in image.contents(raw_head, 64):
                    raise Damage("%s in it does not have its service's format" % path)
    except ext.Unknown as error:
        raise Damage("its state files cannot be read: %s" % error)
    return Checks(verdict, present, size, files, None if complete else True)
