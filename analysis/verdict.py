"""Which services must never stop: the paper's rules, how sure they make one, and why in plain words.

The paper (section 4): "SMS services that initiated new network connections to compute nodes were identified as
non-time-critical", those "that accepted new network connections from compute nodes" as time-critical; but
provisioning "happens rarely and only at the discretion of a system administrator", and file updates "are only
necessary if files have actually changed". docs/classify-rules.md tells all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.budget import REGULAR, Budget
from analysis.model import Verdict
from analysis.numbers import weight
from analysis.observed import Role
from analysis.scene import EXPECTED, UNKNOWN_EVERY_S, Scene
from analysis.services import Seen
from analysis.signatures import TCP, UDP
from analysis.units import counted, span

Initiator = Literal["node", "sms", "both"]
Phase = Literal["boot", "steady", "both"]

CRITICAL: Verdict = "time-critical"
DEFERRABLE: Verdict = "deferrable"
SURE = 0.99
"""No verdict is surer than this: what was not seen may still come."""
PRIOR = 0.4
"""What the catalogue's agreement is worth before anything is seen."""
AGAINST = 0.8
"""What evidence that stands against the catalogue is worth."""
WEAK = 0.3
"""Evidence below this does not stand against the catalogue."""
RARE = 0.01
"""A share of contacts that does not count."""
SHORT_S = 3600.0
"""Leases that end within this make a service for booting one that is needed all the time."""
POLL_LEAST_S, POLL_ANSWER = 30.0, 16384.0
"""A poll that only fetches what has changed: so far apart at least, answers of so many bytes at most."""
FETCHING = {(TCP, port) for port in (80, 443, 873, 8000, 8008, 8080, 8443, 9873)}
"""HTTP and rsync: what can be such a poll where the catalogue does not know the service."""


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it stands on."""

    verdict: Verdict
    confidence: float
    reasons: tuple[str, ...]
    initiator: Initiator
    phase: Phase
    overridden: bool = False


@dataclass(frozen=True)
class _Ruling:
    """What a rule says. ``weight``: how far what was seen carries it, 0..1."""

    verdict: Verdict
    reason: str
    weight: float = 1.0


def judge(seen: Seen, scene: Scene, budget: Budget) -> Judgement:
    """The verdict on a service."""
    initiator, phase = find_initiator(seen), find_phase(seen)
    ruling = _rule(seen, scene, budget, phase)
    facts, signature = _facts(seen, ruling.verdict, phase), seen.signature
    if signature and signature.verdict in (CRITICAL, DEFERRABLE):
        verdict = CRITICAL if signature.verdict == CRITICAL else DEFERRABLE
        said = f"the site says so{f': {signature.verdict_why}' if signature.verdict_why else ''}"
        would = f"without that it would be {ruling.verdict}: {ruling.reason}"
        return Judgement(verdict, SURE, (said, would, *facts), initiator, phase, overridden=True)
    return Judgement(ruling.verdict, _confidence(seen, scene, ruling, phase), (ruling.reason, *facts), initiator, phase)


def find_initiator(seen: Seen) -> Initiator:
    """Who opens connections; where no opening was seen, who is the client by the ports."""
    if seen.by_node and seen.by_sms:
        return "both"
    if seen.opened:
        return "node" if seen.by_node else "sms"
    by_sms = sum(sum(row.packets) for row in seen.rows if row.client in (Role.SMS, Role.OUTSIDE))
    return "sms" if 2 * by_sms > sum(seen.packets) else "node"


def find_phase(seen: Seen) -> Phase:
    """Whether it is used while nodes boot, later, or both. One contact in a hundred does not count."""
    least = RARE * (seen.boot + seen.steady)
    if seen.boot <= least:
        return "steady"
    return "boot" if seen.steady <= least else "both"


# How sure.


def evidence(seen: Seen, scene: Scene, phase: Phase) -> float:
    """0..1: how much was seen. Grows with contacts, with time, and with nodes.

    - n contacts that all show the same leave a share of others of up to 3 in n (the rule of three): n / (n + 3);
    - time in periods of the service, or boots for one that belongs to booting, c: c / (c + 1);
    - k machines that use it: (k + 1) / (k + 2), the rule of succession (Laplace) for the next one to do the same.
    """
    contacts, users = seen.contacts, max(len(seen.clients), seen.most_clients, seen.most_servers)
    cycles = scene.boots if phase == "boot" and scene.boots else scene.duration_s / period_s(seen)
    return (contacts / (contacts + 3)) * (cycles / (cycles + 1)) * ((users + 1) / (users + 2))


def period_s(seen: Seen) -> float:
    """Seconds between two contacts of a node: as seen, else as the catalogue says, else an hour."""
    medians = [seen.regular(role)[0] for role in (Role.NODE, Role.SMS)]
    known = seen.signature.every_s if seen.signature else 0.0
    return max(medians[0] or medians[1] or known or UNKNOWN_EVERY_S, 1e-3)


def _confidence(seen: Seen, scene: Scene, ruling: _Ruling, phase: Phase) -> float:
    found = evidence(seen, scene, phase) * ruling.weight
    if seen.signature:
        agrees = seen.critical == (ruling.verdict == CRITICAL)
        found = PRIOR + (1 - PRIOR) * found if agrees else AGAINST * found
    return round(min(max(found, 0.01), SURE), 3)


def _would_be_seen(seen: Seen, scene: Scene) -> bool:
    """Whether nodes that are up would have been seen to use it, with 95 % probability (`scene.EXPECTED`)."""
    known = seen.signature.every_s if seen.signature else UNKNOWN_EVERY_S
    return known > 0 and scene.steady_s / known >= EXPECTED


# The rules, the first that applies.


def _rule(seen: Seen, scene: Scene, budget: Budget, phase: Phase) -> _Ruling:
    return (
        _routed(seen)
        or _not_seen_to_open(seen)
        or _not_answered(seen)
        or _sms_opens(seen, scene)
        or _poll(seen)
        or _boot(seen, scene, budget, phase)
        or _nodes_open(seen, scene, phase)
    )


def _routed(seen: Seen) -> _Ruling | None:
    if not seen.routed:
        return None
    inwards = f", {counted(seen.by_sms, 'connection')} came in from there" if seen.by_sms else ""
    reason = f"{_nodes(seen)} opened {counted(seen.by_node, 'connection')} to addresses outside through it{inwards}"
    return _Ruling(CRITICAL, reason)


def _not_seen_to_open(seen: Seen) -> _Ruling | None:
    """Flows that were open when the capture began say nothing of who opened them."""
    if seen.opened:
        return None
    reason = f"no connection was seen to open ({seen.midstream:,} were open already when the capture began)"
    if seen.signature:
        return _by_catalogue(seen, reason)
    if find_initiator(seen) == "node":
        return _Ruling(CRITICAL, f"{reason}; by its port the management node is the one that is asked", 0.3)
    return _Ruling(DEFERRABLE, f"{reason}; by its port the nodes are the ones that are asked", 0.3)


def _not_answered(seen: Seen) -> _Ruling | None:
    """Connections over TCP that nobody answered: it may be away already."""
    if seen.midstream or seen.unanswered < seen.opened or any(protocol == UDP for protocol, _ in seen.places):
        return None
    reason = f"none of {counted(seen.opened, 'connection')} was answered: it is away, or was never there"
    if seen.signature:
        return _by_catalogue(seen, reason)
    if seen.by_node:
        return _Ruling(CRITICAL, f"{reason}; {_opened(seen)}", 0.3)
    return _Ruling(DEFERRABLE, f"{reason}; {_opened(seen)}", 0.3)


def _sms_opens(seen: Seen, scene: Scene) -> _Ruling | None:
    if seen.by_node > RARE * seen.opened or (seen.by_node and seen.critical):
        return None
    if seen.critical and not _would_be_seen(seen, scene):
        return _by_catalogue(seen, f"{_opened(seen)} so far, and the capture is too short to say that nodes never do")
    return _Ruling(DEFERRABLE, _opened(seen))


def _poll(seen: Seen) -> _Ruling | None:
    """Warewulf's way: nodes ask regularly, and fetch only what somebody has changed."""
    median, range_s = seen.regular(Role.NODE)
    each = seen.bytes[1] / max(seen.contacts, 1)
    often = _opened(seen) + (f", each every {span(median)}" if median else "")
    if seen.signature and seen.signature.poll:
        return _Ruling(DEFERRABLE, f"{often}; they fetch only what somebody has changed")
    if seen.critical or seen.boot > seen.steady or not set(seen.places) <= FETCHING:
        return None
    if median < POLL_LEAST_S or range_s > REGULAR * median or each > POLL_ANSWER or seen.bytes[1] < seen.bytes[0]:
        return None
    reason = f"{often}, and the answers are small ({each:,.0f} bytes): a poll that fetches only what has changed"
    return _Ruling(DEFERRABLE, reason, 0.6)


def _boot(seen: Seen, scene: Scene, budget: Budget, phase: Phase) -> _Ruling | None:
    """What nodes need while they boot only is an administrator's decision."""
    in_boots = f"{seen.boot:,} of {counted(seen.boot + seen.steady, 'contact')} fell in {counted(scene.boots, 'boot')}"
    if seen.signature and seen.signature.boot:
        if budget.renewals and budget.seconds < SHORT_S:
            left = f"the first would lose its address {span(budget.seconds)} into an outage"
            return _Ruling(CRITICAL, f"nodes that are up renew leases, and {left}")
        if phase == "boot":
            return _Ruling(DEFERRABLE, f"nodes need it only while they boot: {in_boots}")
        return _Ruling(DEFERRABLE, f"nodes need it only while they boot, the catalogue says; {in_boots}", 0.5)
    if phase != "boot":
        return None
    if _would_be_seen(seen, scene):
        return _Ruling(
            DEFERRABLE, f"nodes used it only while they booted: {in_boots}, and it would have been seen later"
        )
    short = f"{in_boots}, but only {span(scene.steady_s)} of nodes that had settled were seen"
    if seen.signature:
        return _by_catalogue(seen, short)
    return _Ruling(CRITICAL, f"{short}, too little to say that nodes need it for booting only", 0.3)


def _nodes_open(seen: Seen, scene: Scene, phase: Phase) -> _Ruling:
    found = evidence(seen, scene, phase)
    if seen.signature and not seen.critical and found < WEAK:
        return _by_catalogue(seen, f"{_opened(seen)}, too few to stand against the catalogue")
    # Where both open, what nodes do weighs by its share.
    share = seen.by_node / max(seen.opened, 1)
    return _Ruling(CRITICAL, _opened(seen), 1.0 if seen.critical else 0.5 + 0.5 * share)


def _by_catalogue(seen: Seen, reason: str) -> _Ruling:
    verdict = CRITICAL if seen.critical else DEFERRABLE
    need = "that nodes need it at every moment" if seen.critical else "that it can wait"
    return _Ruling(verdict, f"{reason}; the catalogue says {need}", 0.3)


# Plain words.


def _nodes(seen: Seen) -> str:
    return counted(max(len(seen.clients), seen.most_clients, 1), "node")


def _opened(seen: Seen) -> str:
    """ "450 nodes opened 12,031 connections, the management node none"."""
    if not seen.by_node:
        reached = f" to {counted(seen.most_servers, 'node')}" if seen.most_servers else ""
        return f"the management node opened {counted(seen.by_sms, 'connection')}{reached}, nodes opened none"
    by_sms = f"{seen.by_sms:,}" if seen.by_sms else "none"
    often = f" ({counted(seen.contacts, 'contact')})" if seen.contacts > 2 * seen.opened else ""
    return f"{_nodes(seen)} opened {counted(seen.by_node, 'connection')}{often}, the management node {by_sms}"


def _facts(seen: Seen, verdict: Verdict, phase: Phase) -> tuple[str, ...]:
    facts = []
    if seen.midstream and seen.opened:
        facts.append(f"{counted(seen.midstream, 'more connection')} were open when the capture began")
    if phase == "both":
        facts.append(f"{seen.boot:,} contacts fell in nodes' boots, {seen.steady:,} in steady state")
    for role, who in ((Role.NODE, "a node"), (Role.SMS, "the management node")):
        median, range_s = seen.regular(role)
        if median:
            often = "regularly" if range_s <= REGULAR * median else f"the middle half within {span(range_s)}"
            many = f"{weight(seen.intervals[role]):,.0f} intervals"
            facts.append(f"{who} makes contact every {span(median)}, {often} ({many})")
    if seen.unanswered and seen.unanswered < seen.opened:
        facts.append(f"{counted(seen.unanswered, 'connection')} got no answer")
    if seen.signature and not seen.signature.verdict and seen.critical != (verdict == CRITICAL):
        facts.append(
            f"the catalogue takes it for {CRITICAL if seen.critical else DEFERRABLE}: what was seen stands against it"
        )
    return tuple(facts)
