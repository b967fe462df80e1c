"""What one should know before believing a classification, as sentences: the gravest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.addresses import is_link_local, is_local, network
from analysis.model import Service
from analysis.observed import Observation, Role, Row
from analysis.protocols import DHCP_PORTS
from analysis.roles import Roles
from analysis.scene import Scene
from analysis.signatures import UDP
from analysis.told import Told
from analysis.units import counted, listed, number, share, span

GAP = 0.05
"""A share of the time that may be missing without a word."""
WHOLE = 400
"""Bytes of a packet that all that is read of it takes: DHCP's options are the longest."""
FIRST_BYTES = 98
"""Bytes of a packet that its first 32 of TCP's payload take at least, with usual headers (14 + 20 + 32)."""
FEW = 2
"""Nodes that a cluster has at least."""
REASONS = 3
ODD_TIME = "time far from its neighbours'"
"""What the core calls a packet that it read and gave another time."""


def make_remarks(
    observation: Observation,
    roles: Roles,
    scene: Scene,
    told: Told,
    services: Sequence[Service],
    renewed_s: float | None = None,
) -> tuple[str, ...]:
    """The sentences; none for a capture that is whole, long, and plainly a cluster's.

    Args:
        renewed_s: after so many seconds the first node that is up loses its lease of DHCP; None where none renews.
    """
    return (
        *_damage(observation),
        *observation.remarks,
        *roles.remarks,
        *_stranger(roles, scene),
        *_gaps(observation),
        *_cut(observation, scene, told),
        *_renewals(renewed_s),
    )


def _damage(observation: Observation) -> Iterator[str]:
    """What could not be read. A damaged record may hide many others."""
    skipped = {reason: count for reason, count in observation.skipped.items() if reason != ODD_TIME}
    if lost := sum(skipped.values()):
        kinds = sorted(skipped.items(), key=lambda one: (-one[1], one[0]))
        reasons = ", ".join(f"{number(count)} {reason}" for reason, count in kinds[:REASONS])
        part = share(lost / (lost + observation.packets))
        yield f"{counted(lost, 'record')} ({part}) damaged or lost, and maybe what stood between: {reasons}"
    if observation.truncated:
        yield "a file ends in the middle of a packet: what came after that is missing"
    if beyond := observation.beyond[0]:
        part = share(beyond / max(observation.packets, 1))
        yield f"there was no room for the addresses of {counted(beyond, 'packet')} ({part}): no verdict has them"
    if odd := observation.skipped.get(ODD_TIME, 0):
        yield f"{counted(odd, 'packet')} have impossible times: those before them stand instead"


def _gaps(observation: Observation) -> Iterator[str]:
    """Files of a set that are not there."""
    gap_s, all_s = observation.gap_s, observation.duration_s
    if gap_s > GAP * all_s:
        yield (
            f"no file covers {span(gap_s)} ({share(gap_s / all_s)}) of the {span(all_s)} from the first packet to the "
            f"last: all rests on the other {span(observation.covered_s)}"
        )


def _stranger(roles: Roles, scene: Scene) -> Iterator[str]:
    """What makes one doubt that this is a cluster at all."""
    if scene.nodes < FEW and not roles.node:
        yield (
            f"only {counted(scene.nodes, 'machine')} could be a compute node: does the capture show a cluster's own "
            "network? Verdicts rest on that alone"
        )
    own = next((one for one in roles.sms.addresses if not is_link_local(one)), "")
    apart = sum(not is_local(one) and network(one) != network(own) for one in scene.addresses)
    if own and not is_local(own) and 2 * apart > len(scene.addresses):
        yield (
            f"{own} and most of those that talk to it have public addresses of different networks: this looks like a "
            "server of the internet rather than a cluster's management node"
        )


def _cut(observation: Observation, scene: Scene, told: Told) -> Iterator[str]:
    """What packets that are cut do not tell."""
    if not observation.cut or observation.cut_at >= WHOLE:
        if scene.hidden:
            yield "nodes ask for addresses by DHCP, and yet no boot could be made out: boots are not told from the rest"
        return
    asked = any(_of_dhcp(row) for row in observation.rows)
    lost = [
        *(["when nodes booted"] if scene.hidden else []),
        *(["how long leases of DHCP last"] if asked and not told.leases and not told.endless else []),
        *(["which service some connections are to"] if observation.cut_at < FIRST_BYTES else []),
    ]
    if lost:
        hidden = listed(lost)
        cut = f"{counted(observation.cut, 'packet')} are cut at {observation.cut_at} bytes"
        yield f"{cut}, which hides {hidden}: capture with tcpdump -s {WHOLE}"


def _of_dhcp(row: Row) -> bool:
    return (row.protocol, row.port, row.client) == (UDP, DHCP_PORTS[0], Role.NODE)


def _renewals(renewed_s: float | None) -> Iterator[str]:
    """Nodes that are up and lose their address when DHCP is away for long."""
    if renewed_s is not None:
        yield f"nodes that are up renew leases: provisioning (DHCP) cannot be off for longer than {span(renewed_s)}"
