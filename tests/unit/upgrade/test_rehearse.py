"""The plan of a rehearsal: production's addresses and names, in isolated networks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import read_bases, read_catalog, select
from appliance.config.model import Site
from appliance.errors import ConfigError, Refused, SmsError
from appliance.lab import render
from appliance.lab.journal import Journal
from appliance.lab.layout import PROVISIONING, PUBLIC, Layout, Plan
from appliance.operations.context import Cluster
from appliance.operations.upgrade.rehearse_checks import (
    compare_production,
    count_cables,
    is_idle,
    override_resources,
    read_jobs,
    read_queue,
    read_recovered,
)
from appliance.operations.upgrade.rehearse_folders import Record, read_record, remove_leftovers, write_record
from appliance.operations.upgrade.rehearse_plan import (
    CARRIER,
    OUTSIDE,
    ROUTER,
    choose_nodes,
    find_peers,
    make_plan,
    rehearsal_site,
    user_lines,
)
from appliance.operations.upgrade.rehearse_vm import judge_polls, need_polls
from appliance.plan.overlay.names import read_hosts
from appliance.share import share
from appliance.tools.ports import Link

BASIC: dict[str, Any] = {
    "cluster": "alpha",
    "hostname": "services",
    "admin_hosts": [{"name": "admin1", "address": "admin1"}],
    "networks": {
        "provisioning": {"bridge": "br-nmn", "address": "10.1.0.1/16", "mac": "02:00:00:00:00:01"},
        "public": {
            "bridge": "br-can",
            "address": "192.0.2.9/28",
            "mac": "02:00:00:00:00:02",
            "gateway": "192.0.2.1",
            "probe": "198.51.100.7",
        },
        "dns": ["10.1.0.53"],
    },
    "slurm": {
        "nodes": [
            {"name": "gpu[1-2]"},
            {"name": "n[001-450]", "address": "10.1.1.[1-450]", "cpus": 64},
            {"name": "far1", "address": "172.16.0.1"},
        ]
    },
    "ntp": ["192.0.2.3", "pool.example.org"],
    "syslog_forward": "203.0.113.4:1514",
    "mail": {"relay": "mail.example.org:587"},
    "filesync": {"server": "https://10.1.0.99/files"},
    "snapshots": {"standby": ["admin1"]},
}


def site(**changes: Any) -> Site:
    return Site.model_validate({**BASIC, **changes})


def nowhere(name: str) -> str:
    return ""


def test_the_first_nodes_whose_addresses_are_known() -> None:
    nodes, skipped = choose_nodes(site(), 2, {}, nowhere)
    assert nodes == [("n001", "10.1.1.1"), ("n002", "10.1.1.2")]
    assert skipped == ["gpu1: its name does not resolve", "gpu2: its name does not resolve"]


def test_names_are_resolved_by_the_containers_hosts_file_first() -> None:
    nodes, skipped = choose_nodes(site(), 3, {"gpu1": "10.1.2.1"}, {"gpu2": "10.1.2.2"}.get)  # type: ignore[arg-type]
    assert nodes == [("gpu1", "10.1.2.1"), ("gpu2", "10.1.2.2"), ("n001", "10.1.1.1")]
    assert not skipped


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"name": "far1", "address": "172.16.0.1"}, "172.16.0.1 is not in the provisioning network 10.1.0.0/16"),
        ({"name": "n1", "address": "10.1.0.1"}, "10.1.0.1 is already used"),
        ({"name": "n1", "address": "10.1.0.53"}, "10.1.0.53 is already used"),
        ({"name": "switch", "address": "10.1.0.2"}, "its name is reserved in a rehearsal"),
        ({"name": "services", "address": "10.1.0.2"}, "its name is reserved in a rehearsal"),
        ({"name": "n1"}, "its name does not resolve"),
    ],
)
def test_unusable_nodes(node: dict[str, str], why: str) -> None:
    with pytest.raises(Refused, match="no compute node can be rehearsed") as caught:
        choose_nodes(site(slurm={"nodes": [node]}), 1, {}, nowhere)
    assert why in caught.value.message and "--nodes 0" in caught.value.hint


def test_a_number_of_nodes() -> None:
    assert choose_nodes(site(slurm={}), 0, {}, nowhere) == ([], [])
    with pytest.raises(Refused, match="the site file has none"):
        choose_nodes(site(slurm={}), 1, {}, nowhere)
    for count in (-1, 17):
        with pytest.raises(ConfigError):
            choose_nodes(site(), count, {}, nowhere)


def plan() -> Plan:
    return make_plan(site(), [("n001", "10.1.1.1"), ("n002", "10.1.1.2")], folder=Path("/s/rh-1"), user=("", ""))


def test_the_plan_has_productions_addresses_and_bridges() -> None:
    made = plan()
    assert made.addresses == {PROVISIONING: "10.1.0.1", PUBLIC: "192.0.2.9"}
    assert made.bridges == {PROVISIONING: "br-nmn", PUBLIC: "br-can"}
    assert made.prefixes == {PROVISIONING: 16, PUBLIC: 28}
    assert made.gateways == {PROVISIONING: "10.1.0.1", PUBLIC: "192.0.2.1"}
    assert made.container == "services" and made.disk == "/s/rh-1" and made.held


def behind_routers() -> Site:
    """Nodes in two networks behind routers; the highest address of the first is a node's."""
    routes = [
        {"network": "10.100.0.0/29", "gateway": "10.1.0.254"},
        {"network": "10.101.0.0/16", "gateway": "10.1.0.253"},
        {"network": "10.102.0.7/32", "gateway": "10.1.0.253"},
    ]
    provisioning = {**BASIC["networks"]["provisioning"], "routes": routes}
    nodes = ["10.100.0.6", "10.101.0.1", "10.102.0.7", "10.1.0.254", "10.1.1.1"]
    return site(
        networks={**BASIC["networks"], "provisioning": provisioning},
        slurm={"nodes": [{"name": f"n{i}", "address": address} for i, address in enumerate(nodes)]},
    )


def test_nodes_behind_routers() -> None:
    """One host is all routers; every node's route leads through the address that it has in the node's network."""
    routed = behind_routers()
    nodes, skipped = choose_nodes(routed, 5, {}, nowhere)
    assert [name for name, _ in nodes] == ["n0", "n1", "n4"]
    assert [why.partition(": ")[2] for why in skipped] == [
        "10.102.0.7/32 has no room for a router",
        "10.1.0.254 is already used",
    ]
    plan = make_plan(routed, nodes, folder=Path("/s"), user=("", ""))
    hosts = {host.name: host for host in plan.hosts}
    batches = {name: render.host_batch(host, plan).splitlines() for name, host in hosts.items()}
    assert {"addr add 10.100.0.6/29 dev eth0", "route add default via 10.100.0.5"} <= set(batches["n0"])
    assert {"addr add 10.101.0.1/16 dev eth0", "route add default via 10.101.255.254"} <= set(batches["n1"])
    assert {"addr add 10.1.1.1/16 dev eth0", "route add default via 10.1.0.1"} <= set(batches["n4"])
    assert [line for line in batches[ROUTER] if "addr add" in line or "route" in line] == [
        "addr add 10.1.0.254/16 dev prov0",
        "addr add 10.100.0.5/29 dev rout0",
        "addr add 10.1.0.253/16 dev prov0",
        "addr add 10.101.255.254/16 dev rout0",
        "route add default via 10.1.0.1",
    ]
    journal = json.loads(json.dumps(plan.as_dict()))
    assert Plan.from_dict(journal) == plan
    assert ROUTER not in {host.name for host in make_plan(site(), [], folder=Path("/s"), user=("", "")).hosts}


def test_the_outside_host_has_all_peers_of_the_container() -> None:
    names = [peer.name for peer in find_peers(site())]
    assert names == [
        *("192.0.2.3", "pool.example.org", "203.0.113.4", "mail.example.org", "10.1.0.53", "198.51.100.7"),
    ]
    outside = next(host for host in plan().hosts if host.name == OUTSIDE)
    assert outside.addresses == {PUBLIC: "192.0.2.1", PROVISIONING: "10.1.0.53"}
    assert outside.more == ((PUBLIC, "192.0.2.3/28"), ("lo", "203.0.113.4/32"), ("lo", "198.51.100.7/32"))
    assert plan().ports == {"syslog": (1514,), "mail": (587,)}
    assert plan().answers == {"n001": "10.1.1.1", "n002": "10.1.1.2"}
    without = make_plan(site(networks={**BASIC["networks"], "dns": []}), [], folder=Path("/s"), user=("", ""))
    assert without.answers is None, "where there is no name server there is none"


def test_files_of_the_hosts() -> None:
    layout = Layout("rh-1", 2, plan())
    hosts = {host.name: host for host in layout.hosts}
    assert layout.nodes == ("n001", "n002") and layout.disk == Path("/s/rh-1")
    assert "addr add 10.1.1.1/16 dev eth0" in render.host_batch(hosts["n001"], layout.plan)
    carrier = render.host_batch(hosts[CARRIER], layout.plan)
    assert "addr add" not in carrier and "route add" not in carrier
    assert "link set prov0 master br-nmn up" in carrier
    outside = render.host_batch(hosts[OUTSIDE], layout.plan)
    assert "addr add 203.0.113.4/32 dev lo" in outside and "addr add 192.0.2.3/28 dev pub0" in outside
    switch = render.switch_batch(layout).splitlines()
    assert "link set p-n1 master br-nmn" in switch, "a node's cable is down until it is set apart"
    assert "link set p-host master br-nmn up" in switch
    files = render.host_files(layout, hosts["n001"], render.Keys(b"key", b"", {}), sms="/sms")
    assert "10.1.0.1:6817" in files["lab/supervisord.conf"].data.decode()
    assert "sshd" not in files["lab/supervisord.conf"].data.decode()
    assert "10.1.0.1 services\n" in files["etc/hosts"].data.decode()
    assert files["etc/munge/munge.key"] == render.File(b"key", 0o400)
    reported = render.host_files(layout, hosts[OUTSIDE], render.Keys(b"", b"", {}), sms="/sms")
    assert 'port="1514"' in reported["etc/rsyslog.conf"].data.decode()
    assert "587 inet" in reported["lab/setup.sh"].data.decode()


@pytest.mark.parametrize(
    ("name", "address"), [("n002", "10.1.1.2"), ("n002.example.org", "10.1.1.2"), ("mail.example.org", "192.0.2.1")]
)
def test_names_are_answered(name: str, address: str) -> None:
    layout = Layout("rh-1", 2, plan())
    outside = next(host for host in layout.hosts if host.name == OUTSIDE)
    text = render.host_files(layout, outside, render.Keys(b"", b"", {}), sms="/sms")["lab/names.py"].data.decode()
    program: dict[str, Any] = {"__name__": "names"}
    exec(compile(text, "names.py", "exec"), program)
    assert program["ADDRESSES"] == ["192.0.2.1", "10.1.0.53", "192.0.2.3", "203.0.113.4", "198.51.100.7"]
    labels = b"".join(bytes([len(word)]) + word.encode() for word in name.split(".")) + b"\0"
    said = program["answer"](b"\1\2" + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\1\0\1")
    assert said[:2] == b"\1\2" and ".".join(map(str, said[-4:])) == address
    assert program["answer"](b"\1\2" + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\x1c\0\1")[6:8] == b"\0\0", "no AAAA"


def test_a_journal_finds_all_of_it_again(tmp_path: Path) -> None:
    journal = Journal("rh-1", 2, plan=plan().as_dict())
    again = Journal(**json.loads(json.dumps(journal.__dict__)))
    assert again.layout == Layout("rh-1", 2, plan())


def test_the_site_of_a_rehearsal_writes_to_its_own_folders_only() -> None:
    mine = rehearsal_site(site(), Path("/s/rh-1"))
    assert str(mine.state) == "/s/rh-1/state" and mine.overlay.directory is None
    assert [host.name for host in mine.admin_hosts] == [CARRIER]
    assert not mine.snapshots.standby and mine.filesync.server is None
    assert mine.slurm == site().slurm and mine.networks == site().networks and mine.ntp == site().ntp


def test_the_lines_of_a_user() -> None:
    passwd, group = "root:x:0:0::/root:/bin/sh\nann:x:2000:100:Ann:/home/ann:/bin/sh\n", "users:x:100:\n"
    assert user_lines(passwd, group, "ann") == ("ann:x:2000:100:Ann:/home/ann:/bin/sh", "users:x:100:")
    assert user_lines(passwd, "", "ann")[1] == "ann:x:100:"
    with pytest.raises(ConfigError, match="no user bob"):
        user_lines(passwd, group, "bob")


def test_a_hosts_file_is_read() -> None:
    text = "127.0.0.1 localhost\n10.1.1.1 n1 n1.example # n9\n::1 six\n\n10.1.1.2 n1\nnonsense\n"
    assert read_hosts(text) == {"localhost": "127.0.0.1", "n1": "10.1.1.1", "n1.example": "10.1.1.1"}


def test_jobs_that_the_state_must_have() -> None:
    reported = "job.7 100.5\njob.12 50\njob.13 195\njob.x 10\n"
    assert read_jobs(reported, 200.0) == [7, 12], "13 came 5 s before the state was copied"


def test_the_jobs_that_a_controller_has_recovered() -> None:
    log = (
        "[2026-11-21T21:00:00] slurmctld version 22.05.8 started on cluster lab\n"
        "[2026-11-21T21:00:01] Recovered JobId=3 Assoc=0\n"
        "[2026-11-21T22:00:00] slurmctld version 22.05.8 started on cluster lab\n"
        "[2026-11-21T22:00:01] Recovered JobId=4 Assoc=0\n"
        "[2026-11-21T22:00:01] Recovered JobId=5_1(6) Assoc=0\n"
        "[2026-11-21T22:00:01] Recovered information about 2 jobs\n"
    )
    started = "slurmctld version .* started"
    assert read_recovered(log, started) == {4}
    assert read_recovered(log.splitlines()[1], started) == {3}
    assert read_recovered("", started) == set()


def cable(index: int, far: int, name: str = "eth0", kind: str = "veth") -> Link:
    return {"ifname": name, "ifindex": index, "link_index": far, "linkinfo": {"info_kind": kind}, "flags": ["UP"]}


LO: Link = {"ifname": "lo", "ifindex": 1, "link_type": "loopback", "flags": ["UP"]}


def test_cables_are_counted() -> None:
    bridge = cable(2, 0, "br", "bridge")
    tunnel: Link = {**cable(3, 0, "tunl0", "ipip"), "flags": []}  # the kernel's own, in every namespace
    assert count_cables({"switch": [LO, bridge, cable(5, 9), tunnel], "node": [LO, cable(9, 5)]}) == 1


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (cable(3, 77, "veth9"), "the peer of veth9 of node is outside the rehearsal"),
        ({"ifname": "ens3", "ifindex": 3, "link_type": "ether", "flags": ["UP"]}, "ens3 of node is not a cable"),
        (cable(3, 0, "vx0", "vxlan"), "vx0 of node is not a cable of the rehearsal: vxlan"),
        (cable(3, 0, "mv0", "macvlan"), "mv0 of node"),
    ],
)
def test_a_way_out_is_detected(link: Link, words: str) -> None:
    with pytest.raises(SmsError, match=words):
        count_cables({"switch": [LO, cable(5, 9)], "node": [LO, cable(9, 5), link]})


@pytest.mark.parametrize(
    ("state", "idle"),
    [
        ("IDLE", True),
        ("IDLE+MAINTENANCE+RESERVED", True),
        ("IDLE+DRAIN", False),
        ("DOWN+MAINTENANCE", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE*", False),
        ("ALLOCATED", False),
        ("", False),
    ],
)
def test_an_idle_node(state: str, idle: bool) -> None:
    assert is_idle(state) is idle


def test_a_record_survives_its_file_and_may_be_missing(tmp_path: Path) -> None:
    record = Record("rh-1", "/x.sif", 4, 10.0, kept=True)
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    (tmp_path / "rehearsal.json").write_text("{")
    assert not read_record(tmp_path).kept


def test_no_leftovers_without_a_rehearsal(tmp_path: Path) -> None:
    assert remove_leftovers(cluster_of(site(state=str(tmp_path)))) == []


def without_vm(**changes: Any) -> Site:
    return site(provisioning={"address": "10.1.0.99/16", "mac": "02:00:00:00:00:63"}, **changes)


def test_without_the_vm_its_address_exists_and_the_container_still_polls_it(tmp_path: Path) -> None:
    plan = make_plan(without_vm(), [], folder=tmp_path, user=("", ""), without_vm=True)
    assert plan.hosts[0].addresses[PROVISIONING] == "10.1.0.53" and plan.hosts[0].more[-1] == (
        PROVISIONING,
        "10.1.0.99/16",
    )
    assert rehearsal_site(without_vm(), tmp_path, without_vm=True).filesync.server == "https://10.1.0.99/files"
    assert rehearsal_site(without_vm(), tmp_path).filesync.server is None


def cluster_of(of: Site, *names: str) -> Cluster:
    services = select(read_catalog(share("definitions", "services")), names)
    return Cluster(of, services, read_bases(share("definitions", "bases"))["debian-12"])


def test_a_site_without_a_vm_is_refused() -> None:
    with pytest.raises(Refused, match="has no provisioning VM"):
        need_polls(cluster_of(site()))
    with pytest.raises(Refused, match="pulls no files"):
        need_polls(cluster_of(without_vm(), "munge"))
    need_polls(cluster_of(without_vm(), "filesync"))


POLL = ("10.1.0.1", 6, 443)


@pytest.mark.parametrize(
    ("found", "expected", "wrong"),
    [
        ({POLL: 7}, "only the container's file synchronisation has tried to reach", ""),
        ({}, "", "inconclusive"),
        ({POLL: 7, ("10.1.1.1", 17, 69): 1}, "", r"try to reach the VM: 10\.1\.1\.1 \(17/69\)$"),
        ({POLL: 7, ("10.1.0.1", 6, 8080): 2}, "", r"10\.1\.0\.1 \(tcp/8080\)$"),
    ],
)
def test_allowed_clients_of_a_vm_that_is_off(found: dict[Any, int], expected: str, wrong: str) -> None:
    if wrong:
        with pytest.raises(SmsError, match=wrong):
            judge_polls(Counter(found), "10.1.0.99", POLL)
    else:
        assert expected in judge_polls(Counter(found), "10.1.0.99", POLL)


@pytest.mark.parametrize(
    ("value", "kept"),
    [("(null)", ""), ("", ""), ("l3cache_as_socket,shutdown_on_reboot", "l3cache_as_socket,shutdown_on_reboot,")],
)
def test_resources_of_nodes_are_overridden(value: str, kept: str) -> None:
    config = f"SlurmctldPort           = 6817\nSlurmdParameters        = {value}\nSlurmdPidFile = /run/slurmd.pid\n"
    assert override_resources(config) == f"SlurmdParameters={kept}config_overrides\n"


def test_jobs_of_production_that_a_snapshot_must_have() -> None:
    taken = 1_000_000.0
    output = "7 999000\n8_4 999000\n9 999995\n10 Unknown\n11 1000500\n12 999989\n"
    assert read_queue(output, taken) == {7, 12}, "those that are older, and of arrays the id of the array"
    assert compare_production({7, 12, 13}, frozenset({7, 12})) == "2 jobs, none missing"
    with pytest.raises(SmsError, match="1 of 2 jobs of production are not in the snapshot: 12"):
        compare_production({7}, frozenset({7, 12}))
