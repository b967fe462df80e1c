"""The lab's legacy node: its addresses, its files, and the site file that describes the same cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.catalog import read_catalog
from appliance.config.check import check_site
from appliance.config.read import read_site_text
from appliance.errors import ConfigError
from appliance.lab import legacy, render
from appliance.lab.journal import Journal
from appliance.lab.layout import SHAPES, Extras, Layout
from appliance.lab.root import MANAGEMENT, NODES, root_of, root_path
from appliance.share import share
from tests.images import ACCOUNTING
from tests.places import GOLDEN
from tests.sites import BASES

LAYOUT = Layout("t-lab", 2, legacy=True)
HOSTS = {host.name: host for host in LAYOUT.hosts}
OLD = HOSTS["sms-old"]
KEYS = render.Keys(b"munge", b"ssh-ed25519 AAAA admin", dict.fromkeys(render.ssh_hosts(LAYOUT), b"key"), database="pw")
SHOWN = re.compile(r"etc/(?!hosts$|hostname$|machine-id$|munge/)|lab/(net|ready.sh|setup.sh|systemd.sh)$")


def files(name: str = "sms-old", layout: Layout = LAYOUT) -> dict[str, render.File]:
    return render.host_files(layout, HOSTS[name], KEYS, sms="/venv/bin/sms")


def site(layout: Layout) -> Any:
    return yaml.safe_load(render.site_file(layout))


def test_its_files_are_these(golden: Callable[[Path, dict[str, str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMS_MACHINE", raising=False)  # part of the cgroup's name
    binds = [("/var/lib/sms-lab/t-lab/home", "/home", False)]
    texts = {path: file.data.decode() for path, file in files().items() if SHOWN.match(path)}
    texts["init.sh"] = render.init_script(LAYOUT, OLD, lower="/cache/root", binds=binds)
    golden(GOLDEN / "lab-legacy", texts)


def test_it_has_the_containers_addresses_first_and_its_macs() -> None:
    described = site(LAYOUT)["networks"]
    assert {network: OLD.mac(network) for network in OLD.addresses} == {
        network: described[network]["mac"] for network in ("provisioning", "public")
    }
    batch = render.host_batch(OLD).splitlines()
    assert [line for line in batch if line.startswith("addr")] == [
        *("addr add 10.77.0.1/24 dev prov0", "addr add 10.77.0.5/24 dev prov0"),
        *("addr add 10.78.0.2/24 dev pub0", "addr add 10.78.0.5/24 dev pub0"),
    ]
    assert "route add default via 10.78.0.254" in batch


def test_its_name_leads_to_its_own_address() -> None:
    for name, address in {"node1": "10.77.0.5", "admin": "10.78.0.5", "sms-old": "10.77.0.5"}.items():
        hosts = files(name)["etc/hosts"].data.decode()
        assert f"{address} sms-old\n" in hosts
        assert re.search(r"^10\.7[78]\.0\.[12] sms-services$", hosts, re.MULTILINE)
    known = render.known_hosts(LAYOUT, {"sms-old": "ssh-ed25519 AAAA x"})
    assert known == "sms-old,10.77.0.5,10.78.0.5 ssh-ed25519 AAAA\n"
    assert b"Host outside" in files("admin")["etc/ssh/ssh_config.d/sms-lab.conf"].data


def test_what_holds_a_secret_is_for_its_owner_only() -> None:
    secret = {path: file.mode for path, file in files().items() if b"pw" in file.data or "key" in path}
    assert set(secret) == {*legacy.PRIVATE, "etc/munge/munge.key", "lab/ssh_host_key", "lab/authorized_keys"}
    assert not [path for path, mode in secret.items() if mode & 0o077]


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_the_site_file_describes_its_cluster(nodes: int) -> None:
    layout, catalogue = replace(LAYOUT, count=nodes), read_catalog(share("definitions", "services"))
    read, document = read_site_text(render.site_file(layout), "sms.yaml")
    assert not check_site(read, document, services=list(catalogue), bases=BASES, selected=read.service_names)
    assert read.service_names == ACCOUNTING, "real tests have the image of these"
    text = render.host_files(layout, OLD, KEYS, sms="")["etc/slurm/slurm.conf"].data.decode()
    assert f"ClusterName={read.cluster}\n" in text
    for node in read.slurm.nodes:
        line = f"NodeName={node.name} NodeAddr={node.address} CPUs={node.cpus} RealMemory={node.memory_mb} "
        assert line in text
    assert text.count("NodeName=") == len(read.slurm.nodes) == bool(nodes)
    assert text.count("PartitionName=normal ") == bool(nodes)


def test_every_unit_is_probed() -> None:
    ready = files()["lab/ready.sh"].data.decode()
    for unit in legacy.UNITS:
        assert f"off {unit} || " in ready and f'missing+=" {unit}"' in ready
    assert "lab/supervisord.conf" not in files()


def test_other_labs_do_not_change() -> None:
    plain = replace(LAYOUT, legacy=False)
    assert [host.name for host in LAYOUT.hosts if host not in plain.hosts] == ["sms-old"]
    assert "services" not in site(plain)
    for name in ("node1", "admin"):
        before, after = (render.host_files(one, HOSTS[name], KEYS, sms="/sms") for one in (plain, LAYOUT))
        assert before["etc/resolv.conf"].data == b"" and b"/root/.ssh" not in before["lab/setup.sh"].data
        assert before.keys() == after.keys()
    assert "sms-old" not in str(plain.namespaces)


def test_it_has_a_root_and_a_disk_of_its_own() -> None:
    assert root_of(OLD) is MANAGEMENT and root_of(HOSTS["node1"]) is NODES
    assert root_path(MANAGEMENT) != root_path() == root_path(NODES)
    assert LAYOUT.disk_of(OLD) == Path("/var/lib/sms-lab/t-lab/sms-old")
    assert not [name for name, host in HOSTS.items() if name != "sms-old" and LAYOUT.disk_of(host)]


def test_the_journal_remembers_it() -> None:
    written = json.loads(json.dumps(asdict(Journal("t-lab", 2, legacy=True))))
    assert Journal(**written).layout == LAYOUT
    assert not Journal("t-lab", 2).layout.legacy


@pytest.mark.parametrize("more", [{"shape": "routed"}, {"metal": 1}, {"engines": ("nomad",)}])
def test_it_is_not_combined(more: dict[str, Any]) -> None:
    assert "routed" in SHAPES
    with pytest.raises(ConfigError, match="legacy node"):
        Extras(legacy=True, **more).layout("x", 1)
