"""Build the classification from the counts: services with verdicts, routed traffic, services not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from analysis.budget import Budget, find_budget
from analysis.context import CaptureContext, make_context
from analysis.likeness import find_doubt
from analysis.matrix import make_matrix
from analysis.model import Capture, Classification, Connections, Interval, Latency, Nodes, Service, Verdict
from analysis.numbers import quantiles, weight
from analysis.observed import Observation, Role
from analysis.protocols import SLURM_PORTS
from analysis.remarks import make_remarks
from analysis.roles import Roles
from analysis.samples import DecodedSamples, own_samples, read_samples
from analysis.services import ServiceCounts, sort_traffic
from analysis.signatures import TCP, Signature
from analysis.unseen import find_unseen
from analysis.users import count_users
from analysis.verdict import CRITICAL, judge
from analysis.visibility import find_limit

MAX_NODES, MAX_PROBLEMS, MAX_TYPES = 1000, 100, 4


def classify(
    observation: Observation,
    roles: Roles,
    signatures: Sequence[Signature],
    overrides: Mapping[str, Verdict] | None = None,
) -> Classification:
    """Classify a capture.

    Args:
        observation: counts grouped by ``roles``; its links show where routed traffic goes.
        signatures: the catalogue, in the order in which its first bytes were passed to the core.
        overrides: the site's own verdicts by service name, in the catalogue or not.
    """
    context = make_context(observation, roles.by_index, roles.routed)
    own = own_samples(observation.samples, roles.by_index)
    decoded = read_samples(own, observation.cut_at if observation.cut else 0)
    traffic = sort_traffic(observation, roles.by_index, signatures)
    count_users(traffic.services, observation, roles.by_index, context)
    context = replace(context, doubt=find_doubt(observation, roles, traffic.services, context))
    budgets = [find_budget(counts, decoded, context) for counts in traffic.services]
    services = [
        _service(counts, observation, context, decoded, budget, (overrides or {}).get(counts.name))
        for counts, budget in zip(traffic.services, budgets, strict=True)
    ]
    renewed = next((budget.seconds for budget in budgets if budget.renewals), None)
    services.sort(key=lambda one: (one.verdict != CRITICAL, -one.packets, one.name))
    limit = find_limit(observation, context, one_node=bool(roles.node))
    names = {one.name for one in services}
    unseen = find_unseen(signatures, names, context, others=traffic.others, limit=limit)
    hidden = limit if any(one.finding == "not shown" for one in unseen) else ""
    return Classification(
        capture=_capture(observation, make_remarks(observation, roles, context, decoded, renewed, hidden)),
        sms=roles.sms,
        nodes=_nodes(context),
        services=tuple(services),
        routed=traffic.routed,
        unseen=unseen,
        elsewhere=traffic.elsewhere,
        unclassified=traffic.unclassified,
        bin_s=observation.bin_s,
        servers=roles.servers,
        matrix=make_matrix(observation, roles.by_index, context),
    )


def _service(
    counts: ServiceCounts,
    observation: Observation,
    context: CaptureContext,
    decoded: DecodedSamples,
    budget: Budget,
    site: Verdict | None,
) -> Service:
    found = judge(counts, context, budget, site)
    signature = counts.signature
    return Service(
        name=counts.name,
        verdict=found.verdict,
        ports=counts.ports,
        title=signature.summary if signature else "",
        confidence=found.confidence,
        budget_s=budget.seconds,
        budget_why=budget.why,
        budget_from=budget.source,
        initiator=found.initiator,
        phase=found.phase,
        clients=counts.reached if not counts.by_node and (counts.by_sms or not counts.users) else counts.users,
        contacts=counts.contacts,
        connections=Connections(counts.by_node, counts.by_sms, counts.midstream, counts.unanswered),
        packets=sum(counts.packets),
        bytes=sum(counts.bytes),
        packets_each=(counts.packets[0], counts.packets[1]),
        bytes_each=(counts.bytes[0], counts.bytes[1]),
        first_s=_after(observation, counts.first_ns),
        last_s=_after(observation, counts.last_ns),
        interval_s=_interval(counts),
        latency_ms=_latency(counts),
        reasons=(*found.reasons, *_details(counts, decoded)),
        carried=bool(signature and signature.carried),
        advice=signature.advice if signature else "",
        overridden=found.overridden,
        timeline=tuple(counts.timeline),
        timeline_boot=tuple(counts.timeline_boot),
    )


def _interval(counts: ServiceCounts) -> Interval | None:
    """Return the interval of the nodes' contacts, else of the management node's."""
    for role in (Role.NODE, Role.SMS):
        if weight(found := counts.intervals[role]) > 0:
            low, median, high = quantiles(found, (0.25, 0.5, 0.75))
            return Interval(median, high - low)
    return None


def _latency(counts: ServiceCounts) -> Latency | None:
    if weight(counts.latencies) <= 0:
        return None
    return Latency(*(1e3 * value for value in quantiles(counts.latencies, (0.5, 0.99))))


def _details(counts: ServiceCounts, decoded: DecodedSamples) -> tuple[str, ...]:
    """Describe the decoded Slurm messages."""
    if decoded.slurm and any((TCP, port) in counts.places for port in SLURM_PORTS):
        types = ", ".join(f"{name} {number}" for name, number in decoded.slurm_types.most_common(MAX_TYPES))
        return (f"messages of Slurm {', '.join(decoded.slurm_releases)}; of {len(decoded.slurm)} decoded: {types}",)
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
        problems=tuple(f"{one.file}: byte {one.offset}: {one.what}" for one in observation.problems[:MAX_PROBLEMS]),
        covered_s=observation.covered_s,
        cut_packets=observation.cut,
        cut_at=observation.cut_at,
        remarks=remarks,
        gaps=tuple((_after(observation, begin), _after(observation, end)) for begin, end in observation.gaps),
    )


def _after(observation: Observation, at_ns: int) -> float:
    """Return seconds after the start of the capture."""
    return max(at_ns - observation.start_ns, 0) / 1e9


def _time(at_ns: int) -> str:
    """Format as RFC 3339 in UTC; "" beyond the supported range."""
    try:
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_ns // 1000)
    except OverflowError:
        return ""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nodes(context: CaptureContext) -> Nodes:
    addresses = tuple(sorted(context.addresses, key=_order)[:MAX_NODES])
    return Nodes(context.nodes, addresses, context.boots, context.hidden, not context.doubt)


def _order(address: str) -> tuple[int, int]:
    parsed = ip_address(address)
    return parsed.version, int(parsed)
