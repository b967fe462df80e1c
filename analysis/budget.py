"""How long a service can be away before nodes notice: by what the capture shows, else by the catalogue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from analysis.observed import Role
from analysis.protocols import DHCP_PORTS, NTP_PORT, SLURM_PORTS
from analysis.protocols.ntp import REACH
from analysis.protocols.slurm import PING
from analysis.scene import EXPECTED, UNKNOWN_EVERY_S, Scene
from analysis.services import REGULAR, Seen
from analysis.signatures import TCP, UDP
from analysis.told import Told
from analysis.units import counted, span

Source = Literal["observed", "catalogue", "protocol"]

SYN_RETRIES_S = 127.0
"""A connection that nobody answers is tried for so long (tcp_syn_retries = 6, Linux, ip-sysctl)."""
RETRIES_S = 924.0
"""An open connection resends for so long, 924.6 s, until it is given up (tcp_retries2 = 15, Linux, ip-sysctl)."""
UNASKED_S = 86400.0
"""Budget of a service that nodes never ask for and the catalogue does not know."""
PING_SHARE = 3
"""slurmctld pings each node every third of SlurmdTimeout (src/slurmctld/controller.c)."""
SYSLOG_UDP = {(UDP, 514), (UDP, 6514)}
SYSLOG_TCP = {(TCP, 514), (TCP, 601), (TCP, 6514), (TCP, 2514), (TCP, 20514)}


@dataclass(frozen=True)
class Budget:
    """Seconds, how they were reckoned, and what that rests on. ``renewals``: leases that nodes renew limit it."""

    seconds: float
    why: str
    source: Source = "catalogue"
    renewals: bool = False


def find_budget(seen: Seen, told: Told, scene: Scene) -> Budget:
    """The outage budget of a service. Never infinite, never negative."""
    places = set(seen.places)
    found = None
    if (UDP, DHCP_PORTS[0]) in places:
        found = _dhcp(seen, told, scene)
    elif (UDP, NTP_PORT) in places:
        found = _ntp(seen, told)
    elif places & {(TCP, port) for port in SLURM_PORTS}:
        found = _slurm(seen, told)
    elif places & (SYSLOG_UDP | SYSLOG_TCP) and (seen.signature is None or _is_syslog(seen)):
        found = _syslog(places)
    return found or (_catalogues(seen) if seen.signature else _unknown(seen, scene))


def _catalogues(seen: Seen) -> Budget:
    """The catalogue's number, which for DHCP without one is a day."""
    if seen.signature is None:
        return Budget(UNASKED_S, "only a node that boots notices", "protocol")
    return Budget(max(seen.signature.budget_s, 0.0), seen.signature.budget_why)


def _dhcp(seen: Seen, told: Told, scene: Scene) -> Budget:
    """A node that is just about to renew, at T1, loses its address when the lease ends (RFC 2131, section 4.4.5)."""
    own = _catalogues(seen)
    leases = [(one.lease_s - min(one.renew_s, one.lease_s), one) for one in told.leases]
    if not leases:
        endless = replace(own, why=f"{own.why}; leases never end")
        return endless if told.endless else _lease_unknown(seen, told, scene, own)
    left_s, shortest = min(leases, key=lambda one: one[0])
    terms = f"a lease lasts {span(shortest.lease_s)} and is renewed after {span(shortest.renew_s)}"
    if told.renewals or _renewals(seen, told):
        why = f"{terms}: who is about to renew keeps its address for {span(left_s)} more"
        return Budget(left_s, why, "observed", renewals=True)
    sure = told.requests_read or not told.relayed
    if sure and scene.settled and scene.steady_s >= 2 * shortest.renew_s * max(scene.nodes, 1):
        return replace(own, why=f"{own.why}; {terms}, but no node that was up did so: they keep what they got at boot")
    why = f"{terms}; nobody was seen to renew, but the capture is too short to tell"
    return Budget(left_s, why, "observed") if left_s < own.seconds else replace(own, why=why)


def _renewals(seen: Seen, told: Told) -> int:
    """How often nodes that are up asked the server itself, not everybody, by the counts.

    A relay does so too; and where all packets were read, they tell who renewed.
    """
    if told.relayed or told.requests_read:
        return 0
    return sum(
        row.contacts_steady
        for row in seen.rows
        if (row.protocol, row.port, row.client, row.server) == (UDP, DHCP_PORTS[0], Role.NODE, Role.SMS)
    )


def _lease_unknown(seen: Seen, told: Told, scene: Scene, own: Budget) -> Budget:
    """No answer told the lease: no longer than what was seen vouches for.

    Who renews does so at T1, after half the lease unless the server says otherwise, so that as much is left then.
    """
    cut = f"packets are cut at {told.cut_at} bytes" if told.cut_at else "no answer that names it was captured"
    if renewals := max(told.renewals, _renewals(seen, told)):
        every_s = scene.steady_s / renewals
        why = f"how long a lease lasts is not known ({cut}), but nodes that are up ask anew every {span(every_s)}, and "
        why += "have about as long left then"
        return Budget(min(every_s, own.seconds), why, "observed", renewals=True)
    unknown = f"how long a lease lasts is not known ({cut})"
    if scene.longest_s >= own.seconds:
        return replace(own, why=f"{own.why}; {unknown}")
    why = f"{unknown}; a node that was up went {span(scene.longest_s)} without renewing, so that a lease lasts longer"
    return Budget(scene.longest_s, f"{why}; the catalogue says at most {span(own.seconds)}: {own.why}", "observed")


def _ntp(seen: Seen, told: Told) -> Budget | None:
    polls = told.polls
    if not polls:
        own = _catalogues(seen) if seen.signature else None
        median, _ = seen.regular(Role.NODE)
        if not told.cut_at or not own or not 0 < REACH * median < own.seconds:
            return None
        why = f"nodes ask every {span(median)}, which packets cut at {told.cut_at} bytes do not tell themselves"
        return Budget(
            REACH * median, f"{why}, and give a server up after {REACH} polls (RFC 5905, section 9.2)", "observed"
        )
    least, most = min(polls), max(polls)
    often = f"every {least:g} s" if least == most else f"every {least:g} s to {most:g} s"
    return Budget(
        REACH * least,
        f"nodes ask {often}, as their packets say, and give a server up after {REACH} polls without an answer "
        "(RFC 5905, section 9.2); their clocks run on for long after that",
        "observed",
    )


def _slurm(seen: Seen, told: Told) -> Budget | None:
    """SlurmdTimeout, by the pings; where messages are cut, regular contacts are taken for them if that is less."""
    pings = sum(one.type == PING for one in told.slurm)
    median, range_s = seen.regular(Role.SMS)
    timeout_s = PING_SHARE * median
    if not 10 <= timeout_s <= 65533 or range_s > REGULAR * median:
        return None
    unread = not told.slurm and told.cut_at and seen.signature and timeout_s < seen.signature.budget_s
    if not pings and not unread:
        return None
    own = f"; {seen.signature.budget_why}" if seen.signature and seen.signature.budget_why else ""
    return Budget(
        round(timeout_s, 1),
        f"the controller pings a node every {median:.3g} s, a third of SlurmdTimeout, so that is {timeout_s:.0f} s "
        f"(slurm.conf(5)){own}",
        "observed",
    )


def _is_syslog(seen: Seen) -> bool:
    return bool(seen.signature and set(seen.signature.ports) & SYSLOG_UDP)


def _syslog(places: set[tuple[int, int]]) -> Budget:
    if places & SYSLOG_UDP:
        return Budget(0.0, "syslog over UDP is lost at once, and the sender does not know (RFC 5426)", "protocol")
    return Budget(
        RETRIES_S,
        f"all senders use TCP: it resends for {span(RETRIES_S)} (tcp_retries2, ip-sysctl), and senders with a queue "
        "keep their lines for longer",
        "protocol",
    )


def _unknown(seen: Seen, scene: Scene) -> Budget:
    """For a service that nobody knows: until somebody asks, and as long as the network keeps trying."""
    if not seen.by_node and not (seen.midstream and not seen.by_sms):
        return Budget(UNASKED_S, "nodes do not ask for it: only who works on the management node notices", "observed")
    if not seen.steady and seen.boot and scene.longest_s >= EXPECTED * UNKNOWN_EVERY_S:
        return Budget(UNASKED_S, "only a node that boots notices", "observed")
    clients = max(len(seen.clients), seen.most_clients, 1)
    median, _ = seen.regular(Role.NODE)
    turn_s = median / clients
    often = f"one of {counted(clients, 'node')} asks every {span(turn_s)}" if turn_s else "when somebody asks next"
    if any(protocol == UDP for protocol, _ in seen.places):
        return Budget(turn_s, f"{often}, and over UDP nothing tries again by itself", "observed")
    if seen.midstream > seen.opened:
        return Budget(
            RETRIES_S,
            f"connections stay open, and TCP resends for {span(RETRIES_S)} (tcp_retries2, ip-sysctl)",
            "protocol",
        )
    return Budget(
        turn_s + SYN_RETRIES_S,
        f"{often}, and TCP tries to connect for {SYN_RETRIES_S:.0f} s (tcp_syn_retries, ip-sysctl); the program itself "
        "may give up sooner",
        "observed",
    )
