"""The native core: reads captures at the speed of the disk. ``analysis/core/*.c``; `make core` builds it."""

import builtins
from collections.abc import Sequence
from typing import Any

ABI: int
"""Rises with every change of this file; reading.py refuses a stale build."""

def first_time(data: bytes, zstd: bool = False) -> int:
    """Nanoseconds of the first packet of a capture that begins with these bytes; -1 where none can be told."""

def has_zstd() -> bool:
    """Whether this machine has a libzstd, so that `Counter.read` can take what it compressed."""

class Counter:
    """Counts what captures hold. Files are fed one after the other; memory is bounded whatever they hold."""

    packets: int
    bytes: int
    read_bytes: int
    """Rise while ``read`` runs in another thread."""

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
            samples: (protocol, port, how many packets to keep).
            node: count only what is to or from this address: 4 bytes IPv4, 6 a MAC, 16 IPv6.
            keep_flows: keep so many flows one by one, for `flows`.
        Raises:
            ValueError: a bound is broken.
        """
    def read(self, descriptor: int, prefix: builtins.bytes = b"", zstd: bool = False) -> None:
        """Read one capture file: ``prefix``, then the descriptor up to its end. Releases the GIL.

        Args:
            zstd: decompress what is read.

        Raises:
            ValueError: this is no capture.
            OSError: from read(2).
        """
    def stop(self) -> None:
        """Make ``read`` in another thread return at the next block."""
    def finish(self) -> None:
        """All files are read: fold what is still open."""
    def hosts(
        self,
    ) -> list[tuple[builtins.bytes, tuple[builtins.bytes, ...], builtins.bytes, builtins.bytes, int, int, bool]]:
        """(address, macs, via, claimed, sent, received, outgoing) by index."""
    def rows(self, roles: builtins.bytes) -> list[tuple[Any, ...]]:
        """Counts grouped by the roles of the hosts, one byte each, in the order of observed.Row's fields."""
    def links(self) -> list[tuple[int, int, int, int, int, int]]:
        """(client, server, protocol, port, packets, bytes) of every pair of hosts."""
    def samples(self) -> list[tuple[int, int, bool, int, int, int, builtins.bytes]]:
        """In the order of observed.Sample's fields."""
    def boots(self) -> list[tuple[builtins.bytes, int, int]]: ...
    def problems(self) -> list[tuple[int, int, str]]:
        """(file, counted from 0 in the order read, byte offset, what) of the first hundred."""
    def flows(self) -> list[tuple[builtins.bytes, int, builtins.bytes, int, int, int, int, int, int]]:
        """(client, port, server, port, protocol, packets and bytes to the server, packets and bytes back)."""
    def files(self) -> list[tuple[int, int, int]]:
        """(first, last, packets) of each file that was read, in that order; times in nanoseconds."""
    def totals(self) -> dict[str, Any]:
        """packets, bytes, start_ns, end_ns, truncated, other {what: (packets, bytes)}, skipped {reason: count},
        beyond (packets, bytes), bin_ns,
        cut (packets of which not all was captured), cut_at (the most bytes of such a one), gap_ns (between files)."""
