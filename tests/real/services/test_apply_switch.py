"""`sms apply` where a new instance is needed: a second one on a copy of the overlay takes over on the same host."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.real.services.test_apply import DEFAULT, applied, fewer_nodes, states, use
from tests.real.services.test_restart import pids
from tests.waiting import wait_until

pytestmark = pytest.mark.real

DNS = "172.30.0.1"
KILL_AGENTS = "pkill -KILL -f 'agent.* (leave|arrive) '"


def other_dns(document: dict[str, Any]) -> None:
    document["networks"]["dns"] = [DNS]


def first_process(playground: Playground, on: str = "host-a") -> int:
    """The first process of the instance, as the host has it."""
    listed = json.loads(playground.host(on).run("apptainer", "instance", "list", "--json", "sms-lab").stdout)
    return int(listed["instances"][0]["pid"])


def assert_one_instance(playground: Playground, on: str = "host-a") -> None:
    """One instance with the usual names, and nothing of another one."""
    assert playground.instances(on) == ["sms-lab"]
    assert len(playground.loops(on)) == 1
    left = playground.host(on).run("sh", "-c", "ls /var/lib/sms/overlays /var/lib/sms/journal").text.split()
    assert not [name for name in left if ".second" in name or name.endswith((".move", ".incoming"))]
    assert not re.search(r"sms[0-9a-f]{8}h[01]", playground.host(on).run("ip", "-o", "link").text)


def test_another_name_server_by_a_second_instance(running: Playground) -> None:
    """The job goes on, the lease counts on, connections are kept; then the same back, and nothing to do."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    before, generation, first = pids(running), running.lease()["generation"], first_process(running)

    def change(document: dict[str, Any]) -> None:
        other_dns(document)
        document["slurm"]["extra"] = ["MaxArraySize=2003"]
        for one in document["slurm"]["nodes"]:
            del one["address"]  # R6: names of nodes, and a name server that does not answer

    def unknown(document: dict[str, Any]) -> None:
        change(document)
        document["slurm"]["nodes"].append({"name": "ghost1", "cpus": 1, "memory_mb": 512})

    refused = running.sms("--site", running.variant("unknown.yaml", unknown), "apply", "-n", ok=(3,))
    assert "finds no address of the nodes ghost1" in (refused.stdout + refused.stderr).decode()

    def elsewhere(document: dict[str, Any]) -> None:
        document["networks"]["provisioning"]["address"] = "10.77.0.9/24"

    planned = applied(running, running.variant("elsewhere.yaml", elsewhere), "-n", ok=(3,))
    assert any("networks.provisioning.address" in one and "node[1-4]" in one for one in planned["refused"])
    site = running.variant("switched.yaml", change)
    planned = applied(running, site, "-n")
    assert len(planned["switch"]) == 1 and planned["switch"][0].startswith("dns is ")
    assert {one["name"]: one["predicted_s"] for one in planned["switching"]["away"]}["nat"] <= 0.5
    assert pids(running) == before
    done = applied(running, site)["switched"]
    assert done["jobs"] >= 1 and done["generation"] == generation + 1 == running.lease()["generation"]
    assert first_process(running) != first
    assert running.sms("exec", "--", "cat", "/etc/resolv.conf").text.split() == ["nameserver", DNS]
    assert "\n10.77.0.101 node1\n" in running.sms("exec", "--", "cat", "/etc/hosts").text
    started = json.loads(running.sms("--site", site, "-q", "start", "--json").stdout)
    assert started["stale"] is False, "addresses that a name service gave are no change of the site file"
    assert_one_instance(running)
    of_node = "grep -rh MaxArraySize /run/slurm/conf/slurm.conf /var/spool/slurmd/conf-cache/slurm.conf"
    wait_until(lambda: "2003" in node.run("sh", "-c", of_node, ok=None).text, "the node has the new slurm.conf")
    assert "sms_gate" not in running.sms("exec", "--", "nft", "list", "tables").text
    wait_until(lambda: running.status()["healthy"], "health")
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    assert applied(running, site)["current"] is True
    assert applied(running, "/etc/sms/sms.yaml")["switched"]["generation"] == generation + 2
    assert_one_instance(running)
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    node.run("scancel", job)
    running.sms("-q", "stop")
    running.assert_nothing_runs()


@pytest.mark.full
def test_a_service_that_fails_there_changes_nothing(running: Playground) -> None:
    """slurmctld refuses a line in the second instance: the first one serves on, with its state."""

    def change(document: dict[str, Any]) -> None:
        other_dns(document)
        document["slurm"]["extra"] = ["SchedulerType=sched/no_such_plugin"]

    first, generation = first_process(running), running.lease()["generation"]
    site = running.variant("failed.yaml", change)
    failed = running.sms("--site", site, "-q", "apply", "--force", ok=(5,)).stderr.decode()
    assert "slurmctld does not answer" in failed
    assert first_process(running) == first and running.lease()["holder"] == "host-a"
    assert running.lease()["generation"] >= generation
    assert_one_instance(running)
    wait_until(lambda: running.status()["healthy"], "health")
    assert applied(running, "/etc/sms/sms.yaml")["current"] is True


@pytest.mark.full
def test_a_way_out_that_is_broken_is_undone(running: Playground) -> None:
    """NAT does not answer after the switch: the first instance serves again, and no job was accepted by the second."""

    def change(document: dict[str, Any]) -> None:
        other_dns(document)
        document["networks"]["public"]["probe"] = "10.78.0.99"

    node, first = running.host("node1"), first_process(running)
    demo.wait_idle(node, NODES)
    process = begin(running, "--site", running.variant("broken.yaml", change), "apply")
    wait_for_step(process, "switch the addresses")
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    assert process.stderr and b"nat does not answer" in process.stderr.read() and process.wait() == 5
    assert first_process(running) == first
    assert_one_instance(running)
    wait_until(lambda: running.status()["healthy"], "health")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    node.run("scancel", job)


STEPS = (
    "copy the overlay",
    "send the changes",
    "stop stateful services",
    "start isolated",
    "switch the addresses",
    "probe the way out",
    "probe every service",
)
KILLED = [
    pytest.param(step, agents, id=f"{step}{', and its agents' * agents}") for step in STEPS for agents in (False, True)
]


@pytest.mark.full
@pytest.mark.parametrize(("step", "agents"), KILLED)
def test_the_next_run_goes_on_after_a_killed_one(running: Playground, step: str, agents: bool) -> None:
    """Killed after a step, with or without its agents: one instance serves after the next run, with the change."""
    site = running.variant("switched.yaml", other_dns)
    process = begin(running, "--site", site, "apply")
    wait_for_step(process, step)
    kill_sms(process.pid)
    if agents:
        running.host("host-a").run("sh", "-c", KILL_AGENTS, ok=None)
    process.communicate()
    done = json.loads(running.sms("--site", site, "-q", "apply", "--json").stdout)
    assert done["current"] or done["switched"]
    assert_one_instance(running)
    assert running.sms("exec", "--", "cat", "/etc/resolv.conf").text.split() == ["nameserver", DNS]
    wait_until(lambda: running.status()["healthy"], "health")
    assert applied(running, site)["current"] is True
    assert applied(running, "/etc/sms/sms.yaml")["switched"]
    assert_one_instance(running)


@pytest.mark.full
@pytest.mark.parametrize("step", ["check the host", "stop stateful services", "probe the way out"])
def test_what_a_killed_switch_held_is_released(running: Playground, step: str) -> None:
    """SIGKILL of it and of its agents: the guard rolls it back or completes it, and then lets jobs start again."""
    demo.wait_idle(running.host("node1"), NODES)
    applied(running, use(running, partitions=[DEFAULT, {"name": "night"}]))

    def change(document: dict[str, Any]) -> None:
        other_dns(document)
        document["slurm"].update(fewer_nodes(running))

    site = running.variant("switched.yaml", change)
    process = begin(running, "--site", site, "apply")
    wait_for_step(process, step)
    kill_sms(process.pid)
    running.host("host-a").run("sh", "-c", KILL_AGENTS, ok=None)
    process.communicate()

    def released() -> bool:
        """Nothing of the killed run is left, and what is not removed takes jobs."""
        left = running.host("host-a").run("sh", "-c", "ls /var/lib/sms/journal").text.split()
        return not [name for name in left if name.endswith(".move")] and states(running) in (set(), {"up", "idle"})

    wait_until(released, "the guard", 120)
    applied(running, site)
    assert_one_instance(running)
    wait_until(lambda: running.status()["healthy"], "health")
    applied(running, "/etc/sms/sms.yaml")
    demo.wait_idle(running.host("node1"), NODES)


@pytest.mark.full
def test_addresses_and_services(running: Playground) -> None:
    """Another public address and one service less, and then the same back; nodes reach the outside by it."""

    def change(document: dict[str, Any]) -> None:
        document["networks"]["public"]["address"] = "10.78.0.77/24"
        document["services"] = ["munge", "slurmctld", "nat", "rsyslog", "chrony", "postfix", "filesync"]

    site = running.variant("other.yaml", change)
    planned = applied(running, site, "-n")
    assert len(planned["switch"]) == 2 and planned["steps"] == []
    done = applied(running, site)["switched"]
    assert "cron" not in done["outage"] and "cron" not in pids(running)
    shown = running.sms("exec", "--", "ip", "-o", "-4", "address", "show", "dev", "eth1").text
    assert "10.78.0.77/24" in shown
    assert running.host("node1").works("ping", "-c", "1", "-W", "2", "10.78.0.254")
    assert_one_instance(running)
    status = json.loads(running.sms("--site", site, "status", "--json", ok=(0, 4)).stdout)
    assert {one["name"] for one in status["services"]} == set(done["outage"])
    assert applied(running, "/etc/sms/sms.yaml")["switched"] and "cron" in pids(running)
    wait_until(lambda: running.status()["healthy"], "health")


SECOND_BRIDGE = """\
ip link add br-two type bridge stp_state 0 forward_delay 0
ip link set br-two up
ip link add two-a type veth peer name two-b
ip link set two-a master br-two up
ip link set two-b master br-prov up
"""


@pytest.mark.full
def test_another_bridge(running: Playground) -> None:
    """A bridge that is linked to the first one: nodes reach the container by it, and then by the first one again."""

    def change(document: dict[str, Any]) -> None:
        document["networks"]["provisioning"]["bridge"] = "br-two"

    host, node = running.host("host-a"), running.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    host.run("sh", "-ec", SECOND_BRIDGE)
    try:
        site = running.variant("bridge.yaml", change)
        planned = applied(running, site, "-n")
        assert planned["switch"] == ["eth0 is on br-prov, not br-two"]
        assert applied(running, site)["switched"]["jobs"] >= 1
        assert_one_instance(running)
        found = json.loads(running.sms("--site", site, "status", "--json").stdout)
        assert {one["bridge"] for one in found["networks"]} == {"br-two", "br-pub"} and found["healthy"]
        assert node.works("scontrol", "ping") and node.works("ping", "-c", "1", "-W", "2", "10.78.0.254")
        assert applied(running, site)["current"] is True
        assert applied(running, "/etc/sms/sms.yaml")["switched"]
        assert_one_instance(running)
    finally:
        host.run("sh", "-c", "ip link delete two-a; ip link delete br-two", ok=None)
    wait_until(lambda: running.status()["healthy"], "health")
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    node.run("scancel", job)


@pytest.mark.full
def test_another_host_name(running: Playground) -> None:
    """The controller serves under it, with its jobs; nodes reach it by its address, which is the same."""

    def change(document: dict[str, Any]) -> None:
        document["hostname"] = "sms-renamed"

    node = running.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    for site, name in ((running.variant("renamed.yaml", change), "sms-renamed"), ("/etc/sms/sms.yaml", "sms-services")):
        assert applied(running, site)["switched"]["jobs"] >= 1
        assert_one_instance(running)
        assert running.sms("exec", "--", "hostname").text == name
        assert "UP" in node.run("scontrol", "ping").text
        found = json.loads(running.sms("--site", site, "status", "--json", ok=(0, 4)).stdout)
        assert all(one["ok"] for one in found["services"])
        assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
        assert demo.as_alice(node, "srun", "-N1", "hostname")
    wait_until(lambda: running.status()["healthy"], "health")
    node.run("scancel", job)


@pytest.mark.full
def test_a_stop_ends_what_a_killed_run_has_left(running: Playground) -> None:
    """Both instances are there, and the second one serves; the next start goes on with its overlay."""
    site = running.variant("switched.yaml", other_dns)
    process = begin(running, "--site", site, "apply")
    wait_for_step(process, "switch the addresses")
    kill_sms(process.pid)
    running.host("host-a").run("sh", "-c", KILL_AGENTS, ok=None)
    process.communicate()
    running.sms("-q", "stop")
    running.assert_nothing_runs()
    running.sms("--site", site, "-q", "start")
    assert_one_instance(running)
    wait_until(lambda: running.status()["healthy"], "health")
    assert applied(running, site)["current"] is True
    applied(running, "/etc/sms/sms.yaml")


@pytest.mark.full
def test_a_gateway_that_is_not_there_is_refused(running: Playground) -> None:
    """Before anything is changed."""

    def change(document: dict[str, Any]) -> None:
        document["networks"]["public"] |= {"address": "10.78.9.2/24", "gateway": "10.78.9.254"}

    first = first_process(running)
    site = running.variant("gateway.yaml", change)
    for words in (("-n",), ()):
        reported = running.sms("--site", site, "apply", *words, ok=(3,)).stderr.decode()
        assert "no machine has the gateway's address 10.78.9.254" in reported and first_process(running) == first
    assert "--host host-a" in running.sms("apply", on="host-b", ok=(3,)).stderr.decode()
