"""Read captures from files, standard input or an interface with the native core.

The data never passes through Python: the core reads a descriptor in a separate thread.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from analysis.addresses import packed
from analysis.cluster import FILE_SYSTEMS, SCHEDULERS
from analysis.errors import CaptureError
from analysis.observed import Boot, Host, Link, Observation, Problem, Role, Row, Sample, Scan
from analysis.protocols import SAMPLED
from analysis.scans import find_scans
from analysis.signatures import Signature
from analysis.sources import GRACE_S, Source, core, in_order, name_of, opened, size_of


@dataclass(frozen=True)
class Progress:
    """Progress of reading in bytes and packets. ``total`` is 0 if unknown."""

    done: int
    total: int
    packets: int


ProgressCallback = Callable[[Progress], None]


@dataclass
class Reading:
    """Captures that were read; `observe` groups the counts by the roles of the addresses."""

    files: tuple[str, ...]
    counter: Any
    notes: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    cut: bool = False
    interrupted: bool = False
    lost: int = 0
    """Packets dropped by the capturing program."""

    def hosts(self) -> tuple[Host, ...]:
        """Return every address that was seen."""
        return self._hosts

    @cached_property
    def _hosts(self) -> tuple[Host, ...]:
        return tuple(
            Host(index, _address(raw), tuple(map(_mac, macs)), _mac(via), _mac(claimed), sent, received, outgoing)
            for index, (raw, macs, via, claimed, sent, received, outgoing) in enumerate(self.counter.hosts())
        )

    @cached_property
    def scans(self) -> tuple[Scan, ...]:
        """The port scans."""
        return find_scans(self.counter.attempts(), self.hosts)

    def links(self) -> list[Link]:
        """Return the traffic of every pair of addresses, by service, without scans."""
        links = list(map(Link._make, self.counter.links()))
        scanned = {pair for scan in self.scans for pair in scan.pairs}
        return [link for pair, link in enumerate(links) if pair not in scanned] if scanned else links

    def _rows(self, roles: bytes) -> list[Any]:
        if not self.scans:
            return list(self.counter.rows(roles))
        scanned = bytearray(len(self.counter.links()))
        for scan in self.scans:
            for pair in scan.pairs:
                scanned[pair] = 1
        return list(self.counter.rows(roles, bytes(scanned)))

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The sampled packets."""
        return tuple(Sample(*one) for one in self.counter.samples())

    def observe(self, roles: bytes, hosts: Sequence[Host], links: Sequence[Link]) -> Observation:
        """Return the counts, grouped by the roles of the hosts: one byte each, by index."""
        totals = self.counter.totals()
        rows = [Row(*(*row[:3], Role(row[3]), Role(row[4]), *row[5:])) for row in self._rows(roles)]
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
            samples=self.samples,
            boots=tuple(Boot(_mac(mac), began, settled) for mac, began, settled in self.counter.boots()),
            other=totals["other"],
            skipped={**totals["skipped"], **({"lost while capturing": self.lost} if self.lost else {})},
            problems=(*problems, *self.notes),
            beyond=totals["beyond"],
            bin_s=totals["bin_ns"] / 1e9,
            cut=totals["cut"],
            cut_at=totals["cut_at"],
            gap_s=totals["gap_ns"] / 1e9,
            gaps=tuple(sorted(gap for gap in totals["gaps"] if gap[0] >= totals["start_ns"])),
            scans=self.scans,
            remarks=(*self.remarks, *_find_overlaps(self.files, self.counter.files())),
        )


def read_captures(
    files: Sequence[str],
    *,
    signatures: Sequence[Signature],
    node: str = "",
    on_progress: ProgressCallback | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Reading:
    """Read files (``-`` is standard input) in the order of their first packets, as one capture.

    The caller has checked them (``check_files``).

    Of several files, those that are not captures are skipped with a remark. Ctrl-C ends standard input and pipes; the
    packets received so far are counted.

    Args:
        node: count only packets to or from this address or link address.
        on_progress: called about ten times a second.
        meanwhile: called once, while the core reads the first file in its own thread.

    Raises:
        CaptureError: none is a capture, or a decompressor is missing.
        KeyboardInterrupt: while regular files were read.
    """
    reading = Reading(tuple(in_order(files)), make_counter(signatures, node))
    sizes = [size_of(file) for file in reading.files]
    total, before = sum(sizes) if all(sizes) else 0, 0
    failures = []
    for file, size in zip(reading.files, sizes, strict=True):
        if reading.interrupted:
            reading.remarks.append(f"{name_of(file)} was not read: interrupted by Ctrl-C")
            continue
        with opened(file) as source:
            report = _progress_reporter(on_progress, before, total, reading.counter)
            failures.append(_read_one(reading, file, source, report, meanwhile))
        meanwhile = None
        before += size
    failed = [failure for failure in failures if failure]
    if len(failed) == len(failures):
        raise failed[0]
    reading.remarks += [f"skipped: {failure.message}" for failure in failed]
    reading.counter.finish()
    return reading


def read_stream(
    name: str,
    source: Source,
    *,
    signatures: Sequence[Signature],
    node: str = "",
    on_progress: ProgressCallback | None = None,
) -> Reading:
    """Read the output of a running program, such as tcpdump on an interface, as `read_captures` reads a file.

    Raises:
        CaptureError: the output is not a capture.
    """
    reading = Reading((name,), make_counter(signatures, node))
    if failure := _read_one(reading, name, source, _progress_reporter(on_progress, 0, 0, reading.counter)):
        raise failure
    reading.counter.finish()
    return reading


def make_counter(signatures: Sequence[Signature], node: str = "", **bounds: int) -> Any:
    """Create a native counter with the services' ports and first bytes."""
    native = core()
    ports = {port for signature in signatures for port in signature.ports if port[1]}
    firsts = [first for signature in signatures for first in signature.first]
    patterns = [(one.protocol, one.port, one.offset, one.low, one.high) for one in firsts]
    return native.Counter(
        sorted(ports | FILE_SYSTEMS.keys() | SCHEDULERS), patterns, SAMPLED, node=_node(node), **bounds
    )


def _node(text: str) -> bytes:
    """Parse an address or link address into bytes."""
    if (raw := packed(text)) or not text:
        return raw
    raise CaptureError(f"{text!r} is neither an address nor a link address", "such as 10.0.3.7 or 52:54:00:12:34:56")


def _address(raw: bytes) -> str:
    if not raw:
        return ""
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _mac(raw: bytes) -> str:
    return raw.hex(":")


def _progress_reporter(
    on_progress: ProgressCallback | None, before: int, total: int, counter: Any
) -> Callable[[int], None]:
    return lambda done: on_progress(Progress(before + done, total, counter.packets)) if on_progress else None


def _read_one(
    reading: Reading,
    file: str,
    source: Source,
    report: Callable[[int], None],
    meanwhile: Callable[[], None] | None = None,
) -> CaptureError | None:
    """Read one source to its end; return the error if it is not a capture."""
    counter, failure, done = reading.counter, [], threading.Event()
    begin: int = counter.read_bytes
    once = [meanwhile] if meanwhile else []

    def work() -> None:
        try:
            counter.read(source.descriptor, source.prefix, source.zstd)
        except (OSError, ValueError, MemoryError) as error:
            failure.append(error)
        finally:
            done.set()

    late = threading.Timer(GRACE_S, counter.stop)
    late.daemon = True
    threading.Thread(target=work, name="core", daemon=True).start()
    # A short first wait: most captures are read before progress would be visible.
    pause = 0.02
    while once or not done.is_set():
        try:
            if once:
                once.pop()()
            # An event, not join(): after a join interrupted by Ctrl-C the thread counts as ended (CPython 3.11).
            if not done.wait(pause):
                report(source.place() if source.place else counter.read_bytes - begin)
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
    size, stream_error = counter.read_bytes - begin, source.error()
    if stream_error:
        reading.cut = True
        reading.notes.append(Problem(name_of(file), size, stream_error))
    return _read_error(name_of(file), failure[0], stream_error, size) if failure else None


def _read_error(name: str, error: Exception, stream_error: str, size: int) -> CaptureError:
    """Convert a failure of the core into an error for the user."""
    if stream_error:
        return CaptureError(f"{name}: {stream_error}")
    if not size:
        return CaptureError(
            f"{name} is empty", "tcpdump without -U writes late: was it killed, or is it still running?"
        )
    if isinstance(error, ValueError):
        return CaptureError(f"{name} is {error}", "tcpdump -w FILE writes captures; dumpcap and tshark -w do as well")
    return CaptureError(f"{name}: {getattr(error, 'strerror', '') or error}")


def _find_overlaps(files: Sequence[str], spans: Sequence[tuple[int, int, int]]) -> list[str]:
    """Return remarks on files that overlap in time."""
    named = sorted((*span, name_of(file)) for file, span in zip(files, spans, strict=False) if span[2])
    remarks = []
    for (first, last, packets, one), (second, end, more, other) in pairwise(named):
        if (first, last, packets) == (second, end, more):
            remarks.append(f"{one} and {other} hold the same packets: all are counted twice")
        elif last - second > 1e9:
            remarks.append(f"{one} and {other} overlap in time: packets in both are counted twice")
    return remarks[:5]
