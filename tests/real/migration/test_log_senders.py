"""Nodes that log over TCP or RELP lose no line in a migration, whether they log all the time or hardly ever."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from tests.real.moves import CARRIERS, Hosts, other
from tests.real.senders import SOCKETS, further_senders, numbered, steady_lines, wait_for_lines

pytestmark = pytest.mark.real

BUSY, IDLE = ("node1", "node2"), ("node3", "node4")


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
    return numbered(hosts.sms("exec", "--", "sh", "-c", "zcat -f /var/log/messages*", on=host).text)


def move(hosts: Hosts, target: str) -> dict[str, Any]:
    """Migrate; what `--json` prints."""
    reported: dict[str, Any] = json.loads(hosts.sms("-q", "migrate", "--force", "--json", target, on="admin").stdout)
    return reported


@pytest.mark.parametrize("moves", [1, pytest.param(3, marks=pytest.mark.full)])
def test_no_line_over_tcp_or_relp_is_lost_in_moves(hosts: Hosts, moves: int) -> None:
    (where,) = [host for host in CARRIERS if hosts.instances(host)]
    expected = set[str]()
    with ExitStack() as senders:
        for node in (*BUSY, *IDLE):
            senders.enter_context(further_senders(hosts.lab, node))
        expected |= log_once(hosts, "before")
        with steady_lines(hosts.lab, BUSY, SOCKETS) as lines:
            for number in range(moves):
                time.sleep(2)
                where = other(where)
                reported = move(hosts, where)
                print(f"move {number + 1}: outage {reported['outage']}; over UDP {reported['lost_datagrams']} lost")
                expected |= log_once(hosts, f"after move {number + 1}")
            time.sleep(2)
        expected |= lines
        wait_for_lines(lambda: lines_on(hosts, where), expected)
    arrived = lines_on(hosts, where)
    twice = Counter(line.split()[0] for line in (Counter(arrived) - Counter(set(arrived))).elements())
    print(f"{len(expected)} lines; sent twice: {dict(twice)}")
    assert sorted(expected - set(arrived)) == []
