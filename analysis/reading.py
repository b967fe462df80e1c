"""Capture files, standard input or an interface -> what was counted in them.

The bytes never come through Python: the native core reads a descriptor in a thread of its own while this one looks on.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from analysis.addresses import packed
from analysis.errors import CaptureError
from analysis.observed import Boot, Host, Link, Observation, Problem, Role, Row, Sample
from analysis.protocols import SAMPLED
from analysis.signatures import Signature
from analysis.sources import LAST_S, Source, core, in_order, name_of, opened, size_of


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
    reading = Reading(tuple(in_order(files)), make_counter(signatures, node))
    sizes = [size_of(file) for file in reading.files]
    total, before = sum(sizes) if all(sizes) else 0, 0
    failures = []
    for file, size in zip(reading.files, sizes, strict=True):
        if reading.interrupted:
            reading.remarks.append(f"{name_of(file)} was not read any more: Ctrl-C came before")
            continue
        with opened(file) as source:
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
    native = core()
    ports = sorted({port for signature in signatures for port in signature.ports if port[1]})
    firsts = [first for signature in signatures for first in signature.first]
    told = [(one.protocol, one.port, one.offset, one.low, one.high) for one in firsts]
    return native.Counter(ports, told, SAMPLED, node=_node(node), **bounds)


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
