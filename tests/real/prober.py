"""Probes the services container every 10 ms from a compute node and records when it answered. Standard library alone.

``python3 prober.py FOLDER [CONTROLLER]``: the questions end with standard input. FOLDER/asked.json then has, by
service, pairs of when it was asked and when it answered (null: never), in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVERY_S = 0.01
PING_EVERY_S = 0.2
TRIED_S = 2.0
APPLIANCE = "10.77.0.1"
CONTROLLER = sys.argv[2] if len(sys.argv) > 2 else APPLIANCE
"""Where an engine has the controller."""
ECHO = ("10.78.0.254", 7007)
TAG = f"outage-{os.getpid()}-{time.time_ns() % 10**9}"
"""Before the number of each line that goes to the system log."""

Rows = list[list[float | None]]
"""Time of the request and of the answer."""


class Datagrams:
    """Numbered datagrams that come back, all on one socket: one connection, where they pass NAT."""

    def __init__(self, rows: Rows, wrap: Callable[[int], bytes], find: Callable[[bytes], int]) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.rows = rows
        self.wrap = wrap
        self.find = find

    def ask(self, address: tuple[str, int], now: float) -> None:
        self.rows.append([now, None])
        with contextlib.suppress(OSError):  # a former ICMP reply reported that no server is there
            self.socket.sendto(self.wrap(len(self.rows) - 1), address)

    def ready(self, events: int, now: float) -> None:
        while True:
            try:
                data = self.socket.recv(2048)
            except BlockingIOError:
                return
            except OSError:
                continue
            number = self.find(data)
            if 0 <= number < len(self.rows) and self.rows[number][1] is None:
                self.rows[number][1] = now


class Connection:
    """A connection that says nothing; who accepts it ends it. The kernel alone would only open it."""

    def __init__(self, poll: select.epoll, row: list[float | None], address: tuple[str, int]) -> None:
        self.poll = poll
        self.row = row
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(address)
        poll.register(self.socket, select.EPOLLOUT)

    def ready(self, events: int, now: float) -> None:
        if events & (select.EPOLLERR | select.EPOLLHUP) and not events & select.EPOLLIN:
            self.close()
        elif events & select.EPOLLOUT:
            self.socket.shutdown(socket.SHUT_WR)
            self.poll.modify(self.socket, select.EPOLLIN)
        else:
            self.row[1] = now
            self.close()

    @property
    def open(self) -> bool:
        return self.socket.fileno() >= 0

    def close(self) -> None:
        if self.open:
            self.poll.unregister(self.socket)
            self.socket.close()


class Ping:
    """``scontrol ping``: a whole message of Slurm there and back."""

    def __init__(self, poll: select.epoll, row: list[float | None]) -> None:
        self.poll = poll
        self.row = row
        argv = ("timeout", f"{TRIED_S:g}", "scontrol", "ping")
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout
        self.number = self.process.stdout.fileno()
        poll.register(self.number, select.EPOLLIN)

    def ready(self, events: int, now: float) -> None:
        self.poll.unregister(self.number)
        if b"is UP" in self.process.communicate()[0]:
            self.row[1] = now


class Prober:
    """All probes, and those that wait for an answer."""

    def __init__(self) -> None:
        self.asked: dict[str, Rows] = {name: [] for name in ("slurmctld", "scontrol ping", "nat", "chrony", "rsyslog")}
        self.poll = select.epoll()
        self.nat = Datagrams(self.asked["nat"], lambda number: b"%d" % number, int)
        # A client's packet, version 4; the server gives back the eight bytes at 40 as those at 24 (RFC 5905).
        self.ntp = Datagrams(
            self.asked["chrony"],
            lambda number: b"\x23" + bytes(39) + (number + 1).to_bytes(8, "big"),
            lambda data: int.from_bytes(data[24:32], "big") - 1,
        )
        self.log = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.waiting: dict[int, Any] = {}
        for one in (self.nat, self.ntp):
            self.waiting[one.socket.fileno()] = one
            self.poll.register(one.socket, select.EPOLLIN)
        self.connections: list[Connection] = []

    def ask(self, now: float) -> None:
        """One of each, but for ``scontrol ping``."""
        self.nat.ask(ECHO, now)
        self.ntp.ask((APPLIANCE, 123), now)
        lines = self.asked["rsyslog"]
        with contextlib.suppress(OSError):
            self.log.sendto(f"<134>{TAG}: {len(lines)}.".encode(), (APPLIANCE, 514))
        lines.append([now, None])
        row: list[float | None] = [now, None]
        self.asked["slurmctld"].append(row)
        one = Connection(self.poll, row, (CONTROLLER, 6817))
        self.waiting[one.socket.fileno()] = one
        self.connections.append(one)
        while not self.connections[0].open or (self.connections[0].row[0] or 0) < now - TRIED_S:
            self.connections.pop(0).close()

    def ping(self, now: float) -> None:
        """Ask Slurm's controller in its own words."""
        row: list[float | None] = [now, None]
        self.asked["scontrol ping"].append(row)
        one = Ping(self.poll, row)
        self.waiting[one.number] = one

    def run(self) -> None:
        """Until standard input ends."""
        self.poll.register(0, select.EPOLLIN)
        due = ping_due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                due = max(due + EVERY_S, now - EVERY_S)
                self.ask(now)
                if now >= ping_due:
                    ping_due = now + PING_EVERY_S
                    self.ping(now)
            for number, events in self.poll.poll(max(0.0, due - time.monotonic())):
                if number == 0:
                    return
                self.waiting[number].ready(events, time.monotonic())


if __name__ == "__main__":
    prober = Prober()
    print("asking", flush=True)
    prober.run()
    Path(sys.argv[1], "asked.json").write_text(json.dumps({"tag": TAG, "asked": prober.asked}))
