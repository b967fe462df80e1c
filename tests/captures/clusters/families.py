"""Families of clusters: what is drawn at random, and what all of a family have in common.

The shares say how common something is on clusters of a few to a few thousand nodes; they are estimates, made before any
verdict was seen, and not a survey.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import tests.captures.clusters.needed
import tests.captures.clusters.strange
import tests.captures.clusters.waits  # noqa: F401 - registers its activities, as the modules above
from analysis.model import Verdict
from tests.captures import files
from tests.captures.clusters.stage import ACTIVITIES, CRITICAL, DEFERRABLE, START_S, Activity, Stage, box
from tests.captures.clusters.tape import Stream, Tape
from tests.captures.files import Packet

SIZES = (2, 4, 10, 30, 100, 450, 2000)
DURATIONS_S = (60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
NODE_SECONDS = 120_000.0
"""Limit of nodes times seconds, so that no capture has much more than 50,000 packets; a minute is the least."""


def _shares(text: str) -> dict[str, float]:
    """Parse shares: activity and share, separated by commas."""
    return {name: float(share) for name, share in (one.split() for one in text.split(","))}


COMMON = _shares(
    """
    nfs 0.8, iscsi 0.03, ntp 0.75, dns 0.5, ldap 0.35, kerberos 0.08, nat 0.5, syslog 0.55,
    syslog_tcp 0.15, mail 0.3, licences 0.15, database 0.05, portal 0.08, registry 0.05, beats 0.04,
    ganglia 0.2, ganglia_polled 0.06, influx 0.08, nsca 0.04, traps 0.04, zabbix_active 0.04, mqtt 0.02,
    stage_out 0.12, ssh 0.85, ipmi 0.4, redfish 0.08, exporter 0.3, exporter_gpu 0.08, nrpe 0.15,
    zabbix_passive 0.06, snmp 0.2, bacula 0.04, puppet 0.06, salt 0.04, repository 0.1, rsync 0.04,
    renewals 0.2, other_nfs 0.15, cfengine 0.03, subscription 0.05, other_dns 0.2, other_ldap 0.1, arp 1.0
    """
)
"""Share of the clusters that have an activity, whatever they are."""
SLURM, PBS = {"slurm": 1.0, "accounting": 0.15}, {"stage_out": 0.6}
WAREWULF3 = {"warewulf3_boot": 1.0, "warewulf3_files": 1.0}
WAREWULF4 = {"warewulf4_boot": 1.0, "warewulf4_files": 1.0}
MONITORED = _shares(
    """
    ganglia 0.5, ganglia_polled 0.2, nsca 0.2, nrpe 0.5, exporter 0.6, influx 0.3, zabbix_active 0.2,
    zabbix_passive 0.2, traps 0.3, snmp 0.6, beats 0.2, mqtt 0.1, exporter_gpu 0.3, redfish 0.3
    """
)
STRANGE = _shares(
    """
    graphite 0.2, collectd 0.2, xymon 0.15, icinga 0.15, redis 0.1, mongodb 0.1, consul 0.1, burp 0.15,
    checkmk 0.15, munin 0.15, debian 0.4, clamav 0.1, inventory 0.1, people 0.4, initrd 0.3, repository 0.1
    """
)
ONE_OF_TWO: dict[str, tuple[str, str]] = {"pbs": ("torque", "openpbs"), "lustre": ("lustre", "other_lustre")}


@dataclass(frozen=True)
class Family:
    """A family of clusters.

    Attributes:
        shares: of activities, instead of those of COMMON.
        either: keys of ONE_OF_TWO: each cluster has one of them.
        change: what happens to the capture: "", or one of CHANGES.
        unseen: whether the fit of the confidence never sees it.
    """

    shares: dict[str, float]
    either: tuple[str, ...] = ()
    busy: tuple[float, ...] = (0.2, 1.0, 5.0)
    routed: bool = False
    six: float = 0.0
    change: str = ""
    unseen: bool = False


FAMILIES = {
    "slurm": Family({**SLURM, **WAREWULF3}),
    "slurm-warewulf4": Family({**SLURM, **WAREWULF4}),
    "slurm-lustre": Family({**SLURM, **WAREWULF4}, either=("lustre",)),
    "pbs": Family({**PBS, **WAREWULF3}, either=("pbs",)),
    "idle": Family({**SLURM, **WAREWULF4}, busy=(0.02,)),
    "busy": Family({**SLURM, **WAREWULF3}, busy=(20.0,)),
    "monitored": Family({**SLURM, **WAREWULF4, **MONITORED}),
    "old": Family({**PBS, **WAREWULF3, "nis": 0.8, "rsh": 0.8, "ganglia": 0.8, "ssh": 0.4}, either=("pbs",)),
    "updated": Family(
        {**SLURM, **WAREWULF4, "puppet": 0.4, "salt": 0.3, "repository": 0.5, "rsync": 0.3, "cfengine": 0.2}
    ),
    "small": Family({**SLURM, "other_nfs": 0.5, "other_dns": 0.5, "other_ldap": 0.3}),
    "routed": Family({**SLURM, **WAREWULF4}, routed=True),
    "cut": Family({**SLURM, **WAREWULF3}, change="cut"),
    "scanned": Family({**SLURM, **WAREWULF4}, change="scanned"),
    "merged": Family({**SLURM, **WAREWULF3}, change="merged"),
    "pbs-lustre": Family({**PBS, **WAREWULF3}, either=("pbs", "lustre"), unseen=True),
    "xcat": Family({**SLURM, "xcat_boot": 1.0}, unseen=True),
    "dual-stack": Family({**SLURM, **WAREWULF4}, six=0.6, unseen=True),
    "sampled": Family({**SLURM, **WAREWULF3}, change="sampled", unseen=True),
    "strange": Family({**SLURM, **WAREWULF4, **STRANGE}, unseen=True),
    "strange-pbs": Family({**PBS, **WAREWULF3, **STRANGE}, either=("pbs",), unseen=True),
    "sampled-web": Family(
        {**SLURM, **WAREWULF3, "portal": 0.4, "repository": 0.4, "debian": 0.3, "registry": 0.2, "people": 0.4},
        change="sampled",
        unseen=True,
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A cluster's capture with its truth.

    Attributes:
        activities: what it does, with the packets of each.
        snap: bytes that were captured of each packet.
    """

    family: str
    seed: int
    nodes: int
    duration_s: float
    activities: dict[str, int]
    packets: list[Packet]
    snap: int = 262144

    def capture(self) -> bytes:
        """Return the capture file."""
        return files.pcap(self.packets, snap=self.snap)

    def truth(self, name: str, ports: tuple[str, ...]) -> Verdict | None:
        """Return the right verdict of a service by its name, else by its ports; None if it is not a service.

        If nodes need one of several uses of a service, they need the service.
        """
        mine = [ACTIVITIES[each] for each in self.activities]
        found = [one for one in mine if name in one.names] or [one for one in mine if set(ports) & set(one.ports)]
        if not found:
            return None
        return CRITICAL if any(one.verdict == CRITICAL for one in found) else DEFERRABLE

    def needs(self) -> dict[str, Activity]:
        """Return what nodes need and used in the capture: with ten packets or more before anything was left out."""
        mine = {each: ACTIVITIES[each] for each, packets in self.activities.items() if packets >= 10}
        return {name: one for name, one in mine.items() if one.verdict == CRITICAL}


def draw(name: str, seed: int) -> Drawn:
    """Return a cluster of a family; the same seed gives the same bytes."""
    family, rng = FAMILIES[name], Random(f"{name}/{seed}")
    nodes = rng.choice(SIZES)
    duration_s = max(min(rng.choice(DURATIONS_S), NODE_SECONDS / nodes), 60.0)
    shares = {**COMMON, **family.shares}
    chosen = [each for each in shares if rng.random() < shares[each]]
    chosen += [rng.choice(ONE_OF_TWO[each]) for each in family.either]
    boots = {}
    if nodes > 1 and rng.random() < 0.5:
        number = min(rng.randint(1, 20), nodes - 1)
        boots = {nodes - 1 - each: START_S + rng.uniform(0.02, 0.5) * duration_s for each in range(number)}
    stage = _stage(family, f"{name}/{seed}", nodes, duration_s)
    stage.boots, stage.busy = boots, rng.choice(family.busy)
    made = perform(stage, chosen)
    packets, snap = sorted(stage.tape.frames, key=lambda packet: packet[0]), 262144
    if family.change:
        packets, snap = CHANGES[family.change](packets, stage, chosen, rng)
    return Drawn(name, seed, nodes, duration_s, made, packets, snap)


def _stage(family: Family, seed: str, nodes: int, duration_s: float) -> Stage:
    router = bytes((0x52, 0x54, 0, 0xFE, 0, 1)) if family.routed else b""
    network = "10.2" if family.routed else "10.1"
    made = [box(each, f"{network}.{1 + each // 250}.{1 + each % 250}", via=router) for each in range(nodes)]
    sms = box(1, "10.1.0.1", vendor=0)
    if family.six:
        prefix = bytes.fromhex("20010db800010001")
        for each in (sms, *made):
            each.v6 = prefix + bytes(4) + each.v4
    return Stage(seed, Tape(), sms, made, START_S, START_S + duration_s, six=family.six)


def perform(stage: Stage, chosen: list[str]) -> dict[str, int]:
    """Make the traffic of all activities; return the packets of each."""
    stage.logins = min(2, len(stage.nodes) - 1) if "people" in chosen else 0
    made, frames, end = {}, stage.tape.frames, round((stage.end_s + 1) * 1e9)
    for name in chosen:
        run, before = ACTIVITIES[name].run, len(frames)
        for number in range(len(stage.nodes)):
            run(stage, number, stage.random(name, number))
        frames[before:] = [packet for packet in frames[before:] if packet[0] < end]
        made[name] = len(frames) - before
    return made


# What happens to captures.

Change = Callable[[list[Packet], Stage, list[str], Random], tuple[list[Packet], int]]


def _cut(packets: list[Packet], stage: Stage, chosen: list[str], rng: Random) -> tuple[list[Packet], int]:
    return packets, rng.choice((64, 96, 128))


def _sampled(packets: list[Packet], stage: Stage, chosen: list[str], rng: Random) -> tuple[list[Packet], int]:
    """One packet of several, at random (as sFlow, RFC 3176)."""
    rate = rng.choice((2, 4, 8, 16))
    return [packet for packet in packets if rng.random() < 1 / rate], 262144


def _scanned(packets: list[Packet], stage: Stage, chosen: list[str], rng: Random) -> tuple[list[Packet], int]:
    """A machine of the network scans the management node and some nodes."""
    scanner, tape, answer = box(9, "10.1.0.99", vendor=6), Tape(), rng.random() < 0.5
    time_s = stage.begin_s + rng.uniform(0.1, 0.5) * (stage.end_s - stage.begin_s)
    for target in (stage.sms, *stage.nodes[:3]):
        for port in rng.sample(range(1, 10000), 300):
            Stream(tape, scanner, target, port).refused(time_s, answer=answer)
            time_s += 0.003
    return sorted([*packets, *tape.frames], key=lambda packet: packet[0]), 262144


def _merged(packets: list[Packet], stage: Stage, chosen: list[str], rng: Random) -> tuple[list[Packet], int]:
    """A second capture of the cluster, days later, in the same file."""
    later = rng.choice((6 * 3600, 86400, 7 * 86400)) + stage.end_s - stage.begin_s
    second = Stage(f"{stage.seed}/later", Tape(), stage.sms, stage.nodes, stage.begin_s, stage.end_s, busy=stage.busy)
    perform(second, chosen)
    moved = sorted((time + round(later * 1e9), frame) for time, frame in second.tape.frames)
    return [*packets, *moved], 262144


CHANGES: dict[str, Change] = {"cut": _cut, "sampled": _sampled, "scanned": _scanned, "merged": _merged}
