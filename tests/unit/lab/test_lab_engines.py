"""What engines add to the hosts of a lab."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from appliance.config.model import Site
from appliance.errors import ConfigError, Refused
from appliance.lab import render
from appliance.lab.engines import members, programs
from appliance.lab.engines.keys import KUBECONFIG, make_keys
from appliance.lab.journal import Journal
from appliance.lab.layout import SHAPES, LabHost, Layout, Plan

LAYOUT = Layout("t-lab", 2, engines=("nomad", "kubernetes"))
HOSTS = {host.name: host for host in LAYOUT.hosts}
KEYS = render.Keys(b"munge", b"ssh-ed25519 AAAA admin", dict.fromkeys(render.ssh_hosts(LAYOUT), b"key"))
PATHS = {name: f"/engines/{name}" for name in programs.PROGRAMS}


def files(host: LabHost, keys: render.Keys = KEYS) -> dict[str, render.File]:
    own = {name: PATHS[name] for name in members.programs(LAYOUT, host)}
    return render.host_files(LAYOUT, host, keys, sms="/venv/bin/sms", programs=own)


def test_hosts_of_engines_have_a_place() -> None:
    assert [name for name in HOSTS if name not in {host.name for host in Layout("t-lab", 2).hosts}] == [
        *("server1", "server2", "server3", "control", "worker1", "worker2")
    ]
    assert Journal("t-lab", 2, engines=["nomad", "kubernetes"]).layout == LAYOUT
    addresses = [address for host in LAYOUT.hosts for address in host.addresses.values()]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("engines", [("nomad",), ("kubernetes",), ("nomad", "kubernetes")])
def test_the_site_file_names_the_engines(engines: tuple[str, ...]) -> None:
    site = Site.model_validate(yaml.safe_load(render.site_file(Layout("x", 2, engines=engines))))
    for engine, expected in {"nomad": "10.77.0.11", "kubernetes": "10.77.0.40"}.items():
        address = getattr(site.engines, engine).address
        assert str(address) == expected if engine in engines else address is None
    assert (site.engines.nomad.api is None) == ("nomad" not in engines)
    assert (site.engines.kubernetes.kubeconfig is None) == ("kubernetes" not in engines)


def test_every_program_of_a_host_is_on_its_path() -> None:
    for host in LAYOUT.hosts:
        setup = files(host)["lab/setup.sh"].data.decode()
        linked = {name for name in PATHS if f"ln -s /engines/{name} /usr/local/bin/{name}\n" in setup}
        assert linked == set(members.programs(LAYOUT, host))
        for command, _ in members.commands(LAYOUT, host).values():
            assert command.split()[0] in {*linked, "bash", "sh", "containerd", "python3"}


def test_admin_hosts_without_an_agent_reach_the_servers() -> None:
    """By a forwarded port: what sms sends to another machine is encrypted."""
    command, _ = members.commands(LAYOUT, HOSTS["admin"])["nomad-api"]
    assert command == "python3 /lab/forward.py 10.78.0.21 4646" and members.API == "http://127.0.0.1:4646"
    assert "lab/forward.py" in files(HOSTS["host-b"]) and "lab/forward.py" not in files(HOSTS["host-a"])


def test_clients_of_nomad_have_what_the_export_demands() -> None:
    state = json.loads(files(HOSTS["host-a"])["lab/nomad.json"].data)["client"]
    assert state["host_volume"] == {"sms-lab": {"path": members.STATE, "read_only": False}}
    node = json.loads(files(HOSTS["node1"])["lab/nomad.json"].data)["client"]
    assert node["node_pool"] == "compute" and node["max_kill_timeout"] == state["max_kill_timeout"] == "600s"
    assert "client" not in json.loads(files(HOSTS["server1"])["lab/nomad.json"].data)
    assert "lab/nomad.json" not in files(HOSTS["host-b"])


def test_slurmd_waits_for_the_controller_of_any_of_them() -> None:
    conf = files(HOSTS["node1"])["lab/supervisord.conf"].data.decode()
    assert "--conf-server 10.77.0.1:6817,10.77.0.11:6817,10.77.0.40:6817'" in conf
    plain = Layout("t-lab", 1)
    conf = render.host_files(plain, plain.hosts_of("node")[0], KEYS, sms="")["lab/supervisord.conf"].data.decode()
    assert "--conf-server 10.77.0.1:6817'" in conf


@pytest.mark.skipif(not shutil.which("gcc"), reason="it compiles the first process of pods")
def test_secrets_are_readable_by_root_only(tmp_path: Path) -> None:
    class Here(Layout):
        @property
        def engines_disk(self) -> Path:
            return tmp_path

    keys = make_keys(Here("t-lab", 2, engines=LAYOUT.engines))
    assert {name for name, own in keys.items() if KUBECONFIG in own} == {"control", "host-a", "host-b", "admin"}
    for host in LAYOUT.hosts:
        made = files(host, render.Keys(b"", KEYS.authorized, KEYS.host, engines=keys))
        assert {path for path, file in made.items() if path in keys.get(host.name, {}) and file.mode != 0o600} == set()
        assert not [path for path, file in made.items() if b"PRIVATE KEY" in file.data and file.mode != 0o600]
    assert make_keys(Layout("x", 1, engines=("nomad",))) == {}


def test_pods_of_each_cluster_node_have_a_cgroup_and_a_network_of_their_own() -> None:
    workers = LAYOUT.hosts_of("worker")
    assert len({members.cgroup(LAYOUT, host) for host in workers}) == len(workers) == 2
    steps = "\n".join(members.steps(LAYOUT, workers[0]))
    assert "ip route add 10.97.2.0/24 via 10.77.0.33" in steps and "10.97.1.0/24" not in steps


def test_what_a_lab_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no engine docker"):
        Layout("x", 1, engines=("docker",))
    with pytest.raises(ConfigError, match="on the provisioning network"):
        Layout("x", 1, SHAPES["routed"], engines=("nomad",))
    assert Layout("x", 1, Plan(), engines=("nomad",)).engines


def test_programs_are_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMS_ENGINES", str(tmp_path))
    (tmp_path / "nomad").touch()
    programs.need_programs(["nomad"])
    with pytest.raises(Refused, match=f"{tmp_path} has no kubectl"):
        programs.need_programs(["nomad", "kubectl"])
    monkeypatch.delenv("SMS_ENGINES")
    monkeypatch.setattr(programs, "PINS", tmp_path / "none")
    with pytest.raises(Refused) as refused:
        programs.need_programs(["nomad"])
    assert "SMS_ENGINES=DIR" in refused.value.hint
