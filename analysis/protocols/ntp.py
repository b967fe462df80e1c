"""Decode NTP: the poll intervals of nodes (RFC 5905, figure 8)."""

from __future__ import annotations

from dataclasses import dataclass

CLIENT, SERVER = 3, 4
REACH = 8
"""Unanswered polls until a client marks its server unreachable (RFC 5905, section 9.2: the reach register)."""
MIN_POLL, MAX_POLL = 3, 17
"""Exponents of 2 s that clients use (chrony.conf(5) and RFC 5905 end at 17; 3 is ntpd's lowest)."""


@dataclass(frozen=True)
class Ntp:
    """A packet. ``poll_s``: seconds between two polls."""

    mode: int
    poll_s: float


def read_ntp(payload: bytes) -> Ntp | None:
    """Decode the payload of a datagram; None if it is neither a client's nor a server's packet."""
    if len(payload) < 48:
        return None
    mode, poll = payload[0] & 7, payload[2]
    return Ntp(mode, float(2**poll)) if mode in (CLIENT, SERVER) and MIN_POLL <= poll <= MAX_POLL else None
