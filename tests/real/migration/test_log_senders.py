"""Nodes that log over TCP or RELP lose no line in a migration, whether they log all the time or hardly ever."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from appliance.lab import Lab
from tests.places import ROOT
from tests.real.moves import Hosts, other
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

MOVES = 3
EVERY_S = 0.05
BUSY, IDLE = ("node1", "node2"), ("node3", "node4")
NUMBERED = """\
n=0
while [ ! -e "/run/end $2" ]; do n=$((n+1)); logger $1 -t numbered "$2 $n of them"; echo $n; sleep $3; done
rm "/run/end $2"
"""
SENDERS = """\
global(workDirectory="/var/spool/rsyslog")
module(load="imuxsock" SysSock.Use="off")
%s
input(type="imuxsock" Socket="/run/relp.sock" ruleset="relp")
input(type="imuxsock" Socket="/run/defaults.sock")
ruleset(name="relp") {
%s
}
*.* @@10.77.0.1:514
"""
"""By RELP as documented; and by TCP without a queue of its own and without retries."""
SOCKETS = {"queue": "", "defaults": "-u/run/defaults.sock", "relp": "-u/run/relp.sock"}
"""How `logger` reaches each sender of a node; the lab's own has a queue."""


def senders_conf() -> str:
    """Configuration of the further senders of a node."""
    text = (ROOT / "docs/running.md").read_text()
    found = re.search(r'^```\n(module\(load="omrelp"\))\n(action.*?)\n```$', text, re.MULTILINE | re.DOTALL)
    assert found
    return SENDERS % found.groups()


@contextmanager
def further_senders(lab: Lab, node: str) -> Iterator[None]:
    """A second rsyslogd on a node."""
    host = lab.host(node)
    host.write("/run/defaults.conf", senders_conf().encode())
    argv = [*host.prefix, "rsyslogd", "-n", "-f", "/run/defaults.conf", "-i", "/run/defaults.pid"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: host.works("test", "-S", "/run/defaults.sock"), "its socket")
        try:
            yield
        finally:
            host.run("sh", "-c", "kill $(cat /run/defaults.pid)", ok=None)
            process.wait(10)


@contextmanager
def numbered_lines(lab: Lab, node: str, sender: str) -> Iterator[list[int]]:
    """Lines are logged on a node all the time; yields a list, which has their count afterwards."""
    name = f"{sender} {node}"
    argv = [*lab.host(node).prefix, "sh", "-c", NUMBERED, "numbered", SOCKETS[sender], name, str(EVERY_S)]
    logged: list[int] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield logged
        finally:
            lab.host(node).write(f"/run/end {name}", b"")
            logged += [int(line) for line in (process.stdout or ()) if line.endswith("\n")][-1:]


def log_once(hosts: Hosts, text: str) -> set[str]:
    """Each silent sender logs one line; returns the lines."""
    found = set()
    for node in IDLE:
        for sender, path in SOCKETS.items():
            line = f"{sender} {node} {text}"
            hosts.host(node).run("logger", *filter(None, [path]), "-t", "numbered", line)
            found.add(line)
    return found


def lines_on(hosts: Hosts, host: str) -> list[str]:
    """The numbered lines in the log of all nodes, also if it was rotated."""
    script = "zcat -f /var/log/messages* | sed -n 's/.* numbered: //p'"
    return hosts.sms("exec", "--", "sh", "-c", script, on=host).text.splitlines()


def move(hosts: Hosts, target: str) -> dict[str, Any]:
    """Migrate; what `--json` prints."""
    reported: dict[str, Any] = json.loads(hosts.sms("-q", "migrate", "--force", "--json", target, on="admin").stdout)
    return reported


def test_no_line_over_tcp_or_relp_is_lost_in_three_moves(hosts: Hosts) -> None:
    where, expected, logged = "host-a", set(), {}
    with ExitStack() as senders:
        for node in (*BUSY, *IDLE):
            senders.enter_context(further_senders(hosts.lab, node))
        expected |= log_once(hosts, "before")
        with ExitStack() as lines:
            for node in BUSY:
                for sender in SOCKETS:
                    name = f"{sender} {node}"
                    logged[name] = lines.enter_context(numbered_lines(hosts.lab, node, sender))
            for number in range(MOVES):
                time.sleep(2)
                where = other(where)
                reported = move(hosts, where)
                print(f"move {number + 1}: outage {reported['outage']}; over UDP {reported['lost_datagrams']} lost")
                expected |= log_once(hosts, f"after move {number + 1}")
            time.sleep(2)
        for name, (count,) in logged.items():
            assert count > 100, f"{name} logged for some seconds"
            expected |= {f"{name} {number} of them" for number in range(1, count + 1)}

        def missing() -> set[str]:
            return expected - set(lines_on(hosts, where))

        with suppress(AssertionError):
            wait_until(lambda: not missing(), "all lines", 60, 1)
    arrived = lines_on(hosts, where)
    twice = Counter(line.split()[0] for line in (Counter(arrived) - Counter(set(arrived))).elements())
    print(f"{len(expected)} lines; sent twice: {dict(twice)}")
    assert sorted(expected - set(arrived)) == []
