"""Small captures of every kind, by name: contents and file format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import Plan, simulate
from tests.captures.files import Packet

A, B, C = "10.1.1.1", "10.1.0.1", "198.51.100.7"
A6, B6 = "fd00::1", "fd00::2"
MAC_A, MAC_B = "52:54:00:01:00:00", "52:54:00:00:00:01"
START_NS = 1_700_000_000_123_456_789

Wrap = Callable[[bytes, int], bytes]


def in_ethernet(payload: bytes, kind: int = p.IPV4) -> bytes:
    """From A to B."""
    return p.ethernet(payload, kind, src=MAC_A, dst=MAC_B)


def tagged(*tags: tuple[int, int]) -> Wrap:
    """Frames with VLAN tags."""
    return lambda payload, kind: p.ethernet(payload, kind, src=MAC_A, dst=MAC_B, tags=tags)


def spaced(frames: list[bytes], step_ns: int = 1_000_500_000) -> list[Packet]:
    """Frames with times."""
    return [(START_NS + number * step_ns, frame) for number, frame in enumerate(frames)]


def conversation(wrap: Wrap, source: str = A, target: str = B) -> list[bytes]:
    """A short TCP connection, a datagram there and back, a ping."""
    kind = p.IPV6 if ":" in source else p.IPV4
    there = [
        p.ip(p.tcp(b"", 40000, 6817, p.SYN), p.TCP, source, target),
        p.ip(p.tcp(b"hello", 40000, 6817, p.ACK | p.PSH, seq=1), p.TCP, source, target),
        p.ip(p.udp(b"<30>log", 40001, 514), p.UDP, source, target),
    ]
    back = [
        p.ip(p.tcp(b"", 6817, 40000, p.SYN | p.ACK), p.TCP, target, source),
        p.ip(p.tcp(b"x" * 300, 6817, 40000, p.ACK), p.TCP, target, source),
        p.ip(p.udp(b"y" * 48, 123, 40002), p.UDP, target, source),
    ]
    return [wrap(packet, kind) for pair in zip(there, back, strict=True) for packet in pair]


def odd_headers() -> list[bytes]:
    """IPv4 options, IPv6 extension headers of all kinds, SCTP, ICMP, IGMP, frames without IP."""
    http = p.tcp(b"GET / HTTP/1.1\r\n\r\n", 40010, 80, p.ACK | p.PSH, options=bytes((8, 10)) + bytes(8))
    request = p.udp(p.ntp(3, stratum=3, poll=6, sent_ns=START_NS), 40011, 123)
    six = [
        [(p.HOP, bytes(6))],
        [(p.OPTIONS, bytes(14)), (p.ROUTING, bytes((0, 0)) + bytes(4))],
        [(p.AUTH, bytes(10))],
        [(p.HOP, bytes(6)), (p.AUTH, bytes(22)), (p.OPTIONS, bytes(6))],
    ]
    return [
        in_ethernet(p.ipv4(http, p.TCP, A, B, options=bytes((0x94, 4, 0, 0)))),
        in_ethernet(p.ipv4(request, p.UDP, A, B, options=bytes((7, 39, 4)) + bytes(36))),
        *(in_ethernet(p.ipv6(http, p.TCP, A6, B6, extensions=chain), p.IPV6) for chain in six),
        *(in_ethernet(p.ipv6(request, p.UDP, A6, B6, extensions=chain), p.IPV6) for chain in six),
        in_ethernet(p.ipv4(p.sctp(b"data", 40012, 2905), p.SCTP, A, B)),
        in_ethernet(p.ipv4(p.ping(7, 1), p.ICMP, A, B)),
        in_ethernet(p.ipv4(p.ping(7, 1, answer=True), p.ICMP, B, A)),
        # Port unreachable, which quotes a packet: it does not belong to that packet's flow.
        in_ethernet(p.ipv4(p.icmp(3, 3, bytes(4) + p.ipv4(request, p.UDP, B, A)), p.ICMP, A, B)),
        in_ethernet(p.ipv6(p.icmp(135, 0, bytes(4) + p.ip_bytes(B6)), p.ICMPV6, A6, B6), p.IPV6),
        in_ethernet(p.ipv4(b"\x16\0\0\0" + bytes(4), p.IGMP, A, "224.0.0.22", options=b"\x94\4\0\0")),
        in_ethernet(p.ipv4(bytes(20), 89, A, B)),
        in_ethernet(p.arp(MAC_A, A, B), p.ARP),
        in_ethernet(p.lldp(MAC_A, "swp1"), p.LLDP),
        in_ethernet(b"\1" + bytes(45), 0x88B5),
        p.llc(bytes(35), src=MAC_A, dst="01:80:c2:00:00:00"),
    ]


def tunnels() -> list[bytes]:
    """Packets inside others: IP in IP (RFC 2003), GRE (RFC 2784)."""
    inner = p.ipv4(p.tcp(b"inside", 40030, 80, p.ACK), p.TCP, "172.16.0.1", "172.16.0.2")
    return [
        in_ethernet(p.ipv4(inner, 4, A, B)),
        in_ethernet(p.ipv4(bytes(2) + p.IPV4.to_bytes(2) + inner, p.GRE, A, B)),
        in_ethernet(p.ipv6(inner, 4, A6, B6), p.IPV6),
    ]


def in_pppoe(packet: bytes, kind: int = p.IPV4) -> bytes:
    """IPv4 inside a session of PPP over Ethernet."""
    return in_ethernet(p.pppoe(packet), p.PPPOE_SESSION)


def in_pieces() -> list[bytes]:
    """Fragmented datagrams: two interleaved, one in reverse order, one without its first fragment; also IPv6."""
    big, other = p.udp(bytes(6000), 40020, 514), p.udp(bytes(4000), 40021, 514)
    mixed = [
        piece
        for pair in zip(
            p.fragments(big, p.UDP, A, B, ident=1), p.fragments(other, p.UDP, A, B, ident=2, size=1000), strict=True
        )
        for piece in pair
    ]
    segment = p.fragments(p.tcp(bytes(2000), 40022, 2049, p.ACK), p.TCP, A, B, ident=3)
    backwards = p.fragments(p.udp(bytes(3000), 40025, 514), p.UDP, A, B, ident=4)[::-1]
    headless = p.fragments(p.udp(bytes(3000), 40026, 514), p.UDP, A, B, ident=5)[1:]
    six = p.fragments6(p.udp(bytes(4000), 40023, 514), p.UDP, A6, B6, ident=70000)
    return [
        *(in_ethernet(piece) for piece in mixed + segment + backwards + headless),
        *(in_ethernet(piece, p.IPV6) for piece in six),
        *(in_ethernet(piece) for piece in p.fragments(p.udp(bytes(3000), 40024, 514), p.UDP, B, A, ident=1)),
    ]


@dataclass(frozen=True)
class Sample:
    """A sample capture.

    Attributes:
        times: whether the file has the time of every packet to the microsecond.
    """

    data: bytes
    frames: list[bytes]
    times: bool = True


def dialects() -> dict[str, Sample]:
    """The same traffic in every variant of pcap and pcapng."""
    frames = conversation(in_ethernet)
    packets = spaced(frames)
    made: dict[str, bytes] = {}
    for order, word in (("<", "little"), (">", "big")):
        for magic, kind in ((files.MICRO, "micro"), (files.NANO, "nano"), (files.MODIFIED, "modified")):
            made[f"pcap-{kind}-{word}"] = files.pcap(packets, magic=magic, order=order)
        made[f"pcapng-{word}"] = files.pcapng(packets, order=order)
        for resolution, name in ((9, "nano"), (6, "micro"), (10, "10^-10"), (0x80 | 20, "2^-20"), (0x80 | 32, "2^-32")):
            made[f"pcapng-{name}-{word}"] = files.pcapng(packets, order=order, resolution=resolution)
        made[f"pcapng-mixed-{word}"] = mixed(packets, order)
    samples = {name: Sample(data, frames) for name, data in made.items()}
    samples["pcapng-seconds"] = Sample(files.pcapng(packets, resolution=0), frames, times=False)
    samples["pcapng-simple"] = Sample(simple(frames), frames, times=False)
    return samples


def mixed(packets: list[Packet], order: str) -> bytes:
    """Sections in both byte orders, interfaces of several resolutions, an offset, options, blocks to be skipped."""
    made = files.Pcapng(order)
    made.unknown()
    made.interface(resolution=9)
    made.interface(resolution=0x80 | 30, name="eth1", offset_s=1_600_000_000)
    made.names()
    made.packet(1, packets[0], (1, b"a remark"), (2, bytes(4)))
    made.packet(0, packets[1])
    made.unknown(0x80000BAD, 4000)
    made.statistics(1)
    made.section(">" if order == "<" else "<")
    made.interface(name="eth2")
    made.old_packet(0, packets[2])
    made.section(order, length=-1)
    made.interface(resolution=3, snap=0)
    made.interface(resolution=9)
    for packet in packets[3:]:
        made.packet(1, packet)
    return bytes(made.data)


def simple(frames: list[bytes]) -> bytes:
    """Simple packet blocks."""
    made = files.Pcapng()
    made.interface(snap=2000)
    for frame in frames:
        made.simple(frame)
    return bytes(made.data)


def links() -> dict[str, Sample]:
    """The same traffic with every link type, IPv4 and IPv6."""
    wraps: dict[str, tuple[int, Wrap]] = {
        "ethernet": (files.ETHERNET, in_ethernet),
        "vlan": (files.ETHERNET, tagged((p.VLAN, 100))),
        "qinq": (files.ETHERNET, tagged((p.QINQ, 7), (p.VLAN, 100))),
        "vlan-twice": (files.ETHERNET, tagged((p.VLAN, 7), (p.VLAN, 100))),
        "sll": (files.SLL, lambda payload, kind: p.sll(payload, kind, src=MAC_A)),
        "sll-vlan": (
            files.SLL,
            lambda payload, kind: p.sll(bytes((0, 5)) + kind.to_bytes(2) + payload, p.VLAN, src=MAC_A),
        ),
        "sll2": (files.SLL2, lambda payload, kind: p.sll2(payload, kind, src=MAC_A)),
        "raw": (files.RAW, lambda payload, kind: payload),
        "null-little": (files.NULL, lambda payload, kind: p.null(payload)),
        "null-big": (files.NULL, lambda payload, kind: p.null(payload, order=">")),
        "loop": (files.LOOP, lambda payload, kind: p.null(payload, order=">")),
    }
    made = {}
    for name, (link, wrap) in wraps.items():
        frames = conversation(wrap) + conversation(wrap, A6, B6)
        made[name] = Sample(files.pcap(spaced(frames), link=link), frames)
    made["ipv4"] = Sample(
        files.pcap(spaced(conversation(lambda data, kind: data)), link=files.IPV4),
        conversation(lambda data, kind: data),
    )
    bare6 = conversation(lambda data, kind: data, A6, B6)
    made["ipv6"] = Sample(files.pcap(spaced(bare6), link=files.IPV6), bare6)
    return made


def contents() -> dict[str, Sample]:
    """All kinds of headers, fragments, cut frames."""
    made = {}
    for name, frames in (("headers", odd_headers()), ("fragments", in_pieces())):
        made[name] = Sample(files.pcap(spaced(frames)), frames)
        for snap in (64, 68, 96):
            made[f"{name}-snap-{snap}"] = Sample(files.pcap(spaced(frames), snap=snap), frames)
    made["tunnels"] = Sample(files.pcap(spaced(tunnels())), tunnels())
    # A session, after its PADI (RFC 2516, 5.1).
    frames = [in_ethernet(p.pppoe(b"", code=9, session=0), p.PPPOE_DISCOVERY), *conversation(in_pppoe)]
    made["pppoe"] = Sample(files.pcap(spaced(frames)), frames)
    packets = simulate(Plan(nodes=4, duration_s=900, boots=1, translated=True)).packets()
    frames = [frame for _, frame in packets]
    made["cluster"] = Sample(files.pcap(packets, magic=files.NANO), frames)
    made["cluster-snap-64"] = Sample(files.pcap(packets, snap=64), frames)
    made["cluster-pcapng"] = Sample(files.pcapng(packets, resolution=9, snap=128), frames)
    return made


def everything() -> dict[str, Sample]:
    """All samples."""
    return {**dialects(), **links(), **contents()}
