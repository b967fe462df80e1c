"""Build frames, byte by byte. Checksums above IPv4's header are 0: they are never checked."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from ipaddress import ip_address

# Ethertypes.
IPV4, ARP, VLAN, IPV6, QINQ, LLDP = 0x0800, 0x0806, 0x8100, 0x86DD, 0x88A8, 0x88CC
PPPOE_DISCOVERY, PPPOE_SESSION = 0x8863, 0x8864
# IP protocols.
ICMP, IGMP, TCP, UDP, GRE, ICMPV6, SCTP = 1, 2, 6, 17, 47, 58, 132
# IPv6 extension headers.
HOP, ROUTING, FRAGMENT, AUTH, OPTIONS = 0, 43, 44, 51, 60

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

BROADCAST = "ff:ff:ff:ff:ff:ff"
SHORTEST = 60
"""Bytes of the shortest Ethernet frame, without its checksum; the sender's card pads shorter ones."""


@cache
def mac_bytes(mac: str) -> bytes:
    """Encode ``52:54:00:00:00:01``."""
    return bytes.fromhex(mac.replace(":", ""))


@cache
def ip_bytes(address: str) -> bytes:
    """Encode an IP address: 4 or 16 bytes."""
    return ip_address(address).packed


def ip_text(address: bytes) -> str:
    """Decode an IP address."""
    return str(ip_address(address))


# The link.


def ethernet(
    payload: bytes, kind: int = IPV4, *, src: str, dst: str, tags: Sequence[tuple[int, int]] = (), pad: bool = False
) -> bytes:
    """An Ethernet frame; ``tags`` are (VLAN or QINQ, number), the outer one first."""
    tagged = b"".join(struct.pack("!HH", *tag) for tag in tags)
    frame = mac_bytes(dst) + mac_bytes(src) + tagged + struct.pack("!H", kind) + payload
    return frame.ljust(SHORTEST, b"\0") if pad else frame


def llc(payload: bytes, *, src: str, dst: str, sap: int = 0x42) -> bytes:
    """An 802.3 frame: the length instead of Ethernet II's type (spanning tree by default)."""
    body = bytes((sap, sap, 3)) + payload
    frame = mac_bytes(dst) + mac_bytes(src) + struct.pack("!H", len(body)) + body
    return frame.ljust(SHORTEST, b"\0")


def sll(payload: bytes, kind: int = IPV4, *, src: str, sort: int = 0) -> bytes:
    """Linux cooked v1; ``sort``: 0 to us, 1 broadcast, 2 multicast, 3 others', 4 from us (LINKTYPE_LINUX_SLL)."""
    return struct.pack("!HHH8sH", sort, 1, 6, mac_bytes(src), kind) + payload


def sll2(payload: bytes, kind: int = IPV4, *, src: str, sort: int = 0, interface: int = 2) -> bytes:
    """Linux cooked v2 (LINKTYPE_LINUX_SLL2)."""
    return struct.pack("!HHIHBB8s", kind, 0, interface, 1, sort, 6, mac_bytes(src)) + payload


def null(payload: bytes, *, order: str = "<") -> bytes:
    """BSD loopback: the address family in the capturing host's byte order (LINKTYPE_NULL); ``>`` is LINKTYPE_LOOP."""
    return struct.pack(f"{order}I", 2 if payload[0] >> 4 == 4 else 30) + payload


# The network.


def _checksum(header: bytes) -> int:
    """RFC 1071."""
    total: int = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(
    payload: bytes,
    protocol: int,
    src: str,
    dst: str,
    *,
    ident: int = 0,
    options: bytes = b"",
    offset: int = 0,
    more: bool = False,
    ttl: int = 64,
) -> bytes:
    """An IPv4 packet; ``offset`` in bytes, a multiple of 8."""
    options = options.ljust(-(-len(options) // 4) * 4, b"\0")
    first, size = 0x45 + len(options) // 4, 20 + len(options) + len(payload)
    flags = (0x2000 if more else 0) | offset // 8
    start = struct.pack("!BBHHHBB", first, 0, size, ident, flags, ttl, protocol)
    end = ip_bytes(src) + ip_bytes(dst) + options
    return start + struct.pack("!H", _checksum(start + b"\0\0" + end)) + end + payload


def fragments(payload: bytes, protocol: int, src: str, dst: str, *, ident: int, size: int = 1480) -> list[bytes]:
    """A datagram in fragments of ``size`` bytes (a multiple of 8)."""
    return [
        ipv4(payload[at : at + size], protocol, src, dst, ident=ident, offset=at, more=at + size < len(payload))
        for at in range(0, len(payload), size)
    ]


def ipv6(payload: bytes, protocol: int, src: str, dst: str, *, extensions: Sequence[tuple[int, bytes]] = ()) -> bytes:
    """An IPv6 packet; ``extensions`` are (kind, what follows the two bytes of next header and length)."""
    body, following = payload, protocol
    for kind, data in reversed(extensions):
        body, following = extension(kind, data, following) + body, kind
    return struct.pack("!IHBB", 6 << 28, len(body), following, 64) + ip_bytes(src) + ip_bytes(dst) + body


def extension(kind: int, data: bytes, following: int) -> bytes:
    """One extension header (RFC 8200, 4; the authentication header counts in words: RFC 4302, 2.2)."""
    if kind == FRAGMENT:
        return struct.pack("!BB", following, 0) + data[:6].ljust(6, b"\0")
    if kind == AUTH:
        data = data.ljust(max(10, -(-(len(data) + 2) // 4) * 4 - 2), b"\0")
        return struct.pack("!BB", following, (len(data) + 2) // 4 - 2) + data
    # Zeroes are Pad1; PadN would be more usual.
    data = data.ljust(-(-(len(data) + 2) // 8) * 8 - 2, b"\0")
    return struct.pack("!BB", following, (len(data) + 2) // 8 - 1) + data


def fragments6(payload: bytes, protocol: int, src: str, dst: str, *, ident: int, size: int = 1440) -> list[bytes]:
    """A datagram over IPv6 in fragments of ``size`` bytes (a multiple of 8)."""
    made = []
    for at in range(0, len(payload), size):
        more = at + size < len(payload)
        header = struct.pack("!HI", at | more, ident)
        made.append(ipv6(payload[at : at + size], protocol, src, dst, extensions=[(FRAGMENT, header)]))
    return made


def ip(payload: bytes, protocol: int, src: str, dst: str) -> bytes:
    """IPv4 or IPv6, by the addresses."""
    return (ipv6 if ":" in src else ipv4)(payload, protocol, src, dst)


# The transport.


def tcp(
    payload: bytes, sport: int, dport: int, flags: int, *, seq: int = 0, ack: int = 0, options: bytes = b""
) -> bytes:
    """A TCP segment."""
    options = options.ljust(-(-len(options) // 4) * 4, b"\1")
    words = 5 + len(options) // 4
    return struct.pack("!HHIIBBHHH", sport, dport, seq, ack, words << 4, flags, 64240, 0, 0) + options + payload


def udp(payload: bytes, sport: int, dport: int) -> bytes:
    """A UDP datagram."""
    return struct.pack("!HHHH", sport, dport, 8 + len(payload), 0) + payload


def sctp(payload: bytes, sport: int, dport: int, *, tag: int = 1) -> bytes:
    """An SCTP packet with one DATA chunk (RFC 9260, 3.3.1)."""
    chunk = struct.pack("!BBHIHHI", 0, 3, 16 + len(payload), 1, 0, 0, 0) + payload
    return struct.pack("!HHII", sport, dport, tag, 0) + chunk.ljust(-(-len(chunk) // 4) * 4, b"\0")


def icmp(kind: int, code: int = 0, body: bytes = b"") -> bytes:
    """An ICMP message; ``body`` follows the four bytes of type, code and checksum."""
    start = struct.pack("!BBH", kind, code, 0)
    return struct.pack("!BBH", kind, code, _checksum((start + body).ljust(-(-(4 + len(body)) // 2) * 2, b"\0"))) + body


def ping(ident: int, number: int, *, answer: bool = False, size: int = 56) -> bytes:
    """An echo request or reply."""
    return icmp(0 if answer else 8, 0, struct.pack("!HH", ident, number) + bytes(size))


def arp(
    sender_mac: str, sender: str, target: str, *, target_mac: str = "00:00:00:00:00:00", answer: bool = False
) -> bytes:
    """An ARP request or reply (RFC 826); a request for the own address is an announcement."""
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, 2 if answer else 1)
    return head + mac_bytes(sender_mac) + ip_bytes(sender) + mac_bytes(target_mac) + ip_bytes(target)


def lldp(chassis: str, port: str, ttl_s: int = 120) -> bytes:
    """An LLDP announcement (IEEE 802.1AB): chassis, port, time to live, end."""
    return b"".join(
        struct.pack("!H", kind << 9 | len(value)) + value
        for kind, value in (
            (1, b"\4" + mac_bytes(chassis)),
            (2, b"\5" + port.encode()),
            (3, struct.pack("!H", ttl_s)),
            (0, b""),
        )
    )


def pppoe(payload: bytes, *, code: int = 0, session: int = 1) -> bytes:
    """PPP over Ethernet: IPv4 in a session, or a discovery packet by its code (RFC 2516, 4)."""
    body = payload if code else b"\0\x21" + payload
    return struct.pack("!BBHH", 0x11, code, session, len(body)) + body


# Application protocols.


def bootp(
    message: int,
    *,
    mac: str,
    xid: int,
    options: Iterable[tuple[int, bytes]] = (),
    yours: str = "0.0.0.0",
    own: str = "0.0.0.0",
    relay: str = "0.0.0.0",
) -> bytes:
    """A DHCP message (RFC 2131, 2); ``message`` is option 53: 1 discover, 2 offer, 3 request, 5 ack.

    Args:
        own: the client's address (ciaddr), which it has already.
        relay: the address of the relay that forwards it (giaddr).
    """
    op = 2 if message in (2, 5, 6) else 1
    head = struct.pack("!BBBBIHH", op, 1, 6, relay != "0.0.0.0", xid, 0, 0x8000)
    addresses = ip_bytes(own) + ip_bytes(yours) + bytes(4) + ip_bytes(relay)
    coded = b"".join(bytes((code, len(value))) + value for code, value in [(53, bytes((message,))), *options])
    body = head + addresses + mac_bytes(mac).ljust(16, b"\0") + bytes(64 + 128) + b"\x63\x82\x53\x63" + coded + b"\xff"
    return body.ljust(300, b"\0")


def ntp(mode: int, *, stratum: int, poll: int, sent_ns: int, received_ns: int = 0, origin: bytes = bytes(8)) -> bytes:
    """An NTPv4 packet (RFC 5905, 7.3); ``poll`` is the power of two of seconds."""
    head = struct.pack("!BBbb", 4 << 3 | mode, stratum, poll, -23)
    root = struct.pack("!II4s", 0x0200, 0x0400, b"\xc6\x33\x64\x07")
    return (
        head + root + ntp_time(sent_ns - 10**9 if mode == 4 else 0) + origin + ntp_time(received_ns) + ntp_time(sent_ns)
    )


def ntp_time(time_ns: int) -> bytes:
    """Seconds since 1900 and their fraction; 0 is "unknown"."""
    if not time_ns:
        return bytes(8)
    seconds, rest = divmod(time_ns, 10**9)
    return struct.pack("!II", seconds + 2208988800 & 0xFFFFFFFF, (rest << 32) // 10**9)


def slurm(kind: int, body: bytes, *, version: int = 0x2600, sender: str = "0.0.0.0", sender_port: int = 0) -> bytes:
    """A Slurm message: length, header, MUNGE credential, body.

    The layout is that of ``pack_header`` in Slurm's src/common/slurm_protocol_pack.c; 0x2600 is Slurm 22.05.
    """
    head = struct.pack("!HHHHIHH", version, 0, 0, kind, len(body), 0, 0)
    head += struct.pack("!H", 2) + ip_bytes(sender) + struct.pack("!H", sender_port)
    credential = b"MUNGE:AwQFAACkQ2h1YmJ5IGJ1bm5pZXMgc2xlZXA=:"
    auth = struct.pack("!II", 101, len(credential) + 1) + credential + b"\0"
    return struct.pack("!I", len(head + auth + body)) + head + auth + body


def rpc_call(xid: int, procedure: int, body: bytes = b"", *, program: int = 100003, version: int = 3) -> bytes:
    """An ONC RPC call over TCP with its record mark (RFC 5531, 9 and 11); NFS is program 100003."""
    call = struct.pack("!IIIIII", xid, 0, 2, program, version, procedure) + struct.pack("!IIII", 0, 0, 0, 0) + body
    return struct.pack("!I", 0x80000000 | len(call)) + call


def rpc_reply(xid: int, body: bytes = b"") -> bytes:
    """An RPC reply: accepted, success."""
    reply = struct.pack("!IIIIII", xid, 1, 0, 0, 0, 0) + body
    return struct.pack("!I", 0x80000000 | len(reply)) + reply
