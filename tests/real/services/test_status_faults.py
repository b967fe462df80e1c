"""Faults that keep every daemon running and yet nodes from being served: `sms status` sees each of them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.operations.lab import demo
from tests.hostile.verbs import run_measured
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, fresh_lab, wrong_munge_key
from tests.waiting import wait_until

pytestmark = pytest.mark.real

HOST, NODES = "host-a", 2
ABSENT, ABSENT_ADDRESS = "node9", "10.77.0.99"
"""A node that is not installed yet."""
UNREGISTERED = f"1 of {NODES + 1} nodes have not registered with slurmctld: {ABSENT}"
SLURMD_TIMEOUT_S = 30
"""The controller queries its nodes each third of it."""
Status = dict[str, Any]


@pytest.fixture(scope="module")
def served() -> Iterator[Playground]:
    """One lab and one start for all tests; its nodes are registered, and the start is long enough ago."""

    def quick(document: dict[str, Any]) -> None:
        document["slurm"]["extra"] = [f"SlurmdTimeout={SLURMD_TIMEOUT_S}"]
        document["slurm"]["nodes"].append({"name": ABSENT, "address": ABSENT_ADDRESS, "cpus": 1, "memory_mb": 512})

    with fresh_lab("t-status", NODES) as lab:
        playground = Playground(lab)
        playground.variant("sms.yaml", quick)
        give_image(playground, build_image(lab))
        playground.sms("-q", "start")
        demo.wait_idle(playground.host("node1"), NODES)
        assert playground.status()["healthy"], "a start alone must not count"
        wait_until(lambda: playground.status()["uptime_s"] > 62, "the time that nodes have to register")
        yield playground


def looked(playground: Playground) -> Status:
    """The status, after a check that exit status and JSON agree."""
    result = playground.sms("status", "--json", ok=(0, 4))
    found: Status = json.loads(result.stdout)
    assert (result.status == 0) is found["healthy"], found
    return found


@contextmanager
def fault(playground: Playground, *, within_s: float = 0) -> Iterator[Callable[[str], Status]]:
    """Healthy before and after; yield a function that waits for a warning with these words."""
    wait_until(lambda: looked(playground)["healthy"], "health before")

    def seen(words: str) -> Status:
        began = time.monotonic()
        while True:
            found = looked(playground)
            took = time.monotonic() - began
            if any(words in warning for warning in found["warnings"]) and not found["healthy"]:
                print(f"{words!r}: seen after {took:.1f} s")
                return found
            assert took < within_s, f"not seen within {within_s} s: {words!r} in {found['warnings']}"

    yield seen
    wait_until(lambda: looked(playground)["healthy"], "health afterwards")


def test_nothing_is_wrong(served: Playground) -> None:
    found = looked(served)
    assert found["healthy"] and found["warnings"] == [UNREGISTERED]
    prov, pub = found["networks"]
    assert (prov["bridge"], prov["uplinks"], prov["problems"]) == ("br-prov", ["prov0"], [])
    assert (pub["bridge"], pub["uplinks"], pub["problems"]) == ("br-pub", ["pub0"], [])
    assert prov["port"].startswith("veth") and prov["answering"] >= NODES and set(prov["silent"]) <= {ABSENT_ADDRESS}
    assert found["nodes"]["count"] == NODES + 1 and found["nodes"]["problem"] == ""
    (silent,) = found["nodes"]["silent"]
    assert silent["name"] == ABSENT and not silent["registered"] and not silent["acknowledged"]
    (probe,) = found["probes"]
    assert (probe["network"], probe["nodes"], probe["port"]) == ("10.77.0.0/24", ["node1", "node2"], 6818)
    assert probe["ok"] and found["stopped"] == [] and found["guarded"] is True


def test_slurmd_logs_nothing_about_a_status(served: Playground) -> None:
    log = ("wc", "-l", "/var/log/lab/slurmd.log")
    before = [served.host(name).run(*log).text for name in ("node1", "node2")]
    for _ in range(3):
        assert looked(served)["probes"][0]["ok"]
    time.sleep(1)
    assert [served.host(name).run(*log).text for name in ("node1", "node2")] == before


@pytest.mark.parametrize("network", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_port_off_the_bridge(served: Playground, network: int) -> None:
    state = served.status()["networks"][network]
    host = served.host(HOST)
    with fault(served) as seen:
        host.run("ip", "link", "set", state["port"], "nomaster")
        try:
            found = seen(f"is not on bridge {state['bridge']}")
            assert found["networks"][network]["problems"] and all(one["ok"] for one in found["services"] if not network)
        finally:
            host.run("ip", "link", "set", state["port"], "master", state["bridge"])


@pytest.mark.full
def test_the_uplink_off_the_bridge(served: Playground) -> None:
    host = served.host(HOST)
    with fault(served) as seen:
        host.run("ip", "link", "set", "prov0", "nomaster")
        try:
            assert seen("bridge br-prov has no uplink")["networks"][0]["uplinks"] == []
        finally:
            host.run("ip", "link", "set", "prov0", "master", "br-prov")


def switch(playground: Playground, port: str, state: str) -> None:
    argv = ["ip", "-n", playground.lab.layout.namespace("switch"), "link", "set", port, state]
    subprocess.run(argv, check=True)


def test_the_uplink_without_a_carrier(served: Playground) -> None:
    with fault(served) as seen:
        switch(served, f"p-{HOST}", "down")
        try:
            seen("bridge br-prov has no uplink: prov0 has no carrier")
        finally:
            switch(served, f"p-{HOST}", "up")


@pytest.mark.full
def test_the_bridge_deleted(served: Playground) -> None:
    host, port = served.host(HOST), served.status()["networks"][0]["port"]
    (lines,) = (host.run("ip", "-json", "address", "show", "br-prov").stdout,)
    (shown,) = json.loads(lines)
    address = next(one for one in shown["addr_info"] if one["family"] == "inet")
    with fault(served) as seen:
        host.run("ip", "link", "delete", "br-prov")
        try:
            seen("bridge br-prov does not exist")
        finally:
            batch = f"""link add br-prov address {shown["address"]} type bridge stp_state 0 forward_delay 0
                link set prov0 master br-prov up
                link set {port} master br-prov up
                link set br-prov up
                address add {address["local"]}/{address["prefixlen"]} dev br-prov
            """
            host.run("ip", "-batch", "-", input=batch.encode())


@pytest.mark.full
def test_a_partition_beyond_the_switch(served: Playground) -> None:
    """All is well on the host: only connections to nodes show it, at once, and later the controller."""
    nodes = [f"p-node{number}" for number in range(1, NODES + 1)]
    with fault(served, within_s=SLURMD_TIMEOUT_S / 3 + 30) as seen:
        for port in nodes:
            switch(served, port, "down")
        try:
            found = looked(served)
            assert not found["healthy"] and not found["probes"][0]["ok"]
            assert any("no node of 10.77.0.0/24 accepts connections" in warning for warning in found["warnings"])
            silent = seen("nodes do not respond to slurmctld: node[1-2")["nodes"]["silent"]
            silent = [one for one in silent if one["name"] != ABSENT]
            assert [one["name"] for one in silent] == ["node1", "node2"]
            assert all("not_responding" in one["state"] and not one["acknowledged"] for one in silent)
        finally:
            for port in nodes:
                switch(served, port, "up")


def test_a_wrong_munge_key_on_a_node(served: Playground) -> None:
    with fault(served, within_s=SLURMD_TIMEOUT_S / 3 + 30) as seen, wrong_munge_key(served.host("node2")):
        found = seen(f"1 of {NODES + 1} nodes do not respond to slurmctld: node2")
        assert all(service["ok"] for service in found["services"]), "no probe sees it"
        assert found["probes"][0]["ok"], "nor a connection"
        # Down, with the controller's own reason.
        seen("node2 (Not responding)")


def test_another_uid_on_a_node(served: Playground) -> None:
    """Only jobs show it; afterwards the node ends them. Adds: what slurmctld logs, and that its log has the time."""
    node = served.host("node2")

    def set_uid(number: str) -> None:
        node.run("usermod", "--uid", number, "slurm")
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "slurmd")

    usual = node.run("id", "-u", "slurm").text
    with fault(served, within_s=30) as seen:
        set_uid("970")
        try:
            served.sms("exec", "--", "sbatch", "-w", "node2", "-o", "/dev/null", "--wrap", "true")
            assert seen(f"1 of {NODES + 1} nodes refuse slurmctld")["nodes"]["refusing"] == ["node2"]
        finally:
            set_uid(usual)
            # The controller repeats the order to end the job every few minutes only.
            for state in ("down", "resume"):
                served.sms("exec", "--", "scontrol", "update", "nodename=node2", f"state={state}", "reason=uid")
    lines = served.sms("logs", "-n", "20", "slurmctld").text.splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z slurmctld: ", line) for line in lines[1:]), lines


def test_a_node_that_is_drained_is_no_fault_and_its_reason_stays_text(served: Playground) -> None:
    update = ("exec", "--", "scontrol", "update", "nodename=node2")
    served.sms(*update, "state=drain", "reason=\x1b[2J\nnode1" + " " * 60 + "x")
    switch(served, "p-node2", "down")
    try:
        wait_until(lambda: len(served.status()["nodes"]["silent"]) == 2, "the controller's view")
        found = looked(served)
        (silent,) = (one for one in found["nodes"]["silent"] if one["name"] != ABSENT)
        text = served.sms("status").text
        assert all(letter.isprintable() or letter == "\n" for letter in text) and "1 of them out of service" in text
        assert silent["name"] == "node2" and silent["acknowledged"] and silent["reason"].isprintable()
        assert found["healthy"], found["warnings"]
    finally:
        switch(served, "p-node2", "up")
        served.sms(*update, "state=resume")


def test_a_stopped_daemon(served: Playground) -> None:
    """Postfix under SIGSTOP greets nevertheless: the kernel accepts connections, or a child of it does."""
    master = served.sms("exec", "--", "pidof", "-s", "master").text
    with fault(served) as seen:
        served.sms("exec", "--", "kill", "-STOP", master)
        try:
            (stopped,) = seen("process master of the services container is stopped")["stopped"]
            assert stopped["pid"] == int(master)
        finally:
            served.sms("exec", "--", "kill", "-CONT", master)


def test_an_overlay_that_takes_no_writes(served: Playground) -> None:
    """A folder in the place of the file that status writes refuses it as a file system does; the rest is still read."""
    path = "/var/lib/.sms-write"
    with fault(served) as seen:
        served.sms("exec", "--", "mkdir", path)
        try:
            found = seen("the overlay cannot be written")
            assert found["uptime_s"] > 0 and found["overlay"].get("size"), found
            assert not any("cannot be listed" in warning for warning in found["warnings"]), found["warnings"]
        finally:
            served.sms("exec", "--", "rmdir", path)


def test_no_guard(served: Playground) -> None:
    with fault(served, within_s=5) as seen:
        served.host(HOST).run("sh", "-c", 'kill "$(cat /run/sms/lab.guard.lock)"')
        try:
            assert seen("no guard runs on host-a")["guarded"] is False
        finally:
            served.sms("-q", "start")


def test_every_snapshot_damaged(served: Playground) -> None:
    served.sms("-q", "overlay", "snapshot")
    assert served.status()["healthy"]
    folder = "/var/lib/sms/snapshots/lab/000001"
    host = served.host(HOST)
    with fault(served) as seen:
        host.run("cp", "-p", f"{folder}/digests", "/root/digests")
        host.run("sh", "-c", 'printf x | dd of="$1" bs=1 seek=7 conv=notrunc status=none', "spoil", f"{folder}/digests")
        served.sms("overlay", "verify", "--all", ok=None)
        try:
            assert seen("every snapshot is damaged")["snapshots"]["damaged"] == [1]
        finally:
            host.run("cp", "-p", "/root/digests", f"{folder}/digests")
            served.sms("-q", "overlay", "verify", "--all")


def mtu(playground: Playground, value: int) -> None:
    """Set the MTU of the provisioning network, from the bridge of the host to a node."""
    host = playground.host(HOST)
    for link in ("prov0", "br-prov"):
        host.run("ip", "link", "set", link, "mtu", str(value))
    playground.host("node1").run("ip", "link", "set", "eth0", "mtu", str(value))
    switch = ("ip", "-n", playground.lab.layout.namespace("switch"), "link", "set")
    for port in (f"p-{HOST}", "p-node1"):
        subprocess.run([*switch, port, "mtu", str(value)], check=True)


def test_another_mtu_on_the_bridge(served: Playground) -> None:
    """R20. Adds: the new instance has it, the bridge keeps it, and frames of that size pass."""
    node = served.host("node1")
    large = ("ping", "-M", "do", "-s", "8000", "-c", "1", "-W", "2", "10.77.0.1")
    try:
        with fault(served) as seen:
            mtu(served, 9000)
            assert not node.works(*large)
            seen("eth0 is 1500 (container) and 1500 (port), and that of br-prov 9000")
            served.sms("-q", "apply")
            assert node.works(*large)
            assert "mtu 9000" in served.host(HOST).run("ip", "link", "show", "dev", "br-prov").text
    finally:
        mtu(served, 1500)
        served.sms("-q", "apply")


def test_another_machine_has_the_address(served: Playground) -> None:
    """R19."""
    node = served.host("node2")
    mac = json.loads(node.run("ip", "-json", "link", "show", "dev", "eth0").stdout)[0]["address"]
    with fault(served) as seen:
        node.run("ip", "address", "add", "10.77.0.1/24", "dev", "eth0")
        try:
            seen(f"another machine, {mac}, answers for the container's address 10.77.0.1")
        finally:
            node.run("ip", "address", "del", "10.77.0.1/24", "dev", "eth0")


def submit(playground: Playground, *options: str) -> str:
    """Submit a job as a user of a node; return its identifier."""
    return demo.as_alice(playground.host("node2"), "sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap=true")


def test_a_job_that_a_node_could_not_launch(served: Playground) -> None:
    """As after a power loss (T6): Slurm holds it for good. The command of the message releases it."""
    node, stepd = served.host("node1"), "/usr/sbin/slurmstepd"
    with fault(served, within_s=20) as seen:
        node.run("mount", "--bind", "/dev/null", stepd)
        try:
            job = submit(served, "-w", "node1")
            found = seen(f"scontrol release {job}`")
            assert found["held"] == [job] and all(one["ok"] for one in found["services"])
        finally:
            node.run("umount", stepd)
        served.sms("exec", "--", "scontrol", "release", job)
        # Slurm itself delays a requeued job.
        served.sms("exec", "--", "scontrol", "update", f"jobid={job}", "starttime=now")
        assert looked(served)["held"] == []
    served.sms("exec", "--", "scancel", job)


def test_a_user_with_jobs_whose_account_has_gone(served: Playground) -> None:
    """A container without it puts the job back into the queue for ever."""
    with fault(served) as seen:
        job = submit(served, "--hold")
        served.sms("exec", "--", "sh", "-euc", "cp -p /etc/passwd /etc/passwd.t; sed -i /^alice:/d /etc/passwd")
        try:
            assert seen("users who have jobs, but no account")["strangers"] == [2000]
        finally:
            served.sms("exec", "--", "mv", "/etc/passwd.t", "/etc/passwd")
            served.sms("exec", "--", "scancel", job)


BURST = """
import socket
with socket.create_connection(("127.0.0.1", 514)) as one:
    for number in range(40000):
        one.sendall(b"<13>burst: %06d %s\\n" % (number, b"x" * 900))
"""
"""More than the queue on disk may have: a 32nd of the overlay."""


@pytest.mark.full
@pytest.mark.parametrize("verdict", ["reject with tcp reset", "drop"])
def test_a_collector_that_is_away(served: Playground, verdict: str) -> None:
    """R7. What fits the queue is sent later, what does not is counted, and the log here goes on."""
    outside = ("ip", "netns", "exec", served.lab.layout.namespace("outside"), "nft")
    rules = f"table ip away {{\nchain in {{\ntype filter hook input priority 0\ntcp dport 514 {verdict}\n}}\n}}\n"
    subprocess.run([*outside, "-f", "-"], input=rules, text=True, check=True)

    def count() -> int:
        return sum(int(one["lines"]) for one in looked(served)["discarded"])

    before = count()
    try:
        served.sms("exec", "--", "python3", "-c", BURST, timeout=60)
        assert "node2" in demo.syslog_arrives(served.lab, served.host("node2"))
        wait_until(lambda: count() - before > 1000, "what rsyslogd counts each minute", 90)
        found = looked(served)
        (discarded,) = found["discarded"]
        assert discarded["queue"] == "collector"
        assert any(str(discarded["lines"]) in warning for warning in found["warnings"])
        assert found["healthy"], found["warnings"]
    finally:
        subprocess.run([*outside, "delete", "table", "ip", "away"], check=True)


MAILS = """
import smtplib
for number in range(200):
    try:
        with smtplib.SMTP("10.77.0.1", timeout=30) as one:
            text = b"Subject: filled %d\\n\\n" % number + (b"x" * 70 + b"\\n") * 110_000
            one.sendmail("alice@node1", ["root@example.org"], text)
    except smtplib.SMTPResponseException as error:
        print(number, error.smtp_code)
        break
"""
"""Mails of 8 MB until one is refused; prints how many were accepted, and the code."""


@pytest.mark.full
@pytest.mark.parametrize("verdict", ["reject with tcp reset", "drop", "a name that is not resolved"])
def test_a_mail_relay_that_is_away(served: Playground, verdict: str) -> None:
    """Mail is accepted, and kept, until it would take the room of the controller; what is refused is counted."""
    node = served.host("node1")
    outside = ("ip", "netns", "exec", served.lab.layout.namespace("outside"), "nft")
    named = "name" in verdict

    def other(document: dict[str, Any]) -> None:
        document["mail"]["relay"] = "relay.example.org:25"

    with fault(served):
        if named:
            served.sms("--site", served.variant("relay.yaml", other), "-q", "apply")
        else:
            rules = (
                f"table ip away {{\nchain in {{\ntype filter hook input priority 0\ntcp dport 25 {verdict}\n}}\n}}\n"
            )
            subprocess.run([*outside, "-f", "-"], input=rules, text=True, check=True)
        try:
            accepted, code = node.run("python3", "-c", MAILS, timeout=600).text.split()
            assert int(accepted) > 5 and code == "452"
            found = looked(served)
            assert any("postfix has refused 1 mails" in one for one in found["warnings"]) and found["healthy"]
            space = found["overlay"]
            assert space["size"] - space["used"] > 100 << 20, "room for the controller"
            job = demo.run_job(node).split()[1]
            assert job and "node2" in demo.syslog_arrives(served.lab, served.host("node2"))
        finally:
            if named:
                served.sms("-q", "apply")
            else:
                subprocess.run([*outside, "delete", "table", "ip", "away"], check=True)
            served.sms("exec", "--", "postqueue", "-f")
        queue = ("exec", "--", "sh", "-c", "postqueue -j | wc -l")
        wait_until(lambda: served.sms(*queue).text == "0", "the mails have been sent", 300)
        served.sms("exec", "--", "truncate", "-s", "0", "/var/log/sms/postfix.log")


PROBE = "/opt/sms/bin/sms-probe"


@pytest.mark.parametrize(
    "program",
    ["exec yes", pytest.param("exec head -c 4G /dev/zero >&2", marks=pytest.mark.full)],
    ids=["lines", "errors"],
)
def test_a_hostile_container_that_prints_for_ever(served: Playground, program: str) -> None:
    """Its root replaces the program by which it is probed. `sms status` reached 3.4 GB in 10 s."""
    with fault(served):
        made = f"printf '#!/bin/sh\\n{program}\\n' >{PROBE}.new && chmod 755 {PROBE}.new"
        served.sms("exec", "--", "sh", "-euc", f"cp -a {PROBE} {PROBE}.before; {made}; mv {PROBE}.new {PROBE}")
        try:
            began = time.monotonic()
            result, peak_mib = run_measured(served.host(HOST), "sms", "status", timeout=120)
            assert result.status in (1, 4) and peak_mib < 250 and time.monotonic() - began < 60
            assert b"more than 16 MiB" in result.stderr and b"Traceback" not in result.stderr
        finally:
            served.sms("exec", "--", "mv", f"{PROBE}.before", PROBE)


def test_a_collector_that_takes_connections_and_reads_nothing(served: Playground) -> None:
    """R7: rsyslogd goes on with the lines of nodes once what may wait for the collector is full."""
    control = ("supervisorctl", "-c", "/lab/supervisord.conf", "signal")
    outside = served.host("outside")
    outside.run(*control, "STOP", "rsyslogd")
    try:
        served.sms("exec", "--", "python3", "-c", BURST, timeout=60)
        assert "node2" in demo.syslog_arrives(served.lab, served.host("node2"))
        assert all(one["ok"] for one in looked(served)["services"])
    finally:
        outside.run(*control, "CONT", "rsyslogd")
