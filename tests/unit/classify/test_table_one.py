"""A capture of eight kinds of traffic and provisioning yields Table 1 of "Decoupled management nodes" (2018).

Through the whole of ``sms classify``: reading, roles, the shipped catalogue, verdicts; and every number next to the
verdict is compared with the generator's expected counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.model import Classification, Service
from analysis.services import iana_name
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures import packets as p
from tests.captures.cluster import ALL, START_S, Made, Plan, simulate, syslog
from tests.captures.wire import Message

Need = Callable[[str], str]

TABLE_ONE = {
    "SMS-mgmt": {"Provisioning", "File synchronization"},
    "SMS-services": {"Rsyslog", "NFS", "Routing", "Ganglia/monitoring", "Slurm", "Mail", "NTP"},
}
"""Table 1, section 4."""

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
"""Name of a service in the catalogue, and in Table 1."""

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
"""Name of a service in the catalogue, and in the generator."""

WITHOUT_SSH = tuple(service for service in ALL if service != "ssh")
PLAN = Plan(nodes=8, boots=2, duration_s=7200)


def found(*captures: Path, **options: str) -> Classification:
    return classify(ClassifyOptions(tuple(map(str, captures)), **options), Silent())  # type: ignore[arg-type]


def write(folder: Path, made: Made) -> Path:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return file


def groups(classification: Classification) -> dict[str, set[str]]:
    """The services of each group, by the name in Table 1 if it has one."""
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_table_one_of_other_clusters(variant: str, tmp_path: Path) -> None:
    assert groups(found(write(tmp_path, simulate(VARIANTS[variant])))) == TABLE_ONE


@pytest.mark.parametrize("by", ["mac", "address"])
def test_only_one_node(by: str, tmp_path: Path) -> None:
    """A node is traced from power-on, for hours; its first DHCP packets do not have its address yet."""
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
    # Without provisioning: TFTP's second flow is not separate, and DHCP broadcasts of all nodes have the same key.
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


def test_all_packets_are_counted(made: Made, all_of_it: Classification) -> None:
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


def test_roles(made: Made, all_of_it: Classification) -> None:
    assert (all_of_it.sms.mac, all_of_it.sms.addresses) == (made.sms.mac, (made.sms.address,))
    assert sorted(all_of_it.nodes.addresses) == sorted(node.address for node in made.nodes)
    assert all_of_it.nodes.booted == PLAN.boots
    assert {where.address for where in all_of_it.routed.destinations} <= {one.address for one in made.outside}


def test_intervals_latency_and_phase(all_of_it: Classification) -> None:
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
"""Ports below 1024 that an NFS client may use, and that services have."""


@pytest.mark.parametrize("port", RESERVED)
def test_nfs_from_a_port_of_another_service(port: int, tmp_path: Path) -> None:
    """The mount existed before the capture: only the ports show which side is the server."""
    made = simulate(Plan(nodes=6, duration_s=3600, boots=0))
    for number, (time, frame) in enumerate(made.frames):
        changed = bytearray(frame)
        for at in (34, 36):
            # Only one node: if the SMS were the client, it would use many of these ports.
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
"""The same traffic in different files, by name."""


@pytest.fixture(scope="module")
def small() -> Made:
    return simulate(Plan(nodes=6, duration_s=3600))


def numbers(classification: Classification) -> list[tuple[object, ...]]:
    """Results that must not depend on the file format."""
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


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_file_format_changes_nothing(
    way: str, small: Made, as_it_is: Classification, need: Need, tmp_path: Path
) -> None:
    if way in ("zstd", "lz4"):
        need(way)
    names = []
    for name, data in WAYS[way](small.packets()).items():
        (tmp_path / name).write_bytes(data)
        names.append(tmp_path / name)
    # In reverse order: files are sorted by their first packet.
    assert numbers(found(*reversed(names))) == numbers(as_it_is)


@pytest.mark.slow
@pytest.mark.parametrize("snap", [64, 96, 128])
def test_short_snap_lengths_change_no_verdict(snap: int, small: Made, as_it_is: Classification, tmp_path: Path) -> None:
    short = tmp_path / "short.pcap"
    short.write_bytes(files.pcap(small.packets(), snap=snap))
    cut = found(short)
    # Without payload the path of a GET and Slurm on srun's port are unknown: they are separate services then.
    assert groups(cut)["SMS-services"] - {"http", "tcp/dynamic"} == groups(as_it_is)["SMS-services"]
    assert (cut.capture.packets, cut.capture.bytes) == (as_it_is.capture.packets, as_it_is.capture.bytes)


# Misleading captures: services that nodes need stay time-critical.


def in_boot_only(made: Made, service: str, port: int) -> None:
    """Every node uses it while it boots, as sssd, a resolver or a mount does."""
    for number, node in enumerate(made.nodes):
        for time_s in (made.born_s(number) + after_s for after_s in (30, 60, 90)):
            made.connect(time_s, service, node, made.sms, port, [(0.001, "c", b"\x30\x0c"), (0.001, "s", b"\x30\x0c")])


def test_an_idle_cluster_still_needs_its_services(tmp_path: Path) -> None:
    """Without jobs the controller pings, and nodes open nothing."""
    made = simulate(Plan(nodes=16, boots=0, duration_s=3600, busy=1e-9, services=("slurm", "ntp", "ganglia")))
    slurm = by_name(found(write(tmp_path, made)))["slurmctld"]
    assert (slurm.connections.node, slurm.verdict) == (0, "time-critical")
    assert slurm.connections.sms > 500
    assert any("too short to exclude that nodes do" in reason for reason in slurm.reasons)


@pytest.mark.parametrize(("service", "port"), [("ldap", 389), ("nfs", 2049), ("dns", 53), ("unknown", 4444)])
def test_a_capture_that_ends_with_the_boot(service: str, port: int, tmp_path: Path) -> None:
    """200 nodes at once, each idle for minutes: hours of node time, but only minutes of elapsed time."""
    made = simulate(Plan(nodes=200, boots=200, duration_s=60, services=("provisioning",), image_bytes=20_000))
    in_boot_only(made, service, port)
    made.plan = Plan(nodes=200, duration_s=420)
    made.end_s += 360
    for number in range(200):
        syslog(made, number, made.random("syslog", number))
    seen = by_name(found(write(tmp_path, made)))
    name = service if service in seen else f"tcp/{port}"
    name = name if name in seen else iana_name((6, port))
    assert seen[name].phase == "boot"
    assert seen[name].verdict == "time-critical", seen[name].reasons
    assert seen["provisioning"].verdict == "deferrable"


def test_rare_needs_of_nodes_beside_a_busy_monitor(tmp_path: Path) -> None:
    made = simulate(Plan(nodes=8, boots=0, duration_s=7200, services=("ntp",)))
    messages: list[Message] = [(0.001, "c", b"?"), (0.001, "s", b"!")]
    for number, node in enumerate(made.nodes):
        for time_s in made.times(number, 5, made.random("monitor", number)):
            made.connect(time_s, "monitor", made.sms, node, 5693, messages)
        for time_s in made.times(number, 900, made.random("need", number)):
            made.connect(time_s, "monitor", node, made.sms, 5693, messages)
    seen = by_name(found(write(tmp_path, made)))[iana_name((6, 5693))]
    assert seen.connections.node == 64 and seen.connections.sms > 11_000
    assert seen.verdict == "time-critical", seen.reasons


def test_ssh_with_few_logins_of_nodes(tmp_path: Path) -> None:
    made = simulate(Plan(nodes=8, boots=0, duration_s=7200, busy=20, services=("ssh",)))
    for node in made.nodes[:2]:
        made.connect(made.end_s - 3600, "ssh", node, made.sms, 22, [(0.01, "s", b"SSH-2.0-x\r\n")])
    seen = by_name(found(write(tmp_path, made)))["ssh"]
    assert (seen.connections.node, seen.verdict) == (2, "deferrable")


def behind_a_router(made: Made) -> None:
    """Nodes in another network as seen by the management node: all have the router's link address."""
    router = p.mac_bytes("52:54:00:fd:00:01")
    macs = {p.mac_bytes(node.mac) for node in made.nodes}
    made.frames = [
        (
            time,
            (router if frame[:6] in macs else frame[:6])
            + (router if frame[6:12] in macs else frame[6:12])
            + frame[12:],
        )
        for time, frame in made.frames
    ]


def test_nodes_in_a_network_of_their_own(tmp_path: Path) -> None:
    """Cray's node management network is routed: DHCP comes through a relay, and Ganglia by unicast."""
    services = tuple(one for one in WITHOUT_SSH if one not in ("provisioning", "arp"))
    made = simulate(
        Plan(nodes=40, boots=0, duration_s=3600, services=services, multicast=False, network="10.2.1", sms="10.1.0.1")
    )
    behind_a_router(made)
    seen = found(write(tmp_path, made))
    assert groups(seen) == {**TABLE_ONE, "SMS-mgmt": {"File synchronization"}}
    assert seen.nodes.count == 40


# Leases.


def test_leases_are_read_however_many_nodes_boot(tmp_path: Path) -> None:
    """Offers and answers alternate: sampling every second of them must not lose all answers."""
    made = simulate(Plan(nodes=8, boots=8, duration_s=1200, services=WITHOUT_SSH))
    dhcpd = by_name(found(write(tmp_path, made)))["provisioning"]
    assert (dhcpd.budget_s, dhcpd.budget_from) == (10800, "observed")
    assert "a lease lasts 6 h" in dhcpd.budget_why


@pytest.mark.parametrize("snap", [64, 128])
def test_leases_that_are_cut_are_not_guessed(snap: int, tmp_path: Path) -> None:
    """The budget is what was seen, not the catalogue's month."""
    made = simulate(Plan(nodes=8, boots=8, duration_s=1200, services=WITHOUT_SSH))
    file = tmp_path / "cut.pcap"
    file.write_bytes(files.pcap(made.packets(), snap=snap))
    seen = found(file)
    dhcpd = by_name(seen)["provisioning"]
    assert dhcpd.budget_s <= 1260
    assert f"packets are cut at {snap} bytes" in dhcpd.budget_why
    assert any(f"cut at {snap} bytes" in remark for remark in seen.capture.remarks)
    assert seen.capture.cut_at == snap


# Ports shared with other services.


@pytest.mark.parametrize(
    ("port", "payload", "name", "verdict"),
    [
        (8888, b"CONNECT mirror.example.org:443 HTTP/1.1\r\n\r\n", "", "time-critical"),
        (3001, b"\x16\3\1\2\0\1", "", "time-critical"),
        (3002, b"what is it\n", "", "time-critical"),
        (8888, b"GET /meta-data HTTP/1.1\r\n\r\n", "provisioning", "deferrable"),
        (3002, b"installstatus booted\n", "provisioning", "deferrable"),
    ],
)
def test_shared_ports_of_provisioning(port: int, payload: bytes, name: str, verdict: str, tmp_path: Path) -> None:
    """A proxy in constant use; a message that a node sends once while it boots."""
    made = simulate(Plan(nodes=8, boots=0, duration_s=3600, services=("ntp",)))
    for number, node in enumerate(made.nodes):
        for time_s in made.times(number, 3600 if name else 300, made.random("proxy", number)):
            made.connect(
                time_s, "proxy", node, made.sms, port, [(0.001, "c", payload), (0.001, "s", b"HTTP/1.1 200 OK\r\n")]
            )
    seen = by_name(found(write(tmp_path, made)))
    assert {one.name: one.verdict for one in seen.values() if one.name != "chrony"} == {
        name or iana_name((6, port)): verdict
    }


def test_public_time_servers_say_nothing_about_nat(tmp_path: Path) -> None:
    made = simulate(Plan(nodes=4, duration_s=1200, boots=0, services=("syslog", "slurm", "arp")))
    for number, node in enumerate(made.nodes):
        for poll in range(18):
            request, answer = (p.ntp(mode, stratum=2, poll=6, sent_ns=10**18) for mode in (3, 4))
            exchange: list[Message] = [(0, "c", request), (0.02, "s", answer)]
            made.exchange(START_S + 5 + number + 64 * poll, "ntp", node, made.outside[0], (node.port(), 123), exchange)
    seen = by_name(found(write(tmp_path, made)))
    assert (seen["nat"].budget_s, seen["nat"].budget_from) == (0, "catalogue")
    assert "chrony" not in seen
