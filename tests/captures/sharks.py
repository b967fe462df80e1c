"""Counts of tshark, in a form for comparison with other counts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.signatures import SCTP, TCP, UDP
from tests.captures import packets as p

End = tuple[bytes, int]
Way = tuple[int, End, End]
"""Protocol, sender, receiver: one direction of a flow."""


@dataclass
class Counted:
    """Packets and bytes of a capture.

    Attributes:
        ways: (packets, bytes) of each direction of each flow of TCP, UDP and SCTP.
        plain: of other protocols above IP, by (protocol, sender, receiver).
        connections: flows of TCP, UDP and SCTP, as separated by the program.
        tables: frames of each pair of endpoints, by protocol, from ``tshark -z conv``.
        later: packets that are later fragments, by protocol and endpoints; tshark's own tables omit them.
    """

    packets: int = 0
    bytes: int = 0
    ways: dict[Way, tuple[int, int]] = field(default_factory=dict)
    plain: dict[Way, tuple[int, int]] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    tables: dict[str, dict[frozenset[End], int]] = field(default_factory=dict)
    later: dict[tuple[int, frozenset[End]], int] = field(default_factory=dict)

    def add(self, way: Way, packets: int, size: int) -> None:
        """Add counts of one direction."""
        counts = self.ways if way[0] in (TCP, UDP, SCTP) else self.plain
        before = counts.get(way, (0, 0))
        if packets:
            counts[way] = before[0] + packets, before[1] + size


def tshark(tool: str, file: Path, *argv: str) -> str:
    """Run tshark without name resolution and without reassembly; return its output."""
    plain = [
        *("-o", "ip.defragment:FALSE", "-o", "ipv6.defragment:FALSE", "-o", "tcp.desegment_tcp_streams:FALSE"),
        # Heuristic dissectors may mistake a payload for a tunnel.
        *("-o", "udp.try_heuristic_first:FALSE", "-o", "gui.max_tree_items:100000000"),
    ]
    done = subprocess.run([tool, "-n", "-r", file, *plain, *argv], capture_output=True, timeout=600)
    # After a truncated capture the status is 2.
    assert done.returncode in (0, 2), done.stderr.decode(errors="replace")
    return done.stdout.decode(errors="replace")


FIELDS = (
    *(
        "frame.len",
        "frame.protocols",
        "ip.src",
        "ip.dst",
        "ipv6.src",
        "ipv6.dst",
        "ip.proto",
        "ip.frag_offset",
        "ip.id",
    ),
    *("ipv6.fraghdr.offset", "ipv6.fraghdr.ident", "tcp.srcport", "tcp.dstport", "udp.srcport", "udp.dstport"),
    *("sctp.srcport", "sctp.dstport", "ipv6.nxt", "frame.encap_type", "tcp.stream"),
)
BELOW = {"ipv6.hopopts", "ipv6.routing", "ipv6.fraghdr", "ipv6.dstopts", "ah", "mipv6", "shim6", "hip"}
"""Headers allowed between IPv6 and the transport."""
TRANSPORTS = {"tcp": TCP, "udp": UDP, "sctp": SCTP}
NUMBERS = {**TRANSPORTS, "icmp": p.ICMP, "icmpv6": p.ICMPV6, "igmp": p.IGMP, "gre": p.GRE}


def by_tshark(tool: str, file: Path) -> Counted:
    """Count with tshark, packet by packet: the outermost IP header, and the transport directly above it.

    Later fragments have no ports; they are counted with the flow of the datagram's first fragment.
    """
    fields = [word for name in FIELDS for word in ("-e", name)]
    separators = ("-E", "separator=|", "-E", "occurrence=f", "-z", "conv,tcp", "-z", "conv,udp")
    counted = Counted()
    firsts: dict[tuple[Any, ...], Way] = {}
    streams, table = set(), ""
    for line in tshark(tool, file, "-T", "fields", *separators, *fields).splitlines():
        if "|" not in line or table:
            columns = line.split()
            if columns[1:] == ["Conversations"]:
                table = columns[0].lower()
                counted.tables[table] = {}
            elif len(columns) > 8 and columns[1] == "<->":
                _conversation(columns, counted.tables, table)
            continue
        one = dict(zip(FIELDS, line.split("|"), strict=True))
        if not one["frame.encap_type"]:
            continue  # a custom block of pcapng: tshark numbers it, but it is not a packet
        size = int(one["frame.len"])
        counted.packets += 1
        counted.bytes += size
        streams.add(one["tcp.stream"])
        if way := _way(one, firsts):
            counted.add(way, 1, size)
            if int(one["ip.frag_offset"] or one["ipv6.fraghdr.offset"] or 0):
                both = (way[0], frozenset(way[1:]))
                counted.later[both] = counted.later.get(both, 0) + 1
    counted.connections[TCP] = len(streams - {""})
    return counted


def _way(one: Mapping[str, str], firsts: dict[tuple[Any, ...], Way]) -> Way | None:
    """Return the flow and direction of a packet; None without an IP header."""
    layers = one["frame.protocols"].split(":")
    outer = next((layer for layer in layers if layer in ("ip", "ipv6")), None)
    if not outer or not (one[f"{outer}.src"] and one[f"{outer}.dst"]):
        return None
    above = next((layer for layer in layers[layers.index(outer) + 1 :] if layer not in BELOW), "")
    sender, receiver = (p.ip_bytes(one[f"{outer}.{end}"]) for end in ("src", "dst"))
    offset, ident = (
        (one["ip.frag_offset"], one["ip.id"])
        if outer == "ip"
        else (one["ipv6.fraghdr.offset"], one["ipv6.fraghdr.ident"])
    )
    datagram = (sender, receiver, ident)
    if int(offset or 0):
        return firsts.get(datagram)
    ports = (0, 0)
    if above in TRANSPORTS:
        ports = (int(one[f"{above}.srcport"] or 0), int(one[f"{above}.dstport"] or 0))
    number = NUMBERS.get(above) or int(one["ip.proto"] if outer == "ip" else one["ipv6.nxt"] or 0)
    way = (number, (sender, ports[0]), (receiver, ports[1]))
    if ident:
        firsts[datagram] = way
    return way


def _conversation(columns: list[str], tables: dict[str, dict[frozenset[End], int]], table: str) -> None:
    """Add a line of ``tshark -z conv``; a reopened connection is two lines there and one entry here."""
    ends = frozenset(_end(columns[place]) for place in (0, 2))
    # "frames bytes unit" for each direction, then for both.
    frames = tables.setdefault(table, {})
    frames[ends] = frames.get(ends, 0) + int(columns[3]) + int(columns[6])


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return p.ip_bytes(address), int(port)
