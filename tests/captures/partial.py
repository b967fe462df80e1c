"""Captures that do not show all that nodes do: of one service, of one protocol, without ARP, of an idle network."""

from __future__ import annotations

from collections.abc import Callable

from tests.captures import packets as p
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.files import Packet
from tests.captures.variants import small

Frames = list[Packet]
HOURS_S = 6 * 3600.0


def whole() -> Made:
    """A cluster at work, for a quarter of an hour."""
    return simulate(Plan(nodes=12, boots=0, duration_s=900.0))


def is_arp(frame: bytes) -> bool:
    """Whether it is a frame of ARP."""
    return frame[12:14] == p.ARP.to_bytes(2)


def is_of(frame: bytes, *protocols: int) -> bool:
    """Whether it is a packet of one of these IP protocols."""
    return frame[12:14] == p.IPV4.to_bytes(2) and frame[23] in protocols


def has_port(frame: bytes, port: int) -> bool:
    """Whether it is a packet of TCP or UDP from or to a port."""
    return is_of(frame, p.TCP, p.UDP) and port.to_bytes(2) in (frame[34:36], frame[36:38])


FILTERS: dict[str, Callable[[bytes], bool]] = {
    "ip": lambda frame: is_of(frame, p.TCP, p.UDP, p.ICMP, p.IGMP),
    "not arp": lambda frame: not is_arp(frame),
    "tcp": lambda frame: is_of(frame, p.TCP),
    "udp": lambda frame: is_of(frame, p.UDP),
    "tcp or arp": lambda frame: is_of(frame, p.TCP) or is_arp(frame),
    "udp or arp": lambda frame: is_of(frame, p.UDP) or is_arp(frame),
    "port 22": lambda frame: has_port(frame, 22),
    "port 22 or arp": lambda frame: has_port(frame, 22) or is_arp(frame),
    "port 2049 or arp": lambda frame: has_port(frame, 2049) or is_arp(frame),
    "port 22 or port 123 or arp": lambda frame: has_port(frame, 22) or has_port(frame, 123) or is_arp(frame),
    "port 514 or port 123": lambda frame: has_port(frame, 514) or has_port(frame, 123),
}
"""Filters of tcpdump."""


def filtered(made: Made, expression: str) -> Frames:
    """Keep the frames that a filter of tcpdump passes."""
    return [(time, frame) for time, frame in made.packets() if FILTERS[expression](frame)]


def ssh_alone() -> Made:
    """An administrator's commands on a network on which nothing else runs."""
    return small("ssh", "arp", nodes=12, duration_s=HOURS_S)


def idle() -> Made:
    """Nodes without jobs or users: the scheduler pings them, ARP, LLDP, and the time now and then."""
    made = small("arp", "lldp", nodes=12, duration_s=HOURS_S)
    for number, node in enumerate(made.nodes):
        for time_s in made.times(number, 1024, made.random("time", number)):
            request, answer = (p.ntp(mode, stratum=3, poll=10, sent_ns=round(time_s * 1e9)) for mode in (3, 4))
            exchange = [(0.0, "c", request), (0.0003, "s", answer)]
            made.exchange(time_s, "ntp", node, made.sms, (123, 123), exchange)
        for time_s in made.times(number, 100, made.random("ping", number)):
            ping = p.slurm(1008, bytes(8), sender=made.sms.address, sender_port=6818)
            made.connect(
                time_s, "slurm", made.sms, node, 6818, [(2e-4, "c", ping), (1e-3, "s", p.slurm(8001, bytes(8)))]
            )
    return made


def links_only() -> Made:
    """Nodes that search for others, renew no lease and use nothing but a clock, once."""
    made = small("arp", "lldp", nodes=4, duration_s=HOURS_S)
    for number, node in enumerate(made.nodes):
        for time_s in made.times(number, 300, made.random("names", number)):
            flow = made.open((p.UDP, node.address, 5353, "224.0.0.251", 5353), "names", "node")
            made.datagram(
                time_s,
                flow,
                bytes(40),
                (node, 5353, node, 5353),
                to="01:00:5e:00:00:fb",
                target="224.0.0.251",
            )
        made.exchange(
            START_S + 9 + number, "ntp", node, made.sms, (123, 123), [(0, "c", bytes(48)), (0.001, "s", bytes(48))]
        )
    return made
