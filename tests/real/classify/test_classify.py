"""The lab listens to its own provisioning network while everything happens there, and the capture is classified."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from appliance.operations.lab.capture import _container
from tests.real.conftest import NODES, Playground
from tests.real.labs import fresh_lab

pytestmark = pytest.mark.real

NAME = "t-main"
"""The shared lab."""
SMS = (sys.executable, "-m", "appliance")
SMS_ADDRESS, SMS_MAC = "10.77.0.1", "02:00:0a:4d:00:01"
NODE_ADDRESSES = [f"10.77.0.{100 + number}" for number in range(1, NODES + 1)]
EMPTY_B = 74
"""Bytes of the longest TCP packet without data: Ethernet, IPv4, and TCP with all its options of a SYN."""
CRITICAL = ("slurmctld", "rsyslog", "chrony", "postfix", "nat")

ASK_TIME = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
    ask.settimeout(5)
    ask.sendto(bytes([0x23]) + bytes(47), ("10.78.0.254", 123))
    assert len(ask.recv(99)) == 48
"""
"""A node queries the time of the outside, past the container: UDP through NAT."""


@pytest.fixture(scope="module")
def cluster(playground: Playground, built: Built) -> Playground:
    """The services container runs on host-a and every node is registered."""
    playground.sms("-q", "start", "--host", "host-a", on="admin")
    demo.wait_idle(playground.host("node1"), NODES)
    return playground


class Listening:
    """`sms lab capture` under way into a file."""

    def __init__(self, file: Path, *words: str) -> None:
        self.file = file
        argv = [*SMS, "-q", "lab", "capture", "--name", NAME, "-o", str(file), "--json", *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        demo.wait_for("the capture's head", self._head)

    def _head(self) -> str:
        assert self.process.poll() is None, self.process.communicate()[1]
        return "there" if self.file.exists() and self.file.stat().st_size >= 24 else ""

    def end(self, signum: int | None = None) -> dict[str, Any]:
        """What it says at its end."""
        if signum:
            self.process.send_signal(signum)
        stdout, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr
        reported: dict[str, Any] = json.loads(stdout)
        return reported


def ssh_from_the_sms(there: Playground, address: str) -> str:
    """A command on a node over SSH, opened from the container's own address; the node's host key is checked."""
    etc = there.lab.etc
    inside, _ = _container(there.lab)
    options = ("BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={etc / 'known_hosts'}")
    words = [word for option in options for word in ("-o", option)]
    key = ("-F", "none", "-i", str(etc / "keys" / "id_ed25519"))
    return inside.run("ssh", *key, *words, f"root@{address}", "printf '%s' \"$SSH_CLIENT\"; hostname").text


@contextmanager
def plugged_in(there: Playground) -> Iterator[None]:
    """A machine on the network that uses nothing: it only says by multicast that it is there, as all do (RFC 4861)."""
    space = there.lab.layout.namespace("switch")
    for words in ("add t-x type veth peer name t-y", "set t-x master br-prov up", "set t-y up"):
        subprocess.run(["ip", "-n", space, "link", *words.split()], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "-n", space, "link", "del", "t-x"], check=True)


def make_traffic(there: Playground) -> None:
    """Of every kind that there is in this lab."""
    nodes = [there.host(name) for name in there.lab.nodes]
    # Lines of the others come over connections that were open before the capture.
    nodes[0].run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "rsyslogd")
    for host in nodes:
        host.run("logger", "--tag", "t-classify", "a line of a node")
        host.run("chronyc", "burst", "2/4")
        host.run("mail", "-s", "words of a node", "someone@example.test", input=b"words\n")
        demo.fetch_outside(host)
        host.run("python3", "-c", ASK_TIME)
    # The lab's own line accepts the key from hosts of the lab only.
    public = (there.lab.etc / "keys" / "id_ed25519.pub").read_text()
    for host in nodes:
        host.write("/root/.ssh/authorized_keys", f'from="{SMS_ADDRESS}" {public}'.encode(), mode=0o600)
    for address in NODE_ADDRESSES:
        assert ssh_from_the_sms(there, address).startswith(f"{SMS_ADDRESS} ")
    job = demo.run_job(nodes[0]).split()[1]
    assert demo.as_alice(nodes[1], "srun", f"--nodes={NODES}", "hostname").count("node") == NODES
    # A step that ends before it has read the end of its input resets the connection, and srun may lose its last output.
    inside = ("exec", "--", "srun", "--input=none", "-N2")
    assert there.sms(*inside, "hostname").text.split() in (["node1", "node2"], ["node2", "node1"])
    # The lines of two nodes arrive in parts, which may alternate.
    assert there.sms(*inside, "python3", "-c", "print('big' * 20000)").text.count("b") == 2 * 20000
    demo.mail_arrives(there.host("outside"), job)


@pytest.fixture(scope="module")
def capture(cluster: Playground, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of that in a file."""
    for name in cluster.lab.nodes:  # the container may be another one since their last line
        demo.syslog_arrives(cluster.lab, cluster.host(name))
    listening = Listening(tmp_path_factory.mktemp("capture") / "lab.pcap", "--duration", "10m")
    began = time.monotonic()
    try:
        with plugged_in(cluster):
            make_traffic(cluster)
            time.sleep(max(0.0, began + 15 - time.monotonic()))  # some polls of the clocks
    except BaseException:
        listening.end(signal.SIGINT)  # else a later test takes it for its own
        raise
    reported = listening.end(signal.SIGINT)
    assert reported["interrupted"] and reported["dropped"] == 0 and reported["interface"] == "br-prov"
    assert reported["bytes"] == listening.file.stat().st_size
    assert listening.file.stat().st_mode & 0o777 == 0o600
    counted = subprocess.run(["tcpdump", "-nr", listening.file], capture_output=True, check=True)
    assert reported["packets"] == counted.stdout.count(b"\n") > 500
    return listening.file


def classify(*words: str, given: bytes | None = None) -> dict[str, Any]:
    """`sms classify --format json` on this machine."""
    argv = [*SMS, "-q", "classify", "--format", "json", *words]
    done = subprocess.run(argv, input=given, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def found(capture: Path) -> dict[str, Any]:
    """The classification of it."""
    return classify(str(capture))


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {service["name"]: service for service in found["services"]}


@pytest.mark.parametrize("name", CRITICAL)
def test_what_nodes_need_at_every_moment_is_time_critical(found: dict[str, Any], name: str) -> None:
    service = by_name(found)[name]
    assert (service["verdict"], service["group"]) == ("time-critical", "SMS-services")
    assert service["initiator"] == ("both" if name == "slurmctld" else "node")
    assert service["clients"] == NODES and service["reasons"] and not service["overridden"]
    assert service["carried"] and (service["budget_s"] > 0) == (name != "nat")  # NAT cannot be away at all


def test_ssh_from_the_management_node_can_wait(found: dict[str, Any]) -> None:
    ssh = by_name(found)["ssh"]
    assert (ssh["verdict"], ssh["group"], ssh["initiator"]) == ("deferrable", "SMS-mgmt", "sms")
    assert ssh["connections"]["sms"] == NODES and ssh["connections"]["node"] == 0


def test_management_node_and_nodes_are_found_by_themselves(found: dict[str, Any]) -> None:
    assert found["sms"]["mac"] == SMS_MAC
    # Its own address of the link is its own too; the outside's, whose packets come from its MAC, is not.
    assert [address for address in found["sms"]["addresses"] if ":" not in address] == [SMS_ADDRESS]
    assert [address for address in found["nodes"]["addresses"] if ":" not in address] == NODE_ADDRESSES
    assert found["nodes"]["count"] == NODES


def test_slurm_is_one_service_with_its_dynamic_ports(found: dict[str, Any]) -> None:
    slurm = by_name(found)["slurmctld"]
    assert {"tcp/6817", "tcp/6818"} <= set(slurm["ports"])
    assert slurm["connections"]["node"] > 0 and slurm["connections"]["sms"] > 0
    strangers = [what["what"] for what in found["unclassified"]["top"]]
    # The controller's call to a command that ends just then is reset before it sends anything: nothing identifies it.
    others = [each for each in found["services"] if each["bytes"] > EMPTY_B * each["packets"]]
    unknown = [each["name"] for each in others if each["name"] not in (*CRITICAL, "ssh")]
    assert not [name for name in (*strangers, *unknown) if "tcp" in name], (strangers, others)


def test_what_goes_outside_is_named(found: dict[str, Any]) -> None:
    outside = {where["address"]: where for where in found["routed"]["destinations"]}["10.78.0.254"]
    assert {"tcp/80", "udp/123"} <= set(outside["ports"])


def test_syslog_over_connections_from_before_the_capture_is_seen_as_such(found: dict[str, Any]) -> None:
    connections = by_name(found)["rsyslog"]["connections"]
    assert connections["node"] >= 1 and connections["midstream"] >= NODES - 1 and connections["sms"] == 0


def test_every_packet_is_accounted_for(found: dict[str, Any], capture: Path) -> None:
    counted = subprocess.run(["tcpdump", "-nr", capture], capture_output=True, check=True)
    assert found["capture"]["packets"] == counted.stdout.count(b"\n")
    assert not found["capture"]["truncated"] and found["capture"]["skipped"] == {}
    parts = [*found["services"], found["elsewhere"], found["unclassified"]]
    routed = 0 if "nat" in by_name(found) else found["routed"]["packets"]
    assert sum(part["packets"] for part in parts) + routed == found["capture"]["packets"]


def test_one_node_can_be_looked_at_as_the_paper_did(capture: Path) -> None:
    alone = classify(str(capture), "--node", NODE_ADDRESSES[1])
    assert alone["sms"]["mac"] == SMS_MAC
    reported = {name: (by_name(alone)[name]["verdict"], by_name(alone)[name]["clients"]) for name in CRITICAL}
    assert reported == dict.fromkeys(CRITICAL, ("time-critical", 1))
    assert by_name(alone)["ssh"]["verdict"] == "deferrable"


def test_a_pipe_gives_the_same_result_as_the_file(capture: Path, found: dict[str, Any]) -> None:
    piped = classify("-", given=capture.read_bytes())
    assert piped["capture"].pop("files") == ["-"]
    assert {**piped, "capture": piped["capture"]} == {
        **found,
        "capture": {key: value for key, value in found["capture"].items() if key != "files"},
    }


@pytest.mark.parametrize(
    "command",
    [
        "timeout --signal=INT 5 tcpdump -i br-prov -U -w - 2>/dev/null | sms -q classify - --format json",
        "sms -q classify --live br-prov --duration 5s --format json",
    ],
    ids=["tcpdump in a pipe", "live"],
)
def test_an_admin_host_listens_to_its_own_bridge(cluster: Playground, command: str) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.2):
            cluster.host("node2").run("logger", "--tag", "t-classify", "a line")
            cluster.host("node3").run("sinfo", ok=None)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        said = cluster.host("host-a").run("sh", "-c", command, timeout=60)
    finally:
        stop.set()
        worker.join()
    seen = json.loads(said.stdout)
    assert seen["sms"]["mac"] == SMS_MAC
    assert 2 < seen["capture"]["duration_s"] < 30
    names = by_name(seen)
    assert {name: names[name]["verdict"] for name in ("slurmctld", "rsyslog", "chrony")} == dict.fromkeys(
        ("slurmctld", "rsyslog", "chrony"), "time-critical"
    )


def test_the_lab_capture_in_a_pipe(cluster: Playground, tmp_path: Path) -> None:
    capture = subprocess.Popen(
        [*SMS, "-q", "lab", "capture", "--name", NAME, "--duration", "4s", "-o", "-", "--at", "sms"],
        stdout=subprocess.PIPE,
    )
    with capture:
        argv = [*SMS, "-q", "classify", "--format", "json", "-"]
        done = subprocess.run(argv, stdin=capture.stdout, capture_output=True, check=True, timeout=60)
    assert capture.returncode == 0
    assert by_name(json.loads(done.stdout))["chrony"]["verdict"] == "time-critical"


def test_the_verdict_builds_the_container(cluster: Playground, capture: Path) -> None:
    chosen, site = cluster.lab.etc / "classification.yaml", str(cluster.lab.etc / "sms.yaml")
    for argv in (
        ("classify", str(capture), "-o", str(chosen)),
        ("--site", site, "build", "--from", str(chosen), "--dry-run"),
    ):
        done = subprocess.run([*SMS, "-q", *argv], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
    for package in ("slurmctld", "munge", "rsyslog", "chrony", "postfix", "nftables"):
        assert package in done.stdout, package
    assert "openssh" not in done.stdout


def test_ends_of_a_capture(cluster: Playground, tmp_path: Path) -> None:
    """Its time, a second one beside it, SIGTERM, and the end of its reader."""
    first = Listening(tmp_path / "first.pcap", "--duration", "3s", "--at", "node1")
    second = Listening(tmp_path / "second.pcap", "--duration", "60s")
    ping = ("ping", "-c", "3", "-i", "0.01", "-q", SMS_ADDRESS)
    cluster.host("node1").run(*ping)
    reported = second.end(signal.SIGTERM)  # right after: the last second comes through
    read = subprocess.run(["tcpdump", "-nr", second.file, "icmp"], capture_output=True, check=True)
    assert reported["interrupted"] and read.stdout.count(b"\n") == 6
    reported = first.end()
    assert not reported["interrupted"] and 3 <= reported["seconds"] < 30 and reported["interface"] == "eth0"
    argv = [*SMS, "-q", "lab", "capture", "--name", NAME, "--duration", "60s", "-o", "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as piped:
        assert piped.stdout
        piped.stdout.read(24)
        piped.stdout.close()
        cluster.host("node1").run(*ping)
        assert piped.wait(60) == 141


def test_a_killed_capture_leaves_no_tcpdump(cluster: Playground, tmp_path: Path) -> None:
    listening = Listening(tmp_path / "x.pcap", "--duration", "600s")
    listening.process.kill()
    listening.process.communicate()

    def gone() -> str:
        cluster.host("node1").run("ping", "-c", "1", "-q", SMS_ADDRESS)
        left = subprocess.run(["pgrep", "-f", "600 tcpdump -i br-prov"], capture_output=True, check=False)
        return "" if left.stdout else "gone"

    demo.wait_for("the end of tcpdump", gone)


def test_a_full_disk_is_said_and_what_came_before_is_kept(cluster: Playground, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        listening = Listening(small / "x.pcap", "--duration", "60s")
        cluster.host("node1").run("curl", "-s", "-o", "/dev/null", "http://10.78.0.254/big")
        _, errors = listening.process.communicate(timeout=60)
        assert listening.process.returncode == 1
        assert b"No space left on device; its first 64 KiB are kept" in errors and b"  hint: " in errors
        kept = classify(str(small / "x.pcap"))
        assert kept["capture"]["packets"] > 10
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_lab_that_goes_down_ends_its_capture(tmp_path: Path) -> None:
    other = "t-listen"
    with fresh_lab(other, 1):
        argv = [*SMS, "-q", "lab", "capture", "--name", other, "-o", str(tmp_path / "x.pcap"), "--duration", "60s"]
        running = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        demo.wait_for("the capture's head", lambda: "there" if list(tmp_path.glob("x.pcap")) else "")
        time.sleep(1)
        argv[argv.index("-o") + 1] = "-"
        refused = subprocess.run([*argv, "--at", "sms"], capture_output=True, text=True, check=False)
        assert refused.returncode == 3 and "is not running in lab t-listen" in refused.stderr
    assert "ended with status -9" in running.communicate(timeout=60)[1]
    assert running.returncode == 1
