"""Other machines that serve, beside the management node: filers, a second management node, another DHCP server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.model import Classification, Server, Service, Unclassified
from appliance.cli.classify.view import view_text
from appliance.operations.classify.classify import ClassifyOptions, classify, render
from appliance.progress import Silent
from tests.captures import files, others
from tests.captures.cluster import Made, Plan, simulate
from tests.captures.variants import small
from tests.captures.wire import Station


def found(folder: Path, made: Made, **options: str) -> Classification:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(made.packets()))
    return classify(ClassifyOptions((str(file),), **options), Silent())  # type: ignore[arg-type]


def unseen(seen: Classification) -> dict[str, str]:
    return {one.name: one.finding for one in seen.unseen}


def names(seen: Classification) -> set[str]:
    return {one.name for one in seen.services}


def test_a_busy_filer_on_a_mirror_port_is_a_server(tmp_path: Path) -> None:
    """98 % of the packets are NFS of nodes with a filer: it is neither the management node nor a node, nor unused."""
    made = others.filer()
    seen = found(tmp_path, made)
    assert seen.sms.addresses == (made.sms.address,)
    assert seen.nodes.count == 8
    (server,) = seen.servers
    total = made.truth()["files"]
    assert server == Server(
        (others.FILER.address,), others.FILER.mac, "server", ("nfs",), 8, total.packets, total.bytes
    )
    assert total.packets > 70_000
    assert names(seen) == {"slurmctld", "chrony", "rsyslog", "ssh"}
    assert unseen(seen)["nfs"] == "elsewhere"
    (why,) = (one.why for one in seen.unseen if one.name == "nfs")
    assert why == f"it is used at other machines than the management node: {total.packets:,} packets"


def test_servers_in_all_outputs(tmp_path: Path) -> None:
    seen = found(tmp_path, others.filer(nodes=4, every_s=20))
    text = view_text(seen)
    assert "servers  10.1.0.50 (server): nfs for 4 nodes, 944 packets, " in text
    (hardly,) = (line for line in text.splitlines() if "hardly used here" in line)
    assert "nfs" not in hardly
    assert "here, but used at other machines: nfs" in text
    page = render(seen, "html")
    assert "10.1.0.50 (server): nfs" in page
    assert "used at other machines" in page


def test_servers_of_a_file_system_that_is_not_in_the_catalogue(tmp_path: Path) -> None:
    """Both are clients of each other, too, and mounted before the capture."""
    seen = found(tmp_path, others.lustre())
    assert seen.nodes.count == 6
    assert [(one.addresses, one.role, one.services, one.nodes) for one in seen.servers] == [
        (("10.1.0.50",), "server", ("lustre",), 6),
        (("10.1.0.51",), "server", ("lustre",), 6),
    ]


def test_two_management_nodes_are_two(tmp_path: Path) -> None:
    """The second is not a node, though it is a client of the first's slurmctld; a remark names it."""
    made = others.failover_pair()
    seen = found(tmp_path, made)
    assert (seen.sms.addresses, seen.nodes.count, seen.nodes.booted) == ((made.sms.address,), 8, 2)
    (server,) = seen.servers
    assert (server.addresses, server.role) == ((others.STANDBY.address,), "management node")
    assert (server.services, server.nodes) == (("chrony", "slurmctld"), 8)
    (remark,) = seen.capture.remarks
    assert remark.startswith("10.1.0.2 is another management node: it serves chrony and slurmctld to 8 nodes; ")
    other = found(tmp_path, made, sms=others.STANDBY.address)
    assert {one.role for one in other.servers} == {"management node"}
    assert other.servers[0].addresses == (made.sms.address,)
    assert other.servers[0].services == ("chrony", "provisioning", "rsyslog", "slurmctld")
    assert other.nodes.count == 8


def test_a_second_management_node_is_known_by_pings_of_its_controller(tmp_path: Path) -> None:
    """On the first one's own interface, nothing else of it is seen."""
    made = others.failover_pair()
    own = bytes.fromhex(made.sms.mac.replace(":", ""))
    made.frames = [(time, frame) for time, frame in made.frames if own in (frame[:6], frame[6:12]) or frame[0] & 1]
    seen = found(tmp_path, made)
    assert seen.nodes.count == 8
    assert [(one.addresses, one.role, one.services) for one in seen.servers] == [
        (("10.1.0.2",), "management node", ("slurmctld",))
    ]
    assert "servers  10.1.0.2 (management node): slurmctld, 170 packets, " in view_text(seen)


def test_dhcp_of_another_machine_is_not_the_management_nodes(tmp_path: Path) -> None:
    made = others.own_dhcp_server()
    seen = found(tmp_path, made)
    assert seen.nodes.count == 4
    assert names(seen) == {"slurmctld", "chrony"}
    (server,) = seen.servers
    assert (server.addresses, server.role, server.services) == (("10.1.0.2",), "management node", ("provisioning",))
    assert unseen(seen)["provisioning"] == "elsewhere"
    parts: list[Service | Unclassified] = [*seen.services, seen.elsewhere, seen.unclassified]
    assert sum(one.packets for one in parts) == seen.capture.packets == len(made.frames)


def test_nodes_that_serve_each_other_are_nodes(tmp_path: Path) -> None:
    """Neither ssh, rsync, slurmd's messages nor the first process of a job make a server."""
    seen = found(tmp_path, others.peers())
    assert (seen.nodes.count, seen.servers) == (6, ())


def node_that_exports() -> Made:
    """A node with slurmd whose disk the others mount."""
    made = small("slurm", "ntp", "arp", nodes=6, duration_s=600.0)
    for client in made.nodes[1:]:
        others.mount(made, client, made.nodes[0])
    return made


def test_a_node_that_serves_others_is_a_node_and_a_server(tmp_path: Path) -> None:
    seen = found(tmp_path, node_that_exports())
    assert seen.nodes.count == 6
    (server,) = seen.servers
    assert (server.role, server.services, server.nodes) == ("node", ("nfs",), 5)


def test_the_management_nodes_own_servers_are_listed(tmp_path: Path) -> None:
    made = small("slurm", "ntp", "arp", nodes=6, duration_s=600.0)
    others.mount(made, made.sms, others.FILER)
    seen = found(tmp_path, made)
    (server,) = seen.servers
    assert (server.role, server.services, server.nodes) == ("server", ("nfs",), 0)
    assert "10.1.0.50 (server): nfs for the SMS" in view_text(seen)
    assert unseen(seen)["nfs"] == "elsewhere"


@pytest.mark.parametrize("make", [others.filer, others.failover_pair])
def test_one_node_of_a_mirror_port_shows_its_servers(make: Callable[[], Made], tmp_path: Path) -> None:
    made = make()
    seen = found(tmp_path, made, node=made.nodes[0].address, sms=made.sms.address)
    assert [one.nodes for one in seen.servers] == [1]


def test_many_services_of_a_machine_are_few_names(tmp_path: Path) -> None:
    seen = found(tmp_path, others.many_ports(100))
    (server,) = seen.servers
    assert len(server.services) == 100
    (line,) = (line for line in view_text(seen).splitlines() if line.startswith("servers"))
    assert " and 92 others for 4 nodes, " in line
    assert len(line) < 300


def test_many_servers_of_dhcp_are_few_remarks(tmp_path: Path) -> None:
    more = [Station(f"dhcp{number}", f"52:54:00:0d:00:{number:02x}", f"10.1.0.{100 + number}") for number in range(9)]
    seen = found(tmp_path, others.own_dhcp_server(*more))
    assert [one.role for one in seen.servers] == ["management node"] * 10
    remarks = [one for one in seen.capture.remarks if "management node" in one]
    assert len(remarks) == 4
    assert remarks[3] == "7 more machines serve nodes as a management node does"


@pytest.mark.parametrize("sms", ["", "10.1.0.1"])
def test_two_clusters_on_a_mirror_port_do_not_mix(sms: str, tmp_path: Path) -> None:
    """NAT and Ganglia by multicast, too, are those of one."""
    (tmp_path / "two.pcap").write_bytes(files.pcap(others.two_clusters()))
    plan = Plan(nodes=6, boots=0, duration_s=1200.0, services=("slurm", "ntp", "ganglia", "routing", "nfs", "arp"))
    (tmp_path / "one.pcap").write_bytes(files.pcap(simulate(plan).packets()))
    two, one = (
        classify(ClassifyOptions((str(tmp_path / name),), sms=sms), Silent()) for name in ("two.pcap", "one.pcap")
    )
    counts = [
        {(each.name, each.clients, each.packets, each.verdict, each.confidence) for each in found.services}
        for found in (two, one)
    ]
    assert counts[0] == counts[1]
    assert (two.nodes.count, two.routed.packets) == (6, one.routed.packets)
    assert [(each.addresses, each.role, each.nodes) for each in two.servers] == [(("10.2.0.1",), "management node", 5)]
    assert "of another scheduler alone, and not counted as nodes: 5 machines" in two.capture.remarks


def test_the_nodes_of_a_pair_are_nodes(tmp_path: Path) -> None:
    (tmp_path / "pair.pcap").write_bytes(files.pcap(others.failover_pair().packets()))
    found = classify(ClassifyOptions((str(tmp_path / "pair.pcap"),)), Silent())
    assert found.nodes.count == 8
    assert not any("another scheduler" in one for one in found.capture.remarks)
