"""What single packets say in the words of their protocols. The only place that knows scapy, and only inside functions.

Nothing here raises, whatever a packet holds: what cannot be read is None.
"""

from __future__ import annotations

from analysis.signatures import TCP, UDP

DHCP_PORTS, NTP_PORT, SLURM_PORTS = (67, 68), 123, (6817, 6818)
"""DHCP's second port is the client's: a broadcast answer goes there, and no question that it belongs to."""

SAMPLED = ((UDP, DHCP_PORTS[0], 2048), (UDP, NTP_PORT, 512), *((TCP, port, 64) for port in SLURM_PORTS))
"""(protocol, port, packets worth keeping) of the packets that this room can read; the first ones are kept. The core
counts all of DHCP by the server's port."""

READ_AT_MOST = 24
"""Packets of a kind that are read in full: a packet costs half a millisecond, and more of them say nothing new."""


def warm() -> None:
    """Import what reading packets needs, 0.15 s of it; for a thread beside the one that waits for the native core."""
    from scapy.config import conf

    # Nothing is sent from here: this machine's routes are not wanted.
    conf.route_autoload = conf.route6_autoload = False
    import scapy.layers.dhcp
    import scapy.layers.ntp  # noqa: F401
