"""A capture of the paper's eight kinds of traffic and provisioning: the verdict is Table 1 of the paper.

Through the whole of ``sms classify``: reading, roles, the shipped catalogue, verdicts; and every number beside the
verdict is held against what the generator knows that it made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.model import Classification, Service
from appliance.flow.classify import Question, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import ALL, Made, Plan, simulate

Need = Callable[[str], str]

TABLE_ONE = {
    "SMS-mgmt": {"Provisioning", "File synchronization"},
    "SMS-services": {"Rsyslog", "NFS", "Routing", "Ganglia/monitoring", "Slurm", "Mail", "NTP"},
}
"""As it stands in section 4 of the paper."""

PAPER = {
    "provisioning": "Provisioning",
    "warewulf": "File synchronization",
    "rsyslog": "Rsyslog",
    "nfs": "NFS",
    "nat": "Routing",
    "ganglia": "Ganglia/monitoring",
    "slurmctld": "Slurm",
    "postfix": "Mail",
    "chrony": "NTP",
}
"""The catalogue's name of a service, and the paper's."""

MADE = {
    "provisioning": "provisioning",
    "warewulf": "filesync",
    "rsyslog": "syslog",
    "nfs": "nfs",
    "nat": "routing",
    "ganglia": "ganglia",
    "slurmctld": "slurm",
    "postfix": "mail",
    "chrony": "ntp",
    "ssh": "ssh",
}
"""The catalogue's name of a service, and the generator's."""

WITHOUT_SSH = tuple(service for service in ALL if service != "ssh")
PLAN = Plan(nodes=8, boots=2, duration_s=7200)


def found(*captures: Path, **words: str) -> Classification:
    return classify(Question(tuple(map(str, captures)), **words), Silent())  # type: ignore[arg-type]


def write(folder: Path, made: Made) -> Path:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return file


def groups(classification: Classification) -> dict[str, set[str]]:
    """The services of each group, by the paper's name where it has one."""
    split: dict[str, set[str]] = {"SMS-mgmt": set(), "SMS-services": set()}
    for service in classification.services:
        split[service.group].add(PAPER.get(service.name, service.name))
    return split


@pytest.fixture(scope="module")
def made() -> Made:
    return simulate(PLAN)


@pytest.fixture(scope="module")
def all_of_it(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Classification:
    return found(write(tmp_path_factory.mktemp("table"), made))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_table_one(seed: int, tmp_path: Path) -> None:
    made = simulate(Plan(nodes=8, boots=2, duration_s=7200, services=WITHOUT_SSH, seed=seed))
    assert groups(found(write(tmp_path, made))) == TABLE_ONE


VARIANTS = {
    "translated copies on the same interface": Plan(nodes=6, duration_s=7200, translated=True, services=WITHOUT_SSH),
    "Ganglia by unicast": Plan(nodes=6, duration_s=7200, multicast=False, services=WITHOUT_SSH),
    "many nodes, twenty minutes": Plan(nodes=60, duration_s=1200, boots=3, services=WITHOUT_SSH),
    "every node boots": Plan(nodes=5, duration_s=7200, boots=5, services=WITHOUT_SSH, busy=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_one_of_other_clusters(variant: str, tmp_path: Path) -> None:
    assert groups(found(write(tmp_path, simulate(VARIANTS[variant])))) == TABLE_ONE


@pytest.mark.parametrize("by", ["mac", "address"])
def test_one_node_as_the_paper_did(by: str, tmp_path: Path) -> None:
    """A node is traced from the moment that it is powered on, for hours; its DHCP bears no address of it yet."""
    made = simulate(Plan(nodes=4, boots=1, duration_s=14400, services=WITHOUT_SSH, seed=5))
    seen = found(write(tmp_path, made), node=getattr(made.nodes[-1], by))
    assert groups(seen) == TABLE_ONE
    assert seen.nodes.booted == 1


def test_ssh_from_the_sms_can_wait(all_of_it: Classification) -> None:
    split = groups(all_of_it)
    assert split["SMS-mgmt"] == TABLE_ONE["SMS-mgmt"] | {"ssh"}
    assert split["SMS-services"] == TABLE_ONE["SMS-services"]


def by_name(classification: Classification) -> dict[str, Service]:
    return {service.name: service for service in classification.services}


def test_packets_and_bytes_are_the_true_ones(made: Made, all_of_it: Classification) -> None:
    truth, seen = made.truth(), by_name(all_of_it)
    assert {name: (seen[name].packets, seen[name].bytes) for name in MADE} == {
        name: (truth[service].packets, truth[service].bytes) for name, service in MADE.items()
    }


def test_who_opened_what_is_true(made: Made, all_of_it: Classification) -> None:
    truth, seen = made.truth(), by_name(all_of_it)
    # Provisioning is left out: TFTP's second flow is none of its own, and DHCP's broadcasts have one key for all nodes.
    names = [name for name in MADE if name != "provisioning"]
    opened = {name: seen[name].connections for name in names}
    assert {name: (one.node, one.sms, one.midstream) for name, one in opened.items()} == {
        name: (
            truth[MADE[name]].opened.get("node", 0),
            truth[MADE[name]].opened.get("sms", 0),
            truth[MADE[name]].midstream,
        )
        for name in names
    }


def test_everything_is_accounted_for(made: Made, all_of_it: Classification) -> None:
    parts = [
        *((service.packets, service.bytes) for service in all_of_it.services if service.name != "nat"),
        (all_of_it.routed.packets, all_of_it.routed.bytes),
        (all_of_it.elsewhere.packets, all_of_it.elsewhere.bytes),
        (all_of_it.unclassified.packets, all_of_it.unclassified.bytes),
    ]
    whole = (all_of_it.capture.packets, all_of_it.capture.bytes)
    assert tuple(map(sum, zip(*parts, strict=True))) == whole
    assert whole == (len(made.frames), sum(len(frame) for _, frame in made.frames))
    assert all_of_it.unclassified.packets == 0


def test_who_is_who(made: Made, all_of_it: Classification) -> None:
    assert (all_of_it.sms.mac, all_of_it.sms.addresses) == (made.sms.mac, (made.sms.address,))
    assert sorted(all_of_it.nodes.addresses) == sorted(node.address for node in made.nodes)
    assert all_of_it.nodes.booted == PLAN.boots
    assert {where.address for where in all_of_it.routed.destinations} <= {one.address for one in made.outside}


def test_how_often_and_when(all_of_it: Classification) -> None:
    seen = by_name(all_of_it)
    poll, ganglia = seen["warewulf"].interval_s, seen["ganglia"].interval_s
    assert poll and poll.median == pytest.approx(300, abs=5)
    assert poll.jitter < 20
    assert ganglia and ganglia.median == pytest.approx(20, abs=1)
    latency = seen["chrony"].latency_ms
    assert latency and latency.p50 == pytest.approx(0.3, abs=0.01)
    assert seen["provisioning"].phase == "boot"
    assert {name for name, one in seen.items() if one.phase == "steady"} >= {"rsyslog", "slurmctld", "postfix", "ssh"}


RESERVED = (749, 853, 636, 873, 993, 1021)
"""Ports below 1024 that an NFS client may take, and that services have."""


@pytest.mark.parametrize("port", RESERVED)
def test_nfs_from_a_port_that_is_a_services_too(port: int, tmp_path: Path) -> None:
    """The mount was there before the capture: nothing but the ports tells who serves."""
    made = simulate(Plan(nodes=6, duration_s=3600, boots=0))
    for number, (time, frame) in enumerate(made.frames):
        changed = bytearray(frame)
        for at in (34, 36):
            # All of one node: the SMS would have many of them, were it the client.
            if frame[23:24] == b"\6" and frame[36 - (at - 34) : 38 - (at - 34)] == (2049).to_bytes(2):
                node = frame[26:30] if at == 34 else frame[30:34]
                if node == p.ip_bytes(made.nodes[0].address):
                    changed[at : at + 2] = port.to_bytes(2)
        made.frames[number] = (time, bytes(changed))
    seen = by_name(found(write(tmp_path, made)))
    assert set(seen) <= set(MADE)
    assert seen["nfs"].connections.midstream == 6
    assert seen["nfs"].packets == made.truth()["nfs"].packets


# The same traffic in other files.


WAYS: dict[str, Callable[[list[files.Packet]], dict[str, bytes]]] = {
    "nanoseconds, big-endian": lambda packets: {"a": files.pcap(packets, magic=files.NANO, order=">")},
    "pcapng": lambda packets: {"a": files.pcapng(packets, resolution=9)},
    "parts of an hour": lambda packets: {
        str(at): files.pcap(packets[at : at + 5000]) for at in range(0, len(packets), 5000)
    },
    "a rotated set": lambda packets: files.rotated(packets, size=2_000_000, count=10),
    "gzip": lambda packets: {"a": files.compress("gzip", files.pcap(packets), parts=3)},
    "xz": lambda packets: {"a": files.compress("xz", files.pcap(packets), parts=3)},
    "zstd": lambda packets: {"a": files.compress("zstd", files.pcap(packets), parts=3)},
    "lz4": lambda packets: {"a": files.compress("lz4", files.pcap(packets), parts=3)},
}
"""How the same traffic may be written: the files by name."""


@pytest.fixture(scope="module")
def small() -> Made:
    return simulate(Plan(nodes=6, duration_s=3600))


def numbers(classification: Classification) -> list[tuple[object, ...]]:
    """What no way of writing may change."""
    return [
        (
            one.name,
            one.verdict,
            one.ports,
            one.connections,
            one.packets,
            one.bytes,
            one.phase,
            one.clients,
            one.timeline,
        )
        for one in classification.services
    ]


@pytest.fixture(scope="module")
def as_it_is(small: Made, tmp_path_factory: pytest.TempPathFactory) -> Classification:
    return found(write(tmp_path_factory.mktemp("small"), small))


@pytest.mark.parametrize("way", WAYS)
def test_how_it_is_written_changes_nothing(
    way: str, small: Made, as_it_is: Classification, need: Need, tmp_path: Path
) -> None:
    if way in ("zstd", "lz4"):
        need(way)
    names = []
    for name, data in WAYS[way](small.packets()).items():
        (tmp_path / name).write_bytes(data)
        names.append(tmp_path / name)
    # The last first: the order is found by the times inside.
    assert numbers(found(*reversed(names))) == numbers(as_it_is)


@pytest.mark.parametrize("snap", [64, 96, 128])
def test_short_snap_lengths_change_no_verdict(snap: int, small: Made, as_it_is: Classification, tmp_path: Path) -> None:
    short = tmp_path / "short.pcap"
    short.write_bytes(files.pcap(small.packets(), snap=snap))
    cut = found(short)
    # Without payload nobody can tell what a GET asks for, nor that srun's port speaks Slurm: they stand alone then.
    assert groups(cut)["SMS-services"] - {"http", "tcp/dynamic"} == groups(as_it_is)["SMS-services"]
    assert (cut.capture.packets, cut.capture.bytes) == (as_it_is.capture.packets, as_it_is.capture.bytes)
