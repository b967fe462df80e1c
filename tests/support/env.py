"""The environment of verbs in tests: what they do to the world, in place of names of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.config.model import AdminHost, Site
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.env import Env, Hosts, Locks
from appliance.progress import Silent
from appliance.tools.agent import Agents, Bounds, OnRows

NOW = 1_795_000_000.0
"""The Unix time at which the clocks of tests begin."""


@dataclass
class FakeClock:
    """Time that passes when somebody sleeps, or a test changes ``now``."""

    now: float = NOW
    slept: list[float] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Serial(Executor):
    """A pool that does its work at once, in the caller's thread."""

    def __init__(self, workers: int = 1) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


class FakeHosts(Hosts):
    """These hosts, by name; ``here`` is the name of this machine. ``separated``: how often they were reconnected."""

    here = ""

    def __init__(self, hosts: Mapping[str, Host], here: str = "") -> None:
        super().__init__()
        self.hosts = dict(hosts)
        self.here = here
        self.separated = 0

    def open(self, site: Site, admin: AdminHost) -> Host:
        return self.hosts[admin.name]

    @property
    def this(self) -> Host:
        assert self.here in self.hosts, "a verb runs something on this machine: `here` names the host for it"
        return self.hosts[self.here]

    def separate(self) -> FakeHosts:
        self.separated += 1
        return FakeHosts(self.hosts, self.here)


Answer = Callable[[Host, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class FakeAgents(Agents):
    """Agents whose commands are functions of a test; what it has none for is an error of the test.

    Requests of ``shared/requests.py`` are performed by the host itself, in the caller's thread.
    """

    answers: Mapping[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Name of the host, command and request of each call."""

    def call(
        self,
        host: Host,
        command: str,
        request: dict[str, Any],
        progress: Any = None,
        *,
        on_rows: OnRows | None = None,
        bounds: Bounds | None = None,
    ) -> dict[str, Any]:
        self.requests.append((host.name, command, request))
        return self.answers[command](host, request)

    def query(self, host: Host, command: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        return self.call(host, command, request)


class Reports(Silent):
    """Keeps the lines that stay, and the texts of steps."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)

    def step(self, text: str) -> Any:
        self.steps.append(text)
        return super().step(text)


class Impatient(Locks):
    """Locks that refuse at once what another run holds."""

    wait_s = 0.0


class Unlocked(Locks):
    """Locks that nobody else has, and that leave no file."""

    @contextmanager
    def hold(self, host: Host, path: str, what: str) -> Iterator[None]:
        yield


def fake_env(hosts: Mapping[str, Host] | None = None, *, here: str = "", **parts: Any) -> Env:
    """Return an environment: a clock of its own, work in the caller's thread, locks that refuse at once.

    Args:
        hosts: what the admin hosts are, by name; without them they are the real ones.
        here: the name of this machine.
        parts: of ``Env``, in place of these.
    """
    known: dict[str, Any] = {"clock": FakeClock(), "pool": Serial, "locks": Impatient()}
    if hosts is not None:
        known["hosts"] = FakeHosts(hosts, here)
    return Env(**{**known, **parts})


def with_env(cluster: Cluster, **parts: Any) -> Cluster:
    """Return the cluster with other parts of its environment."""
    return replace(cluster, env=replace(cluster.env, **parts))


def clock_of(cluster: Cluster) -> FakeClock:
    """Return the clock that a test moves."""
    assert isinstance(cluster.env.clock, FakeClock)
    return cluster.env.clock
