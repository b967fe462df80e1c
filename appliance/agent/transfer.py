"""Transfer snapshots between stores: only chunks that the receiver lacks are sent, each verified against its digest.

The stream from ``export`` to ``import``, with the reply of ``import`` indented:

    SMS1, 4 and 8 bytes the lengths of what follows: the manifest as JSON, the list of digests
        4 bytes the length of a bitmap, the bitmap: a bit per chunk that is to be sent (length 0: none)
    for each of these, in order: 1 byte its encoding, 4 bytes its length, the chunk

Chunks that were received stay when the transfer fails: the next attempt resumes after them. The sweep of
`sms overlay prune` removes chunks that no snapshot refers to.
"""

import collections
import dataclasses
import hashlib
import json
import os
import select
import shutil
import stat
import struct
import subprocess
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Deque, Dict, Iterator, List, Optional, Set, Tuple

from appliance.agent import protocol
from appliance.agent.check import check
from appliance.agent.manifest import check_manifest
from appliance.agent.protocol import Problem, field
from appliance.agent.source import WORKERS, chunk_digest
from appliance.agent.store import (
    CHUNK,
    FOLDER_NAME,
    PARTIAL,
    ZERO,
    ChunkList,
    Damage,
    Reader,
    Snapshot,
    Store,
    chunk_path,
    count_chunks,
    digest_of,
    open_stored,
)
from appliance.agent.take import Pending
from appliance.shared.manifest import Manifest
from appliance.shared.outputs import begin

MAGIC = b"SMS1"
LENGTH = ">I"
HEAD = ">IQ"
FRAME = ">BI"
PLAIN, COMPRESSED = 0, 1
"""Encoding of a chunk: as it is, or by zlib."""
LONGEST_MANIFEST = 1 << 18
"""Bytes; operations/snapshots/transfer.py has the same limit."""
MAX_NUMBER_GAP = 100000
"""A received snapshot keeps its number if it is at most so far ahead: a larger one would use up the six digits."""
SAMPLE, PAUSE = 16, 256
"""Chunks compressed as a sample; if that saves too little, chunks sent as they are before the next sample."""
MAX_RATIO = 0.8
"""Compression goes on while the compressed sample is at most this share of its size."""
PATIENCE_S = 60.0
"""Seconds without data after which the other side is treated as gone."""
REPLY_S = 1800.0
"""Seconds that the other side may take to find out which chunks it lacks."""
REPORT_EVERY = 64
"""Chunks between two progress messages."""
RETRY_HINT = "run it again: the chunks received so far are kept"


def _use_stderr() -> None:
    """Send messages to standard error: standard output carries data."""
    protocol.OUTPUT[0] = 2


def _send(data: Any) -> None:
    view = memoryview(data)
    try:
        while len(view):
            view = view[os.write(1, view) :]
    except BrokenPipeError:
        raise Problem("the receiver closed the connection", "the other side reports why", gone=True)


class Incoming:
    """Standard input, with a timeout.

    A broken network does not close connections: without the timeout the store would stay locked for hours.
    """

    def __init__(self) -> None:
        self.patience_s = PATIENCE_S
        self._buffer = b""

    def read(self, size: int, what: str) -> bytes:
        """Read ``size`` bytes; ``what`` names them in errors.

        Raises:
            Problem: the input ended before, or nothing was received for ``patience_s`` seconds.
        """
        parts = [self._buffer[:size]]
        self._buffer = self._buffer[size:]
        missing = size - len(parts[0])
        while missing > 0:
            if not select.select([0], [], [], self.patience_s)[0]:
                raise Problem("nothing was received for %d s in the middle of %s" % (self.patience_s, what), RETRY_HINT)
            block = os.read(0, max(missing, 1 << 18))
            if not block:
                raise Problem("the connection ended in the middle of " + what, RETRY_HINT)
            parts.append(block[:missing])
            self._buffer = block[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def _find_verified(store: Store, number: int) -> Snapshot:
    """Return a snapshot that may be sent.

    Raises:
        Problem: there is none of that number, or it is damaged.
    """
    one = store.find(str(number))
    if not one.verified:
        why = (one.health.get("damage") or ["it was never checked"])[0]
        raise Damage(
            "snapshot %d is damaged: %s; it is not sent" % (number, why),
            "`sms overlay verify %d` checks it again; `sms overlay list` shows others" % number,
        )
    return one


@contextmanager
def _open_checked(store: Store, snapshot: Snapshot) -> Iterator[Reader]:
    """Open a snapshot; record damage that is found in its health, so that it no longer counts as verified."""
    try:
        with Reader(snapshot) as reader:
            yield reader
    except Damage as error:
        store.set_health(snapshot, [error.what])
        raise


def image(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the whole image to standard output, holes as zeros, every chunk verified; for borg."""
    _use_stderr()
    store = Store(field(request, "store", str))
    with store.reading():
        snapshot = _find_verified(store, field(request, "snapshot", int))
        with _open_checked(store, snapshot) as reader:
            protocol.step("image", field(request, "what", str, "read snapshot %d" % snapshot.number))
            for number in range(reader.count):
                if number % REPORT_EVERY == 0:
                    protocol.progress(number * CHUNK, reader.size)
                _send(reader.read(number))
            protocol.progress(reader.size, reader.size)
    return {"bytes": reader.size}


def export(request: Dict[str, Any]) -> Dict[str, Any]:
    """Send a snapshot to ``import`` on another host: its manifest and digests, then the chunks that it requests."""
    _use_stderr()
    store = Store(field(request, "store", str))
    with ExitStack() as stack:
        stack.enter_context(store.reading())
        snapshot = _find_verified(store, field(request, "snapshot", int))
        reader = stack.enter_context(_open_checked(store, snapshot))
        text = json.dumps(snapshot.manifest.to_dict()).encode()
        _send(MAGIC + struct.pack(HEAD, len(text), len(reader.list)) + text + reader.list)
        wanted = read_wanted(Incoming(), reader.count)
        compressor = Compressor() if field(request, "compress", bool, False) else None
        sent = 0
        for number in wanted:
            data = reader.read(number)
            kind, data = compressor.encode(data) if compressor else (PLAIN, data)
            _send(struct.pack(FRAME, kind, len(data)) + data)
            sent += len(data)
    return {"chunks": len(wanted), "sent_bytes": sent}


def read_wanted(incoming: Incoming, count: int) -> List[int]:
    """Read the request of the other side; return the numbers of the chunks in it.

    Raises:
        Problem: the connection ended, or the request is invalid.
    """
    incoming.patience_s = REPLY_S
    (length,) = struct.unpack(LENGTH, incoming.read(4, "the request for chunks"))
    if length not in (0, (count + 7) // 8):
        raise Problem("the other side requests %d chunks, but there are %d" % (length * 8, count))
    return read_bits(incoming.read(length, "the request for chunks"), count)


def read_bits(bits: bytes, count: int) -> List[int]:
    """Return the numbers below ``count`` whose bit is set."""
    return [number for number in range(min(count, len(bits) * 8)) if bits[number // 8] >> (number % 8) & 1]


class Compressor:
    """Compresses chunks as long as that reduces their size."""

    def __init__(self) -> None:
        self.before = self.after = self.tried = self.pause = 0

    def encode(self, data: bytes) -> Tuple[int, bytes]:
        """Return a chunk's encoding, and its bytes in that encoding."""
        if self.pause:
            self.pause -= 1
            return PLAIN, data
        compressed = zlib.compress(data, 1)
        self.before, self.after, self.tried = self.before + len(data), self.after + len(compressed), self.tried + 1
        if self.tried == SAMPLE:
            if self.after > self.before * MAX_RATIO:
                self.pause = PAUSE
            self.before = self.after = self.tried = 0
        return (COMPRESSED, compressed) if len(compressed) < len(data) else (PLAIN, data)


def decompress(kind: int, data: bytes) -> bytes:
    """Return the plain bytes of an encoded chunk.

    Raises:
        Problem: it is damaged.
    """
    if kind == PLAIN:
        return data
    try:
        decoder = zlib.decompressobj()
        plain = decoder.decompress(data, CHUNK + 1)
        if kind == COMPRESSED and decoder.eof and not decoder.unused_data and len(plain) <= CHUNK:
            return plain
    except zlib.error:
        pass
    raise damaged()


def damaged(what: str = "the data received") -> Problem:
    """Return the error for data that arrived changed; ``what`` names it."""
    return Problem("%s is not what was sent: it was damaged in transit" % what, RETRY_HINT)


class Offer(ChunkList):
    """A snapshot that is offered: its manifest, and the digests of its chunks."""

    def __init__(self, manifest: Manifest, digests: bytes) -> None:
        self.manifest = manifest
        self.size = manifest.size
        self.list = digests
        if hashlib.sha256(digests).hexdigest() != manifest.digests:
            raise damaged()


def read_offer(incoming: Incoming, cluster: str = "") -> Offer:
    """Read the header of ``export``'s stream; ``cluster``: the cluster that the snapshot must be of.

    Raises:
        Problem: it is not a valid header, or the connection ended.
    """
    what = "the list of digests"
    if incoming.read(4, what) != MAGIC:
        raise Problem("the data received is not a snapshot", "is `sms` the same version on both sides?")
    length, digests = struct.unpack(HEAD, incoming.read(12, what))
    if length > LONGEST_MANIFEST:
        raise Problem("received a manifest of %d bytes" % length)
    try:
        manifest = check_manifest(json.loads(incoming.read(length, what).decode()), cluster)
    except (ValueError, RecursionError):
        raise damaged()
    if digests != count_chunks(manifest.size) * 32:
        raise damaged()
    return Offer(manifest, incoming.read(digests, what))


def find_same(store: Store, uuid: str) -> Optional[Snapshot]:
    """Return the verified snapshot in the store with the same UUID, or None."""
    for one in store.list()[0]:
        if one.verified and one.manifest.uuid == uuid:
            return one
    return None


def verified_digests(store: Store) -> Set[bytes]:
    """Return the digests of the chunks that verified snapshots refer to."""
    good: Set[bytes] = set()
    for one in store.list()[0]:
        if one.verified and one.manifest.method == "delta":
            good |= one.chunks()
    return good


def find_missing(store: Store, offer: Offer) -> List[int]:
    """Return the numbers of the chunks that the store lacks, each digest once.

    A chunk that a verified snapshot refers to is known to be good. Other chunks were left by an interrupted run,
    perhaps by a power failure: these are read and verified.
    """
    good = verified_digests(store)
    seen = {ZERO}
    found = []
    for number in range(offer.count):
        digest = offer.digest(number)
        if digest not in seen:
            seen.add(digest)
            if not _is_here(store, digest, offer.length(number), trusted=digest in good):
                found.append(number)
    return found


def _is_here(store: Store, digest: bytes, length: int, *, trusted: bool) -> bool:
    path = chunk_path(store.root, digest)
    try:
        state = os.lstat(path)
        if state.st_size != length or not stat.S_ISREG(state.st_mode):
            return False
        if trusted:
            return True
        with open(open_stored(path), "rb", 0) as stream:
            return digest_of(stream.read(CHUNK + 1)) == digest
    except OSError:
        return False


def estimate(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what an import of the snapshot on standard input would transfer; change nothing."""
    _use_stderr()
    store = Store(field(request, "store", str))
    offer = read_offer(Incoming(), field(request, "cluster", str, ""))
    same = find_same(store, offer.manifest.uuid)
    missing = [] if same else find_missing(store, offer)
    size = sum(offer.length(number) for number in missing)
    return {"present": same.number if same else 0, "chunks": len(missing), "bytes": size}


def import_snapshot(request: Dict[str, Any]) -> Dict[str, Any]:
    """Store the snapshot on standard input; request the missing chunks on standard output."""
    _use_stderr()
    store = Store(field(request, "store", str))
    origin = field(request, "origin", str)
    incoming = Incoming()
    with store.writing():
        offer = read_offer(incoming, field(request, "cluster", str, ""))
        same = find_same(store, offer.manifest.uuid)
        if same:
            _send(struct.pack(LENGTH, 0))
            return {"snapshot": same.to_dict(), "present": True, "bytes": 0}
        protocol.step("compare", "compare with the store")
        missing = find_missing(store, offer)
        total = sum(offer.length(number) for number in missing)
        _check_room(store, total)
        protocol.detail("%d of %d chunks are new" % (len(missing), offer.count))
        protocol.step("receive", field(request, "what", str, "receive snapshot %d" % offer.manifest.number))
        bits = bytearray((offer.count + 7) // 8)
        for number in missing:
            bits[number // 8] |= 1 << number % 8
        _send(struct.pack(LENGTH, len(bits)) + bits)
        receive(store, incoming, offer, missing, total)
        snapshot = commit_received(store, offer, origin, request)
    return {"snapshot": snapshot.to_dict(), "present": False, "bytes": total}


def receive(store: Store, incoming: Incoming, offer: Offer, missing: List[int], total: int) -> None:
    """Store the chunks as they are received, in several threads.

    Raises:
        Problem: the connection ended, or a chunk was damaged.
    """
    done = 0
    waiting: Deque[Any] = collections.deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        for at, number in enumerate(missing):
            if at % REPORT_EVERY == 0:
                protocol.progress(done, total)
            waiting.append(pool.submit(put_expected, store, read_frame(incoming), offer.digest(number)))
            if len(waiting) > 2 * WORKERS:
                waiting.popleft().result()
            done += offer.length(number)
        for one in waiting:
            one.result()
    protocol.progress(total, total)


def read_frame(incoming: Incoming) -> Tuple[int, bytes]:
    """Read the next chunk: its encoding, and its bytes in that encoding.

    Raises:
        Problem: the connection ended, or the frame is invalid.
    """
    kind, length = struct.unpack(FRAME, incoming.read(5, "the chunks"))
    if length > 2 * CHUNK:
        raise damaged()
    return kind, incoming.read(length, "the chunks")


def put_expected(store: Store, frame: Tuple[int, bytes], digest: bytes) -> None:
    """Store a chunk that must have this digest; replace an existing file of that name, which is known to be damaged.

    Raises:
        Problem: it has another digest.
    """
    data = decompress(*frame)
    if store.put(data, flush=store.set_aside(digest)) != digest:
        raise damaged()


def _check_room(store: Store, wanted: int) -> None:
    free = store.free_bytes()
    if free < wanted + (16 << 20):
        raise Problem(
            "the file system of %s has %d MiB free, %d are needed" % (store.root, free >> 20, (wanted >> 20) + 16),
            "`sms overlay prune` on that host makes room",
            3,
        )


def receive_image(request: Dict[str, Any]) -> Dict[str, Any]:
    """Store the snapshot whose image a program prints: borg, which is started as a child process."""
    _use_stderr()
    store = Store(field(request, "store", str))
    manifest = check_manifest(field(request, "manifest", dict), field(request, "cluster", str, ""))
    with store.writing():
        same = find_same(store, manifest.uuid)
        if same:
            return {"snapshot": same.to_dict(), "present": True, "bytes": 0}
        protocol.step("receive", field(request, "what", str, "receive snapshot %d" % manifest.number))
        child = begin(subprocess.Popen, field(request, "argv", list), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            digests = store_image(store, child, manifest.size)
            status = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        # The program's own message on standard error says more.
        if status not in (0, 1):
            raise Problem("%s ended with status %d" % (field(request, "program", str), status), program=status)
        offer = Offer(manifest, digests)
        snapshot = commit_received(store, offer, field(request, "origin", str), request)
    return {"snapshot": snapshot.to_dict(), "present": False, "bytes": manifest.used_bytes}


def store_image(store: Store, child: "subprocess.Popen[bytes]", size: int) -> bytes:
    """Store the image that a program prints, chunk by chunk; return the list of digests."""
    assert child.stdout
    stream, digests = child.stdout, bytearray()
    good = verified_digests(store)
    for at, data in enumerate(iter(lambda: stream.read(CHUNK), b"")):
        if at * CHUNK + len(data) > size:
            raise damaged()
        if at % REPORT_EVERY == 0:
            protocol.progress(at * CHUNK, size)
        digest = chunk_digest(data)
        digests += digest
        if digest != ZERO and not _is_here(store, digest, len(data), trusted=digest in good):
            put_expected(store, (PLAIN, data), digest)
    return bytes(digests)


def commit_received(store: Store, offer: Offer, origin: str, request: Dict[str, Any]) -> Snapshot:
    """Check a snapshot whose chunks are all in the store, and commit it.

    Raises:
        Problem: it is damaged.
    """
    protocol.step("check", "check the file system and the state files")
    number, folder = begin_numbered(store, offer.manifest.number)
    try:
        manifest = dataclasses.replace(offer.manifest, number=number)
        reader = Pending(store, manifest, offer.list, None)
        try:
            check(reader, store.temporary, request)
        except Damage as error:
            what = "snapshot %d of %s cannot be kept: %s" % (offer.manifest.number, origin, error.message)
            raise Problem(what, "`sms overlay verify` on both sides shows which of them is damaged")
        except Problem as error:
            error.message = "snapshot %d of %s: %s" % (offer.manifest.number, origin, error.message)
            raise
        protocol.step("commit", "commit the snapshot")
        notes = list(manifest.notes)
        if number != offer.manifest.number:
            notes.append("it is snapshot %d of %s" % (offer.manifest.number, origin))
        came = {"at": time.time(), "from": origin, "number": offer.manifest.number}
        manifest = dataclasses.replace(manifest, method="delta", new_bytes=store.new_bytes, notes=notes, came=came)
        return store.commit(folder, manifest, offer.list)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def begin_numbered(store: Store, wanted: int) -> Tuple[int, str]:
    """Create the folder of a snapshot: with the wanted number if it is free in this store, else with the next one."""
    final = os.path.join(store.root, FOLDER_NAME % wanted)
    newest = max([one.number for one in store.list()[0]] or [0])
    if 0 < wanted <= newest + MAX_NUMBER_GAP and not os.path.exists(final):
        os.mkdir(final + PARTIAL, 0o700)
        return wanted, final + PARTIAL
    return store.begin()
