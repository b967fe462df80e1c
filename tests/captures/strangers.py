"""Captures of networks that are not a cluster: a home router, a plant, a server of the internet, loopback."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import START_S
from tests.captures.variants import HELLO
from tests.captures.wire import Message, Station, Wire

DURATION_S = 4 * 3600.0


@dataclass(frozen=True)
class Stranger:
    """A capture: its frames and its link type."""

    frames: list[files.Packet]
    link: int = files.ETHERNET


def home_router() -> Stranger:
    """Seven devices: addresses by DHCP with leases that they renew, names, time and a web page of the router, NAT."""
    wire = Wire(Station("router", "52:54:00:00:00:01", "192.168.1.1"))
    outside = [Station(address, wire.sms.mac, address) for address in ("198.51.100.10", "203.0.113.7", "203.0.113.99")]
    for number in range(7):
        device, rng = (
            Station(f"device{number}", f"52:54:00:0d:00:{number:02x}", f"192.168.1.{20 + number}"),
            Random(number),
        )
        for time_s in _times(rng, 1800):
            _renewal(wire, device, time_s)
        for time_s in _times(rng, 60):
            request = rng.randbytes(2) + bytes((1, 0, 0, 1)) + bytes(6) + b"\7example\3org\0\0\1\0\1"
            answer = request[:2] + bytes((0x81, 0x80, 0, 1)) + bytes(6) + b"\7example\3org\0\0\1\0\1"
            wire.exchange(
                time_s, "dns", device, wire.sms, (device.port(), 53), [(0, "c", request), (0.01, "s", answer)]
            )
            wire.connect(time_s + 0.02, "https", device, rng.choice(outside), 443, _tls(rng))
        for time_s in _times(rng, 1024):
            request, answer = (p.ntp(mode, stratum=2, poll=10, sent_ns=round(time_s * 1e9)) for mode in (3, 4))
            wire.exchange(time_s, "ntp", device, wire.sms, (123, 123), [(0, "c", request), (0.01, "s", answer)])
        for time_s in _times(rng, 120):
            _discovery(wire, device, time_s)
        for time_s in _times(rng, 300):
            _arp(wire, device, time_s)
    reader = Station("device0", "52:54:00:0d:00:00", "192.168.1.20")
    for time_s in _times(Random("page"), 900):
        page: list[Message] = [
            (0.01, "c", b"GET / HTTP/1.1\r\n\r\n"),
            (0.1, "s", b"HTTP/1.1 200 OK\r\n\r\n" + bytes(900)),
        ]
        wire.connect(time_s, "http", reader, wire.sms, 80, page)
    return Stranger(wire.packets())


def plant() -> Stranger:
    """An operator's station polls twelve controllers by Modbus every two seconds; they query its clock."""
    wire = Wire(Station("station", "52:54:00:00:00:01", "10.20.0.1"))
    for number in range(12):
        device, rng = Station(f"plc{number}", f"52:54:00:0e:00:{number:02x}", f"10.20.0.{100 + number}"), Random(number)
        messages: list[Message] = []
        for turn in range(round(DURATION_S / 20)):
            head = struct.pack("!HHHB", turn & 0xFFFF, 0, 6, 1)
            messages += [(20.0, "c", head + b"\3\0\0\0\x0a"), (0.005, "s", head + b"\3\x14" + bytes(20))]
        wire.connect(START_S + rng.uniform(0, 20), "modbus", wire.sms, device, 502, messages)
        for time_s in _times(rng, 64):
            request, answer = (p.ntp(mode, stratum=2, poll=6, sent_ns=round(time_s * 1e9)) for mode in (3, 4))
            wire.exchange(time_s, "ntp", device, wire.sms, (123, 123), [(0, "c", request), (0.01, "s", answer)])
        for time_s in _times(rng, 300):
            _arp(wire, device, time_s)
    return Stranger(wire.packets())


def internet_server(*, raw: bool = True) -> Stranger:
    """A public server with web pages, mail and ssh for clients everywhere; ``raw``: without link addresses."""
    wire, gateway = Wire(Station("server", "52:54:00:00:00:01", "203.0.113.10")), "52:54:00:ff:00:01"
    for number in range(40):
        rng = Random(number)
        client = Station(f"client{number}", gateway, f"198.{18 + number % 2}.{rng.randrange(256)}.{1 + number}")
        for time_s in _times(rng, 600):
            port = rng.choice((443, 443, 443, 25, 22))
            wire.connect(time_s, "service", client, wire.sms, port, _tls(rng) if port == 443 else _talk(port))
    # Its neighbour in the data centre copies files from it.
    neighbour = Station("neighbour", "52:54:00:0f:00:01", "203.0.113.11")
    for time_s in _times(Random("copy"), 300):
        wire.connect(
            time_s, "copy", neighbour, wire.sms, 873, [(0.01, "s", b"@RSYNCD: 31.0\n"), (0.01, "c", b"@RSYNCD: 31.0\n")]
        )
        _arp(wire, neighbour, time_s)
    frames = wire.packets()
    if raw:
        return Stranger([(time, frame[14:]) for time, frame in frames if frame[12:14] == b"\x08\0"], files.RAW)
    return Stranger(frames)


def loopback() -> Stranger:
    """Programs of one machine: a web server, a database, a cache."""
    wire = Wire(Station("here", "00:00:00:00:00:00", "127.0.0.1"))
    local = Station("local", "00:00:00:00:00:00", "127.0.1.1")
    for number, port in enumerate((8080, 5432, 6379, 80)):
        rng = Random(number)
        for time_s in _times(rng, 20):
            wire.connect(time_s, "local", rng.choice((local, wire.sms)), wire.sms, port, _talk(port))
    return Stranger([(time, p.null(frame[14:])) for time, frame in wire.packets()], files.NULL)


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "home router": home_router,
    "plant": plant,
    "internet server": internet_server,
    "internet server, Ethernet": lambda: internet_server(raw=False),
    "loopback": loopback,
}


def _times(rng: Random, mean_s: float) -> list[float]:
    """Random times (a Poisson process)."""
    found, time_s = [], START_S + rng.expovariate(1 / mean_s)
    while time_s < START_S + DURATION_S:
        found.append(time_s)
        time_s += rng.expovariate(1 / mean_s)
    return found


def _tls(rng: Random) -> list[Message]:
    return [
        (0.02, "c", HELLO + rng.randbytes(506)),
        (0.03, "s", b"\x16\3\3\0\x7a" + rng.randbytes(3000)),
        (0.02, "c", b"\x17\3\3\0\x40" + rng.randbytes(64)),
    ]


def _talk(port: int) -> list[Message]:
    return [(0.01, "s", b"%d hello\r\n" % port), (0.01, "c", b"hello\r\n"), (0.01, "s", bytes(300))]


def _arp(wire: Wire, device: Station, time_s: float) -> None:
    request = p.arp(device.mac, device.address, wire.sms.address)
    answer = p.arp(wire.sms.mac, wire.sms.address, device.address, target_mac=device.mac, answer=True)
    wire.noise("ARP", time_s, device, request, p.ARP, to=p.BROADCAST)
    wire.noise("ARP", time_s + 1e-4, wire.sms, answer, p.ARP, to=device.mac)


def _discovery(wire: Wire, device: Station, time_s: float) -> None:
    flow = wire.open((p.UDP, device.address, 5353, "224.0.0.251", 5353), "names", "node")
    ends = (device, 5353, device, 5353)
    wire.datagram(time_s, flow, bytes(60), ends, to="01:00:5e:00:00:fb", target="224.0.0.251")


def _renewal(wire: Wire, device: Station, time_s: float) -> None:
    """A lease of an hour."""
    flow = wire.open((p.UDP, device.address, 68, wire.sms.address, 67), "provisioning", "node")
    lease = [(54, p.ip_bytes(wire.sms.address)), (51, struct.pack("!I", 3600)), (58, struct.pack("!I", 1800))]
    for wait_s, kind in ((0.0, 3), (0.001, 5)):
        options = lease if kind == 5 else [(60, b"android-dhcp-13")]
        payload = p.bootp(kind, mac=device.mac, xid=round(time_s), options=options, own=device.address)
        ends = (device, 68, wire.sms, 67) if kind == 3 else (wire.sms, 67, device, 68)
        wire.datagram(time_s + wait_s, flow, payload, ends, back=kind == 5)
