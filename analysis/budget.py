"""Outage budgets: how long a service may be down before nodes notice, from the capture, else from the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from analysis.context import EXPECTED, UNKNOWN_EVERY_S, CaptureContext
from analysis.observed import Role
from analysis.protocols import DHCP_PORTS, NTP_PORT, SLURM_PORTS
from analysis.protocols.ntp import REACH
from analysis.protocols.slurm import PING
from analysis.samples import DecodedSamples
from analysis.services import REGULAR, ServiceCounts
from analysis.signatures import TCP, UDP
from analysis.units import counted, span

Source = Literal["observed", "catalogue", "protocol"]

SYN_RETRIES_S = 127.0
"""TCP retries an unanswered connection for this long (tcp_syn_retries = 6, Linux, ip-sysctl)."""
RETRIES_S = 924.0
"""TCP retransmits on an open connection for this long, 924.6 s (tcp_retries2 = 15, Linux, ip-sysctl)."""
UNUSED_S = 86400.0
"""Budget of a service that nodes never use and the catalogue does not know."""
PING_SHARE = 3
"""slurmctld pings each node every third of SlurmdTimeout (src/slurmctld/controller.c)."""
SYSLOG_UDP = {(UDP, 514), (UDP, 6514)}
SYSLOG_TCP = {(TCP, 514), (TCP, 601), (TCP, 6514), (TCP, 2514), (TCP, 20514)}


@dataclass(frozen=True)
class Budget:
    """A tolerated outage in seconds, its reason and its source.

    Attributes:
        renewals: lease renewals of nodes limit it.
        undecided: systems of nodes have leases, but the capture is too short to show whether they renew them.
    """

    seconds: float
    why: str
    source: Source = "catalogue"
    renewals: bool = False
    undecided: bool = False


def find_budget(counts: ServiceCounts, decoded: DecodedSamples, context: CaptureContext) -> Budget:
    """Return the outage budget of a service; always finite and not negative."""
    # Routed traffic uses the ports of other services, of which it is none.
    places = set() if counts.routed else set(counts.places)
    found = None
    if (UDP, DHCP_PORTS[0]) in places:
        found = _dhcp(counts, decoded, context)
    elif (UDP, NTP_PORT) in places:
        found = _ntp(counts, decoded)
    elif places & {(TCP, port) for port in SLURM_PORTS}:
        found = _slurm(counts, decoded)
    elif places & (SYSLOG_UDP | SYSLOG_TCP) and (counts.signature is None or _is_syslog(counts)):
        found = _syslog(places)
    return found or (_from_catalogue(counts) if counts.signature else _unknown(counts, context))


def _from_catalogue(counts: ServiceCounts) -> Budget:
    """Return the catalogue's budget; for DHCP without an entry, a day."""
    if counts.signature is None:
        return Budget(UNUSED_S, "only a node that boots notices", "protocol")
    return Budget(max(counts.signature.budget_s, 0.0), counts.signature.budget_why)


def _dhcp(counts: ServiceCounts, decoded: DecodedSamples, context: CaptureContext) -> Budget:
    """A node that is about to renew at T1 loses its address when the lease expires (RFC 2131, section 4.4.5)."""
    default = _from_catalogue(counts)
    # Nobody renews what firmware got: the system that it started has an address of its own.
    leases = [(one.lease_s - min(one.renew_s, one.lease_s), one) for one in decoded.system_leases or decoded.leases]
    if not leases:
        endless = replace(default, why=f"{default.why}; leases never expire")
        return endless if decoded.endless else _lease_unknown(counts, decoded, context, default)
    left_s, shortest = min(leases, key=lambda one: one[0])
    terms = f"a lease lasts {span(shortest.lease_s)} and is renewed after {span(shortest.renew_s)}"
    if decoded.renewals or _renewals(counts, decoded):
        why = f"{terms}: a node that is about to renew keeps its address for {span(left_s)} more"
        return Budget(left_s, why, "observed", renewals=True)
    complete = decoded.requests_read or not decoded.relayed
    if complete and context.settled and context.steady_s >= 2 * shortest.renew_s * max(context.nodes, 1):
        return replace(
            default, why=f"{default.why}; {terms}, but no running node did so: nodes keep the address from their boot"
        )
    why = f"{terms}; no renewal was seen, but the capture is too short to decide"
    undecided = bool(decoded.system_leases)
    if left_s < default.seconds:
        return Budget(left_s, why, "observed", undecided=undecided)
    return replace(default, why=why)


def _renewals(counts: ServiceCounts, decoded: DecodedSamples) -> int:
    """Count unicast requests of running nodes to the server.

    0 with a relay, whose requests are unicast as well, and if all requests were decoded, which shows the renewals.
    """
    if decoded.relayed or decoded.requests_read:
        return 0
    return sum(
        row.contacts_steady
        for row in counts.rows
        if (row.protocol, row.port, row.client, row.server) == (UDP, DHCP_PORTS[0], Role.NODE, Role.SMS)
    )


def _lease_unknown(counts: ServiceCounts, decoded: DecodedSamples, context: CaptureContext, default: Budget) -> Budget:
    """Budget if no answer shows the lease time: the longest time without a renewal that was seen.

    Nodes renew at T1, by default after half the lease, so that the same time is left then.
    """
    cut = f"packets are cut at {decoded.cut_at} bytes" if decoded.cut_at else "no answer with it was captured"
    if renewals := max(decoded.renewals, _renewals(counts, decoded)):
        every_s = context.steady_s / renewals
        why = f"the lease time is unknown ({cut}), but running nodes renew every {span(every_s)}, and "
        why += "have about the same time left then"
        return Budget(min(every_s, default.seconds), why, "observed", renewals=True)
    unknown = f"the lease time is unknown ({cut})"
    if context.longest_s >= default.seconds:
        return replace(default, why=f"{default.why}; {unknown}")
    why = f"{unknown}; a running node did not renew for {span(context.longest_s)}, so that a lease lasts longer"
    return Budget(
        context.longest_s, f"{why}; the catalogue says at most {span(default.seconds)}: {default.why}", "observed"
    )


def _ntp(counts: ServiceCounts, decoded: DecodedSamples) -> Budget | None:
    polls = decoded.polls
    if not polls:
        default = _from_catalogue(counts) if counts.signature else None
        median, _ = counts.regular(Role.NODE)
        if not decoded.cut_at or not default or not 0 < REACH * median < default.seconds:
            return None
        why = f"nodes poll every {span(median)} by their packet times (packets are cut at {decoded.cut_at} bytes)"
        return Budget(
            REACH * median,
            f"{why}, and mark a server unreachable after {REACH} polls (RFC 5905, section 9.2)",
            "observed",
        )
    least, most = min(polls), max(polls)
    often = f"every {least:g} s" if least == most else f"every {least:g} s to {most:g} s"
    return Budget(
        REACH * least,
        f"nodes poll {often} (poll field) and mark a server unreachable after {REACH} unanswered polls "
        "(RFC 5905, section 9.2); their clocks stay accurate for much longer",
        "observed",
    )


def _slurm(counts: ServiceCounts, decoded: DecodedSamples) -> Budget | None:
    """Derive SlurmdTimeout from the pings; if messages are cut, from regular contacts, if that is shorter."""
    pings = sum(one.type == PING for one in decoded.slurm)
    median, range_s = counts.regular(Role.SMS)
    timeout_s = PING_SHARE * median
    if not 10 <= timeout_s <= 65533 or range_s > REGULAR * median:
        return None
    unread = not decoded.slurm and decoded.cut_at and counts.signature and timeout_s < counts.signature.budget_s
    if not pings and not unread:
        return None
    default = f"; {counts.signature.budget_why}" if counts.signature and counts.signature.budget_why else ""
    return Budget(
        round(timeout_s, 1),
        f"the controller pings a node every {median:.3g} s, a third of SlurmdTimeout, which is {timeout_s:.0f} s "
        f"(slurm.conf(5)){default}",
        "observed",
    )


def _is_syslog(counts: ServiceCounts) -> bool:
    return bool(counts.signature and set(counts.signature.ports) & SYSLOG_UDP)


def _syslog(places: set[tuple[int, int]]) -> Budget:
    if places & SYSLOG_UDP:
        return Budget(0.0, "syslog over UDP is lost immediately and unnoticed (RFC 5426)", "protocol")
    return Budget(
        RETRIES_S,
        f"all senders use TCP, which retransmits for {span(RETRIES_S)} (tcp_retries2, ip-sysctl); senders with a queue "
        "keep messages for longer",
        "protocol",
    )


def _unknown(counts: ServiceCounts, context: CaptureContext) -> Budget:
    """Budget of an unknown service: until the next use, plus the time that TCP retries."""
    if not counts.by_node and not (counts.midstream and not counts.by_sms):
        return Budget(UNUSED_S, "nodes do not use it: only users of the management node notice", "observed")
    if not counts.steady and counts.boot and context.longest_s >= EXPECTED * UNKNOWN_EVERY_S:
        return Budget(UNUSED_S, "only a node that boots notices", "observed")
    clients = max(len(counts.clients), counts.most_clients, 1)
    median, _ = counts.regular(Role.NODE)
    turn_s = median / clients
    often = (
        f"one of {counted(max(counts.users, 1), 'node')} uses it every {span(turn_s)}"
        if turn_s
        else "until the next use"
    )
    if any(protocol == UDP for protocol, _ in counts.places):
        return Budget(turn_s, f"{often}, and UDP does not retry", "observed")
    if counts.midstream > counts.opened:
        return Budget(
            RETRIES_S,
            f"connections stay open, and TCP retransmits for {span(RETRIES_S)} (tcp_retries2, ip-sysctl)",
            "protocol",
        )
    return Budget(
        turn_s + SYN_RETRIES_S,
        f"{often}, and TCP tries to connect for {SYN_RETRIES_S:.0f} s (tcp_syn_retries, ip-sysctl); the program may "
        "give up sooner",
        "observed",
    )
