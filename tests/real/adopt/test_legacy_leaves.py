"""The agent on the lab's legacy node, with real systemd and Slurm: jobs run on, also across a reboot of the node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.operations.adopt.inspection import lock_on_old
from appliance.operations.context import Cluster
from appliance.operations.lab.demo import wait_idle
from appliance.operations.lab.lab import lab_power
from appliance.progress import Silent
from appliance.share import share
from appliance.shared.adopt import AdoptRequest, OldInterface, ReturnRequest
from appliance.tools.agent import Agents
from appliance.tools.move import Endpoint
from tests.real.labs import fresh_lab, need_machine
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME, OLD, NODES = "t-leaves", "sms-old", 2
STATE = "/var/lib/slurm/slurmctld"
LOCK = lock_on_old(cast(Cluster, SimpleNamespace(site=SimpleNamespace(cluster="lab"))))
EARLIER = "/run/lock/sms-adopt-lab.lock"
"""The lock of earlier versions, in a folder in which every user can create files."""
RETURN = ReturnRequest("lab", OLD, "host-a", "/var/lib/sms-adopt/lab.json", LOCK)
MOVED = {"prov0": "10.77.0.1", "pub0": "10.78.0.2"}
KEPT = {"prov0": "10.77.0.5", "pub0": "10.78.0.5"}
# A machine on a bridge of host-a that has what has moved, as the services container has.
SERVE = """\
unshare --net sleep infinity </dev/null >/dev/null 2>&1 &
space=$!
while [ "$(readlink /proc/$space/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
while [ $# -gt 0 ]; do
    ip link add "t$#" type veth peer name "c$#" netns $space address "$2"
    ip link set "t$#" master "$1" up
    nsenter -t $space -n ip address add "$3" dev "c$#"
    nsenter -t $space -n ip link set "c$#" up
    shift 3
done
echo $space
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need_machine()
    with fresh_lab(NAME, NODES, legacy=True) as opened:
        wait_idle(opened.host("node1"), NODES)
        yield opened


@pytest.fixture(scope="module")
def networks(lab: Lab) -> dict[str, dict[str, str]]:
    """Those of the lab's site, by the name of the old node's interface."""
    found = yaml.safe_load((lab.etc / "sms.yaml").read_text())["networks"]
    return {"prov0": found["provisioning"], "pub0": found["public"]}


@pytest.fixture(scope="module")
def request_(lab: Lab, networks: dict[str, dict[str, str]]) -> AdoptRequest:
    prefixes = addresses(lab.host(OLD))
    witnesses = {"prov0": ("10.77.0.101", "10.77.0.102"), "pub0": ("10.78.0.254",)}
    interfaces = tuple(
        OldInterface(
            name=name,
            inside=inside,
            mac=networks[name]["mac"],
            spare_mac=f"02:00:00:00:ff:0{inside[-1]}",
            moves=tuple(one for one in prefixes[name] if one.startswith(f"{MOVED[name]}/")),
            keeps=tuple(one for one in prefixes[name] if one.startswith(f"{KEPT[name]}/")),
            witnesses=witnesses[name],
        )
        for name, inside in (("prov0", "eth0"), ("pub0", "eth1"))
    )
    return AdoptRequest(
        **asdict(RETURN),
        away="/var/lib/sms-adopt/lab.away",
        interfaces=interfaces,
        controller=("slurmctld.service",),
        accounting=("slurmdbd.service",),
        stop_wait_s=60,
        state=STATE,
        state_inside="/var/lib/slurm/state",
        stream_ports=(514,),
    )


def addresses(host: Netns) -> dict[str, list[str]]:
    links = json.loads(host.run("ip", "-json", "-4", "address").stdout)
    return {one["ifname"]: [f"{each['local']}/{each['prefixlen']}" for each in one["addr_info"]] for one in links}


def macs(host: Netns) -> dict[str, str]:
    return {one["ifname"]: one["address"] for one in json.loads(host.run("ip", "-json", "link").stdout)}


def ask(endpoint: Endpoint, do: str, kind: str, data: bytes = b"", **facts: object) -> tuple[dict[str, object], bytes]:
    endpoint.send(do, data, **facts)
    return endpoint.receive(kind)


def leave(endpoint: Endpoint) -> None:
    """From begin to release."""
    endpoint.receive("ready")
    ask(endpoint, "note", "noted")
    ask(endpoint, "round", "delta")
    ask(endpoint, "prepare_stop", "prepared")
    ask(endpoint, "stop_accounting", "stopped")
    message, _ = ask(endpoint, "stop", "final")
    ask(endpoint, "connections", "connections")
    released, _ = ask(endpoint, "release", "released")
    print(f"stopped in {message['stop_s']:.3f} s, addresses removed in {released['down_s']:.3f} s")


@contextmanager
def target(lab: Lab, request: AdoptRequest) -> Iterator[str]:
    """Another machine that has the addresses."""
    host = lab.host("host-a")
    words = [
        word
        for one, bridge in zip(request.interfaces, ("br-prov", "br-pub"), strict=True)
        for word in (bridge, one.mac, one.moves[0])
    ]
    pid = host.run("sh", "-c", SERVE, "serve", *words).text.strip()
    try:
        yield pid
    finally:
        host.run("kill", pid, ok=None)
        wait_until(lambda: not host.works("test", "-e", "/sys/class/net/t3"), "its interfaces are gone", 30)


def submit(lab: Lab, seconds: int) -> str:
    argv = ("sbatch", "--parsable", "--chdir=/home/alice", f"--wrap=sleep {seconds}")
    number = lab.host("node1").run("runuser", "-u", "alice", "--", *argv).text
    wait_until(lambda: state_of(lab, number) == "RUNNING", "the job runs", 60)
    return number


def state_of(lab: Lab, number: str) -> str:
    result = lab.host("node1").run("squeue", "-h", "-j", number, "-o", "%T", ok=None, timeout=30)
    return result.text.strip()


def check_serves(lab: Lab, before: tuple[object, object], number: str) -> None:
    old = lab.host(OLD)
    assert (addresses(old), macs(old)) == before
    wait_until(lambda: state_of(lab, number) == "RUNNING", "the same job still runs", 60)
    wait_idle(lab.host("node1"), NODES - 1)
    assert lab.host("node2").run("curl", "-s", "http://10.78.0.254/").text == "outside sees 10.78.0.2"
    wait_until(lambda: not lab.failing(OLD), "its units and daemons answer", 60)
    assert not old.works("test", "-e", RETURN.mark)
    found = old.run("find", "/etc/systemd/system", "-name", "*sms-adopt*").text
    assert found == ""


def test_it_takes_its_services_back_when_the_coordinator_is_gone(lab: Lab, request_: AdoptRequest) -> None:
    old = lab.host(OLD)
    before = (addresses(old), macs(old))
    number = submit(lab, 600)
    # Before root has created it, too: then it would be the user's file.
    assert user_lock(old, LOCK, "echo held; exec sleep 1000") != "held\n"
    with Agents().open_endpoint(old, "adopt_leave", request_, Silent()) as endpoint:
        leave(endpoint)
        assert not old.works("systemctl", "is-active", "slurmctld") and addresses(old)["pub0"] == ["10.78.0.5/24"]
    wait_until(lambda: not old.works("test", "-e", RETURN.mark), "it is done", 60)
    check_serves(lab, before, number)
    lab.host("node1").run("scancel", number)


def test_it_stays_away_at_a_boot_and_returns_by_an_undo(lab: Lab, request_: AdoptRequest) -> None:
    old = lab.host(OLD)
    before = (addresses(old), macs(old))
    number = submit(lab, 1800)
    with Agents().open_endpoint(old, "adopt_leave", request_, Silent()) as endpoint:
        leave(endpoint)
        with target(lab, request_):
            ask(endpoint, "given", "given")
            ask(endpoint, "finish", "finished")
            assert lab_power(NAME, OLD, "off", Silent()) and lab_power(NAME, OLD, "on", Silent())
            old = Lab.open(NAME).host(OLD)
            wait_until(lambda: old.works("systemctl", "is-active", "sms-adopted"), "the guard", 60)
            for name in MOVED:
                assert [one.partition("/")[0] for one in addresses(old)[name]] == [KEPT[name]]
            assert {macs(old)[one.name] for one in request_.interfaces} == {"02:00:00:00:ff:00", "02:00:00:00:ff:01"}
            assert not old.works("systemctl", "is-active", "slurmctld")
            old.run("systemctl", "start", "slurmctld")
            assert not old.works("systemctl", "is-active", "slurmctld")
            found = Agents().call(old, "adopt_resume", {"mark": RETURN.mark, "lock": RETURN.lock})
            assert (found["found"], found["state"], found["trouble"]) == ("given", "given", "")
    copy_state(old)
    unit = "/etc/systemd/system/sms-adopted.service"
    old.write(unit, (old.read(unit) or b"").replace(LOCK.encode(), EARLIER.encode()))
    for argv in (("daemon-reload",), ("restart", "sms-adopted")):
        old.run("systemctl", *argv)
    assert "Permission denied" in user_lock(old, LOCK, "true")
    assert user_lock(old, EARLIER, "echo held; exec sleep 1000") == "held\n"
    with Agents().open_endpoint(old, "adopt_return", RETURN, Silent()) as endpoint:
        assert endpoint.receive("ready")[0]["state_new"] == f"{STATE}.sms-new"
        ask(endpoint, "arm", "armed")
        message, _ = ask(endpoint, "up", "up")
        served, _ = ask(endpoint, "serve", "serves")
        print(f"addresses taken in {message['up_s']:.3f} s, services started in {served['took_s']:.3f} s")
        ask(endpoint, "commit", "committed")
    old.run("pkill", "-u", "2000", "sleep")
    check_serves(Lab.open(NAME), before, number)


def user_lock(old: Netns, path: str, script: str) -> str:
    """Run a script as a user of the old node who has locked a file; return the first line of its output."""
    argv = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups", "flock", "-n", path, "sh", "-c", script]
    process = subprocess.Popen([*old.prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    return process.stdout.readline()


def copy_state(old: Netns) -> None:
    """As the coordinator writes the state of the container."""
    script = share("definitions", "scripts", "state-tree").read_text()
    pair = ("python3", "-I", "-c", script)
    data = old.run(*pair, "read", f"/var/lib/slurm/state={STATE}").stdout
    old.run(*pair, "write", f"/var/lib/slurm/state={STATE}.sms-new", input=data)


def test_the_agent_is_not_left_running(lab: Lab) -> None:
    old = Lab.open(NAME).host(OLD)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([*old.prefix, "pgrep", "-f", "agent.*adopt_"], check=True)
