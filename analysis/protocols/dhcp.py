"""Decode DHCP: servers, leases and renewals (RFC 2131, RFC 2132)."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

DISCOVER, OFFER, REQUEST, DECLINE, ACK, NAK, RELEASE, INFORM = range(1, 9)
FOREVER = 0xFFFFFFFF
"""An infinite lease (RFC 2131, section 3.3)."""
BOOTREPLY = 2
COOKIE = bytes((99, 130, 83, 99))
"""Magic cookie before the options (RFC 2131, section 3)."""
LEASE, KIND, SERVER, RENEWAL, PAD, END = 51, 53, 54, 58, 0, 255
"""Options (RFC 2132)."""
CLASS, ARCHITECTURE, IPXE = 60, 93, 175
"""Options of clients: vendor class (RFC 2132, 9.13), architecture of firmware (RFC 4578, 2.1), iPXE's own (IANA)."""
FIRMWARE = (b"PXEClient", b"HTTPClient", b"iPXE", b"gPXE", b"Etherboot", b"U-Boot", b"U-boot")
"""Vendor classes of firmware and boot loaders."""
LENGTHS = {LEASE: 4, KIND: 1, SERVER: 4, RENEWAL: 4}
"""Bytes of the options that are read (RFC 2132, sections 9.2, 9.6, 9.7, 9.11)."""


@dataclass(frozen=True)
class Dhcp:
    """A message.

    Attributes:
        kind: DISCOVER to INFORM (option 53).
        server: option 54, the server identifier; "" without one.
        lease_s, renew_s: options 51 and 58 in seconds; 0 if missing, infinite for FOREVER. renew_s defaults to half
            the lease (RFC 2131, section 4.4.5).
    """

    kind: int
    server: str = ""
    lease_s: float = 0.0
    renew_s: float = 0.0


def is_reply(payload: bytes) -> bool:
    """Return whether a server (or a relay) sent it."""
    return payload[:1] == bytes((BOOTREPLY,))


def is_relayed(payload: bytes) -> bool:
    """Return whether a relay forwarded it: it writes its address into giaddr and counts hops (RFC 1542, 4.1.1)."""
    return any(payload[24:28]) or any(payload[3:4])


def has_address(payload: bytes) -> bool:
    """Return whether the client has an address already, in ciaddr (RFC 2131, table 5)."""
    return any(payload[12:16])


def is_cut(payload: bytes) -> bool:
    """Return whether a message was cut between ciaddr and its type, the first of its options in practice."""
    return 16 <= len(payload) < 243


def is_renewal(payload: bytes) -> bool:
    """Return whether a client that has an address asks its server to keep it; if the type was cut, by ciaddr alone.

    Renewals go to the server directly (RFC 2131, section 4.4.5): only clients without an address need a relay.
    """
    kind = REQUEST if is_cut(payload) else terms(payload)[0]
    return kind == REQUEST and has_address(payload) and not is_reply(payload) and not is_relayed(payload)


def is_renewed(payload: bytes) -> bool:
    """Return whether a server grants a renewal: it repeats the address that the client has (RFC 2131, table 3)."""
    return is_reply(payload) and has_address(payload) and payload[12:16] == payload[16:20] and terms(payload)[0] == ACK


def client(payload: bytes) -> bytes:
    """Return the link address of the client (chaddr)."""
    return payload[28:44]


def is_firmware(payload: bytes) -> bool:
    """Return whether firmware or a boot loader sent it, not a node's operating system."""
    options, _ = _options(payload)
    return bool(options.keys() & {ARCHITECTURE, IPXE}) or options.get(CLASS, b"").startswith(FIRMWARE)


def terms(payload: bytes) -> tuple[int, bytes, bytes]:
    """Return kind, lease and T1 as raw options: of messages with equal terms only one needs decoding.

    (0, b"", b"") if it is not a DHCP message, or cut before its options.
    """
    options, _ = _options(payload)
    return int.from_bytes(options.get(KIND, b"")[:1]), options.get(LEASE, b""), options.get(RENEWAL, b"")


def _options(payload: bytes) -> tuple[dict[int, bytes], set[int]]:
    """Return the options that are complete, the first of each number, and the numbers of repeated ones."""
    found: dict[int, bytes] = {}
    repeated: set[int] = set()
    at = 240 if payload[236:240] == COOKIE else len(payload)
    while at + 1 < len(payload) and payload[at] != END:
        number, length = payload[at], payload[at + 1]
        if number == PAD:
            at += 1
            continue
        if at + 2 + length <= len(payload):
            if number in found:
                repeated.add(number)
            found.setdefault(number, payload[at + 2 : at + 2 + length])
        at += 2 + length
    return found, repeated


def read_dhcp(payload: bytes) -> Dhcp | None:
    """Decode the payload of a datagram; None if it is not a DHCP message.

    scapy decodes the messages in which an option is repeated or has an unusual length: importing it takes longer than
    all other work on a small capture.
    """
    options, repeated = _options(payload)
    unusual = [one for one, length in LENGTHS.items() if one in options and len(options[one]) != length]
    if unusual or repeated & LENGTHS.keys():
        return _read_by_scapy(payload)
    kind = int.from_bytes(options.get(KIND, b""))
    if not DISCOVER <= kind <= INFORM:
        return None
    lease, renew = (_seconds(int.from_bytes(options.get(one, b""))) for one in (LEASE, RENEWAL))
    return Dhcp(
        kind=kind,
        server=socket.inet_ntoa(options[SERVER]) if SERVER in options else "",
        lease_s=lease,
        renew_s=renew or lease * 0.5,
    )


def _read_by_scapy(payload: bytes) -> Dhcp | None:
    import logging

    logging.getLogger("scapy").setLevel(logging.ERROR)  # it warns about broken packets on standard error
    try:
        from scapy.config import conf

        # Nothing is sent: the routes of this machine are not needed.
        conf.route_autoload = conf.route6_autoload = False
        from scapy.layers.dhcp import BOOTP, DHCP

        packet = BOOTP(payload)
        if DHCP not in packet:
            return None
        options = {one[0]: one[1] for one in packet[DHCP].options if isinstance(one, tuple) and len(one) > 1}
        kind = options.get("message-type")
        if not isinstance(kind, int) or not DISCOVER <= kind <= INFORM:
            return None
        lease = _seconds(options.get("lease_time"))
        return Dhcp(
            kind=kind,
            server=str(options.get("server_id", "")),
            lease_s=lease,
            renew_s=_seconds(options.get("renewal_time")) or lease * 0.5,
        )
    except Exception:
        # scapy raises arbitrary exceptions on bytes that are not DHCP.
        return None


def _seconds(value: object) -> float:
    if not isinstance(value, int):
        return 0.0
    return math.inf if value >= FOREVER else float(value)
