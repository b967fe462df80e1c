"""Remarks: limits of a capture that affect its classification, as sentences, the most serious first."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.addresses import is_link_local, is_local, network
from analysis.confidence import NOT_A_CLUSTER
from analysis.context import CaptureContext
from analysis.likeness import MANY
from analysis.observed import SCANNED, Observation, Role, Row
from analysis.protocols import DHCP_PORTS
from analysis.roles import Roles
from analysis.samples import DecodedSamples
from analysis.signatures import TCP, UDP
from analysis.units import counted, listed, number, share, span

GAP = 0.05
"""Share of the time that may be missing without a remark."""
WHOLE = 400
"""Bytes of a packet needed for everything that is decoded: DHCP's options are the longest."""
FIRST_BYTES = 98
"""Minimum bytes of a packet that hold 32 bytes of TCP payload, with usual headers (14 + 20 + 32)."""
FEW = 2
"""Minimum nodes of a cluster."""
REASONS = SCANS = OTHERS = FILES = 3
NAMED = 8
"""Services of another machine that are named."""
TRUNCATED = "ends in the middle of a record"
"""The core's words for a truncated file."""
ODD_TIME = "time far from its neighbours'"
"""The core's name for a packet whose time it replaced."""


def make_remarks(
    observation: Observation,
    roles: Roles,
    context: CaptureContext,
    decoded: DecodedSamples,
    renewed_s: float | None = None,
    limit: str = "",
) -> tuple[str, ...]:
    """Return the remarks; none for a complete and long capture that clearly shows a cluster.

    Args:
        renewed_s: seconds until the first running node loses its DHCP lease; None if no node renews.
        limit: why the capture cannot show that a service is not used; "" if it can, or none is missing.
    """
    return (
        *_doubt(context),
        *_damage(observation),
        *observation.remarks,
        *roles.remarks,
        *_scans(observation),
        *_stranger(roles, context),
        *_other_management_nodes(roles),
        *_one_way(observation),
        *_gaps(observation),
        *_cut(observation, context, decoded),
        *_limit(limit),
        *_renewals(renewed_s),
    )


def _doubt(context: CaptureContext) -> Iterator[str]:
    if context.doubt:
        yield f"this does not look like a cluster: {context.doubt}; no verdict has more than {share(NOT_A_CLUSTER)}"


def _damage(observation: Observation) -> Iterator[str]:
    """Unreadable records. A damaged record may hide many others."""
    skipped = {reason: count for reason, count in observation.skipped.items() if reason != ODD_TIME}
    if lost := sum(skipped.values()):
        kinds = sorted(skipped.items(), key=lambda one: (-one[1], one[0]))
        reasons = ", ".join(f"{number(count)} {reason}" for reason, count in kinds[:REASONS])
        part = share(lost / (lost + observation.packets))
        yield f"{counted(lost, 'record')} ({part}) damaged or lost, possibly with others between them: {reasons}"
    if observation.truncated:
        files = list(dict.fromkeys(one.file for one in observation.problems if one.what == TRUNCATED))
        named = files and len(observation.files) > 1
        which = f"{listed(files, FILES)} {'ends' if len(files) == 1 else 'end'}" if named else "a file ends"
        yield f"{which} in the middle of a packet: later packets are missing"
    if beyond := observation.beyond[0]:
        part = share(beyond / max(observation.packets, 1))
        yield f"{counted(beyond, 'packet')} ({part}) exceeded the address table: no verdict includes them"
    if odd := observation.skipped.get(ODD_TIME, 0):
        yield f"{counted(odd, 'packet')} with impossible times, replaced by the time of the packet before"


def _scans(observation: Observation) -> Iterator[str]:
    """Port scans, the largest first."""
    hosts = observation.hosts
    scans = sorted(observation.scans, key=lambda one: (-one.packets, one.source))
    for scan in scans[:SCANS]:
        (first, *others) = scan.targets
        of = counted(len(scan.targets), "machine") if others else hosts[first].address
        tried = f"{hosts[scan.source].address} tried {counted(scan.ports, 'port')} of {of}"
        within = span((scan.last_ns - scan.first_ns) / 1e9)
        refused, packets = f"{number(scan.failed)} of them refused or did not answer", counted(scan.packets, "packet")
        yield f"{tried} within {within}, {refused}: a port scan; no service includes its {packets}"
    if rest := scans[SCANS:]:
        packets = counted(sum(one.packets for one in rest), "packet")
        yield f"{counted(len(rest), 'more machine')} scanned ports; no service includes their {packets}"


def _one_way(observation: Observation) -> Iterator[str]:
    """One direction alone: TCP between nodes and the management node has packets of both."""
    to, back = 0, 0
    for row in observation.rows:
        if row.protocol == TCP and row.kind != SCANNED and {row.client, row.server} == {Role.NODE, Role.SMS}:
            by_node, by_sms = row.packets if row.client == Role.NODE else reversed(row.packets)
            to, back = to + by_node, back + by_sms
    if max(to, back) >= MANY and not (to and back):
        there, other = ("nodes", "the management node") if to else ("the management node", "nodes")
        yield (
            f"all {counted(max(to, back), 'packet')} of TCP are from {there} to {other}, none back: one direction was "
            f"captured, or {other} did not answer; who opened a connection, and whether it was answered, is uncertain"
        )


def _gaps(observation: Observation) -> Iterator[str]:
    """Gaps in files, and between those of a set."""
    gap_s, all_s = observation.gap_s, observation.duration_s
    if gap_s > GAP * all_s:
        yield (
            f"nothing was captured for {span(gap_s)} ({share(gap_s / all_s)}) of the {span(all_s)} from the first "
            f"packet to the last: verdicts use the other {span(observation.covered_s)}"
        )


def _stranger(roles: Roles, context: CaptureContext) -> Iterator[str]:
    """Signs that the capture does not show a cluster."""
    if not context.doubt and context.nodes < FEW and not roles.node:
        yield (
            f"only {counted(context.nodes, 'machine')} could be a compute node: does the capture show a cluster's own "
            "network? All verdicts depend on it"
        )
    own = next((one for one in roles.sms.addresses if not is_link_local(one)), "")
    apart = sum(not is_local(one) and network(one) != network(own) for one in context.addresses)
    if own and not is_local(own) and 2 * apart > len(context.addresses):
        yield (
            f"{own} and most of those that talk to it have public addresses of different networks: this looks like a "
            "server of the internet rather than a cluster's management node"
        )


def _other_management_nodes(roles: Roles) -> Iterator[str]:
    """Their services are in neither group."""
    others = [one for one in roles.servers if one.role == "management node"]
    for one in others[:OTHERS]:
        name = one.addresses[0]
        to = f" to {counted(one.nodes, 'node')}" if one.nodes else ""
        served = f"it serves {listed(one.services, NAMED)}{to}"
        yield f"{name} is another management node: {served}; --sms {name} classifies its services instead"
    if rest := others[OTHERS:]:
        yield f"{counted(len(rest), 'more machine serves', 'more machines serve')} nodes as a management node does"


def _limit(limit: str) -> Iterator[str]:
    if limit:
        yield f"no service counts as hardly used, because the capture may not show it: {limit}"


def _cut(observation: Observation, context: CaptureContext, decoded: DecodedSamples) -> Iterator[str]:
    """Information that is missing because packets are cut."""
    if not observation.cut or observation.cut_at >= WHOLE:
        if context.hidden:
            yield "nodes request addresses by DHCP, but no boot was recognized: boot traffic is not separated"
        return
    uses_dhcp = any(_of_dhcp(row) for row in observation.rows)
    lost = [
        *(["when nodes booted"] if context.hidden else []),
        *(["DHCP lease times"] if uses_dhcp and not decoded.leases and not decoded.endless else []),
        *(["which service some connections are to"] if observation.cut_at < FIRST_BYTES else []),
    ]
    if lost:
        hidden = listed(lost)
        cut = f"{counted(observation.cut, 'packet')} are cut at {observation.cut_at} bytes"
        yield f"{cut}, which hides {hidden}: capture with tcpdump -s {WHOLE}"


def _of_dhcp(row: Row) -> bool:
    return (row.protocol, row.port, row.client) == (UDP, DHCP_PORTS[0], Role.NODE)


def _renewals(renewed_s: float | None) -> Iterator[str]:
    """Running nodes lose their address during a long DHCP outage."""
    if renewed_s is not None:
        yield f"running nodes renew leases: the tolerated outage of provisioning (DHCP) is {span(renewed_s)}"
