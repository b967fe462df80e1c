"""Example classification: the cluster of "Decoupled management nodes" (2018), 450 nodes, a day, its Table 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from analysis.model import (
    Capture,
    Change,
    Classification,
    Comparison,
    Connections,
    Destination,
    Interval,
    Latency,
    Matrix,
    Nodes,
    Party,
    Routed,
    Server,
    Service,
    Sms,
    Talk,
    TrafficKind,
    Unclassified,
    Unseen,
)

HOSTILE = "\x1b[31m\x9b2J[red]\u202e\r\n\x00\udc80[/]" + "y" * 300
"""Text that a terminal must not interpret."""
NODES = 450
BINS = 64
"""Parts of a timeline."""
DAY = 86_400.0
BOOTS = (20, 21, 22)
"""Parts of the day in which the administrator restarted nodes."""


def _steady(total: int, wave: float = 0.0) -> tuple[int, ...]:
    """Contacts over the day, in the afternoon higher than the average by the share ``wave``."""
    each = total / BINS
    return tuple(round(each * (1 + wave * math.sin((part / BINS - 0.35) * 2 * math.pi))) for part in range(BINS))


def _at(parts: dict[int, int]) -> tuple[int, ...]:
    return tuple(parts.get(part, 0) for part in range(BINS))


_BOOTING = _at(dict(zip(BOOTS, (31, 24, 9), strict=True)))

SLURM = Service(
    name="slurmctld",
    title="Slurm's controller, the scheduler of the cluster",
    verdict="time-critical",
    ports=("tcp/6817", "tcp/6818", "tcp/dynamic"),
    confidence=0.98,
    budget_s=300,
    budget_why="SlurmdTimeout is 300 s (slurm.conf(5)): after that nodes that do not answer are marked DOWN",
    initiator="both",
    clients=NODES,
    connections=Connections(node=412_300, sms=389_112, midstream=37, unanswered=2),
    packets=9_618_440,
    bytes=1_412_000_512,
    packets_each=(4_911_020, 4_707_420),
    bytes_each=(801_440_000, 610_560_512),
    first_s=0.3,
    last_s=86_399.2,
    interval_s=Interval(98.4, 41.7),
    latency_ms=Latency(1.8, 24.6),
    reasons=(
        "450 of 450 nodes open connections to it: 412,300 in the capture",
        "the management node opens connections to the nodes' slurmd as well: 389,112; nodes open more of them",
        "contacts in all 64 parts of the capture, at every hour",
        "tcp/6817, tcp/6818 and the ports that srun gives out are one service: their first bytes are Slurm's header",
    ),
    carried=True,
    timeline=_steady(12_800 * BINS, 0.35),
    timeline_boot=_at({20: 410, 21: 300, 22: 80}),
)

RSYSLOG = Service(
    name="rsyslog",
    title="receives the system log of every node",
    verdict="time-critical",
    ports=("udp/514",),
    confidence=0.99,
    budget_s=0,
    budget_why="syslog over UDP (RFC 5426) is lost at once; senders over TCP with a queue keep their lines",
    clients=NODES,
    connections=Connections(node=518_400, sms=0, midstream=0, unanswered=518_400),
    packets=3_884_102,
    bytes=842_770_134,
    packets_each=(3_884_102, 0),
    bytes_each=(842_770_134, 0),
    first_s=0.1,
    last_s=86_399.9,
    interval_s=Interval(61.2, 12.9),
    reasons=(
        "450 of 450 nodes send to it, the management node opens nothing",
        "no answers: lost messages are not sent again",
    ),
    carried=True,
    timeline=_steady(518_400, 0.22),
    timeline_boot=_at({20: 5_200, 21: 4_100, 22: 1_300}),
    phase="both",
)

CHRONY = Service(
    name="chrony",
    title="time of the nodes (NTP)",
    verdict="time-critical",
    ports=("udp/123",),
    confidence=0.97,
    budget_s=1024,
    budget_why="clients poll every 64 to 1024 s (RFC 5905) and keep their rate between polls",
    clients=NODES,
    connections=Connections(node=38_020, sms=0, midstream=0),
    packets=76_040,
    bytes=6_843_600,
    packets_each=(38_020, 38_020),
    bytes_each=(3_421_800, 3_421_800),
    first_s=3.1,
    last_s=86_391.0,
    interval_s=Interval(1024.1, 3.8),
    latency_ms=Latency(0.21, 0.9),
    reasons=("450 of 450 nodes poll it", "a poll every 1024 s: the poll exponent in the packets is 10"),
    carried=True,
    timeline=_steady(37_900),
    timeline_boot=_at({20: 64, 21: 48, 22: 8}),
)

POSTFIX = Service(
    name="postfix",
    title="mail of nodes and jobs",
    verdict="time-critical",
    ports=("tcp/25",),
    confidence=0.71,
    budget_s=432_000,
    budget_why="senders queue and retry for days (RFC 5321, 4.5.4.1; maximal_queue_lifetime is 5 days)",
    clients=188,
    connections=Connections(node=1_204, sms=0, midstream=0),
    packets=26_488,
    bytes=4_102_311,
    packets_each=(14_448, 12_040),
    bytes_each=(3_010_101, 1_092_210),
    first_s=1_801.4,
    last_s=85_911.0,
    interval_s=Interval(9_120.0, 8_440.0),
    latency_ms=Latency(4.4, 212.0),
    reasons=("188 of 450 nodes open connections to it", "no period: mail is sent when a job ends"),
    carried=True,
    timeline=_steady(1_204, 0.8),
)

NFS = Service(
    name="nfs",
    title="network file system",
    verdict="time-critical",
    ports=("tcp/2049", "tcp/111"),
    confidence=0.96,
    budget_s=60,
    budget_why="a hard mount blocks readers until the server is back (nfs(5))",
    clients=NODES,
    connections=Connections(node=1_350, sms=0, midstream=450),
    packets=21_904_331,
    bytes=18_441_902_118,
    packets_each=(9_700_120, 12_204_211),
    bytes_each=(1_402_118_000, 17_039_784_118),
    first_s=0.0,
    last_s=86_399.8,
    interval_s=Interval(14.2, 30.1),
    latency_ms=Latency(0.6, 9.8),
    reasons=("450 of 450 nodes hold a mount open", "1,350 new connections by nodes, none by the management node"),
    advice="move files into the node image (man pages, locales); mount the others from a file server",
    timeline=_steady(64_000, 0.3),
    timeline_boot=_at({20: 900, 21: 700, 22: 190}),
    phase="both",
)

GANGLIA = Service(
    name="ganglia",
    title="monitoring",
    verdict="time-critical",
    ports=("udp/8649",),
    confidence=0.99,
    budget_s=80,
    budget_why="gmetad marks a host down after 80 s of silence (4 x TMAX of heartbeat, gmond.conf(5))",
    clients=NODES,
    connections=Connections(node=3_888_000, sms=0, midstream=0, unanswered=3_888_000),
    packets=7_776_120,
    bytes=1_010_895_600,
    packets_each=(7_776_120, 0),
    bytes_each=(1_010_895_600, 0),
    first_s=0.0,
    last_s=86_400.0,
    interval_s=Interval(20.0, 1.2),
    reasons=("450 of 450 nodes send to it every 20 s",),
    advice="send monitoring through syslog: rsyslog is in the container",
    timeline=_steady(3_888_000),
)

NAT = Service(
    name="nat",
    title="routes and translates the traffic of compute nodes to the outside",
    verdict="time-critical",
    confidence=0.93,
    budget_s=0,
    budget_why="packets of nodes to the outside are lost at once; open TCP connections retry for minutes (RFC 9293)",
    clients=412,
    ports=("tcp/443", "tcp/80", "udp/53", "icmp"),
    connections=Connections(node=20_411, sms=0, midstream=88),
    packets=1_884_120,
    bytes=1_622_004_118,
    packets_each=(604_120, 1_280_000),
    bytes_each=(72_004_118, 1_550_000_000),
    first_s=2.0,
    last_s=86_398.0,
    interval_s=Interval(310.0, 420.0),
    latency_ms=Latency(18.0, 260.0),
    reasons=("412 of 450 nodes reach 6 addresses outside through the management node",),
    carried=True,
    timeline=_steady(20_411, 0.5),
)

PROVISIONING = Service(
    name="provisioning",
    title="DHCP, TFTP and the node image over HTTP",
    verdict="deferrable",
    ports=("udp/67", "udp/69", "tcp/80"),
    confidence=0.88,
    budget_s=DAY * 30,
    budget_why="only nodes that start need it, and when they do is the administrator's choice",
    phase="boot",
    clients=64,
    connections=Connections(node=512, sms=0, midstream=0),
    packets=31_200_410,
    bytes=39_801_220_480,
    packets_each=(4_100_200, 27_100_210),
    bytes_each=(270_613_200, 39_530_607_280),
    first_s=27_041.0,
    last_s=30_990.2,
    latency_ms=Latency(2.2, 31.0),
    reasons=(
        "seen only in 64 boots: between a node's DHCP discover and its settling",
        "the administrator decides when a node starts",
    ),
    timeline_boot=_BOOTING,
)

WAREWULF = Service(
    name="warewulf",
    title="file synchronization",
    verdict="deferrable",
    ports=("tcp/9873",),
    confidence=0.97,
    budget_s=DAY,
    budget_why="files stay as they were; only a change of a master file waits",
    clients=NODES,
    connections=Connections(node=129_600, sms=0, midstream=0),
    packets=1_296_000,
    bytes=156_902_400,
    packets_each=(648_000, 648_000),
    bytes_each=(62_208_000, 94_694_400),
    first_s=0.4,
    last_s=86_399.1,
    interval_s=Interval(300.0, 0.6),
    latency_ms=Latency(3.1, 18.2),
    reasons=(
        "450 of 450 nodes open connections to it, every 300 s: this alone would make it time-critical",
        "a steady poll that fetches only changed files: 129,188 of 129,600 answers had the same few bytes",
    ),
    timeline=_steady(129_600),
    timeline_boot=_BOOTING,
)

SSH = Service(
    name="ssh",
    title="remote shell",
    verdict="deferrable",
    ports=("tcp/22",),
    confidence=0.9,
    budget_s=DAY * 7,
    budget_why="nodes never open it: only the administrator notices",
    initiator="sms",
    clients=NODES,
    connections=Connections(node=0, sms=1_840, midstream=3),
    packets=184_002,
    bytes=31_280_340,
    packets_each=(96_120, 87_882),
    bytes_each=(12_495_600, 18_784_740),
    first_s=3_600.2,
    last_s=72_011.8,
    latency_ms=Latency(11.0, 88.0),
    reasons=("the management node opens it, nodes never do", "set by the site: pdsh from the management node only"),
    overridden=True,
    timeline=_at({2: 450, 24: 450, 25: 38, 30: 2, 40: 450, 53: 450}),
)

SERVICES = (SLURM, RSYSLOG, NFS, NAT, GANGLIA, POSTFIX, CHRONY, PROVISIONING, WAREWULF, SSH)


def _balanced(found: Classification) -> Classification:
    """Set the capture's totals to the sum of its parts; routed traffic is the traffic of the service nat."""
    parts: tuple[Service | Unclassified, ...] = (*found.services, found.elsewhere, found.unclassified)
    packets, total = sum(part.packets for part in parts), sum(part.bytes for part in parts)
    return replace(found, capture=replace(found.capture, packets=packets, bytes=total))


def paper() -> Classification:
    """A day of the cluster, with a truncated last file and unclassified traffic."""
    capture = Capture(
        files=tuple(f"/var/tmp/sms.pcap{number}" for number in range(8)),
        packets=0,
        bytes=0,
        start="2024-03-05T06:00:00.125000Z",
        duration_s=DAY,
        truncated=True,
        skipped={"record longer than 262144 bytes": 3, "IPv4 header truncated by the snap length": 118},
        problems=(
            "/var/tmp/sms.pcap3: byte 812,004,112: record length 4,026,531,840 is invalid; resumed 1,204 bytes later",
            "/var/tmp/sms.pcap7: byte 1,000,341,504: the file ends in the middle of a record",
        ),
        covered_s=DAY,
        remarks=("121 records (under 0.1 %) damaged or lost, possibly with others between them",),
    )
    return _balanced(
        Classification(
            capture=capture,
            sms=Sms("52:54:00:0a:01:01", ("10.1.0.1", "fe80::5054:ff:fe0a:101"), "450 nodes use its DHCP and Slurm"),
            nodes=Nodes(NODES, tuple(f"10.1.{n // 250 + 1}.{n % 250 + 1}" for n in range(NODES)), booted=64),
            services=SERVICES,
            routed=Routed(
                NAT.packets,
                NAT.bytes,
                (
                    Destination("198.51.100.10", 1_204_000, 1_402_118_004, ("tcp/443",)),
                    Destination("198.51.100.77", 402_120, 160_114_114, ("tcp/443", "tcp/80")),
                    Destination("203.0.113.53", 211_000, 31_772_000, ("udp/53", "tcp/53")),
                    Destination("203.0.113.9", 51_000, 22_000_000, ("tcp/1947",)),
                    Destination("2001:db8:51:7::a:1", 12_000, 5_000_000, ("tcp/443",)),
                    Destination("203.0.113.99", 4_000, 1_000_000, ("icmp",)),
                ),
            ),
            unseen=(
                Unseen("slurmdbd", 0.0, "used by the controller on the same machine; it has no traffic of its own"),
                Unseen("slurmrestd", DAY * 30, "once a month, by hand"),
                Unseen("mariadb", 3600 * 3.0, "once an hour", "hardly used"),
            ),
            elsewhere=Unclassified(
                804_119, 92_118_004, (TrafficKind("nodes among themselves: tcp/7860", 804_119, 92_118_004),)
            ),
            unclassified=Unclassified(
                214_007,
                13_696_448,
                (
                    TrafficKind("ARP", 190_400, 11_424_000),
                    TrafficKind("LLDP", 20_607, 1_998_879),
                    TrafficKind("ethertype 0x88b5", 3_000, 273_569),
                ),
            ),
            bin_s=DAY / BINS,
            servers=(
                Server(("10.1.0.2",), "52:54:00:0a:01:02", "management node", ("slurmctld",), NODES, 9_000, 812_000),
                Server(("10.2.0.9",), "", "server", ("dns", "nfs"), 0, 4_000, 600_000),
            ),
            matrix=matrix(),
        )
    )


def matrix(rows: int = 50, each: int = 9) -> Matrix:
    """Rows of nodes that all use the management node and the outside, and their neighbours."""
    last = rows * each - 1
    ends = [(n * each, min(n * each + each - 1, last)) for n in range(rows)]
    names = [" to ".join(dict.fromkeys(f"10.1.{n // 250 + 1}.{n % 250 + 1}" for n in pair)) for pair in ends]
    nodes = [Party(name, "node", each) for name in names]
    talks = [Talk(0, number, 900 + number, 90_000 * number) for number in range(1, rows + 1)]
    talks += [Talk(number, 0, 9_000, 1_000_000_000 * number) for number in range(1, rows + 1)]
    talks += [Talk(number, rows + 1, 90, 4_000 * number) for number in range(1, rows + 1, 3)]
    talks += [Talk(number, number + 1, 5, 700) for number in range(1, rows, 7)]
    others = Party("outside", "outside", 6)
    return Matrix((Party("the management node", "sms"), *nodes, others), tuple(sorted(talks)))


def empty() -> Classification:
    """A capture without a packet."""
    none = Unclassified(0, 0)
    capture = Capture(("-",), 0, 0, "", 0.0, False)
    return Classification(capture, Sms("", (), ""), Nodes(0, ()), (), Routed(0, 0), (), none, none, 0.0)


def lasting(duration_s: float, start: str = "2024-02-27T23:59:58.5Z") -> Classification:
    """The same as `paper` in a capture of another length."""
    found, scale = paper(), duration_s / DAY
    services = tuple(replace(one, first_s=one.first_s * scale, last_s=one.last_s * scale) for one in found.services)
    capture = replace(found.capture, start=start, duration_s=duration_s)
    return replace(found, capture=capture, services=services, bin_s=duration_s / BINS)


def interrupted() -> Classification:
    """The same as `paper`, with two gaps: of a fifth of the day, and of a minute."""
    found, gaps = paper(), ((0.4 * DAY, 0.6 * DAY), (0.8 * DAY, 0.8 * DAY + 60))
    missing = sum(end - begin for begin, end in gaps)
    services = tuple(
        replace(
            one,
            timeline=tuple(0 if 26 <= part < 38 else count for part, count in enumerate(one.timeline)),
            timeline_boot=one.timeline_boot,
        )
        for one in found.services
    )
    capture = replace(found.capture, covered_s=DAY - missing, gaps=gaps)
    return replace(found, capture=capture, services=services)


def moved() -> Classification:
    """The same as `paper`, compared with an earlier one."""
    changes = (
        Change("nfs", "verdict", "deferrable", "time-critical", ("tolerated outage 1 min, was 24 h",)),
        Change("rsyslog", "appeared", "", "time-critical", ("confidence 99 %",)),
        Change("nis", "gone", "time-critical", "", ("this capture is too short: 2 days would show it",)),
        Change("chrony", "changed", "time-critical", "time-critical", ("tolerated outage 17.1 min, was 8.53 min",)),
    )
    context = ("captured 24 h, was 1 h", "450 nodes, was 448")
    return replace(paper(), compared=Comparison("before.yaml", context, changes, 7))


def many(count: int = 60) -> Classification:
    """``count`` services, as on a busy network; the fourth is routing."""
    found = paper()
    made = [
        replace(SERVICES[n % 10], name=f"tcp/{10_000 + n}", title="", bytes=SERVICES[n % 10].bytes >> n // 10)
        for n in range(count)
    ]
    return _balanced(replace(found, services=tuple(made), routed=found.routed if count > 3 else Routed(0, 0)))


def huge() -> Classification:
    """The largest possible counts."""
    service = replace(
        NFS, packets=10**12, bytes=10**18, packets_each=(10**12, 0), bytes_each=(10**18, 0), clients=10**6
    )
    routed = Routed(10**12, 10**18, (Destination("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 10**12, 10**18),))
    other = Unclassified(10**12, 10**18, (TrafficKind("ARP", 10**12, 10**18),))
    found = replace(paper(), services=(service,), routed=routed, elsewhere=other, unclassified=other)
    return replace(found, capture=replace(found.capture, packets=3 * 10**12, bytes=3 * 10**18, duration_s=1e9))


FIXED = ("verdict", "initiator", "phase", "budget_from", "role", "kind", "before", "after", "finding")
"""Fields with a fixed set of values."""


def with_text(value: Any, give: Callable[[], str]) -> Any:
    """Replace every string, except in the fixed fields, by another text."""
    if isinstance(value, Talk):  # numbers only
        return value
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if one.name not in FIXED]
        return replace(value, **{name: with_text(getattr(value, name), give) for name in names})
    if isinstance(value, tuple):
        return tuple(with_text(one, give) for one in value)
    if isinstance(value, dict):
        return {f"{give()}{number}": one for number, one in enumerate(value.values())}
    return give() if isinstance(value, str) else value
