"""`sms migrate` goes unnoticed."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.lab import Lab
from appliance.lab.layout import PUBLIC
from appliance.operations.context import open_cluster
from appliance.operations.lab.demo import as_alice, wait_for, wait_idle
from appliance.plan.machine import inside_argv
from appliance.progress import Silent
from tests.images import with_accounting
from tests.real.conftest import NODES
from tests.real.labs import build_image
from tests.real.migration.conftest import where
from tests.real.moves import (
    CARRIERS,
    CONTROLLER,
    OVERLAY,
    Background,
    Hosts,
    Prober,
    Stepping,
    Watch,
    job_states,
    ssh_cut,
)

pytestmark = pytest.mark.real

MB = 1 << 20
BIG = 50 * MB
"""Bytes of the file that the lab's outside gives."""
BIG_URL = "http://10.78.0.254/big"

SYSLOG = """\
import socket, sys, time
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
n, next_one = 0, time.time()
while True:
    n += 1
    one.sendto(b"<13>Nov 21 00:00:00 node2 moving: line %d of them" % n, ("10.77.0.1", 514))
    print(n, time.time(), flush=True)
    next_one += 0.01
    time.sleep(max(0, next_one - time.time()))
"""
NTP = """\
import socket, time
while True:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.settimeout(0.1)
    began = time.time()
    try:
        one.sendto(b"\\x23" + bytes(47), ("10.77.0.1", 123))
        one.recv(99)
        print("%.3f %.3f" % (began, time.time()), flush=True)
    except OSError:
        pass
    one.close()
    time.sleep(max(0, began + 0.05 - time.time()))
"""
WRITER = """\
mkdir -p /var/lib/moving; cd /var/lib/moving; i=$(cat lines 2>/dev/null | wc -l)
while :; do i=$((i+1)); echo $i >>lines; sync lines; sleep 0.01; done
"""
TREE = """\
set -e
rm -rf /var/lib/tree; mkdir -p /var/lib/tree/deep/er; cd /var/lib/tree
for i in 1 2 3 4 5 6 7 8 9; do head -c $((i * 30001)) /dev/urandom >"file $i"; done
ln "file 1" deep/hard; ln -s ../"file 2" deep/soft; mkfifo deep/fifo; : >deep/er/empty
truncate -s 3M sparse; printf x >>sparse; chmod 4711 "file 3"; chown 2000:33 "file 4"
touch -d @1000000000 "file 5"; rm "file 9"; sync
"""
LOOK = """\
cd /var/lib/tree
find . -printf '%p %y %m %U %G %n %s %l\\n' | grep -v ' d ' | sort
find . -type f -print0 | sort -z | xargs -0 sha256sum
stat -c %Y "file 5"
"""


def move(hosts: Hosts, *words: str) -> dict[str, Any]:
    """To the other host, from the admin's machine; what `--json` prints."""
    _, target = where(hosts)
    argv = ("-q", *words, "migrate", "--force", "--json", target)
    reported: dict[str, Any] = json.loads(hosts.sms(*argv, on="admin").stdout)
    assert reported["target"] == target and hosts.instances(target) == ["sms-lab"]
    return reported


def inside(hosts: Hosts, host: str, script: str) -> str:
    """What a shell in the container prints."""
    return hosts.sms("exec", "--", "sh", "-c", script, on=host).text


def forget_copies(hosts: Hosts, host: str) -> None:
    """Nothing lies on a host that a copy could be made of."""
    hosts.host(host).run("sh", "-c", 'rm -rf "$1" "$1".* /var/lib/sms/snapshots', "forget", OVERLAY)


@contextmanager
def in_network(lab: Lab, node: str, program: str) -> Iterator[list[str]]:
    """A program in a node's network; the lines that it prints."""
    argv = ["nsenter", f"--net=/proc/{lab.host(node).pid}/ns/net", sys.executable, "-c", program]
    lines: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        try:
            yield lines
        finally:
            process.kill()
            reader.join()


class Spy(Background):
    """Looks at the command lines of all processes, again and again, for a secret."""

    def __init__(self, key: bytes) -> None:
        self.shapes = (key[:33], key[:33].hex().encode(), base64.b64encode(key[:33]))
        self.found: list[bytes] = []
        self.looked = 0
        super().__init__()

    def has(self, data: bytes) -> bool:
        """Whether the secret is in there, in any shape."""
        return any(shape in data for shape in self.shapes)

    def work(self) -> None:
        while not self._ended.wait(0.2):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = process.read_bytes()
                except OSError:
                    continue
                self.looked += 1
                if self.has(words):
                    self.found.append(words)


@dataclass
class Seen:
    """One move, and what was seen of it."""

    hosts: Hosts
    source: str
    target: str
    reported: dict[str, Any]
    jobs: dict[str, str]
    download: str
    sent: dict[int, float]
    ntp: list[tuple[float, float]]
    tree: tuple[str, str]
    lines_before: int
    watch: Watch
    spy: Spy
    asked: float
    controller_away_s: float
    histories: dict[str, list[dict[str, Any]]]

    def at(self, host: str, event: str) -> float:
        """When something happened."""
        return next(float(line["at"]) for line in reversed(self.histories[host]) if line["event"] == event)


@pytest.fixture(scope="module")
def seen(hosts: Hosts) -> Seen:
    """A move with jobs, a download, syslog, NTP and a writer going on."""
    source, target = where(hosts)
    node = hosts.host("node1")
    jobs = {
        "running": as_alice(node, "sbatch", "--parsable", "--nodelist=node1", "--wrap=sleep 20; echo done"),
        "array": as_alice(node, "sbatch", "--parsable", "--array=1-6", "--exclude=node1", "--wrap=sleep 2"),
        "queued": as_alice(node, "sbatch", "--parsable", f"--nodes={NODES}", "--wrap=srun hostname"),
    }
    as_alice(node, "sbatch", "--hold", "--parsable", "--wrap=true")
    wait_for("the job", lambda: "yes" if hosts_state(hosts, jobs["running"]) == "RUNNING" else "")
    inside(hosts, source, TREE)
    before = inside(hosts, source, LOOK)
    curl = ["curl", "-s", "-w", "%{stderr}%{http_code} %{size_download} %{num_connects} %{time_total}", BIG_URL]
    key = (hosts.lab.etc / "keys" / "munge.key").read_bytes()
    began = time.time()
    cluster = open_cluster(hosts.lab.etc / "sms.yaml", None, Silent())
    writer = [*hosts.lab.host(source).prefix, *inside_argv(cluster.site, cluster.services, "sh", "-c", WRITER)]
    prober = Prober(hosts.lab, "node4", CONTROLLER)
    with (
        ExitStack() as stack,
        in_network(hosts.lab, "node2", SYSLOG) as sent,
        in_network(hosts.lab, "node4", NTP) as ntp,
        Watch(hosts.lab) as watch,
        Spy(key) as spy,
    ):
        writing = subprocess.Popen(writer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(writing.wait)
        stack.callback(writing.kill)
        time.sleep(0.5)
        lines = int(inside(hosts, source, "wc -l </var/lib/moving/lines"))
        run = Stepping(hosts.lab, "-q", "migrate", "--json", target)
        stack.callback(run.kill)
        assert run.to("<stop"), run.end(60)
        pipe = subprocess.PIPE
        download = subprocess.Popen([*hosts.lab.host("node3").prefix, *curl], stdout=pipe, stderr=pipe)
        asked = time.time()
        over = threading.Event()
        reader = threading.Thread(target=read_slowly, args=(download, over))
        reader.start()
        stack.callback(reader.join)
        stack.callback(over.set)
        time.sleep(0.5)
        run.free()
        moved = run.end(300)
        assert moved.status == 0, moved.stderr
        reported = json.loads(moved.stdout)
        over.set()
        reader.join()
        downloaded = download.communicate()[1].decode()
        writing.wait(30)
    ended = time.time()
    prober.end()
    return Seen(
        hosts,
        source,
        target,
        reported,
        jobs,
        downloaded,
        {int(number): float(at) for number, at in whole(sent)},
        [(float(one), float(two)) for one, two in whole(ntp)],
        (before, inside(hosts, target, LOOK)),
        lines,
        watch,
        spy,
        asked,
        prober.away_s(began, ended),
        {host: hosts.history(host) for host in CARRIERS},
    )


def read_slowly(download: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Read the download, so that it is under way until the move is over, however long that lasts."""
    assert download.stdout
    left = BIG
    while block := download.stdout.read(1 << 16):
        left -= len(block)
        over.wait(0.02 if left > BIG // 2 else 0.5)


def whole(lines: list[str]) -> list[list[str]]:
    """The words of lines that were not cut when their writer ended."""
    return [line.split() for line in lines if line.endswith("\n")]


def hosts_state(hosts: Hosts, job: str) -> str:
    """A job's state, as seen by a node."""
    return job_states(hosts.host("node1").run("scontrol", "-o", "show", "job", job).text).get(job, "")


def test_the_same_jobs_run_and_end_as_they_should(seen: Seen) -> None:
    node = seen.hosts.host("node1")

    def ended() -> str:
        states = job_states(node.run("scontrol", "-o", "show", "jobs").text)
        return "yes" if all(states.get(job) == "COMPLETED" for job in seen.jobs.values()) else ""

    wait_for("the end of the jobs", ended, 300)
    assert node.run("cat", f"/home/alice/slurm-{seen.jobs['running']}.out").text == "done"
    names = node.run("cat", f"/home/alice/slurm-{seen.jobs['queued']}.out").text.split()
    assert sorted(names) == sorted(seen.hosts.lab.nodes)
    outputs = node.run("sh", "-c", f"ls /home/alice/slurm-{seen.jobs['array']}_*.out").text.split()
    assert len(outputs) == 6
    assert seen.reported["jobs"] >= 8, "each task of an array is one"
    following = as_alice(node, "sbatch", "--parsable", "--wrap=true")
    assert int(following) > max(int(job) for job in seen.jobs.values()), "numbers go on"


def test_a_download_continues_over_the_same_connection(seen: Seen) -> None:
    code, size, connects, seconds = seen.download.split()
    assert (code, int(size), connects) == ("200", BIG, "1")
    assert seen.asked + float(seconds) > seen.at(seen.target, "up"), "it was under way then"
    assert seen.reported["connections"] >= 1


def test_syslog_is_lost_in_the_switch_alone_and_counted(seen: Seen) -> None:
    count = "grep -o 'line [0-9]* of them' /var/log/messages | cut -d' ' -f2"
    arrived = {int(word) for word in inside(seen.hosts, seen.target, count).split()}
    missing = sorted(set(seen.sent) - arrived)
    released, up = seen.at(seen.source, "released"), seen.at(seen.target, "up")
    print(f"{len(missing)} of {len(seen.sent)} lines missing, {seen.reported['lost_datagrams']} reported; {missing}")
    assert len(seen.sent) > 500
    # The switch is reported within a moment after the ports are up; clocks of one machine need no slack for more.
    assert [n for n in missing if not released - 0.5 < seen.sent[n] < up + 0.5] == []
    # Other nodes send a line now and then, which is counted as well.
    assert len(missing) <= seen.reported["lost_datagrams"] <= len(missing) + 20


def test_time_is_served_during_the_outage_of_the_controller(seen: Seen) -> None:
    stopping, released, up = (
        seen.at(seen.source, "stopping"),
        seen.at(seen.source, "released"),
        seen.at(seen.target, "up"),
    )
    while_away = [one for one in seen.ntp if stopping < one[0] and one[1] < released]
    after = [one for one in seen.ntp if one[0] > up]
    assert len(while_away) >= 3 and len(after) >= 3
    print(f"outage of slurmctld: {seen.controller_away_s:.2f} s, as a node saw it; reported {seen.reported['outage']}")
    assert set(seen.reported["outage"]) == set(seen.reported["services"])
    assert seen.reported["outage"]["nat"] < seen.reported["outage"]["slurmctld"]


def test_what_was_written_arrives(seen: Seen) -> None:
    assert seen.tree[0] == seen.tree[1]
    lines = inside(seen.hosts, seen.target, "cat /var/lib/moving/lines").split()
    assert lines == [str(number) for number in range(1, len(lines) + 1)], "none is missing in the middle"
    assert len(lines) >= seen.lines_before
    more = inside(seen.hosts, seen.target, f"timeout 1 sh -c '{WRITER}'; cat /var/lib/moving/lines").split()
    assert len(more) > len(lines) and more == [str(number) for number in range(1, len(more) + 1)]
    left = seen.hosts.host(seen.source).run("e2fsck", "-fn", OVERLAY + ".moved", ok=None)
    assert left.status == 0, left.text


def test_one_host_serves_at_each_moment_and_nothing_is_left_on_the_other(seen: Seen) -> None:
    assert seen.watch.twice == [] and seen.watch.looked > 1000
    assert seen.watch.serving() == {seen.target: ["br-prov", "br-pub"]}
    assert seen.hosts.instances(seen.source) == [] and seen.hosts.loops(seen.source) == []
    status = seen.hosts.status(seen.target)
    assert status["healthy"] and status["lease"]["holder"] == seen.target
    assert status["lease"]["generation"] == seen.reported["generation"]
    leases = [seen.hosts.lease(host) for host in CARRIERS]
    assert [lease["holder"] for lease in leases] == [seen.target] * 2
    links = seen.hosts.host(seen.target).run("ip", "-br", "link").text
    assert "h0" not in [line.split()[0][-2:] for line in links.splitlines()], "the bridges that lead nowhere are gone"
    for host in CARRIERS:
        names = {line["event"] for line in seen.hosts.history(host)}
        assert {"begun", "moved"} <= names
        assert not (seen.hosts.disk(host) / "journal" / "lab.move").exists()


def test_no_secret_is_seen_while_it_moves(seen: Seen) -> None:
    assert seen.spy.found == [] and seen.spy.looked > 100
    for host in CARRIERS:
        for path in (seen.hosts.disk(host) / "journal").rglob("*"):
            assert path.is_dir() or not seen.spy.has(path.read_bytes()), path
        readable = seen.hosts.host(host).run(
            "find", "/var/lib/sms/overlays", "/run/sms", "-type", "f", "-perm", "/o=r", "-name", "*.img*", ok=None
        )
        assert readable.text == ""


@pytest.mark.parametrize("changed_mb", [pytest.param(1, marks=pytest.mark.full), 12])
def test_bytes_sent_in_the_outage_follow_what_changed(seen: Seen, changed_mb: int) -> None:
    """Back again: what is there is used."""
    hosts = seen.hosts
    source, target = where(hosts)
    run = Stepping(hosts.lab, "-q", "migrate", "--json", target)
    try:
        assert run.to("<stop")
        inside(hosts, source, f"head -c {changed_mb}M /dev/urandom >/root/late; sync /root/late")
        run.free()
        ended = run.end(300)
    finally:
        run.kill()
    assert ended.status == 0, ended.stderr
    reported = json.loads(ended.stdout)
    print(
        f"{changed_mb} MB changed: {reported['last_bytes']} bytes sent in the outage, {reported['copied_bytes']} before"
    )
    assert changed_mb * MB <= reported["last_bytes"] < (changed_mb + 2) * MB
    assert inside(hosts, target, "stat -c %s /root/late") == str(changed_mb * MB)
    assert reported["copied_bytes"] < reported["overlay_bytes"] / 2, "most of it was there"


def test_nodes_that_did_not_reach_the_new_controller_are_queried_at_once(hosts: Hosts) -> None:
    """Without it, it queries them again after a third of SlurmdTimeout, 100 s, and begins no job until then."""
    _, target = where(hosts)
    cluster = open_cluster(hosts.lab.etc / "sms.yaml", None, Silent())
    silent = ("sinfo", "--noheader", "--dead", "--format=%D")
    run = Stepping(hosts.lab, "-q", "migrate", target)
    try:
        assert run.to("<arm"), run.end(60)
        there = hosts.host(target)
        wait_for(
            "nodes that count as silent",
            lambda: there.run(*inside_argv(cluster.site, cluster.services, *silent), ok=None).text,
        )
        run.free()
        ended = run.end(300)
    finally:
        run.kill()
    assert ended.status == 0, ended.stderr
    wait_for("their answers", lambda: "" if hosts.host("node1").run(*silent).text else "yes", 60)


@pytest.mark.full
def test_the_newest_snapshot_there_is_used(seen: Seen) -> None:
    hosts = seen.hosts
    source, target = where(hosts)
    inside(hosts, source, "head -c 20M /dev/urandom >/root/much; sync /root/much")
    forget_copies(hosts, target)
    site = ("--site", hosts.variant("standby.yaml", lambda it: it.update(snapshots={"standby": list(CARRIERS)})))
    hosts.sms(*site, "-q", "overlay", "snapshot", on=source)
    hosts.sms(*site, "-q", "overlay", "push", "--to", target, on=source)
    reported = move(hosts)
    print(f"{reported['overlay_bytes']} bytes in use, {reported['copied_bytes']} sent")
    assert reported["overlay_bytes"] > 20 * MB and reported["copied_bytes"] < 5 * MB
    assert inside(hosts, target, "stat -c %s /root/much") == str(20 * MB)


@pytest.mark.parametrize("how", ["killed", pytest.param("cut", marks=pytest.mark.full)])
def test_an_interrupted_copy_resumes(seen: Seen, how: str) -> None:
    hosts = seen.hosts
    source, target = where(hosts)
    inside(hosts, source, "head -c 60M /dev/urandom >/root/much; sync /root/much")
    forget_copies(hosts, target)
    shape = ("tc", "qdisc", "{}", "dev", "eth0", "root", "tbf", "rate", "100mbit", "burst", "256k", "latency", "50ms")
    admin = hosts.host("admin")
    admin.run(*(word.format("add") for word in shape))
    run = Stepping(hosts.lab, "-q", "migrate", target)
    try:
        assert run.to(">send")
        run.let_go()
        incoming = hosts.disk(target) / "overlays" / "lab.img.incoming"
        wait_for("half of it", lambda: "yes" if incoming.stat().st_blocks * 512 > 25 * MB else "", 150)
        if how == "killed":
            run.kill()
            run.end(60)
        else:
            with ssh_cut(hosts.lab, target):
                wait_for("the end of the target's part", lambda: "yes" if not incoming.exists() else "", 150)
            assert run.end(200).status == 5, "it serves where it did"
    finally:
        run.kill()
        admin.run("tc", "qdisc", "del", "dev", "eth0", "root", ok=None)
    wait_for("the end of the source's part", lambda: "" if marked(hosts, source) else "yes", 150)
    assert hosts.status(source)["healthy"]
    reported = move(hosts)
    print(f"{reported['overlay_bytes']} bytes in use, {reported['copied_bytes']} sent by the second run")
    assert reported["overlay_bytes"] > 60 * MB
    assert reported["copied_bytes"] < reported["overlay_bytes"] - 20 * MB
    inside(hosts, target, "rm /root/much")


def marked(hosts: Hosts, host: str) -> bool:
    """Whether a move is under way there."""
    return (hosts.disk(host) / "journal" / "lab.move").exists()


# Connections


def count_connections(hosts: Hosts) -> dict[str, int]:
    """Connections from the admin's machine that the sshd of each admin host has accepted since it was started."""
    (admin,) = [one for one in hosts.lab.layout.hosts if one.name == "admin"]
    line = re.compile(rf"^Accepted publickey for root from {re.escape(admin.addresses[PUBLIC])} port ", re.MULTILINE)
    logs = {host: hosts.host(host).read("/var/log/lab/sshd.log") or b"" for host in CARRIERS}
    return {host: len(line.findall(log.decode(errors="replace"))) for host, log in logs.items()}


@pytest.mark.full
def test_a_verb_connects_to_a_host_once(hosts: Hosts) -> None:
    source, target = where(hosts)
    hosts.sms("-q", "overlay", "snapshot", on=source)
    verbs = {
        ("status", "--host", source): (1, 0),
        ("overlay", "push", "--host", source, "--to", target): (1, 1),
        ("migrate", "--force", target): (1, 1),
    }
    for words, least in verbs.items():
        before = count_connections(hosts)
        hosts.sms("-q", *words, on="admin", ok=(0, 4))
        after = count_connections(hosts)
        opened = tuple(after[host] - before[host] for host in (source, target))
        assert all(few <= number <= 1 for few, number in zip(least, opened, strict=True)), (words, opened)
    forget_copies(hosts, source)


# Accounting


@pytest.mark.full  # that accounting works is in test_optional_services.py
def test_accounting_is_whole(hosts: Hosts) -> None:
    """slurmdbd and MariaDB move as well; what they knew they know there, and what comes is added."""
    site = ("--site", hosts.variant("full.yaml", with_accounting))
    build_image(hosts.lab, "full")
    source, target = where(hosts)
    node = hosts.host("node1")
    account = ("sacct", "-X", "-n", "-P", "-a", "-S", "now-1hour", "-o", "jobid,user,state")

    def known(host: str) -> set[str]:
        return set(hosts.sms(*site, "exec", "--", *account, on=host, ok=None).text.splitlines())

    def run_job(host: str) -> str:
        job = as_alice(node, "sbatch", "--parsable", "--wrap=true")
        line = f"{job}|alice|COMPLETED"
        wait_for("the job's record", lambda: "yes" if line in known(host) else "", 300)
        return line

    hosts.sms("-q", "stop", on=source)
    try:
        hosts.sms(*site, "-q", "start", "--host", source, "--wait", "120", on="admin")
        wait_idle(node, NODES)
        before = {run_job(source), run_job(source)}
        running = as_alice(node, "sbatch", "--parsable", "--wrap=sleep 15")
        wait_for("the job", lambda: "yes" if hosts_state(hosts, running) == "RUNNING" else "")
        before |= {line for line in known(source) if line.endswith("COMPLETED")}
        reported = json.loads(hosts.sms(*site, "-q", "migrate", "--force", "--json", target, on="admin").stdout)
        print({name: reported[name] for name in ("parts", "outage", "overlay_bytes", "last_bytes", "seconds")})
        new = run_job(target)
        wait_for("the end", lambda: "yes" if f"{running}|alice|COMPLETED" in known(target) else "", 300)
        assert known(target) == {*before, new, f"{running}|alice|COMPLETED"}
    finally:
        for host in CARRIERS:
            hosts.sms(*site, "-q", "stop", on=host, ok=None)
        hosts.sms("-q", "start", "--host", source, on="admin")
