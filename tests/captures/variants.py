"""Unusual traffic for a simulated cluster: other protocols on known ports, renewed and relayed leases, two networks."""

from __future__ import annotations

import struct
from random import Random

from tests.captures import packets as p
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.wire import Message, Station

HELLO = b"\x16\3\1\2\0\1\0\1\xfc\3\3"
"""A ClientHello of TLS (RFC 8446, 4.1.2) after its record header."""


def small(*services: str, nodes: int = 4, duration_s: float = 600.0) -> Made:
    """A cluster without boots and with few services."""
    return simulate(Plan(nodes=nodes, boots=0, duration_s=duration_s, services=services or ("slurm", "ntp", "arp")))


def rsh(made: Made, client: Station, server: Station, time_s: float, *, errors: int = 0) -> None:
    """One command (rcmd(3)): the port for error output, both users, the command; a zero byte accepts it."""
    messages: list[Message] = [
        (0.001, "c", (b"%d" % errors if errors else b"") + b"\0"),
        (0.001, "c", b"root\0root\0uptime\0"),
        (0.01, "s", b"\0"),
        (0.02, "s", b" 10:15:01 up 12 days\n"),
    ]
    made.connect(time_s, "rsh", client, server, 514, messages, own=1023 - client.port() % 500)


def syslog_tcp(made: Made, node: Station, time_s: float, *, counted: bool) -> None:
    """One message over TCP: after its length (RFC 6587, 3.4.1), or with a line feed at its end."""
    text = f"<30>1 2023-11-14T22:13:20Z {node.name} systemd 1 - - Started".encode()
    framed = b"%d %s" % (len(text), text) if counted else text + b"\n"
    made.connect(time_s, "syslog", node, made.sms, 514, [(0.001, "c", framed)])


def tls(made: Made, node: Station, time_s: float) -> None:
    """A request over TLS to the management node."""
    rng = Random(time_s)
    messages: list[Message] = [
        (0.002, "c", HELLO + rng.randbytes(506)),
        (0.003, "s", b"\x16\3\3\0\x7a" + rng.randbytes(3000)),
        (0.002, "c", b"\x17\3\3\0\x40" + rng.randbytes(64)),
        (0.005, "s", b"\x17\3\3\1\0" + rng.randbytes(256)),
    ]
    made.connect(time_s, "https", node, made.sms, 443, messages)


def quic(made: Made, node: Station, time_s: float, *, port: int = 443, version: int = 1) -> None:
    """Initial packets of both sides and short ones after them (RFC 9000, 17.2.2 and 17.3.1; version 2: RFC 9369)."""
    rng = Random(time_s)
    first = bytes((0xC3 if version == 1 else 0xD3,)) + struct.pack("!I", version)
    messages: list[Message] = [
        (0.0, "c", (first + b"\x08" + rng.randbytes(8) + b"\0").ljust(1200, b"\x5a")),
        (0.004, "s", (first + b"\0\x08" + rng.randbytes(8)).ljust(1200, b"\xa5")),
        (0.002, "c", b"\x43" + rng.randbytes(60)),
        (0.003, "s", b"\x43" + rng.randbytes(700)),
    ]
    made.exchange(time_s, "https", node, made.sms, (node.port(), port), messages)


def named_services() -> Made:
    """Commands over rsh in both framings of its port, syslog over TCP, TLS and QUIC."""
    made = small()
    for number, node in enumerate(made.nodes):
        for turn in range(4):
            time_s = START_S + 20 + turn * 120 + number
            rsh(made, made.sms, node, time_s, errors=1022 - number if turn % 2 else 0)
            syslog_tcp(made, node, time_s + 30, counted=bool(turn % 2))
            tls(made, node, time_s + 40)
            quic(made, node, time_s + 50)
    return made


# DHCP.

WEEK_S = 7 * 86400


def lease(made: Made, seconds: int) -> list[tuple[int, bytes]]:
    """Options of an answer: server, lease and T1 (RFC 2132)."""
    times = ((51, seconds), (58, seconds // 2))
    return [(54, p.ip_bytes(made.sms.address)), *((code, struct.pack("!I", value)) for code, value in times)]


def relayed_boot(made: Made, node: Station, relay: Station, time_s: float) -> None:
    """A first lease through a relay, which sends from and to port 67 (RFC 1542, 4.1)."""
    wanted = [(50, p.ip_bytes(node.address)), (60, b"PXEClient:Arch:00007:UNDI:003016")]
    flow = made.open((p.UDP, relay.address, 67, made.sms.address, 67), "provisioning", "node")
    ends = (relay, 67, made.sms, 67)
    for wait_s, kind in ((0.0, 1), (0.4, 2), (0.8, 3), (1.2, 5)):
        answer = kind in (2, 5)
        payload = p.bootp(
            kind,
            mac=node.mac,
            xid=round(time_s),
            options=lease(made, 2 * WEEK_S) if answer else wanted,
            yours=node.address if answer else "0.0.0.0",
            relay=relay.address,
        )
        made.datagram(time_s + wait_s, flow, payload, ends[2:] + ends[:2] if answer else ends, back=answer)


def renewal(made: Made, node: Station, time_s: float, *, own: str) -> None:
    """A running node asks the server itself: to renew its lease of two hours, if ``own`` is its address."""
    flow = made.open((p.UDP, node.address, 68, made.sms.address, 67), "provisioning", "node")
    for wait_s, kind in ((0.0, 3), (0.001, 5)):
        options = lease(made, 7200) if kind == 5 else [(60, b"Linux")]
        payload = p.bootp(kind, mac=node.mac, xid=round(time_s), options=options, own=own)
        ends = (node, 68, made.sms, 67) if kind == 3 else (made.sms, 67, node, 68)
        made.datagram(time_s + wait_s, flow, payload, ends, back=kind == 5)


def leases(kind: str) -> Made:
    """Six nodes for an hour: "relayed" ones boot, "verified" ones ask for the address they had, "renewed" ones run."""
    made = small("slurm", "ntp", "arp", nodes=6, duration_s=3600.0)
    relay = Station("relay", "52:54:00:fe:00:02", "10.1.0.254")
    for number, node in enumerate(made.nodes):
        time_s = START_S + 300 + 500 * number
        if kind == "relayed":
            relayed_boot(made, node, relay, time_s)
        else:
            renewal(made, node, time_s, own=node.address if kind == "renewed" else "0.0.0.0")
    return made


# Two networks.


def over_ipv6(
    frames: list[tuple[int, bytes]], *, inside: str, outside: str = "2001:db8:ffff::"
) -> list[tuple[int, bytes]]:
    """The same packets of TCP and UDP over IPv6, addresses of 10.0.0.0/8 in the network ``inside``, others outside."""

    def moved(address: bytes) -> str:
        return f"{inside if address[0] == 10 else outside}{address[2:].hex()}"

    made = []
    for time, frame in frames:
        if frame[12:14] == b"\x08\0" and frame[23] in (p.TCP, p.UDP) and frame[30] < 224:
            payload = frame[34 : 14 + int.from_bytes(frame[16:18])]
            packet = p.ipv6(payload, frame[23], moved(frame[26:30]), moved(frame[30:34]))
            made.append((time, frame[:12] + b"\x86\xdd" + packet))
    return made


def dual_stack() -> list[tuple[int, bytes]]:
    """IPv4 and, for everything but ARP, global IPv6 addresses; whatever announced those was before the capture."""
    made = simulate(Plan(nodes=6, boots=0, duration_s=900.0, services=("slurm", "ntp", "nfs", "arp", "routing")))
    sixth = over_ipv6(made.packets(), inside="2001:db8:1:1::")
    # In turns, so that nodes use both.
    return sorted([*made.packets()[::2], *((time + 1000, frame) for time, frame in sixth)])


# Gaps.


def merged(*starts_s: float, duration_s: float = 900.0) -> list[tuple[int, bytes]]:
    """Captures of one cluster, each with other traffic, that begin at these times, in one file."""
    parts = [
        simulate(
            Plan(nodes=6, boots=0, duration_s=duration_s, seed=seed, services=("slurm", "ntp", "nfs", "ganglia", "arp"))
        )
        for seed in range(1, 1 + len(starts_s))
    ]
    return [
        (time + round(start_s * 1e9), frame)
        for start_s, part in zip(starts_s, parts, strict=True)
        for time, frame in part.packets()
    ]
