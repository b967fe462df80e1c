"""Snapshots go to another store and come from one: chunks that the other side lacks, each held against its digest.

What flows from ``export`` to ``import``, and what import answers before the chunks:

    SMS1, 4 and 8 bytes the lengths of what follows: the manifest as JSON, the list of digests
        4 bytes its length, a bit a chunk: send it (none: nothing is wanted)
    for each of these, in order: 1 byte how it is packed, 4 bytes its length, the chunk

Chunks that have come stay when the rest does not: the next try goes on behind them. What no snapshot names the
sweep of `sms overlay prune` removes.
"""

import collections
import hashlib
import json
import os
import select
import shutil
import struct
import subprocess
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Deque, Dict, Iterator, List, Optional, Set, Tuple

from appliance.agent import words
from appliance.agent.check import check
from appliance.agent.manifest import check_manifest
from appliance.agent.source import WORKERS, is_blank
from appliance.agent.store import (
    CHUNK,
    ORDER,
    PARTIAL,
    ZERO,
    Damage,
    Reader,
    Snapshot,
    Store,
    chunk_path,
    count_chunks,
    digest_of,
)
from appliance.agent.take import Pending
from appliance.agent.words import Problem, field

MAGIC = b"SMS1"
LENGTH = ">I"
HEAD = ">IQ"
FRAME = ">BI"
PLAIN, PACKED = 0, 1
"""How a chunk is packed: as it is, or by zlib."""
LONGEST_MANIFEST = 1 << 18
"""Bytes; flow/transfer.py lets no more through."""
LEAP = 100000
"""A number that comes is taken over when it is no further ahead: one that is would use up all there are."""
SAMPLE, PAUSE = 16, 256
"""So many chunks are packed to see whether it pays; where it does not, so many go as they are until the next look."""
PAYS = 0.8
"""Packing pays when it leaves less than this."""
PATIENCE_S = 60.0
"""Nothing comes for so long: the other side is gone, and its network with it."""
ANSWER_S = 1800.0
"""So long it may take the other side to see what it lacks."""
SHOWN = 64
"""Chunks between two words on how far it is."""
AGAIN = "run it again: what has come is kept"


def _words_aside() -> None:
    """Standard output carries data: words go to standard error."""
    words.CHANNEL[0] = 2


def _send(data: Any) -> None:
    view = memoryview(data)
    try:
        while len(view):
            view = view[os.write(1, view) :]
    except BrokenPipeError:
        raise Problem("nobody reads on", "the other side has its own words on that", gone=True)


class Incoming:
    """Standard input, for as long as anything comes.

    Over a network that is cut nobody tells its end, and who waits for it would hold the store's lock for hours.
    """

    def __init__(self) -> None:
        self.patience_s = PATIENCE_S
        self._held = b""

    def take(self, size: int, what: str) -> bytes:
        """So many bytes.

        Raises:
            Problem: it ended before, or nothing comes any more.
        """
        parts = [self._held[:size]]
        self._held = self._held[size:]
        missing = size - len(parts[0])
        while missing > 0:
            if not select.select([0], [], [], self.patience_s)[0]:
                raise Problem("nothing came for %d s in the middle of %s" % (self.patience_s, what), AGAIN)
            block = os.read(0, max(missing, 1 << 18))
            if not block:
                raise Problem("the connection ended in the middle of " + what, AGAIN)
            parts.append(block[:missing])
            self._held = block[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def _find(store: Store, number: int) -> Snapshot:
    """The snapshot, if it is good to be sent.

    Raises:
        Problem: there is none, or it is damaged.
    """
    one = store.find(str(number))
    if not one.verified:
        why = (one.health.get("damage") or ["it was never checked"])[0]
        raise Damage(
            "snapshot %d is damaged: %s; it is not sent" % (number, why),
            "`sms overlay verify %d` looks again; `sms overlay list` shows others" % number,
        )
    return one


class Sound:
    """Reads a snapshot's chunks; damage that it meets is written down, so that nobody takes it for whole again."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        self.store = store
        self.snapshot = snapshot
        try:
            self.reader = Reader(snapshot)
        except Damage as error:
            raise self._noted(error)

    def read(self, number: int) -> bytes:
        """The bytes of a chunk.

        Raises:
            Damage: they have changed.
        """
        try:
            return self.reader.read(number)
        except Damage as error:
            raise self._noted(error)

    def _noted(self, error: Damage) -> Damage:
        self.store.set_health(self.snapshot, [error.what])
        return error


def image(request: Dict[str, Any]) -> Dict[str, Any]:
    """The whole image on standard output, holes as zeros, every chunk verified; for borg."""
    _words_aside()
    store = Store(field(request, "store", str))
    with store.reading():
        one = _find(store, field(request, "snapshot", int))
        sound = Sound(store, one)
        words.step("image", field(request, "what", str, "read snapshot %d" % one.number))
        for number in range(sound.reader.count):
            if number % SHOWN == 0:
                words.moved(number * CHUNK, sound.reader.size)
            _send(sound.read(number))
        words.moved(sound.reader.size, sound.reader.size)
    return {"bytes": sound.reader.size}


def export(request: Dict[str, Any]) -> Dict[str, Any]:
    """A snapshot for ``import`` on another host: its digests, then the chunks that are asked for."""
    _words_aside()
    store = Store(field(request, "store", str))
    with store.reading():
        one = _find(store, field(request, "snapshot", int))
        sound = Sound(store, one)
        text = json.dumps(one.manifest).encode()
        _send(MAGIC + struct.pack(HEAD, len(text), len(sound.reader.list)) + text + sound.reader.list)
        wanted = read_wanted(Incoming(), sound.reader.count)
        press = Press() if field(request, "compress", bool, False) else None
        sent = 0
        for number in wanted:
            data = sound.read(number)
            kind, data = press.pack(data) if press else (PLAIN, data)
            _send(struct.pack(FRAME, kind, len(data)) + data)
            sent += len(data)
    return {"chunks": len(wanted), "sent_bytes": sent}


def read_wanted(incoming: Incoming, count: int) -> List[int]:
    """Numbers of the chunks that the other side asks for.

    Raises:
        Problem: it went, or asks for what there is not.
    """
    incoming.patience_s = ANSWER_S
    (length,) = struct.unpack(LENGTH, incoming.take(4, "what is wanted"))
    if length not in (0, (count + 7) // 8):
        raise Problem("the other side asks for %d chunks, and there are %d" % (length * 8, count))
    return read_bits(incoming.take(length, "what is wanted"), count)


def read_bits(bits: bytes, count: int) -> List[int]:
    """Numbers below ``count`` whose bit is set."""
    return [number for number in range(min(count, len(bits) * 8)) if bits[number // 8] >> (number % 8) & 1]


class Press:
    """Packs chunks for as long as it pays."""

    def __init__(self) -> None:
        self.before = self.after = self.tried = self.pause = 0

    def pack(self, data: bytes) -> Tuple[int, bytes]:
        """The chunk, as it is or packed."""
        if self.pause:
            self.pause -= 1
            return PLAIN, data
        packed = zlib.compress(data, 1)
        self.before, self.after, self.tried = self.before + len(data), self.after + len(packed), self.tried + 1
        if self.tried == SAMPLE:
            if self.after > self.before * PAYS:
                self.pause = PAUSE
            self.before = self.after = self.tried = 0
        return (PACKED, packed) if len(packed) < len(data) else (PLAIN, data)


def unpack(kind: int, data: bytes) -> bytes:
    """A chunk as it was.

    Raises:
        Problem: it is none.
    """
    if kind == PLAIN:
        return data
    try:
        press = zlib.decompressobj()
        plain = press.decompress(data, CHUNK + 1)
        if kind == PACKED and press.eof and not press.unused_data and len(plain) <= CHUNK:
            return plain
    except zlib.error:
        pass
    raise _damaged_on_the_way()


def _damaged_on_the_way() -> Problem:
    return Problem("what came is not what was sent: it was damaged on the way", AGAIN)


class Offer:
    """A snapshot that comes: what it is, and the digests of its chunks."""

    def __init__(self, manifest: Dict[str, Any], digests: bytes) -> None:
        self.manifest = manifest
        self.digests = digests
        self.size: int = self.manifest["size"]
        self.count = count_chunks(self.size)
        if hashlib.sha256(digests).hexdigest() != self.manifest["digests"]:
            raise _damaged_on_the_way()

    def length(self, number: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK, self.size - number * CHUNK)

    def digest(self, number: int) -> bytes:
        """The digest of a chunk."""
        return self.digests[number * 32 : number * 32 + 32]


def read_offer(incoming: Incoming, cluster: str = "") -> Offer:
    """What ``export`` says first; ``cluster``: whose snapshot it must be.

    Raises:
        Problem: it is something else, or cut off.
    """
    what = "the list of digests"
    if incoming.take(4, what) != MAGIC:
        raise Problem("what comes is no snapshot", "is `sms` the same version on both sides?")
    length, digests = struct.unpack(HEAD, incoming.take(12, what))
    if length > LONGEST_MANIFEST:
        raise Problem("what comes has a manifest of %d bytes" % length)
    try:
        manifest = check_manifest(json.loads(incoming.take(length, what).decode()), cluster)
    except (ValueError, RecursionError):
        raise _damaged_on_the_way()
    if digests != count_chunks(manifest["size"]) * 32:
        raise _damaged_on_the_way()
    return Offer(manifest, incoming.take(digests, what))


def find_same(store: Store, uuid: str) -> Optional[Snapshot]:
    """The verified snapshot here that is the same one."""
    for one in store.list()[0]:
        if one.verified and one.manifest["uuid"] == uuid:
            return one
    return None


def good_digests(store: Store) -> Set[bytes]:
    """Those of chunks that a verified snapshot here names."""
    good: Set[bytes] = set()
    for one in store.list()[0]:
        if one.verified and one.manifest["method"] == "delta":
            data = one.digests()
            good.update(data[at : at + 32] for at in range(0, len(data), 32))
    return good


def lacking(store: Store, offer: Offer) -> List[int]:
    """Numbers of the chunks that are not here, each digest once.

    A chunk that a verified snapshot names is known to be good. Others an interrupted run has left, perhaps with the
    machine losing its power: these are read.
    """
    good = good_digests(store)
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
        if os.stat(path).st_size != length:
            return False
        if trusted:
            return True
        with open(path, "rb", 0) as stream:
            return digest_of(stream.read(CHUNK + 1)) == digest
    except OSError:
        return False


def estimate(request: Dict[str, Any]) -> Dict[str, Any]:
    """What an import of the snapshot on standard input would ask for; changes nothing."""
    _words_aside()
    store = Store(field(request, "store", str))
    offer = read_offer(Incoming(), field(request, "cluster", str, ""))
    same = find_same(store, offer.manifest["uuid"])
    missing = [] if same else lacking(store, offer)
    told = {"present": same.number if same else 0, "chunks": len(missing)}
    return dict(told, bytes=sum(offer.length(number) for number in missing))


def take_in(request: Dict[str, Any]) -> Dict[str, Any]:
    """Store the snapshot that comes on standard input: what is lacking is asked for on standard output."""
    _words_aside()
    store = Store(field(request, "store", str))
    origin = field(request, "origin", str)
    incoming = Incoming()
    with store.writing():
        offer = read_offer(incoming, field(request, "cluster", str, ""))
        same = find_same(store, offer.manifest["uuid"])
        if same:
            _send(struct.pack(LENGTH, 0))
            return {"snapshot": same.told(), "present": True, "bytes": 0}
        words.step("compare", "compare with what is here")
        missing = lacking(store, offer)
        total = sum(offer.length(number) for number in missing)
        _check_room(store, total)
        words.detail("%d of %d chunks are new" % (len(missing), offer.count))
        words.step("receive", field(request, "what", str, "receive snapshot %d" % offer.manifest["number"]))
        bits = bytearray((offer.count + 7) // 8)
        for number in missing:
            bits[number // 8] |= 1 << number % 8
        _send(struct.pack(LENGTH, len(bits)) + bits)
        receive(store, incoming, offer, missing, total)
        snapshot = keep(store, offer, origin, request)
    return {"snapshot": snapshot.told(), "present": False, "bytes": total}


def receive(store: Store, incoming: Incoming, offer: Offer, missing: List[int], total: int) -> None:
    """Store the chunks as they come; several threads.

    Raises:
        Problem: the connection ended, or what came is something else.
    """
    done = 0
    waiting: Deque[Any] = collections.deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        for at, number in enumerate(missing):
            if at % SHOWN == 0:
                words.moved(done, total)
            waiting.append(pool.submit(put_as, store, read_frame(incoming), offer.digest(number)))
            if len(waiting) > 2 * WORKERS:
                waiting.popleft().result()
            done += offer.length(number)
        for one in waiting:
            one.result()
    words.moved(total, total)


def read_frame(incoming: Incoming) -> Tuple[int, bytes]:
    """How the next chunk is packed, and what it is then.

    Raises:
        Problem: the connection ended, or this is none.
    """
    kind, length = struct.unpack(FRAME, incoming.take(5, "the chunks"))
    if length > 2 * CHUNK:
        raise _damaged_on_the_way()
    return kind, incoming.take(length, "the chunks")


def put_as(store: Store, frame: Tuple[int, bytes], digest: bytes) -> None:
    """Store a chunk that is to have this digest; one of the same name that is there was found to be no good.

    Raises:
        Problem: it is another one.
    """
    data = unpack(*frame)
    store.set_aside(digest)
    if store.put(data) != digest:
        raise _damaged_on_the_way()


def _check_room(store: Store, wanted: int) -> None:
    free = store.free_bytes()
    if free < wanted + (16 << 20):
        raise Problem(
            "the file system of %s has %d MiB free, %d are needed" % (store.root, free >> 20, (wanted >> 20) + 16),
            "`sms overlay prune` on that host makes room",
            3,
        )


def receive_image(request: Dict[str, Any]) -> Dict[str, Any]:
    """Store the snapshot whose image a program prints: borg, which is started here as a child."""
    _words_aside()
    store = Store(field(request, "store", str))
    manifest = check_manifest(field(request, "manifest", dict), field(request, "cluster", str, ""))
    with store.writing():
        same = find_same(store, manifest["uuid"])
        if same:
            return {"snapshot": same.told(), "present": True, "bytes": 0}
        words.step("receive", field(request, "what", str, "receive snapshot %d" % manifest["number"]))
        child = subprocess.Popen(field(request, "argv", list), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            digests = store_image(store, child, manifest["size"])
            status = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        # Its own words, on standard error, say more than any of ours.
        if status not in (0, 1):
            raise Problem("%s ended with status %d" % (field(request, "program", str), status), program=status)
        offer = Offer(manifest, digests)
        snapshot = keep(store, offer, field(request, "origin", str), request)
    return {"snapshot": snapshot.told(), "present": False, "bytes": manifest["used_bytes"]}


def store_image(store: Store, child: "subprocess.Popen[bytes]", size: int) -> bytes:
    """Store what a program prints, chunk by chunk; give the list of digests."""
    assert child.stdout
    digests = bytearray()
    good = good_digests(store)
    for at, data in enumerate(_chunks(child.stdout)):
        if at * CHUNK + len(data) > size:
            raise _damaged_on_the_way()
        if at % SHOWN == 0:
            words.moved(at * CHUNK, size)
        digest = ZERO if is_blank(data) else digest_of(data)
        digests += digest
        if digest != ZERO and not _is_here(store, digest, len(data), trusted=digest in good):
            put_as(store, (PLAIN, data), digest)
    return bytes(digests)


def _chunks(stream: Any) -> Iterator[bytes]:
    while True:
        data = stream.read(CHUNK)
        if not data:
            return
        yield data


def keep(store: Store, offer: Offer, origin: str, request: Dict[str, Any]) -> Snapshot:
    """Check a snapshot whose chunks are all here, and let it count.

    Raises:
        Problem: it is damaged.
    """
    words.step("check", "check the file system and the state files")
    number, folder = begin_as(store, offer.manifest["number"])
    try:
        reader = Pending(store, number, offer.size, offer.digests, None)
        try:
            check(reader, store.temporary, field(request, "state", list, []), field(request, "heads", dict, {}))
        except Damage as error:
            what = "snapshot %d of %s cannot be kept: %s" % (offer.manifest["number"], origin, error.message)
            raise Problem(what, "`sms overlay verify` on both sides tells which of them is damaged")
        except Problem as error:
            error.message = "snapshot %d of %s: %s" % (offer.manifest["number"], origin, error.message)
            raise
        words.step("commit", "let it count")
        notes = list(offer.manifest.get("notes", []))
        if number != offer.manifest["number"]:
            notes.append("it is snapshot %d of %s" % (offer.manifest["number"], origin))
        manifest = dict(offer.manifest, method="delta", new_bytes=store.new_bytes, notes=notes)
        manifest["came"] = {"from": origin, "number": offer.manifest["number"], "at": time.time()}
        return store.commit(number, folder, manifest, offer.digests)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def begin_as(store: Store, wanted: int) -> Tuple[int, str]:
    """A folder for a snapshot of that number where it is free here, else of the next one."""
    final = os.path.join(store.root, ORDER % wanted)
    newest = max([one.number for one in store.list()[0]] or [0])
    if 0 < wanted <= newest + LEAP and not os.path.exists(final):
        os.mkdir(final + PARTIAL, 0o700)
        return wanted, final + PARTIAL
    return store.begin()
