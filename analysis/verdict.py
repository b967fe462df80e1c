"""The rules that classify services as time-critical or deferrable, with confidence and reasons.

From "Decoupled management nodes" (2018), section 4: "SMS services that initiated new network connections to compute
nodes were identified as non-time-critical", those "that accepted new network connections from compute nodes" as
time-critical; but provisioning "happens rarely and only at the discretion of a system administrator", and file updates
"are only necessary if files have actually changed". docs/classify-rules.md has all rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.budget import Budget
from analysis.confidence import MAX_CONFIDENCE, NOT_A_CLUSTER, Grounds, confidence
from analysis.context import EXPECTED, UNKNOWN_EVERY_S, CaptureContext
from analysis.model import Verdict
from analysis.numbers import quantiles, weight
from analysis.observed import Role, Row
from analysis.services import REGULAR, ServiceCounts
from analysis.signatures import TCP, UDP
from analysis.units import counted, span

Initiator = Literal["node", "sms", "both"]
Phase = Literal["boot", "steady", "both"]

CRITICAL: Verdict = "time-critical"
DEFERRABLE: Verdict = "deferrable"
WEAK = 0.4
"""Evidence below this does not override a deferrable service of the catalogue."""
OVERWHELMING = 100.0
"""Contacts of one node that must be expected, and none seen, to override a time-critical service of the catalogue: the
most harmful error is to stop a service that nodes need."""
NEGLIGIBLE = 0.01
"""Share of contacts that is ignored."""
REPEATED, SEVERAL = 3, 2
"""This many contacts of this many nodes count, whatever their share."""
SHORT_LEASE_S = 86400.0
"""Renewed leases that expire within this make DHCP time-critical: a deferrable service tolerates a day of outage."""
CONTINUOUS = 0.5
"""Minimum share of the capture over which a node's contacts spread if it uses a service not only for booting."""
POLL_LEAST_S, POLL_ANSWER = 30.0, 16384.0
"""A poll that only fetches changes: minimum interval, maximum bytes of an answer."""
POLL_PORTS = {(TCP, port) for port in (80, 873, 8000, 8008, 8080, 9873)}
"""HTTP and rsync: ports where unknown services can be such polls. Not over TLS, where a heartbeat looks the same."""
GENERAL_PORTS = {(TCP, 80), (TCP, 8080), (TCP, 443), (UDP, 443)}
"""HTTP carries anything, such as images, updates, data of programs: a port does not say whether nodes need it."""
MANY_NODES = 5
"""If this many nodes use a service that can wait by the catalogue, it is not a person on a machine or two."""
LONG_BUDGET_S = 3600.0
"""Time-critical services with a longer budget get an additional explanation."""


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reasons. ``grounds``: what its confidence was computed from; None if the site set it."""

    verdict: Verdict
    confidence: float
    reasons: tuple[str, ...]
    initiator: Initiator
    phase: Phase
    grounds: Grounds | None = None

    @property
    def overridden(self) -> bool:
        """Whether the verdict is the site's own."""
        return self.grounds is None


@dataclass(frozen=True)
class _Ruling:
    """The result of a rule.

    Attributes:
        weight: how strongly the evidence supports it, 0..1.
        conclusive: packets prove it; neither a longer capture nor the catalogue could change it.
        of_catalogue: too little was seen, so that the catalogue decides.
    """

    verdict: Verdict
    reason: str
    weight: float = 1.0
    conclusive: bool = False
    of_catalogue: bool = False


def judge(counts: ServiceCounts, context: CaptureContext, budget: Budget, site: Verdict | None = None) -> Judgement:
    """Return the verdict on a service. ``site``: the site's override for this capture, which always wins."""
    initiator, phase = find_initiator(counts), find_phase(counts)
    ruling = _rule(counts, context, budget, phase)
    facts, signature = _facts(counts, ruling.verdict, phase, budget), counts.signature
    why = signature.verdict_why if signature and (site or signature.verdict) == signature.verdict else ""
    for verdict in (CRITICAL, DEFERRABLE):
        if verdict == (site or (signature.verdict if signature else "")):
            site_reason = f"set by the site{f': {why}' if why else ''}"
            alternative = f"otherwise it would be {ruling.verdict}: {ruling.reason}"
            return Judgement(verdict, MAX_CONFIDENCE, (site_reason, alternative, *facts), initiator, phase)
    grounds = _grounds(counts, context, ruling, phase)
    found = min(confidence(grounds), NOT_A_CLUSTER if context.doubt else MAX_CONFIDENCE)
    return Judgement(ruling.verdict, found, (ruling.reason, *facts), initiator, phase, grounds)


def find_initiator(counts: ServiceCounts) -> Initiator:
    """Return who opens connections; if no opening was seen, who is the client by the ports."""
    if counts.by_node and counts.by_sms:
        return "both"
    if counts.opened:
        return "node" if counts.by_node else "sms"
    by_sms = sum(sum(row.packets) for row in counts.rows if row.client in (Role.SMS, Role.OUTSIDE))
    return "sms" if 2 * by_sms > sum(counts.packets) else "node"


def find_phase(counts: ServiceCounts) -> Phase:
    """Return whether it is used while nodes boot, later, or both. One contact in a hundred is ignored."""
    least = NEGLIGIBLE * (counts.boot + counts.steady)
    if counts.boot <= least:
        return "steady"
    return "boot" if counts.steady <= least else "both"


# Confidence.


def evidence(counts: ServiceCounts, context: CaptureContext, phase: Phase) -> float:
    """Return the amount of evidence, 0..1: grows with contacts, time and nodes.

    - n identical contacts limit the share of others to 3 / n (the rule of three): n / (n + 3);
    - c periods of the service, or boots for a boot service: c / (c + 1);
    - k machines that use it: (k + 1) / (k + 2), the rule of succession (Laplace) for the next machine.
    """
    return _evidence(counts, context, phase, counts.contacts, max(counts.users, counts.reached))


def _evidence(counts: ServiceCounts, context: CaptureContext, phase: Phase, contacts: int, users: int) -> float:
    cycles = context.boots if phase == "boot" and context.boots else context.duration_s / period_s(counts)
    return _amount(contacts, users) * (cycles / (cycles + 1))


def _amount(contacts: int, users: int) -> float:
    return (contacts / (contacts + 3)) * ((users + 1) / (users + 2))


def period_s(counts: ServiceCounts) -> float:
    """Return the seconds between two contacts of a node: as seen, else from the catalogue, else an hour."""
    medians = [counts.regular(role)[0] for role in (Role.NODE, Role.SMS)]
    known = counts.signature.every_s if counts.signature else 0.0
    return max(medians[0] or medians[1] or known or UNKNOWN_EVERY_S, 1e-3)


def _grounds(counts: ServiceCounts, context: CaptureContext, ruling: _Ruling, phase: Phase) -> Grounds:
    if ruling.conclusive:
        return Grounds("proved", _amount(counts.contacts, counts.users))
    found = evidence(counts, context, phase) * ruling.weight
    if ruling.of_catalogue:
        return Grounds("decides", found)
    if not counts.signature or _is_general(counts):
        return Grounds("unknown", found)
    return Grounds("agrees" if counts.critical == (ruling.verdict == CRITICAL) else "contradicts", found)


def _is_general(counts: ServiceCounts) -> bool:
    """Return whether the catalogue knows only that it is HTTP, which carries anything."""
    ports = counts.signature.ports if counts.signature else ()
    return bool(ports) and set(ports) <= GENERAL_PORTS


def _would_be_seen(counts: ServiceCounts, context: CaptureContext) -> bool:
    """Return whether a use by a running node would have been seen with 95 % probability (`context.EXPECTED`).

    Only the time of one node counts: nodes that boot together are also idle together, so that they are not independent.
    If the catalogue says time-critical, OVERWHELMING contacts must be expected.
    """
    known = counts.signature.every_s if counts.signature else UNKNOWN_EVERY_S
    return known > 0 and context.longest_s / known >= (OVERWHELMING if counts.critical else EXPECTED)


# The rules: the first that applies decides.


def _rule(counts: ServiceCounts, context: CaptureContext, budget: Budget, phase: Phase) -> _Ruling:
    return (
        _routed(counts)
        or _not_seen_to_open(counts, context)
        or _not_answered(counts)
        or _sms_opens(counts, context)
        or _poll(counts)
        or _boot(counts, context, budget, phase)
        or _nodes_open(counts, context, phase)
    )


def _routed(counts: ServiceCounts) -> _Ruling | None:
    if not counts.routed:
        return None
    inwards = f", {counted(counts.by_sms, 'connection')} came in from outside" if counts.by_sms else ""
    reason = f"{_nodes(counts)} opened {counted(counts.by_node, 'connection')} to outside addresses{inwards}"
    return _Ruling(CRITICAL, reason)


def _not_seen_to_open(counts: ServiceCounts, context: CaptureContext) -> _Ruling | None:
    """Flows that were open when the capture began do not show who opened them."""
    if counts.opened:
        return None
    reason = f"no connection was opened in the capture ({counts.midstream:,} were open when it began)"
    if find_initiator(counts) == "node" and (programs := _by_programs(counts, context)):
        return _Ruling(CRITICAL, f"{reason}; by the port nodes opened them{programs}", 0.3)
    if counts.signature:
        return _by_catalogue(counts, reason)
    if find_initiator(counts) == "node":
        return _Ruling(CRITICAL, f"{reason}; by the port the management node is the server", 0.3)
    if not any(port for _, port in counts.places):
        return _Ruling(CRITICAL, f"{reason}; both ports are dynamic, so that nodes may have opened them", 0.3)
    return _Ruling(DEFERRABLE, f"{reason}; by the port the nodes are the servers", 0.3)


def _not_answered(counts: ServiceCounts) -> _Ruling | None:
    """Unanswered TCP connections: the service may be down already."""
    if counts.midstream or counts.unanswered < counts.opened or any(protocol == UDP for protocol, _ in counts.places):
        return None
    reason = f"none of {counted(counts.opened, 'connection')} was answered: it is down or does not exist"
    if counts.signature:
        return _by_catalogue(counts, reason)
    if counts.by_node:
        return _Ruling(CRITICAL, f"{reason}; {_opened(counts)}", 0.3)
    return _Ruling(DEFERRABLE, f"{reason}; {_opened(counts)}", 0.3)


def _sms_opens(counts: ServiceCounts, context: CaptureContext) -> _Ruling | None:
    if _nodes_need(counts, context):
        return None
    if counts.critical and not _would_be_seen(counts, context):
        return _by_catalogue(counts, f"{_opened(counts)}, but the capture is too short to exclude that nodes do")
    return _Ruling(DEFERRABLE, _opened(counts))


def _nodes_need(counts: ServiceCounts, context: CaptureContext) -> bool:
    """Return whether nodes open connections, too: more than a negligible share, or several nodes repeatedly.

    A busy monitor on the same port makes any share small. Connections that were open when the capture began count, too.
    """
    if counts.by_node > NEGLIGIBLE * counts.opened:
        return True
    again = _node_contacts(counts) >= REPEATED and counts.users >= min(SEVERAL, max(context.nodes, 1))
    return (again and (counts.signature is None or counts.by_node > 0)) or (
        counts.critical and _node_contacts(counts) > 0
    )


def _node_contacts(counts: ServiceCounts) -> int:
    """Return how often nodes used it."""
    return sum(
        max(row.opened, row.contacts_boot + row.contacts_steady) for row in counts.rows if row.client == Role.NODE
    )


def _poll(counts: ServiceCounts) -> _Ruling | None:
    """Polls as Warewulf's: nodes poll regularly and fetch only changes."""
    median, range_s = counts.regular(Role.NODE)
    each = counts.bytes[1] / max(counts.contacts, 1)
    often = _opened(counts) + (f", each every {span(median)}" if median else "")
    if counts.signature and counts.signature.poll:
        return _Ruling(DEFERRABLE, f"{often}; only changes pass, which can wait")
    if (counts.critical and not _is_general(counts)) or counts.boot > counts.steady:
        return None
    if not set(counts.places) <= POLL_PORTS:
        return None
    if median < POLL_LEAST_S or range_s > REGULAR * median or each > POLL_ANSWER or counts.bytes[1] < counts.bytes[0]:
        return None
    reason = f"{often}, and the answers are small ({each:,.0f} bytes): a poll that fetches only changes"
    return _Ruling(DEFERRABLE, reason, 0.6)


def _boot(counts: ServiceCounts, context: CaptureContext, budget: Budget, phase: Phase) -> _Ruling | None:
    """Services that only booting nodes need can wait: the administrator decides when nodes boot."""
    in_boots = _in_boots(counts, context)
    if counts.signature and counts.signature.boot:
        return _boot_by_catalogue(counts, context, budget, phase, in_boots)
    if phase != "boot":
        return None
    if _would_be_seen(counts, context):
        reason = f"nodes used it only while they booted: {in_boots}, and later uses would have been seen"
        return _Ruling(DEFERRABLE, reason)
    short = f"{in_boots}, but no node was observed for more than {span(context.longest_s)} after its boot"
    if counts.signature:
        return _by_catalogue(counts, short)
    return _Ruling(CRITICAL, f"{short}, too short to conclude that nodes need it only for booting", 0.3)


def _boot_by_catalogue(
    counts: ServiceCounts, context: CaptureContext, budget: Budget, phase: Phase, in_boots: str
) -> _Ruling | None:
    leases = ""
    if budget.renewals:
        left = f"the first would lose its address {span(budget.seconds)} into an outage"
        leases = f"running nodes renew leases, and {left}"
        if budget.seconds < SHORT_LEASE_S:
            return _Ruling(CRITICAL, leases, conclusive=True)
        leases += "; else "
    elif budget.undecided and budget.seconds < SHORT_LEASE_S:
        reason = f"{in_boots}, but systems of nodes, not only their firmware, got leases of less than two days"
        return _Ruling(CRITICAL, f"{reason}, and the capture is too short to show whether they renew them", 0.3)
    if _used_continuously(counts, context):
        return None
    if phase == "boot":
        return _Ruling(DEFERRABLE, f"{leases}nodes need it only while they boot: {in_boots}")
    return _Ruling(DEFERRABLE, f"{leases}by the catalogue nodes need it only while they boot; {in_boots}", 0.5)


def _used_continuously(counts: ServiceCounts, context: CaptureContext) -> bool:
    """Return whether several running nodes use it repeatedly over TCP, through half of the capture.

    Lease renewals are over UDP and are handled by the budget.
    """
    rows = [row for row in counts.rows if row.protocol == TCP and row.client == Role.NODE and row.contacts_steady]
    nodes = max((row.client_hosts for row in rows), default=0)
    spread_s = sum(each * count for row in rows for each, count in row.intervals)
    contacts = sum(row.contacts_steady for row in rows)
    return contacts >= REPEATED * max(nodes, 1) and spread_s >= CONTINUOUS * nodes * max(context.duration_s, 1.0)


def _in_boots(counts: ServiceCounts, context: CaptureContext) -> str:
    all_of_it = counted(counts.boot + counts.steady, "contact")
    if context.boots:
        return f"{counts.boot:,} of {all_of_it} fell in {counted(context.boots, 'boot')}"
    if counts.boot:
        return f"{counts.boot:,} of {all_of_it} came from nodes without an address"
    return f"none of its {all_of_it} fell in a boot"


def _nodes_open(counts: ServiceCounts, context: CaptureContext, phase: Phase) -> _Ruling:
    few = _evidence(counts, context, phase, counts.by_node, counts.users) < WEAK and counts.users < MANY_NODES
    programs = _by_programs(counts, context) if few else ""
    if counts.signature and not counts.critical and few and not programs:
        return _by_catalogue(counts, f"{_opened(counts)}, too few to override the catalogue")
    # If both sides open connections, the nodes' share is the weight.
    share = counts.by_node / max(counts.opened, 1)
    return _Ruling(CRITICAL, _opened(counts) + programs, 1.0 if counts.critical else 0.5 + 0.5 * share)


def _by_programs(counts: ServiceCounts, context: CaptureContext) -> str:
    """Return the reason why programs on nodes opened it, although the catalogue says that it can wait; else "".

    It says so of what the management node opens to nodes, too, as people and monitors do: SSH, SNMP, NRPE. Execution
    nodes, where the scheduler starts jobs, open it for a program: output that a batch system copies, traps, results.
    Traps of other machines are lost, too.
    """
    if counts.signature is None or counts.critical or not counts.signature.sms_opens or counts.signature.poll:
        return ""
    users = {context.machine[index] for index in counts.clients if index in context.machine} & context.execution
    if not users and not any(map(_is_lost, counts.rows)):
        return ""
    if not users:
        return "; what they send over UDP without an answer is lost if nobody receives it"
    some = counted(len(users), "of these nodes", "of these nodes")
    return f"; jobs run on {some}: programs use it there, not people"


def _is_lost(row: Row) -> bool:
    """Return whether nodes send datagrams that nobody answers."""
    return (row.protocol, row.client, row.server) == (UDP, Role.NODE, Role.SMS) and row.opened > 0 == row.packets[1]


def _by_catalogue(counts: ServiceCounts, reason: str) -> _Ruling:
    verdict = CRITICAL if counts.critical else DEFERRABLE
    need = "that nodes need it at every moment" if counts.critical else "that it can wait"
    return _Ruling(verdict, f"{reason}; the catalogue says {need}", of_catalogue=True)


# Text of the reasons.


def _nodes(counts: ServiceCounts) -> str:
    return counted(max(counts.users, 1), "node")


def _opened(counts: ServiceCounts) -> str:
    """Describe who opened connections: "450 nodes opened 12,031 connections, the management node none"."""
    if not counts.by_node and (used := _node_contacts(counts)):
        already = f"{_nodes(counts)} used it over connections opened before the capture ({counted(used, 'contact')})"
        return f"{already}, the management node opened {counted(counts.by_sms, 'connection')}"
    if not counts.by_node:
        reached = f" to {counted(counts.reached, 'node')}" if counts.reached else ""
        return f"the management node opened {counted(counts.by_sms, 'connection')}{reached}, nodes opened none"
    by_sms = f"{counts.by_sms:,}" if counts.by_sms else "none"
    often = f" ({counted(counts.contacts, 'contact')})" if counts.contacts > 2 * counts.opened else ""
    return f"{_nodes(counts)} opened {counted(counts.by_node, 'connection')}{often}, the management node {by_sms}"


def _facts(counts: ServiceCounts, verdict: Verdict, phase: Phase, budget: Budget) -> tuple[str, ...]:
    facts = []
    if counts.midstream and counts.opened:
        facts.append(f"{counted(counts.midstream, 'more connection')} were open when the capture began")
    if phase == "both":
        facts.append(f"{counts.boot:,} contacts fell in nodes' boots, {counts.steady:,} in steady state")
    for role, who in ((Role.NODE, "a node"), (Role.SMS, "the management node")):
        median, range_s = counts.regular(role)
        if not median:
            continue
        many = f"{weight(counts.intervals[role]):,.0f} intervals"
        if range_s <= REGULAR * median:
            facts.append(f"regular contacts of {who}, every {span(median)} ({many})")
        else:
            low, high = quantiles(counts.intervals[role], (0.25, 0.75))
            middle = f"the middle half of {many} is {span(low)} to {span(high)} long"
            facts.append(f"irregular contacts of {who}, median interval {span(median)}; {middle}")
    if counts.unanswered and counts.unanswered < counts.opened:
        facts.append(f"{counted(counts.unanswered, 'connection')} unanswered")
    if verdict == CRITICAL and counts.by_node and budget.seconds >= LONG_BUDGET_S:
        waits = f"they tolerate an outage of {span(budget.seconds)}"
        facts.append(f"time-critical because nodes open connections and expect an answer, although {waits}")
    if counts.signature and not counts.signature.verdict and counts.critical != (verdict == CRITICAL):
        facts.append(f"the catalogue says {CRITICAL if counts.critical else DEFERRABLE}: the traffic contradicts it")
    return tuple(facts)
