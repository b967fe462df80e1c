"""Port scans on a simulated wire, as nmap makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tests.captures import packets as p
from tests.captures.wire import OFFER, Connection, Station, Wire

Answer = Literal["none", "reset"]
"""What closed ports do: firewalls drop, others refuse (RFC 9293, section 3.5.2)."""
USUAL = (*range(1, 1024), 1433, 2049, 3260, 3306, 5432, 6817, 6818, 6819, 8080, 8649, 9090, 9100, 15001, 27000, 27017)


def scan(
    wire: Wire,
    at_s: float,
    source: Station,
    target: Station,
    *,
    ports: Sequence[int] = USUAL,
    open_ports: Sequence[int] = (),
    answer: Answer = "none",
    every_s: float = 0.01,
) -> float:
    """Send a SYN to each port, from one port; return the time after it.

    Ports that do not answer are tried twice; a connection to an open one is reset.
    """
    own = source.port()
    for port in ports:
        one = Connection(wire, "scan", source, target, own, port, midstream=False)
        one.flow.syns += 1
        one.segment(at_s, "c", p.SYN, options=OFFER)
        if port in open_ports:
            one.segment(at_s + 1e-4, "s", p.SYN | p.ACK, options=OFFER)
            one.segment(at_s + 2e-4, "c", p.RST, options=b"")
        elif answer == "reset":
            one.segment(at_s + 1e-4, "s", p.RST | p.ACK, options=b"")
        else:
            one.seq["c"] -= 1  # a retransmission
            one.segment(at_s + 1, "c", p.SYN, options=OFFER)
        at_s += every_s
    return at_s


def scan_udp(
    wire: Wire, at_s: float, source: Station, target: Station, *, ports: Sequence[int] = USUAL, every_s: float = 0.01
) -> float:
    """An empty datagram to each port, from one port; return the time after it."""
    own = source.port()
    for port in ports:
        wire.exchange(at_s, "scan", source, target, (own, port), [(0, "c", b""), (1, "c", b"")])
        at_s += every_s
    return at_s
