"""Capture files, standard input or an interface -> what was counted in them.

The bytes never come through Python: the native core reads the descriptor in a thread of its own while this one
looks on. Compressed files are read through the program that knows the format, side by side with the core.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.addresses import packed
from analysis.errors import CaptureError
from analysis.observed import Boot, Host, Link, Observation, Problem, Role, Row, Sample
from analysis.protocols import SAMPLED
from analysis.signatures import Signature

ABI = 3
"""Of the core that this file knows."""
HEAD = 1 << 16
"""Bytes that tell what a file is, and when its first packet came."""

ZSTD = b"\x28\xb5\x2f\xfd"
PROGRAMS: tuple[tuple[bytes, tuple[tuple[str, ...], ...]], ...] = (
    (b"\x1f\x8b", (("igzip", "-dc"), ("pigz", "-dc"), ("gzip", "-dc"))),
    (ZSTD, (("zstd", "-qdc"),)),
    (b"\xfd7zXZ\x00", (("xz", "-dc", "--memlimit-decompress=512MiB"),)),
    (b"\x04\x22\x4d\x18", (("lz4", "-dc"),)),
    (b"BZh", (("bzip2", "-dc"),)),
)
"""Compressed files by their first bytes, and the programs that read them, the fastest first."""

_SKIPPABLE = tuple(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))
"""Frames that zstd and lz4 both allow before the first (RFC 8878, 3.1.2)."""


@dataclass(frozen=True)
class Progress:
    """How far reading has come. ``total`` is 0 where nobody knows it."""

    done: int
    total: int
    packets: int


Watch = Callable[[Progress], None]


@dataclass
class Reading:
    """Captures that were read: addresses first; `observe` groups the counts by what they are."""

    files: tuple[str, ...]
    counter: Any
    notes: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    cut: bool = False
    interrupted: bool = False
    lost: int = 0
    """Packets that whoever captured had no room for."""

    def hosts(self) -> tuple[Host, ...]:
        """Every address that was seen."""
        return tuple(
            Host(index, _address(raw), tuple(map(_mac, macs)), _mac(via), _mac(claimed), sent, received, outgoing)
            for index, (raw, macs, via, claimed, sent, received, outgoing) in enumerate(self.counter.hosts())
        )

    def links(self) -> list[Link]:
        """Every pair of addresses, by service."""
        return list(map(Link._make, self.counter.links()))

    def samples(self) -> tuple[Sample, ...]:
        """The packets that were kept."""
        return tuple(Sample(*one) for one in self.counter.samples())

    def observe(self, roles: bytes, hosts: Sequence[Host], links: Sequence[Link]) -> Observation:
        """The counts, grouped by the roles of the hosts: one byte each, by index."""
        totals = self.counter.totals()
        rows = [Row(*(*row[:3], Role(row[3]), Role(row[4]), *row[5:])) for row in self.counter.rows(roles)]
        problems = [Problem(name_of(self.files[file]), offset, what) for file, offset, what in self.counter.problems()]
        return Observation(
            files=self.files,
            packets=totals["packets"],
            bytes=totals["bytes"],
            start_ns=totals["start_ns"],
            end_ns=totals["end_ns"],
            truncated=totals["truncated"] or self.cut,
            hosts=tuple(hosts),
            links=links,
            rows=tuple(rows),
            samples=self.samples(),
            boots=tuple(Boot(_mac(mac), began, settled) for mac, began, settled in self.counter.boots()),
            other=totals["other"],
            skipped={**totals["skipped"], **({"lost while capturing": self.lost} if self.lost else {})},
            problems=(*problems, *self.notes),
            beyond=totals["beyond"],
            bin_s=totals["bin_ns"] / 1e9,
            cut=totals["cut"],
            cut_at=totals["cut_at"],
            gap_s=totals["gap_ns"] / 1e9,
            remarks=(*self.remarks, *_twice(self.files, self.counter.files())),
        )


def read_captures(
    files: Sequence[str], *, signatures: Sequence[Signature], node: str = "", watch: Watch | None = None
) -> Reading:
    """Read files (``-`` is standard input) in the order of their first packets, as one capture.

    Of several files, one that is no capture is left out, and remarked. Ctrl-C ends standard input and pipes, and what
    came until then counts.

    Args:
        node: count only what is to or from this address or link address.
        watch: called some times a second.

    Raises:
        CaptureError: there is no such file, none is a capture, or a program for one is missing.
        KeyboardInterrupt: while files were read.
    """
    reading = Reading(tuple(_in_order(files)), make_counter(signatures, node))
    sizes = [_size(file) for file in reading.files]
    total, before = sum(sizes) if all(sizes) else 0, 0
    failures = []
    for file, size in zip(reading.files, sizes, strict=True):
        if reading.interrupted:
            reading.remarks.append(f"{name_of(file)} was not read any more: Ctrl-C came before")
            continue
        with _opened(file) as source:
            failures.append(_read_one(reading, file, source, _teller(watch, before, total, reading.counter)))
        before += size
    failed = [failure for failure in failures if failure]
    if len(failed) == len(failures):
        raise failed[0]
    reading.remarks += [f"left out: {failure.message}" for failure in failed]
    reading.counter.finish()
    return reading


def read_stream(
    name: str, source: Source, *, signatures: Sequence[Signature], node: str = "", watch: Watch | None = None
) -> Reading:
    """Read what a program writes while it runs, such as tcpdump on an interface, as `read_captures` reads a file.

    Raises:
        CaptureError: it wrote no capture.
    """
    reading = Reading((name,), make_counter(signatures, node))
    if failure := _read_one(reading, name, source, _teller(watch, 0, 0, reading.counter)):
        raise failure
    reading.counter.finish()
    return reading


def make_counter(signatures: Sequence[Signature], node: str = "", **bounds: int) -> Any:
    """A native counter that knows the services' ports and first bytes."""
    core = _core()
    ports = sorted({port for signature in signatures for port in signature.ports if port[1]})
    firsts = [first for signature in signatures for first in signature.first]
    told = [(one.protocol, one.port, one.offset, one.low, one.high) for one in firsts]
    return core.Counter(ports, told, SAMPLED, node=_node(node), **bounds)


def _core() -> Any:
    try:
        from analysis import _core
    except ImportError as error:
        raise CaptureError(f"the native core is missing: {error}", "in a checkout: make core") from None
    if _core.ABI != ABI:
        raise CaptureError("the native core is of another version", "in a checkout: make core")
    return _core


def _node(text: str) -> bytes:
    """The bytes of an address or a link address."""
    if (raw := packed(text)) or not text:
        return raw
    raise CaptureError(f"{text!r} is neither an address nor a link address", "such as 10.0.3.7 or 52:54:00:12:34:56")


def _address(raw: bytes) -> str:
    if not raw:
        return ""
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _mac(raw: bytes) -> str:
    return raw.hex(":")


def _teller(watch: Watch | None, before: int, total: int, counter: Any) -> Callable[[int], None]:
    return lambda done: watch(Progress(before + done, total, counter.packets)) if watch else None


# ---- sources -----------------------------------------------------------------------------------------------


@dataclass
class Source:
    """Where the core reads: a descriptor, what was read of it already, and how it ends.

    Attributes:
        zstd: the core decompresses it.
        place: how many bytes of the file are done, for the progress; None: those that the core has read.
        endless: Ctrl-C is how it ends.
        end: makes whoever writes to it stop.
        verdict: after the end: what is missing of the capture, or "".
    """

    descriptor: int
    prefix: bytes = b""
    zstd: bool = False
    place: Callable[[], int] | None = None
    endless: bool = False
    end: Callable[[], None] = lambda: None
    verdict: Callable[[], str] = lambda: ""


LAST_S = 2.0
"""Seconds that whoever writes to us has after Ctrl-C, which it got too, to say its last."""


def _read_one(reading: Reading, file: str, source: Source, tell: Callable[[int], None]) -> CaptureError | None:
    """Read one source to its end; the error where it is no capture."""
    counter, failure, done = reading.counter, [], threading.Event()
    begin: int = counter.read_bytes

    def work() -> None:
        try:
            counter.read(source.descriptor, source.prefix, source.zstd)
        except (OSError, ValueError, MemoryError) as error:
            failure.append(error)
        finally:
            done.set()

    late = threading.Timer(LAST_S, counter.stop)
    late.daemon = True
    threading.Thread(target=work, name="core", daemon=True).start()
    # The first look is soon: most captures are read before anybody would want to see how far it has come.
    pause = 0.02
    while not done.is_set():
        try:
            # An event, not join(): a join that Ctrl-C interrupts takes the thread for ended (CPython 3.11).
            if not done.wait(pause):
                tell(source.place() if source.place else counter.read_bytes - begin)
            pause = 0.1
        except KeyboardInterrupt:
            if reading.interrupted or not source.endless:
                counter.stop()
                done.wait()
                raise
            reading.interrupted = True
            source.end()
            late.start()
    late.cancel()
    size, trouble = counter.read_bytes - begin, source.verdict()
    if trouble:
        reading.cut = True
        reading.notes.append(Problem(name_of(file), size, trouble))
    return _told(name_of(file), failure[0], trouble, size) if failure else None


def name_of(file: str) -> str:
    """What a person calls it."""
    return "standard input" if file == "-" else file


def _told(name: str, error: Exception, trouble: str, size: int) -> CaptureError:
    """What a failure of the core means."""
    if trouble:
        return CaptureError(f"{name}: {trouble}")
    if not size:
        return CaptureError(f"{name} is empty", "tcpdump without -U writes late: was it killed, or is it still at it?")
    if isinstance(error, ValueError):
        return CaptureError(f"{name} is {error}", "tcpdump -w FILE writes captures; dumpcap and tshark -w do as well")
    return CaptureError(f"{name}: {getattr(error, 'strerror', '') or error}")


def _twice(files: Sequence[str], spans: Sequence[tuple[int, int, int]]) -> list[str]:
    """Remarks on files that hold the same time."""
    named = sorted((*span, name_of(file)) for file, span in zip(files, spans, strict=False) if span[2])
    remarks = []
    for (first, last, packets, one), (second, end, more, other) in pairwise(named):
        if (first, last, packets) == (second, end, more):
            remarks.append(f"{one} and {other} hold the same packets: all of them are counted twice")
        elif last - second > 1e9:
            remarks.append(f"{one} and {other} overlap in time: what both hold is counted twice")
    return remarks[:5]


def _in_order(files: Sequence[str]) -> list[str]:
    """Files by the time of their first packet: what `tcpdump -C -W` leaves is in no order by name."""
    if not files:
        raise CaptureError("no capture is named", "sms classify FILE..., or - for standard input")
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        if file == "-":
            continue
        try:
            status = Path(file).stat()
        except (OSError, ValueError) as error:
            raise CaptureError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(status.st_mode):
            raise CaptureError(f"{file} is a folder", f"name the files in it: {file.rstrip('/')}/*.pcap")
        if (again := seen.setdefault((status.st_dev, status.st_ino), file)) != file or files.count(file) > 1:
            raise CaptureError(f"{file} is given twice" + (f", as {again} too" if again != file else ""))
    if len(files) == 1:
        return list(files)
    return sorted(files, key=lambda file: 2**63 if file == "-" else _first_time(file))


def _first_time(file: str) -> int:
    if not stat.S_ISREG(Path(file).stat().st_mode):
        return 2**63  # a pipe cannot be looked into and read again
    with _opened(file) as source:
        head = source.prefix
        while source.descriptor >= 0 and len(head) < HEAD and (more := os.read(source.descriptor, HEAD - len(head))):
            head += more
        source.end()
    time_ns: int = _core().first_time(head, source.zstd)
    return time_ns if time_ns >= 0 else Path(file).stat().st_mtime_ns


def _size(file: str) -> int:
    """Bytes of a file; 0 where it has no end that is known."""
    if file == "-":
        return 0
    status = Path(file).stat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


@contextmanager
def _opened(file: str) -> Iterator[Source]:
    """A file or standard input, through a decompressor where its first bytes ask for one."""
    try:
        descriptor = sys.stdin.fileno() if file == "-" else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if file == "-" and os.isatty(descriptor):
            raise CaptureError("standard input is a terminal", "tcpdump -i IFACE -w - | sms classify -")
        seekable = stat.S_ISREG(os.fstat(descriptor).st_mode)
        here = os.lseek(descriptor, 0, os.SEEK_CUR) if seekable else 0
        head = os.pread(descriptor, 6, here) if seekable else _at_least(descriptor, 6)
        zstd = head.startswith((ZSTD, *_SKIPPABLE)) and _core().has_zstd()
        program = () if zstd else _program(head)
        read_already = b"" if seekable else head
        if not program:
            source = Source(descriptor, read_already, zstd=zstd, endless=not seekable)
            if zstd and seekable:
                source.place = lambda: os.lseek(descriptor, 0, os.SEEK_CUR)
            yield source
            return
        with _decompressing(program, descriptor, read_already) as source:
            source.endless = not seekable
            if seekable:
                # The child shares our descriptor's place in the file.
                source.place = lambda: os.lseek(descriptor, 0, os.SEEK_CUR)
            yield source
    finally:
        if file != "-":
            os.close(descriptor)


def _at_least(descriptor: int, count: int) -> bytes:
    """The first bytes of a pipe; tcpdump without -U may write nothing before Ctrl-C, which it gets too."""
    head, patience = b"", None
    while len(head) < count:
        try:
            if not select.select([descriptor], [], [], patience)[0]:
                raise KeyboardInterrupt
            more = os.read(descriptor, HEAD)
        except KeyboardInterrupt:
            if patience:
                raise
            patience = LAST_S
            continue
        if not more:
            break
        head += more
    return head


def _program(head: bytes) -> tuple[str, ...]:
    """The decompressor for a file that begins so; () where it is not compressed."""
    for magic, programs in PROGRAMS:
        if head.startswith(magic) or (magic == ZSTD and head.startswith(_SKIPPABLE)):
            for program in programs:
                if path := shutil.which(program[0]):
                    return (path, *program[1:])
            name = programs[-1][0]
            package = {"xz": "xz-utils"}.get(name, name)
            raise CaptureError(f"the capture is compressed, and {name} is not installed", f"apt install {package}")
    return ()


@contextmanager
def _decompressing(program: tuple[str, ...], descriptor: int, prefix: bytes) -> Iterator[Source]:
    feed = subprocess.PIPE if prefix else descriptor
    child = subprocess.Popen(program, stdin=feed, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.stdout, child.stderr
    assert output and errors
    _widen(output.fileno())
    if prefix:
        threading.Thread(target=_pump, args=(prefix, descriptor, child.stdin), daemon=True).start()
    words: list[bytes] = []
    listener = threading.Thread(target=lambda: words.append(errors.read(1 << 16)), daemon=True)
    listener.start()

    def verdict() -> str:
        output.close()
        child.wait()
        listener.join()
        if child.returncode in (0, -signal.SIGPIPE):  # the core wanted no more
            return ""
        said = b"".join(words).decode(errors="replace").strip().splitlines()
        return f"{Path(program[0]).name} gave up: {said[-1] if said else f'status {child.returncode}'}"

    try:
        yield Source(output.fileno(), verdict=verdict)
    finally:
        child.kill()
        child.wait()
        output.close()
        listener.join()
        errors.close()


def _pump(prefix: bytes, descriptor: int, to: Any) -> None:
    """Standard input into a decompressor, what was looked at already first."""
    with suppress(OSError):
        block = prefix
        while block:
            to.write(block)
            block = os.read(descriptor, HEAD)
    with suppress(OSError):
        to.close()


def _widen(descriptor: int) -> None:
    """A pipe of a megabyte: fewer turns between the two programs."""
    import fcntl

    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)
