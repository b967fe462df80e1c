"""Decoders of single packets. The only package that uses scapy, imported only inside a function.

Nothing here raises, whatever a packet holds: the result for an invalid packet is None.
"""

from __future__ import annotations

from analysis.signatures import TCP, UDP

DHCP_PORTS, NTP_PORT, SLURM_PORTS = (67, 68), 123, (6817, 6818)
"""DHCP's second port is the client's: broadcast answers go there."""

SAMPLED = ((UDP, DHCP_PORTS[0], 2048), (UDP, NTP_PORT, 512), *((TCP, port, 64) for port in SLURM_PORTS))
"""(protocol, port, maximum samples) of the packets that are decoded here; the first ones are kept. The core counts all
of DHCP under the server's port."""

READ_AT_MOST = 24
"""Packets of a kind that are decoded in full: scapy takes half a millisecond for one, and more add no information."""
