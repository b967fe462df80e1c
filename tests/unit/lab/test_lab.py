"""The lab's rendered files: its members, and the configuration of its hosts."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from appliance.cli.lab import lab as lab_cmd
from appliance.config.check import check_site
from appliance.config.model import Site
from appliance.config.read import read_site_text
from appliance.errors import ConfigError
from appliance.lab import render
from appliance.lab.down import _remove_cache, empty_folder
from appliance.lab.journal import Journal
from appliance.lab.layout import SHAPES, LabHost, Layout, mac
from appliance.lab.root import source_lines
from appliance.operations.lab.lab import is_build
from tests.sites import BASES, SERVICES
from tests.waiting import wait_until

LAYOUT = Layout("t-lab", 2)
HOSTS = {host.name: host for host in LAYOUT.hosts}
KEYS = render.Keys(b"munge", b"ssh-ed25519 AAAA admin", dict.fromkeys(render.ssh_hosts(LAYOUT), b"key"))


def files(host: LabHost) -> dict[str, render.File]:
    return render.host_files(LAYOUT, host, KEYS, sms="/venv/bin/sms")


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("", 1), ("Lab", 1), ("a/b", 1), ("a b", 1), ("-x", 1), ("x" * 21, 1), ("lab", -1), ("lab", 101)],
)
def test_a_bad_name_or_number_is_refused(name: str, nodes: int) -> None:
    with pytest.raises(ConfigError):
        Layout(name, nodes)


def test_everyone_has_a_place() -> None:
    assert list(HOSTS) == ["outside", "host-a", "host-b", "admin", "node1", "node2"]
    assert HOSTS["node2"].addresses == {"provisioning": "10.77.0.102"}
    assert LAYOUT.namespaces[:2] == ("sms-t-lab-switch", "sms-t-lab-outside")
    assert mac("10.77.0.1") == "02:00:0a:4d:00:01"


def test_interface_names_fit() -> None:
    ports = [host.port(network) for host in Layout("x", 100).hosts for network in host.addresses]
    assert max(map(len, ports)) <= 15
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    ("viewer", "name", "address"),
    [
        ("node1", "sms-services", "10.77.0.1"),
        ("node1", "host-a", "10.77.0.11"),
        ("node1", "outside", "10.78.0.254"),
        ("admin", "host-a", "10.78.0.11"),
        ("outside", "sms-services", "10.78.0.2"),
        ("host-a", "host-b", "10.78.0.12"),
        ("host-a", "sms-services", "10.77.0.1"),
        ("host-a", "node1", "10.77.0.101"),
    ],
)
def test_names_lead_to_the_address_that_is_reached_best(viewer: str, name: str, address: str) -> None:
    lines = {name: address for address, name in LAYOUT.address_lines(HOSTS[viewer])}
    assert lines[name] == address
    assert f"{address} {name}\n" in files(HOSTS[viewer])["etc/hosts"].data.decode()


@pytest.mark.parametrize("nodes", [0, 1, 4, 100])
def test_the_site_file_is_one(nodes: int) -> None:
    site = Site.model_validate(yaml.safe_load(render.site_file(Layout("x", nodes))))
    assert [host.name for host in site.admin_hosts] == ["host-a", "host-b"]
    assert len(site.slurm.nodes) == bool(nodes)
    if nodes:
        expected = {1: ("node1", "10.77.0.101"), 4: ("node[1-4]", "10.77.0.[101-104]")}
        assert (site.slurm.nodes[0].name, site.slurm.nodes[0].address) == expected.get(
            nodes, ("node[1-100]", "10.77.0.[101-200]")
        )


ROUTED = Layout("t-lab", 2, SHAPES["routed"])


def test_nodes_of_a_routed_lab_are_behind_the_router_only() -> None:
    hosts = {host.name: host for host in ROUTED.hosts}
    assert sorted(hosts) == sorted([*HOSTS, "router"])
    assert hosts["node2"].addresses == {"routed": "10.100.0.102"}
    batch = render.switch_batch(ROUTED).splitlines()
    assert "link set r-node1 master br-routed up" in batch and "link set p-router master br-prov up" in batch
    assert [line for line in batch if "master br-prov" in line and "node" in line] == []
    node, router = (render.host_batch(hosts[name], ROUTED.plan).splitlines() for name in ("node1", "router"))
    assert node[-2:] == ["addr add 10.100.0.101/17 dev eth0", "route add default via 10.100.0.1"]
    assert router[-1] == "route add default via 10.77.0.1"
    keys = render.Keys(b"", KEYS.authorized, dict.fromkeys(render.ssh_hosts(ROUTED), b"key"))
    reported = render.host_files(ROUTED, hosts["router"], keys, sms="/venv/bin/sms")
    assert b"ip_forward" in reported["lab/setup.sh"].data and b"[program:" not in reported["lab/supervisord.conf"].data
    assert not [path for path in reported if "munge" in path or "postfix" in path]
    assert "10.100.0.102 node2\n" in render.host_files(ROUTED, hosts["node1"], keys, sms="")["etc/hosts"].data.decode()


@pytest.mark.parametrize("metal", [0, 1])
def test_the_site_file_of_a_routed_lab_has_the_route(metal: int) -> None:
    text = render.site_file(Layout("x", 2, SHAPES["routed"], metal=metal))
    assert _is_valid(text)
    site = Site.model_validate(yaml.safe_load(text))
    (route,) = site.networks.provisioning.routes
    assert (str(route.network), str(route.gateway)) == ("10.100.0.0/17", "10.77.0.254")
    assert site.slurm.nodes[0].address == "10.100.0.[101-102]"


def _is_valid(text: str) -> bool:
    site, document = read_site_text(text, "sms.yaml")
    return not check_site(site, document, services=SERVICES, bases=BASES, selected=["slurmctld"])


def test_a_journal_has_the_shape_of_its_lab() -> None:
    for layout in (ROUTED, LAYOUT):
        plan = None if layout is LAYOUT else layout.plan.as_dict()
        written = json.loads(json.dumps(asdict(Journal(layout.name, layout.count, plan=plan))))
        assert Journal(**written).layout == layout


METAL = Layout("t-lab", 0, metal=2)


def test_machines_without_a_disk_have_addresses_cables_and_controllers_of_their_own() -> None:
    first, second = METAL.machines
    assert (first.name, first.mac, first.address, first.bmc) == (
        *("metal1", "02:00:0a:4d:00:97", "10.77.0.151", "10.77.0.191"),
    )
    assert "tuntap add dev m-metal2 mode tap\nlink set m-metal2 master br-prov up\n" in render.switch_batch(METAL)
    (bmc,) = [host for host in METAL.hosts if host.kind == "bmc"]
    assert render.host_batch(bmc).splitlines()[-3:] == [
        *(f"addr add {address}/24 dev eth0" for address in ("10.77.0.90", first.bmc, second.bmc)),
    ]
    keys = render.Keys(b"", KEYS.authorized, dict.fromkeys(render.ssh_hosts(METAL), b"key"), {"bmc.key": b"secret"})
    reported = render.host_files(METAL, bmc, keys, sms="/venv/bin/sms")
    assert reported["lab/bmc.key"].mode == 0o600
    assert [one["mac"] for one in json.loads(reported["lab/bmc.json"].data)["machines"]] == [first.mac, second.mac]
    carrier = render.host_files(METAL, HOSTS["host-a"], keys, sms="/venv/bin/sms")
    assert "10.77.0.152 metal2\n" in carrier["etc/hosts"].data.decode()
    assert not [path for path in carrier if "bmc" in path]


def test_a_lab_has_no_more_machines_than_it_can_run() -> None:
    with pytest.raises(ConfigError, match="number of machines 5"):
        Layout("x", 0, metal=5)


@pytest.mark.parametrize(("nodes", "metal", "names"), [(0, 2, ["metal[1-2]"]), (1, 1, ["node1", "metal1"])])
def test_the_site_file_of_a_lab_with_machines_has_a_provisioning_vm(nodes: int, metal: int, names: list[str]) -> None:
    site = Site.model_validate(yaml.safe_load(render.site_file(Layout("x", nodes, metal=metal))))
    assert [node.name for node in site.slurm.nodes] == names
    assert site.provisioning
    assert str(site.provisioning.address) == "10.77.0.2/24"
    assert site.provisioning.bmc.password_file and site.provisioning.bmc.ca
    assert [str(each) for each in site.provisioning.bmc.networks][:2] == ["10.77.0.90/32", "10.77.0.191/32"]
    assert "provisioning:\n  address: 10.77.0.2" not in render.site_file(Layout("x", nodes))


def test_the_journal_remembers_the_machines() -> None:
    again = Journal(**json.loads(json.dumps(asdict(Journal("t-lab", 0, metal=2)))))
    assert again.layout == METAL
    assert Journal("t-lab", 2).layout == LAYOUT  # one that was written before there were any


def test_a_carrier_has_its_address_on_a_bridge_whose_mac_stays() -> None:
    assert render.host_batch(HOSTS["host-a"]).splitlines() == [
        "link set lo up",
        "link add br-prov address 02:00:0a:4d:00:0b type bridge stp_state 0 forward_delay 0",
        "link set prov0 master br-prov up",
        "link set br-prov up",
        "addr add 10.77.0.11/24 dev br-prov",
        "link add br-pub address 02:00:0a:4e:00:0b type bridge stp_state 0 forward_delay 0",
        "link set pub0 master br-pub up",
        "link set br-pub up",
        "addr add 10.78.0.11/24 dev br-pub",
        "route add default via 10.78.0.254",
    ]


def test_a_node_goes_out_through_the_container() -> None:
    assert render.host_batch(HOSTS["node1"]).splitlines()[-1] == "route add default via 10.77.0.1"


def test_the_outside_has_no_route_to_the_nodes() -> None:
    assert "route" not in render.host_batch(HOSTS["outside"])


def test_the_switch_has_a_cable_to_every_host() -> None:
    batch = render.switch_batch(LAYOUT)
    assert batch.count("type veth") == 8
    assert "link add p-host-a type veth peer name prov0 netns sms-t-lab-host-a\n" in batch
    assert "link set u-outside master br-pub up\n" in batch


def test_secrets_are_for_their_owner_only_and_only_where_needed() -> None:
    assert files(HOSTS["node1"])["etc/munge/munge.key"].mode == 0o400
    assert files(HOSTS["node1"])["lab/ssh_host_key"].mode == 0o600
    assert not {"etc/munge/munge.key", "lab/ssh_host_key"} & set(files(HOSTS["outside"]))
    assert "etc/munge/munge.key" not in files(HOSTS["host-a"])


def test_each_daemon_is_started_and_probed() -> None:
    for host in HOSTS.values():
        for daemon in render.DAEMONS[host.kind]:
            assert f"[program:{daemon.name}]" in files(host)["lab/supervisord.conf"].data.decode()
            assert f'missing+=" {daemon.name}"' in files(host)["lab/ready.sh"].data.decode()
            # " ;" begins a comment in supervisord's configuration
            assert " ;" not in daemon.command


def test_a_path_with_a_space_and_a_quote_stays_one_word() -> None:
    script = render.init_script(LAYOUT, HOSTS["admin"], lower="/", binds=[("/a b/it's", "/a b/it's", True)])
    assert """mount --bind '/a b/it'"'"'s' "$root"'/a b/it'"'"'s'\n""" in script


def test_an_archive_of_the_same_is_the_same() -> None:
    content = {"b/c": render.File(b"2", 0o600), "a": render.File(b"1")}
    assert render.archive(content) == render.archive(dict(reversed(content.items())))
    with tarfile.open(fileobj=io.BytesIO(render.archive(content))) as tar:
        assert [(entry.name, entry.mode) for entry in tar] == [("a", 0o644), ("b/c", 0o600)]


def test_known_hosts_has_every_name_and_address() -> None:
    text = render.known_hosts(LAYOUT, {"host-a": "ssh-ed25519 AAAA host-a\n"})
    assert text == "host-a,10.77.0.11,10.78.0.11 ssh-ed25519 AAAA\n"


def test_mirrors_are_those_of_the_machine_for_the_suite() -> None:
    said = "\n".join(
        [
            "Debian|bookworm|http://mirror.test/debian/|main",
            "Debian|bookworm|http://mirror.test/debian/|main",
            "Debian|bookworm-security|http://mirror.test/security/|main",
            "Debian|trixie|http://mirror.test/debian/|main",
            "Else|bookworm|http://else.test/|main",
        ]
    )
    assert source_lines(said) == [
        "deb http://mirror.test/debian/ bookworm main",
        "deb http://mirror.test/security/ bookworm-security main",
    ]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["host-a"], []),
        (["host-a", "--", "sms", "status", "--json"], ["--", "sms", "status", "--json"]),
        (["host-a", "ls", "-l"], ["ls", "-l"]),
    ],
)
def test_exec_takes_the_rest_of_the_line(words: list[str], command: list[str]) -> None:
    parser = argparse.ArgumentParser()
    lab_cmd.add(parser.add_subparsers())
    arguments = parser.parse_args(["lab", "exec", "--name", "x", *words])
    assert (arguments.name, arguments.host) == ("x", "host-a")
    assert arguments.command in (command, command[1:])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sms build", True),
        ("/venv/bin/sms --site /etc/sms/more.yaml -q build --locked", True),
        ("sms vm build", True),
        ("sms image build compute", True),
        ("sms exec build", False),
        ("sms vm exec build", False),
        ("sms status", False),
        ("make build", False),
        ("", False),
    ],
)
def test_builds_use_the_network_of_this_machine(words: str, found: bool) -> None:
    assert is_build(words.split()) == found


def test_the_cache_is_emptied_and_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "root-1" / "deep").mkdir(parents=True)
    for _ in range(2):
        empty_folder(cache, str(tmp_path / "lock"))
        assert not cache.exists()


def test_a_cache_that_others_use_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labs in another mount namespace, with a /run of their own, hold a lock on it."""
    for name in ("CACHE", "RUNNING", "DISK", "LOCKS"):
        (tmp_path / name).mkdir()
        monkeypatch.setitem(_remove_cache.__globals__, name, tmp_path / name)
    (tmp_path / "CACHE/root-1").mkdir()
    with subprocess.Popen(["flock", "--shared", str(tmp_path / "CACHE"), "cat"], stdin=subprocess.PIPE) as other:
        assert other.stdin
        wait_until(lambda: f" {(tmp_path / 'CACHE').stat().st_ino} " in held_locks(), "the lock")
        _remove_cache()
        assert (tmp_path / "CACHE/root-1").is_dir()
    _remove_cache()
    assert not (tmp_path / "CACHE").exists()


def held_locks() -> str:
    return Path("/proc/locks").read_text().replace(":", " ")
