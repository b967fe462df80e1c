"""What was counted -> the classification: services with verdicts, what is routed, what was not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from analysis.addresses import UNSPECIFIED
from analysis.budget import Budget, find_budget
from analysis.model import Capture, Classification, Connections, Interval, Latency, Nodes, Service, Verdict
from analysis.numbers import quantiles, weight
from analysis.observed import Observation, Role
from analysis.protocols import SLURM_PORTS
from analysis.remarks import make_remarks
from analysis.roles import Roles
from analysis.scene import Scene, watch
from analysis.services import Seen, sort_traffic
from analysis.signatures import TCP, Signature
from analysis.told import Told, read_samples
from analysis.unseen import find_unseen
from analysis.verdict import CRITICAL, judge

MOST_NODES, MOST_PROBLEMS, MOST_TYPES = 1000, 100, 4


def classify(
    observation: Observation,
    roles: Roles,
    signatures: Sequence[Signature],
    overrides: Mapping[str, Verdict] | None = None,
) -> Classification:
    """All that can be said of a capture.

    Args:
        observation: counts grouped by ``roles``; its links tell where routed traffic goes.
        signatures: the catalogue, in the order in which its first bytes were given to the core.
        overrides: the site's own verdicts by the name of a service, whether the catalogue has it or not.
    """
    scene = watch(observation, roles.by_index)
    told = read_samples(observation.samples, observation.cut_at if observation.cut else 0)
    traffic = sort_traffic(observation, roles.by_index, signatures)
    budgets = [find_budget(seen, told, scene) for seen in traffic.services]
    services = [
        _service(seen, observation, scene, told, budget, (overrides or {}).get(seen.name))
        for seen, budget in zip(traffic.services, budgets, strict=True)
    ]
    renewed = next((budget.seconds for budget in budgets if budget.renewals), None)
    services.sort(key=lambda one: (one.verdict != CRITICAL, -one.packets, one.name))
    return Classification(
        capture=_capture(observation, make_remarks(observation, roles, scene, told, services, renewed)),
        sms=roles.sms,
        nodes=_nodes(scene),
        services=tuple(services),
        routed=traffic.routed,
        unseen=find_unseen(signatures, {one.name for one in services}, scene),
        elsewhere=traffic.elsewhere,
        unclassified=traffic.unclassified,
        bin_s=observation.bin_s,
    )


def _service(
    seen: Seen, observation: Observation, scene: Scene, told: Told, budget: Budget, site: Verdict | None
) -> Service:
    found = judge(seen, scene, budget, site)
    signature = seen.signature
    return Service(
        name=seen.name,
        verdict=found.verdict,
        ports=seen.ports,
        title=signature.summary if signature else "",
        confidence=found.confidence,
        budget_s=budget.seconds,
        budget_why=budget.why,
        budget_from=budget.source,
        initiator=found.initiator,
        phase=found.phase,
        clients=_clients(seen, observation, scene),
        contacts=seen.contacts,
        connections=Connections(seen.by_node, seen.by_sms, seen.midstream, seen.unanswered),
        packets=sum(seen.packets),
        bytes=sum(seen.bytes),
        packets_each=(seen.packets[0], seen.packets[1]),
        bytes_each=(seen.bytes[0], seen.bytes[1]),
        first_s=max(seen.first_ns - observation.start_ns, 0) / 1e9,
        last_s=max(seen.last_ns - observation.start_ns, 0) / 1e9,
        interval_s=_interval(seen),
        latency_ms=_latency(seen),
        reasons=(*found.reasons, *_details(seen, told)),
        carried=bool(signature and signature.carried),
        advice=signature.advice if signature else "",
        overridden=found.overridden,
        timeline=tuple(seen.timeline),
        timeline_boot=tuple(seen.timeline_boot),
    )


def _clients(seen: Seen, observation: Observation, scene: Scene) -> int:
    """Distinct addresses; who asks DHCP has none yet, and is known by its boot."""
    if not seen.by_node and (seen.by_sms or not seen.most_clients):
        return seen.most_servers
    hosts = observation.hosts
    nobody = sum(index < len(hosts) and hosts[index].address in UNSPECIFIED for index in seen.clients)
    named = max(len(seen.clients), seen.most_clients) - nobody
    return max(named, scene.booted_nodes if nobody else 0, 1)


def _interval(seen: Seen) -> Interval | None:
    """Of nodes' contacts; of the management node's where nodes make none."""
    for role in (Role.NODE, Role.SMS):
        if weight(found := seen.intervals[role]) > 0:
            low, median, high = quantiles(found, (0.25, 0.5, 0.75))
            return Interval(median, high - low)
    return None


def _latency(seen: Seen) -> Latency | None:
    if weight(seen.latencies) <= 0:
        return None
    return Latency(*(1e3 * value for value in quantiles(seen.latencies, (0.5, 0.99))))


def _details(seen: Seen, told: Told) -> tuple[str, ...]:
    """What the protocol itself says."""
    if told.slurm and any((TCP, port) in seen.places for port in SLURM_PORTS):
        types = ", ".join(f"{name} {number}" for name, number in told.slurm_types.most_common(MOST_TYPES))
        return (f"messages of Slurm {', '.join(told.slurm_releases)}; of {len(told.slurm)} that were read: {types}",)
    return ()


def _capture(observation: Observation, remarks: tuple[str, ...]) -> Capture:
    return Capture(
        files=observation.files,
        packets=observation.packets,
        bytes=observation.bytes,
        start=_time(observation.start_ns) if observation.packets else "",
        duration_s=observation.duration_s,
        truncated=observation.truncated,
        skipped=dict(observation.skipped),
        problems=tuple(f"{one.file}: byte {one.offset}: {one.what}" for one in observation.problems[:MOST_PROBLEMS]),
        covered_s=observation.covered_s,
        cut_packets=observation.cut,
        cut_at=observation.cut_at,
        remarks=remarks,
    )


def _time(at_ns: int) -> str:
    """RFC 3339 in UTC; "" for what no calendar has."""
    try:
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_ns // 1000)
    except OverflowError:
        return ""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nodes(scene: Scene) -> Nodes:
    return Nodes(scene.nodes, tuple(sorted(scene.addresses, key=_order)[:MOST_NODES]), scene.boots, scene.hidden)


def _order(address: str) -> tuple[int, int]:
    parsed = ip_address(address)
    return parsed.version, int(parsed)
