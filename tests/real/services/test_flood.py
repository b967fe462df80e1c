"""A node that floods the system log: the controller saves its state, and other nodes can log, all the same."""

from __future__ import annotations

import re
import subprocess

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground

pytestmark = pytest.mark.real

FLOOD = """
import os, socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect(("10.77.0.1", 514))
end = time.monotonic() + 6
while time.monotonic() < end:
    for _ in range(50):
        sock.send(b"<13>flood: " + os.urandom(700).hex().encode())
    time.sleep(0.002)
"""
"""Some 200 MB that cannot be compressed much; the lab's overlay has 512 MiB."""
LOGS = "cat /var/log/messages* /var/spool/rsyslog/* | wc -c"
SESSIONS = """
import socket
ones = []
try:
    while True:
        ones.append(socket.create_connection(("10.77.0.1", {port}), 2))
except TimeoutError:
    print(len(ones), flush=True)
input()
"""
"""As many sessions with a port as one machine may have; prints their number."""
LINE = """
import socket
with socket.create_connection(("10.77.0.1", 2514), 10) as one:
    replies = one.makefile("rb")
    def send(number, command, data):
        one.sendall(b"%d %s %d %s\\n" % (number, command, len(data), data))
        head = b""
        while head.count(b" ") < 3:
            head += replies.read(1)
        return replies.read(int(head.split()[2]) + 1)
    send(1, b"open", b"relp_version=0\\nrelp_software=test,1,http://localhost\\ncommands=syslog")
    print(send(2, b"syslog", b"<13>relp: a line of node2").decode())
"""
"""One line over RELP, by the protocol itself; prints the reply to it."""


def number(running: Playground, script: str) -> int:
    return int(running.sms("exec", "--", "sh", "-c", script).text)


def test_a_flood_leaves_room_for_the_controllers_state(running: Playground) -> None:
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    before = number(running, "df --output=used -B1 / | tail -n 1")
    # Without the limit per sender, as if many addresses sent it.
    running.sms("exec", "--", "nft", "delete", "table", "inet", "sms_logs")
    try:
        node.run("python3", "-c", FLOOD, timeout=120)
        assert number(running, LOGS) < 40 << 20
        assert number(running, "stat -c %s /var/spool/rsyslog/messages.full") > 4 << 20, "it was a flood"
        for _ in range(3):
            running.sms("exec", "--", "logrotate", "--state", "/var/lib/logrotate/status", "/etc/logrotate.conf")
        assert number(running, LOGS) < 60 << 20
        assert number(running, "df --output=used -B1 / | tail -n 1") - before < 80 << 20
    finally:
        running.sms("exec", "--", "nft", "-f", "/etc/sms/nat.nft")
    saved = "stat -c %Y /var/spool/slurmctld/job_state || echo 0"  # the first job of all creates it
    last = number(running, saved)
    demo.as_alice(node, "sbatch", "--parsable", "--wrap=true")
    demo.wait_for("the saved state", lambda: "yes" if number(running, saved) > last else "")
    assert "node2" in demo.syslog_arrives(running.lab, running.host("node2"))


def test_a_sender_that_floods_is_limited_alone(running: Playground) -> None:
    running.sms("exec", "--", "nft", "-f", "/etc/sms/nat.nft")
    running.host("node1").run("python3", "-c", FLOOD, timeout=120)
    listed = running.sms("exec", "--", "nft", "list", "table", "inet", "sms_logs").text
    dropped = re.search(r"update @senders .* counter packets (\d+) ", listed)
    assert "10.77.0.101" in listed and dropped and int(dropped[1]) > 0
    assert "node2" in demo.syslog_arrives(running.lab, running.host("node2"))


def test_a_sender_with_too_many_sessions_leaves_some_to_others(running: Playground) -> None:
    inside = ("exec", "--", "sh", "-c")
    limit = running.sms(*inside, "grep 'open files' /proc/$(cat /run/rsyslog/rsyslogd.pid)/limits").text.split()[3]
    assert int(limit) > 2 * 2000, "sessions over TCP and RELP, each with a descriptor"
    argv = [*running.host("node1").prefix, "python3", "-c", SESSIONS.format(port=2514)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            # 200 of this node: rsyslogd has one of them, if it connected after the rules were loaded.
            assert process.stdout and int(process.stdout.readline()) in (199, 200)
            assert running.host("node2").run("python3", "-c", LINE).text.startswith("200 OK")
            arrived = "grep 'relp: a line of node2$' /var/log/messages || true"
            demo.wait_for("the acknowledged line", lambda: running.sms(*inside, arrived).text)
        finally:
            process.communicate("\n")


def test_a_node_that_opens_connections_to_slurmctld_leaves_some_to_others(running: Playground) -> None:
    """T9: a job of another node is accepted at once, though slurmctld waits for what this one never sends."""
    node = running.host("node2")
    demo.wait_idle(node, NODES)
    argv = [*running.host("node1").prefix, "python3", "-c", SESSIONS.format(port=6817)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and 90 <= int(process.stdout.readline()) <= 100
            job = demo.as_alice(
                node, "sbatch", "--parsable", "-w", "node2", "-o", "/dev/null", "--wrap=true", timeout=10
            )
            demo.wait_for("the job", lambda: "" if node.run("squeue", "-h", "-j", job, ok=None).text else "ended")
        finally:
            process.communicate("\n")
