"""A cluster while its traffic is made: its machines, when its nodes run, and the patterns of their traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from analysis.model import Verdict
from tests.captures.clusters.tape import Box, Stream, Tape
from tests.captures.packets import ip_bytes

START_S = 1_700_000_000
READY_S = 90.0
"""Seconds from a node's first DHCP message until its services run."""
CRITICAL: Verdict = "time-critical"
DEFERRABLE: Verdict = "deferrable"


@dataclass
class Stage:
    """Machines of a cluster.

    Attributes:
        begin_s, end_s: of the capture.
        boots: time of the boot of those nodes that boot in it.
        busy: factor for the rate of what users cause.
        six: share of connections over IPv6.
        logins: number of nodes, the first ones, on which people log in, and no jobs run.
    """

    seed: str
    tape: Tape
    sms: Box
    nodes: list[Box]
    begin_s: float
    end_s: float
    boots: dict[int, float] = field(default_factory=dict)
    busy: float = 1.0
    six: float = 0.0
    logins: int = 0

    def random(self, *what: object) -> Random:
        """Separate random numbers for every purpose."""
        return Random("/".join(map(str, (self.seed, *what))))

    def ready_s(self, number: int) -> float:
        """When the services of a node run."""
        return self.boots[number] + READY_S if number in self.boots else self.begin_s

    def times(self, number: int, every_s: float, rng: Random, *, jitter: float = 0.02) -> Iterator[float]:
        """Regular times of a node; ``jitter`` is a share of the interval."""
        time_s = self.ready_s(number) + rng.uniform(0, every_s)
        while time_s < self.end_s:
            yield time_s
            time_s += every_s * rng.uniform(1 - jitter, 1 + jitter)

    def random_times(self, number: int, mean_s: float, rng: Random, *, users: bool = True) -> Iterator[float]:
        """Random times of a node (a Poisson process); ``users``: they cause it, so that a busy cluster has more."""
        time_s, rate = self.ready_s(number), (self.busy if users else 1.0) / mean_s
        while (time_s := time_s + rng.expovariate(rate)) < self.end_s:
            yield time_s

    def over_six(self, client: Box, server: Box, rng: Random) -> bool:
        """Whether the next connection is over IPv6."""
        return bool(client.v6 and server.v6) and rng.random() < self.six

    def call(
        self,
        time_s: float,
        client: Box,
        server: Box,
        port: int,
        request: bytes,
        answer: bytes,
        rng: Random,
        *,
        own: int = 0,
        first: bytes = b"",
    ) -> float:
        """One connection: open, ``first`` from the server, a request, its answer, close. Return the time after it."""
        stream = Stream(self.tape, client, server, port, own=own, six=self.over_six(client, server, rng))
        stream.open(time_s)
        if first:
            stream.send(time_s + 0.002, first, back=True)
        stream.send(time_s + 0.003, request)
        time_s += 0.003 + rng.uniform(0.0005, 0.01)
        if answer:
            stream.send(time_s, answer, back=True)
        time_s += 1e-5 * (len(answer) // 1460) + 0.002
        stream.close(time_s)
        return time_s

    def ask(
        self, time_s: float, client: Box, own: int, server: Box, port: int, request: bytes, answer: bytes, rng: Random
    ) -> None:
        """A datagram and its answer, if any."""
        six = self.over_six(client, server, rng)
        self.tape.udp(time_s, client, own, server, port, request, six=six)
        if answer:
            self.tape.udp(time_s + rng.uniform(0.0002, 0.003), server, port, client, own, answer, six=six)

    def stay(
        self,
        number: int,
        port: int,
        times: Iterator[float],
        request: bytes,
        answer: bytes,
        rng: Random,
        *,
        own: int = 0,
        server: Box | None = None,
    ) -> None:
        """A connection that a node keeps open; those of nodes that ran before were opened before."""
        client, server = self.nodes[number], server or self.sms
        stream = Stream(self.tape, client, server, port, own=own, six=self.over_six(client, server, rng))
        if number in self.boots and self.ready_s(number) < self.end_s:
            stream.open(self.ready_s(number))
        for time_s in times:
            stream.send(time_s, request)
            stream.send(time_s + rng.uniform(0.0003, 0.004), answer, back=True)


def box(number: int, address: str, *, vendor: int = 1, via: bytes = b"") -> Box:
    """A machine; its link address is by vendor and number."""
    return Box(bytes((0x52, 0x54, 0, vendor)) + number.to_bytes(2), ip_bytes(address), via=via)


Run = Callable[[Stage, int, Random], None]


@dataclass(frozen=True)
class Activity:
    """Traffic of one purpose, and the truth about it.

    Attributes:
        run: makes the traffic of one node, by its number.
        verdict: time-critical if running nodes need an answer of the management node, else deferrable.
        why: the reason, as an administrator would give it.
        names: what the catalogue calls it; ports: what else it may appear as.
    """

    run: Run
    verdict: Verdict
    why: str
    names: tuple[str, ...]
    ports: tuple[str, ...]


ACTIVITIES: dict[str, Activity] = {}


def activity(verdict: Verdict, why: str, *, names: str = "", ports: str = "") -> Callable[[Run], Run]:
    """Register an activity under the name of its function."""

    def register(run: Run) -> Run:
        ACTIVITIES[run.__name__] = Activity(run, verdict, why, tuple(names.split()), tuple(ports.split()))
        return run

    return register
