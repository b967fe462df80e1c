"""A simulated OpenHPC cluster, as captured by `tcpdump` on its management node; the same seed gives the same bytes.

    made = simulate(Plan(nodes=8, duration_s=3600))
    files.pcap(made.packets()), made.truth()["syslog"].packets

Intervals are those of real services (with sources below); amounts are small, so that an hour of eight nodes is a few
thousand packets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from tests.captures import packets as p
from tests.captures.wire import Message, Station, Total, Wire

START_S = 1_700_000_000
SETTLED_S = 120.0
"""Seconds from a node's DHCP discover until all its services run."""
OUTSIDE = ("198.51.100.10", "198.51.100.99", "203.0.113.7")
GANGLIA = ("239.2.11.71", "01:00:5e:02:0b:47")
"""Group and its link address (gmond.conf(5))."""

STEADY = ("filesync", "syslog", "nfs", "routing", "ganglia", "slurm", "mail", "ntp", "ssh")
NOISE = ("arp", "lldp")
BOOT = ("provisioning",)
ALL = (*BOOT, *STEADY, *NOISE)


@dataclass(frozen=True)
class Plan:
    """Parameters of the simulation.

    Attributes:
        boots: number of nodes, the last ones, that boot in the capture, evenly over its first half.
        services: a subset of ALL.
        translated: whether routed packets are seen a second time after the management node's NAT.
        multicast: Ganglia by multicast, else to the management node.
        busy: factor for the rate of random contacts.
    """

    nodes: int = 8
    duration_s: float = 3600.0
    boots: int = 1
    seed: int = 1
    services: tuple[str, ...] = ALL
    translated: bool = False
    multicast: bool = True
    busy: float = 1.0
    image_bytes: int = 200_000
    sms: str = "10.1.0.1"
    network: str = "10.1.1"


class Made(Wire):
    """The wire of a simulated cluster, with its stations."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Station("sms", "52:54:00:00:00:01", plan.sms))
        self.plan = plan
        self.end_s = START_S + plan.duration_s
        self.nodes = [self._node(number) for number in range(plan.nodes)]
        self.router = Station("router", "52:54:00:ff:00:01", "192.0.2.1")
        self.uplink = Station("uplink", "52:54:00:00:00:02", "192.0.2.10")
        self.outside = [Station(address, self.sms.mac, address) for address in OUTSIDE]

    def _node(self, number: int) -> Station:
        address = f"{self.plan.network.rsplit('.', 1)[0]}.{1 + number // 250}.{1 + number % 250}"
        rng = self.random("ports", number)
        mac = f"52:54:00:01:{number >> 8:02x}:{number & 255:02x}"
        return Station(f"node{number + 1}", mac, address, count(rng.randrange(32768, 50000)))

    def random(self, *what: object) -> Random:
        """Separate random numbers for every purpose: adding a service does not change the others."""
        return Random("/".join(map(str, (self.plan.seed, *what))))

    def born_s(self, number: int) -> float:
        """Time when a node boots; 0 if it runs already."""
        first = self.plan.nodes - self.plan.boots
        if number < first:
            return 0.0
        return START_S + 20 + (self.plan.duration_s / 2) * (number - first) / max(self.plan.boots, 1)

    def times(self, number: int, every_s: float, rng: Random, *, jitter_s: float = 0.0) -> Iterator[float]:
        """Regular times of a node, with a random phase."""
        time_s = max(self.born_s(number) + SETTLED_S, START_S) + rng.uniform(0, every_s)
        while time_s < self.end_s:
            yield time_s + rng.uniform(0, jitter_s)
            time_s += every_s

    def random_times(self, number: int, mean_s: float, rng: Random) -> Iterator[float]:
        """Random times of a node (a Poisson process)."""
        time_s = max(self.born_s(number) + SETTLED_S, START_S)
        while (time_s := time_s + rng.expovariate(self.plan.busy / mean_s)) < self.end_s:
            yield time_s


def simulate(plan: Plan) -> Made:
    """Generate all traffic."""
    made = Made(plan)
    for service in plan.services:
        for number in range(plan.nodes):
            SERVICES[service](made, number, made.random(service, number))
    made.frames = [(time, frame) for time, frame in made.frames if time <= made.end_s * 1e9 + 60e9]
    return made


# Provisioning.


def provisioning(made: Made, number: int, rng: Random) -> None:
    """PXE: DHCP, the loader by TFTP; then the kernel's own DHCP, and the image by HTTP (Warewulf 3)."""
    if not (born := made.born_s(number)):
        return
    node = made.nodes[number]
    time_s = dhcp(made, node, born, rng, vendor=b"PXEClient:Arch:00007:UNDI:003016")
    time_s = tftp(made, node, time_s + 0.5, b"warewulf/ipxe/bin-x86_64-efi/ipxe.efi", rng.randbytes(9000), rng)
    for path, size in (("/WW/bootstrap/7", made.plan.image_bytes // 10), ("/WW/vnfs?vnfsid=12", made.plan.image_bytes)):
        time_s = dhcp(made, node, time_s + 4, rng, vendor=b"iPXE")
        messages: list[Message] = [
            (0.001, "c", http_get(f"{path}?hwaddr={node.mac}")),
            (0.004, "s", http_answer(rng.randbytes(size))),
        ]
        time_s = made.connect(time_s + 1, "provisioning", node, made.sms, 80, messages)


def dhcp(made: Made, node: Station, time_s: float, rng: Random, *, vendor: bytes) -> float:
    """DISCOVER, OFFER, REQUEST, ACK; the answers are broadcasts, as its flag requires (RFC 2131, 4.1)."""
    unspecified, broadcast = "0.0.0.0", "255.255.255.255"
    requests = made.open((p.UDP, unspecified, 68, broadcast, 67), "provisioning", "node")
    replies = made.open((p.UDP, made.sms.address, 67, broadcast, 68), "provisioning", "node")
    xid, own = rng.randrange(1 << 32), p.ip_bytes(made.sms.address)
    requested = [
        (60, vendor),
        (55, bytes((1, 3, 6, 12, 15, 66, 67))),
        (97, b"\0" + p.mac_bytes(node.mac).rjust(16, b"\0")),
    ]
    lease = [
        *((54, own), (51, struct.pack("!I", 21600)), (58, struct.pack("!I", 10800)), (59, struct.pack("!I", 18900))),
        *((1, b"\xff\xff\0\0"), (3, own), (6, own), (12, node.name.encode()), (66, made.sms.address.encode())),
    ]
    chosen = [(54, own), (50, p.ip_bytes(node.address)), *requested]
    for wait_s, message, options in ((0.0, 1, requested), (0.9, 2, lease), (0.3, 3, chosen), (0.01, 5, lease)):
        time_s += wait_s
        answer = message in (2, 5)
        yours, served = (node.address, made.sms.address) if answer else (unspecified, unspecified)
        payload = p.bootp(message, mac=node.mac, xid=xid, options=options, yours=yours, own=served)
        ends = (made.sms, 67, node, 68) if answer else (node, 68, made.sms, 67)
        made.datagram(
            time_s,
            replies if answer else requests,
            payload,
            ends,
            to=p.BROADCAST,
            source=made.sms.address if answer else unspecified,
            target=broadcast,
        )
    made.noise("ARP", time_s + 0.01, node, p.arp(node.mac, node.address, node.address), p.ARP, to=p.BROADCAST)
    return time_s + 0.02


def tftp(made: Made, node: Station, time_s: float, name: bytes, data: bytes, rng: Random) -> float:
    """A file; its blocks come from a port chosen by the server (RFC 1350, 4; block size: RFC 2348)."""
    own, theirs, size = node.port(), rng.randrange(32768, 60999), 1456
    request = b"\0\1" + name + b"\0octet\0blksize\0001456\0"
    made.exchange(time_s, "provisioning", node, made.sms, (own, 69), [(0, "c", request)])
    # The server sends first on the second flow, but the node requested it.
    flow = made.open((p.UDP, node.address, own, made.sms.address, theirs), "provisioning", "node")
    blocks = [b"\0\6blksize\0001456\0"]
    for block, at in enumerate(range(0, len(data) + 1, size), 1):
        blocks.append(struct.pack("!HH", 3, block) + data[at : at + size])
    for block, payload in enumerate(blocks):
        made.datagram(time_s + 0.001, flow, payload, (made.sms, theirs, node, own), back=True)
        made.datagram(time_s + 0.0012, flow, struct.pack("!HH", 4, block), (node, own, made.sms, theirs))
        time_s += 0.0015
    return time_s


def http_get(path: str) -> bytes:
    """A request of wget."""
    return f"GET {path} HTTP/1.1\r\nUser-Agent: Wget\r\nHost: 10.1.0.1\r\nConnection: close\r\n\r\n".encode()


def http_answer(body: bytes, kind: str = "application/octet-stream") -> bytes:
    """An answer of Apache."""
    head = f"HTTP/1.1 200 OK\r\nServer: Apache\r\nContent-Length: {len(body)}\r\nContent-Type: {kind}\r\n\r\n"
    return head.encode() + body


# Services of running nodes.


def filesync(made: Made, number: int, rng: Random) -> None:
    """wwgetfiles: cron fetches the list every five minutes, and only changed files."""
    node = made.nodes[number]
    for time_s in made.times(number, 300, rng, jitter_s=10):
        listed = b"".join(b"%d file%d 0 0 0644 1690000000 /etc/file%d\n" % (n, n, n) for n in range(8))
        messages: list[Message] = [
            (0.001, "c", http_get(f"/WW/file?hwaddr={node.mac}&timestamp=0")),
            (rng.uniform(0.002, 0.03), "s", http_answer(listed, "text/plain")),
        ]
        made.connect(time_s, "filesync", node, made.sms, 80, messages)


def syslog(made: Made, number: int, rng: Random) -> None:
    """rsyslog's omfwd: one socket, UDP, no answers."""
    node = made.nodes[number]
    own = node.port()
    for time_s in made.random_times(number, 45, rng):
        word = f"systemd[1]: Started session {rng.randrange(9999)}."
        text = f"<{rng.choice((30, 78, 86))}>Nov 14 22:13:20 {node.name} {word}"
        made.exchange(time_s, "syslog", node, made.sms, (own, 514), [(0, "c", text.encode())])


def nfs(made: Made, number: int, rng: Random) -> None:
    """One mount from a port below 1024, open while the node runs."""
    node = made.nodes[number]
    own, running = rng.randrange(665, 1023), not made.born_s(number)
    messages: list[Message] = []
    begin = max(made.born_s(number) + SETTLED_S, START_S) + rng.uniform(0, 1 if not running else 30)
    time_s = begin
    for xid in count(rng.randrange(1 << 30)):
        # GETATTR, LOOKUP, ACCESS or READ (RFC 1813, 3).
        procedure = rng.choice((1, 3, 4, 6))
        answer = rng.randbytes(8000) if procedure == 6 else bytes(112)
        wait_s = rng.choice((0.002, 0.002, 5.0, 55.0))
        if time_s + wait_s > made.end_s:
            break
        messages += [
            (wait_s, "c", p.rpc_call(xid, procedure, bytes(40))),
            (rng.uniform(1e-4, 4e-3), "s", p.rpc_reply(xid, answer)),
        ]
        time_s += wait_s + 0.01
    made.connect(begin, "nfs", node, made.sms, 2049, messages, own=own, opened=not running, closed=False)


def routing(made: Made, number: int, rng: Random) -> None:
    """Connections to outside addresses: their frames go to the management node's link address."""
    node = made.nodes[number]
    for time_s in made.random_times(number, 400, rng):
        server = rng.choice(made.outside)
        messages: list[Message] = [
            (0.02, "c", b"\x16\3\1\2\0\1\0\1\xfc\3\3" + rng.randbytes(506)),
            (0.03, "s", b"\x16\3\3\0\x7a" + rng.randbytes(rng.randrange(2000, 9000))),
            (0.02, "c", b"\x17\3\3\0\x40" + rng.randbytes(64)),
            (0.05, "s", b"\x17\3\3\1\0" + rng.randbytes(256)),
        ]
        own, before = node.port(), len(made.frames)
        made.connect(time_s, "routing", node, server, 443, messages, own=own)
        if made.plan.translated:
            _translate(made, made.frames[before:], (node, own, server, 443))


def _translate(made: Made, frames: list[tuple[int, bytes]], ends: tuple[Station, int, Station, int]) -> None:
    """The same packets on the other side of the NAT; ports are preserved, as in Linux if they are free."""
    node, own, server, port = ends
    flow = made.open((p.TCP, made.uplink.address, own, server.address, port), "routing", "node")
    for time, frame in frames:
        there = frame[26:30] == p.ip_bytes(node.address)
        macs = (made.router.mac, made.uplink.mac) if there else (made.uplink.mac, made.router.mac)
        public = p.ip_bytes(made.uplink.address)
        addresses = public + frame[30:34] if there else frame[26:30] + public
        copy = b"".join((*map(p.mac_bytes, macs), frame[12:26], addresses, frame[34:]))
        flow.syns += bool(frame[47] & p.SYN) and there
        made.count(flow, not there, len(copy))
        made.frames.append((time + 20_000 if there else time - 20_000, copy))


def ganglia(made: Made, number: int, rng: Random) -> None:
    """gmond: a heartbeat every 20 s, other metrics occasionally (gmond.conf(5), collection_group)."""
    node, own = made.nodes[number], made.nodes[number].port()
    group = Station("group", GANGLIA[1], GANGLIA[0]) if made.plan.multicast else made.sms
    for time_s in made.times(number, 20, rng, jitter_s=2):
        for metric in ("heartbeat", *rng.sample(("load_one", "cpu_user", "mem_free", "bytes_in"), rng.randrange(3))):
            # XDR: a float metric (133), host, name, not spoofed, format, value (gm_protocol.x).
            fields = (
                b"".join(map(_xdr, (node.name, metric))) + bytes(4) + _xdr("%.2f") + struct.pack("!f", rng.random())
            )
            made.exchange(time_s, "ganglia", node, group, (own, 8649), [(0, "c", struct.pack("!I", 133) + fields)])


def _xdr(text: str) -> bytes:
    return struct.pack("!I", len(text)) + text.encode() + bytes(-len(text) % 4)


PING, REGISTRATION, RC, LAUNCH, LAUNCHED, EXIT, EPILOG = 1008, 1002, 8001, 6001, 6002, 6003, 6012
"""Message types of Slurm (src/common/slurm_protocol_defs.h)."""


def slurm(made: Made, number: int, rng: Random) -> None:
    """The controller pings slurmd (a third of SlurmdTimeout), slurmd registers and reports, also to srun."""
    node, sms = made.nodes[number], made.sms
    short = bytes(8)

    def message(time_s: float, client: Station, server: Station, port: int, kind: int, size: int) -> None:
        request = p.slurm(kind, bytes(size), sender=client.address, sender_port=port)
        answer = p.slurm(RC, short, sender=server.address)
        made.connect(
            time_s, "slurm", client, server, port, [(2e-4, "c", request), (rng.uniform(5e-4, 5e-3), "s", answer)]
        )

    if born := made.born_s(number):
        message(born + SETTLED_S - 5, node, sms, 6817, REGISTRATION, 600)
    for time_s in made.times(number, 100, rng):
        message(time_s, sms, node, 6818, PING, 8)
    for time_s in made.random_times(number, 900, rng):
        srun, run_s = sms.port(), rng.uniform(1, 60)
        message(time_s, sms, node, 6818, LAUNCH, 1800)
        message(time_s + 0.05, node, sms, srun, LAUNCHED, 60)
        message(time_s + run_s, node, sms, srun, EXIT, 40)
        message(time_s + run_s + 0.2, node, sms, 6817, EPILOG, 40)


def mail(made: Made, number: int, rng: Random) -> None:
    """Mail at the end of a job (RFC 5321)."""
    node = made.nodes[number]
    for time_s in made.random_times(number, 1800, rng):
        lines = [
            *("220 sms ESMTP Postfix", f"EHLO {node.name}", "250 sms", "MAIL FROM:<slurm>", "250 Ok"),
            *("RCPT TO:<user@example.org>", "250 Ok", "DATA", "354 Go on"),
            *(f"Subject: Slurm Job_id={rng.randrange(99999)} Ended\r\n\r\n.", "250 Ok: queued", "QUIT", "221 Bye"),
        ]
        messages: list[Message] = [(0.003, "cs"[not n % 2], line.encode() + b"\r\n") for n, line in enumerate(lines)]
        made.connect(time_s, "mail", node, made.sms, 25, messages)


def ntp(made: Made, number: int, rng: Random) -> None:
    """Every second node has ntpd (from port 123), the others chrony (a new port each time)."""
    node, poll = made.nodes[number], rng.randrange(6, 11)
    for time_s in made.times(number, 2**poll, rng, jitter_s=2):
        own = 123 if number % 2 else node.port()
        sent, received = round(time_s * 1e9), round((time_s + 1e-4) * 1e9)
        request = p.ntp(3, stratum=3, poll=poll, sent_ns=sent)
        answer = p.ntp(
            4, stratum=2, poll=poll, sent_ns=received + 30_000, received_ns=received, origin=p.ntp_time(sent)
        )
        made.exchange(time_s, "ntp", node, made.sms, (own, 123), [(0, "c", request), (0.0003, "s", answer)])


def ssh(made: Made, number: int, rng: Random) -> None:
    """The administrator's pdsh."""
    for time_s in made.random_times(number, 1200, rng):
        hello: list[Message] = [(0.01, "s", b"SSH-2.0-OpenSSH_8.0\r\n"), (0.001, "c", b"SSH-2.0-OpenSSH_8.0\r\n")]
        keys: list[Message] = [(0.01, "cs"[n % 2], rng.randbytes(rng.randrange(36, 1200))) for n in range(12)]
        made.connect(time_s, "ssh", made.sms, made.nodes[number], 22, hello + keys)


def arp(made: Made, number: int, rng: Random) -> None:
    """ARP between a node and the management node, requested by either."""
    node, sms = made.nodes[number], made.sms
    for time_s in made.times(number, 240, rng, jitter_s=60):
        sender, target = (node, sms) if rng.random() < 0.7 else (sms, node)
        made.noise("ARP", time_s, sender, p.arp(sender.mac, sender.address, target.address), p.ARP, to=p.BROADCAST)
        answer = p.arp(target.mac, target.address, sender.address, target_mac=sender.mac, answer=True)
        made.noise("ARP", time_s + 1e-4, target, answer, p.ARP, to=sender.mac)


def lldp(made: Made, number: int, rng: Random) -> None:
    """The switch, every 30 s, once for all nodes."""
    switch = Station("switch", "52:54:00:fe:00:01", "")
    for time_s in made.times(0, 30, rng) if number == 0 else ():
        made.noise("LLDP", time_s, switch, p.lldp(switch.mac, "swp1"), p.LLDP, to="01:80:c2:00:00:0e")


SERVICES: dict[str, Callable[[Made, int, Random], None]] = {
    "provisioning": provisioning,
    "filesync": filesync,
    "syslog": syslog,
    "nfs": nfs,
    "routing": routing,
    "ganglia": ganglia,
    "slurm": slurm,
    "mail": mail,
    "ntp": ntp,
    "ssh": ssh,
    "arp": arp,
    "lldp": lldp,
}

__all__ = ["ALL", "BOOT", "NOISE", "STEADY", "Made", "Plan", "Total", "simulate"]
