"""A migration under way: what is known before it begins, what its steps pass on, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.catalog import Service
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.plan.migration.move import PARTS
from appliance.plan.migration.plan import Plan
from appliance.plan.services.confinement import Confinement
from appliance.shared.lease import Lease
from appliance.shared.migration import Second
from appliance.tools.move import Endpoint


@dataclass
class MigrationResult:
    """What a migration did. Times in seconds; bytes as transferred.

    ``outage`` by service: from its stop on the source until it is reachable on the target, measured by this process.
    """

    source: str
    target: str
    image: str
    generation: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    outage: dict[str, float] = field(default_factory=dict)
    services: dict[str, float] = field(default_factory=dict)
    overlay_bytes: int = 0
    copied_bytes: int = 0
    last_bytes: int = 0
    frozen_ms: float = 0.0
    connections: int = 0
    lost_datagrams: int = 0
    jobs: int = 0
    rounds: int = 0
    shared: bool = False
    notes: list[str] = field(default_factory=list)

    def measured(self, part: str, seconds: float) -> None:
        """Record how long a part took."""
        assert part in PARTS
        self.parts[part] = round(seconds, 3)


@dataclass(frozen=True)
class Here:
    """What a switch on one host needs besides: source and target are the same host.

    Attributes:
        services: those of the instance that runs; ``unknown``: names of such that this version of sms does not have.
        bridges, addresses, macs: of the instance that runs, as in ``MigrationRequest``.
        seed: command that writes the site's files into the copy, and its input, which holds secrets.
        verb: that switches, for the history and hints.
        wait_s: how long the services may take to answer.
    """

    second: Second
    services: tuple[Service, ...]
    unknown: tuple[str, ...]
    bridges: dict[str, str]
    addresses: dict[str, str]
    macs: tuple[str, ...]
    seed: tuple[tuple[str, ...], bytes] = field(repr=False)
    verb: str
    wait_s: float


@dataclass(frozen=True)
class Inspected:
    """Both hosts after all checks, how a container is confined on each, and the plan."""

    source: Host
    target: Host
    pid: int
    lease: Lease
    plan: Plan
    on_source: Confinement
    on_target: Confinement
    here: Here | None = None


@dataclass
class Migration:
    """One migration under way.

    Attributes:
        source, target: the agents on both hosts.
        connections, neighbours: of the instance on the source, as its agent sent them.
        jobs: states of the jobs on the source, once the target's controller has been checked against them.
        stopped_at: when the source began to stop services, on the monotonic clock.
        complete: the target has everything that the source wrote.
        started: the target has started an instance.
        unchecked: its first process, until it has been checked how it is confined.
        ordered: the target was ordered to take over the addresses; it may have.
        serves: the target has confirmed that it has taken them over. It goes on serving without this process.
        gated: services with state cannot be reached on the target: a rollback loses nothing.
    """

    cluster: Cluster
    inspected: Inspected
    image: Image
    source: Endpoint
    target: Endpoint
    result: MigrationResult
    connections: bytes = b""
    neighbours: list[str] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    stopped_at: float = 0.0
    complete: bool = False
    started: bool = False
    unchecked: int = 0
    ordered: bool = False
    serves: bool = False
    gated: bool = False

    def count_outage(self, now: float, live_since: float, *, live: bool = True) -> None:
        """Record the outages that end now; ``live_since``: when those of services without state began.

        Args:
            live: also of these.
        """
        for service in self.cluster.services:
            if service.live and not live:
                continue
            since = live_since if service.live else self.stopped_at
            self.result.outage[service.name] = round(now - since, 3)
