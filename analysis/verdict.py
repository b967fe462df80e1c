"""Which services must never stop: the paper's rules, how sure they make one, and why in plain words.

The paper (section 4): "SMS services that initiated new network connections to compute nodes were identified as
non-time-critical", those "that accepted new network connections from compute nodes" as time-critical; but
provisioning "happens rarely and only at the discretion of a system administrator", and file updates "are only
necessary if files have actually changed". docs/classify-rules.md tells all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.budget import Budget
from analysis.model import Verdict
from analysis.numbers import quantiles, weight
from analysis.observed import Role
from analysis.scene import EXPECTED, UNKNOWN_EVERY_S, Scene
from analysis.services import REGULAR, Seen
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
WEAK = 0.4
"""Evidence below this does not stand against the catalogue's word that a service can wait."""
OVERWHELMING = 100.0
"""So many contacts of one node have to be expected, and none seen, to stand against the catalogue's word that nodes
need a service at every moment: the mistake that hurts most is to stop what they need."""
RARE = 0.01
"""A share of contacts that does not count."""
AGAIN, SEVERAL = 3, 2
"""So many contacts of so many nodes do count, whatever their share."""
SHORT_S = 86400.0
"""Leases that end within this make a service for booting one that is needed always: what can wait, can for a day."""
ALL_THE_TIME = 0.5
"""A share of the capture over which a node's contacts are spread, when it uses a service not for booting only."""
POLL_LEAST_S, POLL_ANSWER = 30.0, 16384.0
"""A poll that only fetches what has changed: so far apart at least, answers of so many bytes at most."""
FETCHING = {(TCP, port) for port in (80, 873, 8000, 8008, 8080, 9873)}
"""HTTP and rsync: what can be such a poll where the catalogue does not know the service. Not over TLS, where
a heartbeat looks the same."""
LONG_S = 3600.0
"""A budget that asks for a word beside the verdict that a service must not stop."""


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
    """What a rule says.

    Attributes:
        weight: how far what was seen carries it, 0..1.
        told: the packets themselves say so; neither a longer capture nor the catalogue could say otherwise.
    """

    verdict: Verdict
    reason: str
    weight: float = 1.0
    told: bool = False


def judge(seen: Seen, scene: Scene, budget: Budget, site: Verdict | None = None) -> Judgement:
    """The verdict on a service. ``site``: the site's own for this capture, which stands before all others."""
    initiator, phase = find_initiator(seen), find_phase(seen)
    ruling = _rule(seen, scene, budget, phase)
    facts, signature = _facts(seen, ruling.verdict, phase, budget), seen.signature
    why = signature.verdict_why if signature and (site or signature.verdict) == signature.verdict else ""
    for verdict in (CRITICAL, DEFERRABLE):
        if verdict == (site or (signature.verdict if signature else "")):
            said = f"the site says so{f': {why}' if why else ''}"
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
    return _evidence(seen, scene, phase, seen.contacts, max(_users(seen), seen.most_servers))


def _evidence(seen: Seen, scene: Scene, phase: Phase, contacts: int, users: int) -> float:
    cycles = scene.boots if phase == "boot" and scene.boots else scene.duration_s / period_s(seen)
    return _amount(contacts, users) * (cycles / (cycles + 1))


def _amount(contacts: int, users: int) -> float:
    return (contacts / (contacts + 3)) * ((users + 1) / (users + 2))


def _users(seen: Seen) -> int:
    return max(len(seen.clients), seen.most_clients)


def period_s(seen: Seen) -> float:
    """Seconds between two contacts of a node: as seen, else as the catalogue says, else an hour."""
    medians = [seen.regular(role)[0] for role in (Role.NODE, Role.SMS)]
    known = seen.signature.every_s if seen.signature else 0.0
    return max(medians[0] or medians[1] or known or UNKNOWN_EVERY_S, 1e-3)


def _confidence(seen: Seen, scene: Scene, ruling: _Ruling, phase: Phase) -> float:
    found = evidence(seen, scene, phase) * ruling.weight
    if ruling.told:
        found = _amount(seen.contacts, _users(seen))
    elif seen.signature:
        agrees = seen.critical == (ruling.verdict == CRITICAL)
        found = PRIOR + (1 - PRIOR) * found if agrees else AGAINST * found
    return round(min(max(found, 0.01), SURE), 3)


def _would_be_seen(seen: Seen, scene: Scene) -> bool:
    """Whether a node that is up would have been seen to use it, with 95 % probability (`scene.EXPECTED`).

    By the clock of one node: many that boot together also rest together, and are no more than one.
    If the catalogue says that nodes need it, nothing less than OVERWHELMING counts.
    """
    known = seen.signature.every_s if seen.signature else UNKNOWN_EVERY_S
    return known > 0 and scene.longest_s / known >= (OVERWHELMING if seen.critical else EXPECTED)


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
    if _nodes_need(seen, scene):
        return None
    if seen.critical and not _would_be_seen(seen, scene):
        return _by_catalogue(seen, f"{_opened(seen)} so far, and the capture is too short to say that nodes never do")
    return _Ruling(DEFERRABLE, _opened(seen))


def _nodes_need(seen: Seen, scene: Scene) -> bool:
    """Whether nodes open as well: more than a share that does not count, or several of them again and again.

    A busy monitor beside it makes any share small. What was open when the capture began is use as well.
    """
    if seen.by_node > RARE * seen.opened:
        return True
    again = _node_contacts(seen) >= AGAIN and _users(seen) >= min(SEVERAL, max(scene.nodes, 1))
    return (again and (seen.signature is None or seen.by_node > 0)) or (seen.critical and _node_contacts(seen) > 0)


def _node_contacts(seen: Seen) -> int:
    """How often nodes used it."""
    return sum(max(row.opened, row.contacts_boot + row.contacts_steady) for row in seen.rows if row.client == Role.NODE)


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
    in_boots = _in_boots(seen, scene)
    if seen.signature and seen.signature.boot:
        return _boot_by_catalogue(seen, scene, budget, phase, in_boots)
    if phase != "boot":
        return None
    if _would_be_seen(seen, scene):
        reason = f"nodes used it only while they booted: {in_boots}, and it would have been seen later"
        return _Ruling(DEFERRABLE, reason)
    short = f"{in_boots}, but a node that had settled was watched for {span(scene.longest_s)} at most"
    if seen.signature:
        return _by_catalogue(seen, short)
    return _Ruling(CRITICAL, f"{short}, too little to say that nodes need it for booting only", 0.3)


def _boot_by_catalogue(seen: Seen, scene: Scene, budget: Budget, phase: Phase, in_boots: str) -> _Ruling | None:
    leases = ""
    if budget.renewals:
        left = f"the first would lose its address {span(budget.seconds)} into an outage"
        leases = f"nodes that are up renew leases, and {left}"
        if budget.seconds < SHORT_S:
            return _Ruling(CRITICAL, leases, told=True)
        leases += "; else "
    if _all_the_time(seen, scene):
        return None
    if phase == "boot":
        return _Ruling(DEFERRABLE, f"{leases}nodes need it only while they boot: {in_boots}")
    return _Ruling(DEFERRABLE, f"{leases}nodes need it only while they boot, the catalogue says; {in_boots}", 0.5)


def _all_the_time(seen: Seen, scene: Scene) -> bool:
    """Whether several nodes that are up use it over TCP again and again, through half of the capture.

    Their renewals of leases are over UDP, and judged by the budget.
    """
    rows = [row for row in seen.rows if row.protocol == TCP and row.client == Role.NODE and row.contacts_steady]
    nodes = max((row.client_hosts for row in rows), default=0)
    spread_s = sum(each * count for row in rows for each, count in row.intervals)
    contacts = sum(row.contacts_steady for row in rows)
    return contacts >= AGAIN * max(nodes, 1) and spread_s >= ALL_THE_TIME * nodes * max(scene.duration_s, 1.0)


def _in_boots(seen: Seen, scene: Scene) -> str:
    all_of_it = counted(seen.boot + seen.steady, "contact")
    if scene.boots:
        return f"{seen.boot:,} of {all_of_it} fell in {counted(scene.boots, 'boot')}"
    if seen.boot:
        return f"{seen.boot:,} of {all_of_it} came from nodes that had no address yet"
    return f"of its {all_of_it} none came while a node was seen to boot"


def _nodes_open(seen: Seen, scene: Scene, phase: Phase) -> _Ruling:
    if seen.signature and not seen.critical and _evidence(seen, scene, phase, seen.by_node, _users(seen)) < WEAK:
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
    return counted(max(_users(seen), 1), "node")


def _opened(seen: Seen) -> str:
    """ "450 nodes opened 12,031 connections, the management node none"."""
    if not seen.by_node and (used := _node_contacts(seen)):
        already = f"{_nodes(seen)} used it over connections that were open already ({counted(used, 'contact')})"
        return f"{already}, the management node opened {counted(seen.by_sms, 'connection')}"
    if not seen.by_node:
        reached = f" to {counted(seen.most_servers, 'node')}" if seen.most_servers else ""
        return f"the management node opened {counted(seen.by_sms, 'connection')}{reached}, nodes opened none"
    by_sms = f"{seen.by_sms:,}" if seen.by_sms else "none"
    often = f" ({counted(seen.contacts, 'contact')})" if seen.contacts > 2 * seen.opened else ""
    return f"{_nodes(seen)} opened {counted(seen.by_node, 'connection')}{often}, the management node {by_sms}"


def _facts(seen: Seen, verdict: Verdict, phase: Phase, budget: Budget) -> tuple[str, ...]:
    facts = []
    if seen.midstream and seen.opened:
        facts.append(f"{counted(seen.midstream, 'more connection')} were open when the capture began")
    if phase == "both":
        facts.append(f"{seen.boot:,} contacts fell in nodes' boots, {seen.steady:,} in steady state")
    for role, who in ((Role.NODE, "a node"), (Role.SMS, "the management node")):
        median, range_s = seen.regular(role)
        if not median:
            continue
        many = f"{weight(seen.intervals[role]):,.0f} intervals"
        if range_s <= REGULAR * median:
            facts.append(f"{who} makes contact regularly, every {span(median)} ({many})")
        else:
            low, high = quantiles(seen.intervals[role], (0.25, 0.75))
            middle = f"the middle half of {many} are {span(low)} to {span(high)} long"
            facts.append(f"{who} makes contact again after {span(median)} in the median; {middle}")
    if seen.unanswered and seen.unanswered < seen.opened:
        facts.append(f"{counted(seen.unanswered, 'connection')} got no answer")
    if verdict == CRITICAL and seen.by_node and budget.seconds >= LONG_S:
        waits = f"they bear its absence for {span(budget.seconds)}"
        facts.append(f"time-critical because nodes open it and expect an answer; {waits}, which is another matter")
    if seen.signature and not seen.signature.verdict and seen.critical != (verdict == CRITICAL):
        facts.append(
            f"the catalogue takes it for {CRITICAL if seen.critical else DEFERRABLE}: what was seen stands against it"
        )
    return tuple(facts)
