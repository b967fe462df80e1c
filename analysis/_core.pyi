"""The native core: reads captures at disk speed. Source: ``analysis/core/*.c``; `make core` builds it."""

import builtins
from collections.abc import Sequence
from typing import Any

ABI: int
"""Incremented with every change of this file; sources.py refuses a stale build."""

def first_time(data: bytes, zstd: bool = False) -> int:
    """Return the time in ns of the first packet of a capture that begins with these bytes; -1 if unknown."""

def has_zstd() -> bool:
    """Return whether this machine has libzstd, so that `Counter.read` can decompress zstd."""

class Counter:
    """Counts the traffic of captures. Files are read one after the other; memory is bounded whatever they hold."""

    packets: int
    bytes: int
    read_bytes: int
    """These grow while ``read`` runs in another thread."""

    def __init__(
        self,
        ports: Sequence[tuple[int, int]],
        first: Sequence[tuple[int, int, int, builtins.bytes, builtins.bytes]],
        samples: Sequence[tuple[int, int, int]],
        node: builtins.bytes = b"",
        max_flows: int = 131072,
        max_pairs: int = 65536,
        keep_flows: int = 0,
    ) -> None:
        """
        Args:
            ports: (protocol, port) where services listen.
            first: (protocol, port, offset, low, high), at most 32 bytes each: a Row's kind is 1 + the index here.
            samples: (protocol, port, maximum packets to keep).
            node: count only packets to or from this address: 4 bytes IPv4, 6 a MAC, 16 IPv6.
            keep_flows: keep this many single flows, for `flows`.
        Raises:
            ValueError: an argument is out of range.
        """
    def read(self, descriptor: int, prefix: builtins.bytes = b"", zstd: bool = False) -> None:
        """Read one capture file: ``prefix``, then the descriptor up to its end. Releases the GIL.

        Args:
            zstd: decompress the data.

        Raises:
            ValueError: it is not a capture.
            OSError: from read(2).
        """
    def stop(self) -> None:
        """Make ``read`` in another thread return at the next block."""
    def finish(self) -> None:
        """Finish after the last file: add the flows that are still open to their pairs."""
    def hosts(
        self,
    ) -> list[tuple[builtins.bytes, tuple[builtins.bytes, ...], builtins.bytes, builtins.bytes, int, int, bool]]:
        """Return (address, macs, via, claimed, sent, received, outgoing) by index."""
    def rows(self, roles: builtins.bytes, scanned: builtins.bytes = b"") -> list[tuple[Any, ...]]:
        """Return counts grouped by the roles of the hosts, one byte each, in the order of observed.Row's fields.

        Args:
            scanned: a byte for each pair of `links`; those that are not 0 are rows of kind 255 and port 0.
        """
    def links(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return (client, server, protocol, port, packets, bytes) of every pair of hosts."""
    def attempts(self) -> list[tuple[int, int, int, int, int, int, int, int, int, int, int]]:
        """Return the pairs that a scan could consist of, in the order of scans.Attempt's fields."""
    def samples(self) -> list[tuple[int, int, bool, int, int, int, builtins.bytes]]:
        """Return the samples, in the order of observed.Sample's fields."""
    def boots(self) -> list[tuple[builtins.bytes, int, int]]: ...
    def problems(self) -> list[tuple[int, int, str]]:
        """Return (index of the file in the order read, byte offset, what) of the first hundred."""
    def flows(self) -> list[tuple[builtins.bytes, int, builtins.bytes, int, int, int, int, int, int]]:
        """Return (client, port, server, port, protocol, packets and bytes to the server, packets and bytes back)."""
    def files(self) -> list[tuple[int, int, int]]:
        """Return (first, last, packets) of each file, in the order read; times in nanoseconds."""
    def totals(self) -> dict[str, Any]:
        """Return packets, bytes, start_ns, end_ns, truncated, other {what: (packets, bytes)}, skipped {reason: count},
        beyond (packets, bytes), bin_ns, cut (packets captured only in part), cut_at (their maximum captured bytes),
        gap_ns (total of the gaps in and between files), gaps [(from, to)] (the longest 64, in ns, in no order)."""
