"""Whether a capture looks like that of a cluster: other networks have services that nodes would need, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from analysis.cluster import BOOTS, DHCP_SERVERS, SCHEDULERS, STORAGE, Places
from analysis.context import CaptureContext
from analysis.observed import SCANNED, Observation, Role, Row, Sample
from analysis.role_assigner import COMMON_PORTS, Roles
from analysis.services import ServiceCounts
from analysis.signatures import TCP, UDP
from analysis.units import counted

FEW_NODES = 3
"""Machines that behave like nodes, of which a cluster has at least as many."""
OF_A_NODE = 2
"""Critical services that a machine uses if it behaves like a node; names, mail and web pages are not counted."""
MANY = 100
"""Packets of TCP that are not all in one direction by chance."""
CLUSTER_PLACES: Places = SCHEDULERS | BOOTS | STORAGE
ADDRESSES: Places = DHCP_SERVERS | {(UDP, 68), (UDP, 546)}
BOOT_CLIENTS = (b"PXEClient", b"HTTPClient")
"""Vendor classes of firmware that boots from the network (PXE 2.1, 2.2.1; UEFI 2.10, 24.7.3)."""
INSIDE = (Role.NODE, Role.SMS, Role.SERVER)


def find_doubt(
    observation: Observation, roles: Roles, services: Iterable[ServiceCounts], context: CaptureContext
) -> str:
    """Return why the capture does not look like that of a cluster; "" if it does, or if --node names a compute node.

    A cluster has a scheduler, a file system or boots over the network, or FEW_NODES machines that behave like nodes.
    """
    if roles.node or _has_cluster_traffic(observation, services):
        return ""
    nodes = _count_nodes(observation, roles, services, context)
    if nodes >= FEW_NODES:
        return ""
    few = f"only {counted(nodes, 'machine')}" if nodes else "no machine"
    behave = "behave" if nodes > 1 else "behaves"
    return f"no scheduler, file system or boot over the network is in it, and {few} {behave} like a compute node"


def _has_cluster_traffic(observation: Observation, services: Iterable[ServiceCounts]) -> bool:
    # Where TCP has packets of one direction alone, as with a filter on SYN, that nothing is answered shows nothing.
    tcp = [row.packets for row in observation.rows if row.protocol == TCP and row.kind != SCANNED]
    replies = any(map(all, tcp)) or sum(map(sum, tcp)) < MANY
    return (
        any((row.protocol, row.port) in CLUSTER_PLACES and _is_used(row, replies) for row in observation.rows)
        or any(_is_of_cluster(one, replies) for one in services)
        or any(map(_is_boot, observation.samples))
    )


def _is_used(row: Row, replies: bool) -> bool:
    """Return whether machines of the network use it, and it answers; ``replies``: whether an answer would be seen."""
    if row.kind == SCANNED or row.client not in INSIDE or row.server not in INSIDE:
        return False
    if row.protocol == TCP and not replies:
        return True
    return row.packets[1] > 0 and (row.protocol == UDP or row.midstream > 0 or row.unanswered < row.opened)


def _is_of_cluster(counts: ServiceCounts, replies: bool) -> bool:
    """Return whether its first bytes are those of a scheduler or file system, or it serves booting nodes with files."""
    signature = counts.signature
    if signature is None or counts.routed:
        return False
    if signature.boot or signature.poll:
        return any(place not in ADDRESSES for place in counts.places)
    return bool(CLUSTER_PLACES & set(signature.ports)) and any(_is_used(row, replies) for row in counts.rows)


def _is_boot(sample: Sample) -> bool:
    """Return whether firmware requests an address (option 60 of DHCP)."""
    return (sample.protocol, sample.port) in ADDRESSES and any(name in sample.payload for name in BOOT_CLIENTS)


def _count_nodes(
    observation: Observation, roles: Roles, services: Iterable[ServiceCounts], context: CaptureContext
) -> int:
    """Count the machines that use OF_A_NODE critical services or more, and those that --nodes names."""
    used: dict[str, set[str]] = defaultdict(set)
    for counts in services:
        if counts.critical and not counts.routed:
            for row in counts.rows:
                if row.client == Role.NODE and (row.protocol, row.port) not in COMMON_PORTS:
                    for index in row.client_indexes:
                        used[context.machine.get(index, "")].add(counts.name)
    found = {name for name, names in used.items() if name and len(names) >= OF_A_NODE}
    found |= {context.machine[index] for index in roles.given if index in context.machine}
    return len(found - context.hardware)
