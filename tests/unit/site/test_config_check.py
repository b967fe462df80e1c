"""Rules of the site file that involve several values: one change to a valid file, the exact problems it causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.config.check import check_site
from appliance.config.read import read_site_text
from appliance.errors import ConfigError
from appliance.operations.site.find import open_site
from appliance.plan.render import Templates
from appliance.share import share
from tests.sites import BASES, GOOD, SERVICES

Case = tuple[str, str, list[str]]

CASES: dict[str, Case] = {
    "nothing": ("", "", []),
    "network address": (
        "10.77.0.1/24",
        "10.77.0.0/24",
        ["9: networks.provisioning.address: 10.77.0.0 is the address of the network 10.77.0.0/24 itself"],
    ),
    "broadcast address": (
        "10.78.0.2/24",
        "10.78.0.255/24",
        ["13: networks.public.address: 10.78.0.255 is the broadcast address of 10.78.0.0/24"],
    ),
    "a network of one": (
        "10.77.0.1/24",
        "10.77.0.1/32",
        [
            "9: networks.provisioning.address: 10.77.0.1/32 has no room for other hosts",
            "19: slurm.nodes[0].address: 10.77.0.101 is not in the provisioning network 10.77.0.1/32",
        ],
    ),
    "multicast": (
        "10.78.0.2/24",
        "224.0.0.5/24",
        [
            "13: networks.public.address: 224.0.0.5 is not a unicast host address",
            "15: networks.public.gateway: 10.78.0.254 is not in the public network 224.0.0.0/24",
        ],
    ),
    "overlap": (
        "10.78.0.2/24",
        "10.78.0.2/8",
        ["13: networks.public.address: 10.0.0.0/8 overlaps the provisioning network 10.77.0.0/24"],
    ),
    "one bridge": (
        "br-pub",
        "br-prov",
        ["12: networks.public.bridge: br-prov is already the bridge of the provisioning network"],
    ),
    "same MAC in other letters": (
        "02:00:0a:4e:00:02",
        "02:00:0A:4D:00:01",
        ["14: networks.public.mac: 02:00:0A:4D:00:01 is used twice"],
    ),
    "multicast MAC": (
        "02:00:0a:4d:00:01",
        "03:00:0a:4d:00:01",
        ["10: networks.provisioning.mac: 03:00:0a:4d:00:01 is a multicast address"],
    ),
    "zero MAC": (
        "02:00:0a:4d:00:01",
        "00:00:00:00:00:00",
        ["10: networks.provisioning.mac: 00:00:00:00:00:00 is all zeros"],
    ),
    "gateway outside": (
        "gateway: 10.78.0.254",
        "gateway: 10.79.0.1",
        ["15: networks.public.gateway: 10.79.0.1 is not in the public network 10.78.0.0/24"],
    ),
    "gateway is the container": (
        "gateway: 10.78.0.254",
        "gateway: 10.78.0.2",
        ["15: networks.public.gateway: 10.78.0.2 is the container's own address"],
    ),
    "gateway is the broadcast address": (
        "gateway: 10.78.0.254",
        "gateway: 10.78.0.255",
        ["15: networks.public.gateway: 10.78.0.255 is the network or broadcast address of 10.78.0.0/24"],
    ),
    "host twice": (
        "{name: host-b, address: 10.78.0.12}",
        "{name: host-a, address: 10.78.0.11}",
        [
            "5: admin_hosts[1].name: host-a is listed twice",
            "5: admin_hosts[1].address: 10.78.0.11 is listed twice",
        ],
    ),
    "two ports of one address": (
        "{name: host-b, address: 10.78.0.12}",
        "{name: host-b, address: 10.78.0.11, port: 2222}",
        [],
    ),
    "host at the container's address": (
        "10.78.0.12",
        "10.78.0.2",
        [
            "5: admin_hosts[1].address: 10.78.0.2 is the container's address",
        ],
    ),
    "host named like the container": (
        "host-b",
        "sms-services",
        ["5: admin_hosts[1].name: sms-services is also the container's host name"],
    ),
    "services": (
        "[slurmctld, munge]",
        "[slurmctld, mange, munge, munge]",
        [
            "16: services[1]: mange is not a service that the container can run",
            "16: services[3]: munge is listed twice",
        ],
    ),
    "no service": ("[slurmctld, munge]", "[]", ["16: services: the list of services is empty"]),
    "also": (
        "[slurmctld, munge]",
        "{from: c.yaml, also: [ntp]}",
        ["16: services.also[0]: ntp is not a service that the container can run"],
    ),
    "a key of the node twice": (
        'address: "10.77.0.[101-104]"',
        "extra: CPUs=4 State=CLOUD Weight=1 Weight=2",
        ["19: slurm.nodes[0].extra: cpus is set by `cpus`", "19: slurm.nodes[0].extra: weight is set 2 times"],
    ),
    "an address among the settings": ('address: "10.77.0.[101-104]"', "extra: NodeAddr=n.example.org", []),
    "two addresses": (
        "[101-104]",
        '[101-104]", extra: "NodeAddr=n.example.org',
        ["19: slurm.nodes[0].extra: nodeaddr is set by `address`"],
    ),
    "a key of the partition twice": (
        "default: true",
        "default: true, extra: MaxTime=5 State=DOWN",
        ["21: slurm.partitions[0].extra: maxtime is set by `max_time`"],
    ),
    "base": ("cluster: lab", "cluster: lab\nbase: {os: debian-13}", ["2: base.os: debian-13 is not a base"]),
    "fewer addresses": (
        "10.77.0.[101-104]",
        "10.77.0.[101-103]",
        ["19: slurm.nodes[0].address: expands to 3 addresses, but node[1-4] to 4 names"],
    ),
    "addresses outside": (
        "10.77.0.[101-104]",
        "10.76.0.[101-104]",
        ["19: slurm.nodes[0].address: 10.76.0.101 is not in the provisioning network 10.77.0.0/24"],
    ),
    "the container among the nodes": (
        "10.77.0.[101-104]",
        "10.77.0.[1-4]",
        ["19: slurm.nodes[0].address: 10.77.0.1 is the container's address"],
    ),
    "no address": (
        "10.77.0.[101-104]",
        "10.77.0.[253-256]",
        ["19: slurm.nodes[0].address: 10.77.0.255 is the network or broadcast address of 10.77.0.0/24"],
    ),
    "names for addresses": ('"10.77.0.[101-104]"', '"n[1-4].example.org"', []),
    "broken host lists": (
        '{name: "node[1-4]", address: "10.77.0.[101-104]"}',
        '{name: "node[1-4"}',
        [
            "18: slurm.nodes: slurmctld is enabled, but there are no compute nodes",
            "19: slurm.nodes[0].name: node[1-4 has unbalanced brackets",
        ],
    ),
    "node twice": (
        'address: "10.77.0.[101-104]"}',
        'address: "10.77.0.[101-104]"}\n    - {name: "node[3-5]"}',
        ["20: slurm.nodes[1].name: node3 is listed twice"],
    ),
    "nodes with names of others": (
        '{name: "node[1-4]", address: "10.77.0.[101-104]"}',
        '{name: "localhost,sms-services,host-b,node9"}',
        [
            "19: slurm.nodes[0].name: localhost is the name of every machine itself",
            "19: slurm.nodes[0].name: sms-services is the name of the services container",
        ],
    ),
    "a long list of irregular names": (
        '{name: "node[1-4]", address: "10.77.0.[101-104]"}',
        '{name: "' + ",".join(f"x{number * 7919 % 9973:04}y" for number in range(900)) + '"}',
        [],
    ),
    "partition of unknown nodes": (
        "{name: batch, default: true}",
        '{name: batch, nodes: "node[3-6]"}',
        ["21: slurm.partitions[0].nodes: node5 and 1 more are not among slurm.nodes"],
    ),
    "two defaults, one name": (
        "{name: batch, default: true}",
        "{name: batch, default: true}\n    - {name: batch, default: true}",
        [
            "22: slurm.partitions[1].name: batch is listed twice",
            "22: slurm.partitions[1].default: batch is already the default",
        ],
    ),
    "a topology for CPUs": ('address: "10.77.0.[101-104]"', "extra: Sockets=2 CoresPerSocket=8 ThreadsPerCore=2", []),
    "Procs for CPUs": ('address: "10.77.0.[101-104]"', "extra: Procs=8", []),
    "Procs and CPUs": (
        'address: "10.77.0.[101-104]"',
        "cpus: 8, extra: Procs=8",
        ["19: slurm.nodes[0].extra: procs is set by `cpus`"],
    ),
    "CPUs that fit sockets": ('address: "10.77.0.[101-104]"', "cpus: 2, extra: Sockets=2 CoresPerSocket=8", []),
    "CPUs that fit cores": ('address: "10.77.0.[101-104]"', "cpus: 16, extra: CoresPerSocket=8", []),
    "CPUs that fit threads": (
        'address: "10.77.0.[101-104]"',
        "cpus: 64, extra: Boards=2 SocketsPerBoard=2 CoresPerSocket=8 ThreadsPerCore=2",
        [],
    ),
    "CPUs that do not fit": (
        'address: "10.77.0.[101-104]"',
        "cpus: 31, extra: Sockets=2 CoresPerSocket=8 ThreadsPerCore=2",
        ["19: slurm.nodes[0].cpus: 31 does not fit the topology in `extra`"],
    ),
    "CPUs that do not fit cores": (
        'address: "10.77.0.[101-104]"',
        "cpus: 17, extra: CoresPerSocket=8",
        ["19: slurm.nodes[0].cpus: 17 does not fit the topology in `extra`"],
    ),
    "quoted text is not a setting": (
        'address: "10.77.0.[101-104]"',
        "extra: 'Reason=\"see CPUs=5 RealMemory=7\" Feature=a # Weight=1 Weight=2'",
        [],
    ),
    "a node in extra lines, too": (
        "slurm:\n",
        "slurm:\n  extra: ['NodeName=DEFAULT Weight=2', 'NodeName=node[4-5] CPUs=3']\n",
        ["18: slurm.extra[1]: node4 is also among slurm.nodes"],
    ),
    "a partition in extra lines, too": (
        "slurm:\n",
        "slurm:\n  extra: ['PartitionName=batch Nodes=ALL State=DOWN']\n",
        ["18: slurm.extra[0]: batch is also among slurm.partitions"],
    ),
    "a default in extra lines, too": (
        "slurm:\n",
        "slurm:\n  extra: ['PartitionName=b Nodes=ALL Default=No', 'PartitionName=c Nodes=ALL Default=Yes']\n",
        ["18: slurm.extra[1]: batch is already the default"],
    ),
    "no default": ("default: true", "default: false", []),
    "no nodes, no partitions": (
        GOOD[GOOD.index("slurm:") :],
        "",
        [
            "1: slurm.nodes: slurmctld is enabled, but there are no compute nodes",
            "1: slurm.partitions: slurmctld is enabled, but there is no partition",
        ],
    ),
    "too few places": (
        "slurm:\n",
        "slurm:\n  max_nodes: 3\n",
        ["18: slurm.max_nodes: 3 is less than the 4 nodes named"],
    ),
    "lines that are not the site's": (
        "slurm:\n",
        "slurm:\n"
        "  extra:\n    - ReturnToService=1 clustername = mine\n    - AuthType=auth/none\n    - 'A=b # AuthType=x'\n",
        [
            "19: slurm.extra[0]: ClusterName cannot be set by the site",
            "20: slurm.extra[1]: AuthType cannot be set by the site",
        ],
    ),
    "logs that would grow without a limit": (
        "slurm:\n",
        "slurm:\n"
        "  extra: [SlurmctldLogFile=/a, SlurmSchedLogFile=/b, 'JobCompType=\"jobcomp/FileTxt\"', SlurmdLogFile=/c]\n",
        [
            "18: slurm.extra[0]: SlurmctldLogFile cannot be set by the site",
            "18: slurm.extra[1]: SlurmSchedLogFile cannot be set by the site",
            '18: slurm.extra[2]: "jobcomp/FileTxt" writes a file that grows in the overlay without a limit',
        ],
    ),
    "nodes of extra lines": (
        "  partitions:\n    - {name: batch, default: true}",
        "  extra: ['NodeSet=fast Feature=fast']\n  partitions:\n    - {name: batch, nodes: fast}",
        [],
    ),
}


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ("", " CPUs=1 "),
        (", extra: Sockets=2 CoresPerSocket=8", " Sockets=2 "),
        (", extra: Procs=8", " Procs=8"),
        (", extra: 'Reason=\"Sockets=2\"'", " CPUs=1 "),
        (", cpus: 16, extra: CoresPerSocket=8", " CPUs=16 "),
    ],
)
def test_a_node_has_no_cpus_besides_its_topology(extra: str, shown: str) -> None:
    site, _ = read_site_text(GOOD.replace('[101-104]"}', f'[101-104]"{extra}}}'), "sms.yaml")
    text = Templates(share("overlays"), site=site, services=[], other_controllers=[]).file("slurm/slurm.conf.j2")
    (line,) = (line for line in text.splitlines() if line.startswith("NodeName="))
    assert shown in line and line.count("CPUs=") == shown.count("CPUs=")


def _problems(text: str, selected: tuple[str, ...] = ()) -> list[str]:
    site, document = read_site_text(text, "sms.yaml")
    problems = check_site(site, document, services=SERVICES, bases=BASES, selected=selected, controllers=("slurmctld",))
    assert all(problem.hint for problem in problems)
    assert all(problem.file == "sms.yaml" for problem in problems)
    return [f"{problem.line}: {problem.path}: {problem.message}" for problem in problems]


ROUTED = "    mac: 02:00:0a:4d:00:01\n"
AT = "networks.provisioning.routes"
ROUTES: dict[str, tuple[str, list[str]]] = {
    "good": ("[{network: 10.100.0.0/17, gateway: 10.77.0.254}, {network: 10.9.9.9/32, gateway: 10.77.0.254}]", []),
    "gateway outside": (
        "[{network: 10.100.0.0/17, gateway: 10.100.0.1}]",
        [f"11: {AT}[0].gateway: 10.100.0.1 is not in the provisioning network 10.77.0.0/24"],
    ),
    "the container as gateway": (
        "[{network: 10.100.0.0/17, gateway: 10.77.0.1}]",
        [f"11: {AT}[0].gateway: 10.77.0.1 is the container's own address"],
    ),
    "broadcast as gateway": (
        "[{network: 10.100.0.0/17, gateway: 10.77.0.255}]",
        [f"11: {AT}[0].gateway: 10.77.0.255 is the network or broadcast address of 10.77.0.0/24"],
    ),
    "a node as gateway": (
        "[{network: 10.100.0.0/17, gateway: 10.77.0.102}]",
        ["21: slurm.nodes[0].address: 10.77.0.102 is the address of a router"],
    ),
    "overlap with its own network": (
        "[{network: 10.77.0.128/25, gateway: 10.77.0.254}]",
        [f"11: {AT}[0].network: 10.77.0.128/25 overlaps the provisioning network, 10.77.0.0/24"],
    ),
    "overlap with the public network": (
        "[{network: 10.78.0.0/16, gateway: 10.77.0.254}]",
        [f"11: {AT}[0].network: 10.78.0.0/16 overlaps the public network, 10.78.0.0/24"],
    ),
    "overlap of two": (
        "[{network: 10.100.0.0/17, gateway: 10.77.0.254}, {network: 10.100.64.0/18, gateway: 10.77.0.253}]",
        [f"11: {AT}[1].network: 10.100.64.0/18 overlaps another route, 10.100.0.0/17"],
    ),
    "the same twice": (
        "[{network: 10.100.0.0/17, gateway: 10.77.0.254}, {network: 10.100.0.0/17, gateway: 10.77.0.253}]",
        [f"11: {AT}[1].network: 10.100.0.0/17 overlaps another route, 10.100.0.0/17"],
    ),
    "the probe of NAT": (
        "[{network: 169.254.0.0/16, gateway: 10.77.0.254}]",
        [
            f"11: {AT}[0].network: 169.254.0.0/16 overlaps the network of the NAT probe inside the container, "
            "169.254.77.0/30"
        ],
    ),
    "default route twice": (
        "[{network: 0.0.0.0/0, gateway: 10.77.0.254}]",
        [f"11: {AT}[0].network: 0.0.0.0/0 is a second default route"],
    ),
    "the probe behind it": (
        "[{network: 10.9.0.0/24, gateway: 10.77.0.254}]",
        [f"11: {AT}[0].network: 10.9.0.0/24 contains networks.public.probe, 10.9.0.9"],
    ),
    "multicast": (
        "[{network: 224.0.0.0/4, gateway: 10.77.0.254}]",
        [f"11: {AT}[0].network: 224.0.0.0/4 is not a network of hosts"],
    ),
}


@pytest.mark.parametrize(("routes", "expected"), ROUTES.values(), ids=ROUTES)
def test_routes(routes: str, expected: list[str]) -> None:
    text = GOOD.replace("gateway: 10.78.0.254", "gateway: 10.78.0.254\n    probe: 10.9.0.9")
    assert _problems(text.replace(ROUTED, f"{ROUTED}    routes: {routes}\n")) == expected


def test_nodes_behind_a_router() -> None:
    routed = GOOD.replace(ROUTED, f"{ROUTED}    routes: [{{network: 10.100.0.0/17, gateway: 10.77.0.254}}]\n")
    assert _problems(routed.replace("10.77.0.[101-104]", "10.100.0.[101-104]")) == []
    assert _problems(routed.replace("10.77.0.[101-104]", "10.100.128.[101-104]")) == [
        "20: slurm.nodes[0].address: "
        "10.100.128.101 is not in the provisioning network 10.77.0.0/24 or behind its routers"
    ]
    assert _problems(routed.replace("10.77.0.[101-104]", "10.100.127.[252-255]")) == [
        "20: slurm.nodes[0].address: 10.100.127.255 is the network or broadcast address of 10.100.0.0/17"
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rule(case: Case) -> None:
    old, new, problems = case
    assert old in GOOD
    assert _problems(GOOD.replace(old, new, 1)) == problems


def test_probe_of_the_container_itself() -> None:
    text = GOOD.replace("    gateway: 10.78.0.254", "    gateway: 10.78.0.254\n    probe: 10.78.0.2")
    assert _problems(text) == ["16: networks.public.probe: 10.78.0.2 is the container's own address"]


@pytest.mark.parametrize(
    "more", ["ntp: [pool.example.net, 10.77.0.1]", "syslog_forward: 10.78.0.2:514", "mail: {relay: sms-services}"]
)
def test_a_server_that_is_the_container_itself(more: str) -> None:
    (found,) = _problems(f"{GOOD}{more}\n")
    assert "is the container itself" in found


MACVLAN = ("    bridge: br-prov", "    attach: macvlan\n    port: eno1")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([MACVLAN], []),
        ([(MACVLAN[0], "    attach: macvlan\n    port: {host-a: eno1, host-b: ens3}")], []),
        ([MACVLAN, ("    bridge: br-pub", "    attach: macvlan\n    port: eno1")], []),
        ([(MACVLAN[0], MACVLAN[0] + "\n    port: eno1\n    vlan: 20")], []),
        (
            [MACVLAN, ("    bridge: br-pub", "    bridge: br-pub\n    port: eno1")],
            ["networks.public.port: eno1 is already the port of the provisioning network"],
        ),
        ([MACVLAN, ("    bridge: br-pub", "    bridge: br-pub\n    port: eno1\n    vlan: 20")], []),
        (
            [(MACVLAN[0], "    attach: macvlan")],
            ["networks.provisioning: a macvlan interface needs the port of host-a, host-b"],
        ),
        (
            [(MACVLAN[0], "    attach: macvlan\n    port: {host-a: eno1, host-c: ens3}")],
            [
                "networks.provisioning.port: a macvlan interface needs the port of host-b",
                "networks.provisioning.port.host-c: host-c is not an admin host",
            ],
        ),
        (
            [(MACVLAN[0], MACVLAN[0] + "\n    attach: macvlan\n    port: eno1\n    vlan: 20")],
            [
                "networks.provisioning.bridge: a macvlan interface needs no bridge",
                "networks.provisioning.vlan: a VLAN is created below a bridge only",
            ],
        ),
        (
            [(MACVLAN[0], MACVLAN[0] + "\n    vlan: 20")],
            ["networks.provisioning: a VLAN needs the port of host-a, host-b"],
        ),
        (
            [(MACVLAN[0], MACVLAN[0] + "\n    port: enp129s0f1np1\n    vlan: 1234")],
            ["networks.provisioning.vlan: enp129s0f1np1.1234 is too long for the name of an interface"],
        ),
    ],
)
def test_how_hosts_attach_the_container(changes: list[tuple[str, str]], expected: list[str]) -> None:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    found = [problem.partition(": ")[2] for problem in _problems(text)]
    assert len(found) == len(expected), found
    for problem, start in zip(sorted(found), sorted(expected), strict=True):
        assert problem.startswith(start)


def test_one_port_for_two_bridges() -> None:
    text = GOOD.replace("    bridge: br-prov", "    bridge: br-prov\n    port: eth0")
    text = text.replace("    bridge: br-pub", "    bridge: br-pub\n    port: eth0")
    assert _problems(text) == ["14: networks.public.port: eth0 is already the port of the provisioning network"]


def test_services_of_a_classification_count_for_slurm() -> None:
    text = GOOD[: GOOD.index("slurm:")].replace("[slurmctld, munge]", "{from: c.yaml}")
    assert _problems(text) == []
    assert len(_problems(text, selected=("slurmctld",))) == 2


def test_snapshots() -> None:
    text = GOOD + "snapshots: {every_minutes: 7, standby: [host-b, host-c]}\n"
    line = text.count("\n")
    assert _problems(text) == [
        f"{line}: snapshots.every_minutes: an interval of 7 minutes must divide an hour, or be whole hours that divide "
        "a day",
        f"{line}: snapshots.standby[1]: host-c is not an admin host of the site",
    ]


@pytest.mark.parametrize(
    ("fence", "good"),
    [
        ("{command: [/usr/local/sbin/fence, host-a]}", True),
        ("{redfish: {url: https://bmc-a/redfish/v1/Systems/1, user: sms, password_file: bmc}, timeout_s: 30}", True),
        ("{ipmi: {address: bmc-a, user: ADMIN, password_file: bmc}}", True),
        ("{timeout_s: 30}", False),
        ("{command: [], ipmi: {address: bmc-a, user: ADMIN, password_file: bmc}}", True),
        ("{command: [x], ipmi: {address: bmc-a, user: ADMIN, password_file: bmc}}", False),
    ],
)
def test_a_host_is_fenced_in_one_way(fence: str, good: bool) -> None:
    text = GOOD.replace("{name: host-a, address: 10.78.0.11}", f"{{name: host-a, address: 10.78.0.11, fence: {fence}}}")
    words = ["4: admin_hosts[0].fence: must have exactly one of command, redfish and ipmi"]
    assert [line.split("\n")[0] for line in _problems(text)] == ([] if good else words)


@pytest.mark.parametrize(
    ("folders", "good"),
    [
        ("[/a, /b]", True),
        ("[]", True),
        ("[/a]", False),
        ("[/a, /a]", False),
        ("[/a, /b/../a]", False),
        ("[/a, /a/b]", False),
        ("[/a/b, /a]", False),
    ],
)
def test_a_mirror_has_two_folders(folders: str, good: bool) -> None:
    text = GOOD.replace("address: 10.78.0.11}", f"address: 10.78.0.11, mirror: {folders}}}")
    words = ["4: admin_hosts[0].mirror: must name two folders"]
    assert [line.split("\n")[0] for line in _problems(text)] == ([] if good else words)


def test_an_error_of_one_section_hides_none_of_another(tmp_path: Path) -> None:
    path = tmp_path / "sms.yaml"
    text = GOOD.replace("02:00:0a:4d:00:01", "01:00:0a:4d:00:01") + "retention: {hourly: x}\nbase: {os: nosuch}\n"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        open_site(path)
    assert [problem.path for problem in caught.value.problems] == [
        "networks.provisioning.mac",
        "retention.hourly",
        "base.os",
    ]


def test_all_at_once() -> None:
    text = GOOD.replace("10.77.0.1/24", "10.77.0.0/24").replace("02:00:0a:4d:00:01", "01:00:0a:4d:00:01")
    text = text.replace("gateway: 10.78.0.254", "gateway: 10.9.0.1").replace("[slurmctld, munge]", "[slurm]")
    assert [line.partition(":")[0] for line in _problems(text)] == ["9", "10", "15", "16"]
