"""What a capture could have shown: the absence of a service means something only in a capture of all traffic in use."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.context import CaptureContext
from analysis.host_index import NO_MAC
from analysis.observed import SCANNED, Observation, Role, Row
from analysis.protocols import DHCP_PORTS
from analysis.services import PROTOCOL_NAMES, TRANSPORTS, port_name
from analysis.signatures import TCP, UDP
from analysis.units import listed, number, span

IDLE_EVERY_S = 600.0
"""Seconds between two contacts of a node, of all services together, above which a network is idle. A node that has a
clock and a log makes more: chronyd polls every 64 to 1,024 s (chrony.conf(5), minpoll and maxpoll)."""

FEW_PORTS = 3
"""Ports that a filter names: nodes of a cluster use more, for jobs, files, time, names and logs."""


def find_limit(observation: Observation, context: CaptureContext, *, one_node: bool = False) -> str:
    """Return why the capture cannot show that a service is not used; "" if it can.

    Args:
        one_node: whether the capture is restricted to one node, which leaves other packets out.
    """
    rows = [row for row in observation.rows if row.protocol in TRANSPORTS and row.kind != SCANNED]
    return next(_limits(observation, context, rows, one_node), "")


def _limits(observation: Observation, context: CaptureContext, rows: list[Row], one_node: bool) -> Iterator[str]:
    lasted = span(context.duration_s)
    places = {(row.protocol, row.port) for row in rows}
    used = f"all of its traffic is {listed(sorted(map(port_name, places)))}, as if it was filtered"
    if len(places) == 1:
        yield used
    if not one_node and _has_links(observation) and not _has_neighbours(observation):
        yield f"no ARP nor neighbour discovery in {lasted}, as if it was filtered"
    protocols = {protocol for protocol, _ in places}
    if rows and not protocols >= {TCP, UDP}:
        names = " and ".join(PROTOCOL_NAMES[one].upper() for one in sorted(protocols))
        yield f"only {names} in {lasted}, as if it was filtered"
    contacts = sum(map(_contacts, rows))
    if contacts * IDLE_EVERY_S < context.nodes * context.duration_s:
        yield f"its nodes contacted services {number(contacts)} times in {lasted}: they are idle"
    if 1 < len(places) <= FEW_PORTS:
        yield used


def _has_links(observation: Observation) -> bool:
    """Return whether the capture has link addresses: without them there is no ARP."""
    return any(mac != NO_MAC for host in observation.hosts for mac in host.macs)


def _has_neighbours(observation: Observation) -> bool:
    return "ARP" in observation.other or any(host.claimed for host in observation.hosts)


def _contacts(row: Row) -> int:
    """Return how often nodes used a service; addresses and discovery are in idle networks, too."""
    if row.client != Role.NODE or row.server in (Role.NODE, Role.UNKNOWN):
        return 0
    if row.server == Role.GROUP and (row.protocol, row.port) in _IN_ANY_NETWORK:
        return 0
    return max(row.opened, row.contacts_boot + row.contacts_steady)


_IN_ANY_NETWORK = {(UDP, port) for port in (*DHCP_PORTS, 137, 138, 546, 547, 1900, 3702, 5353, 5355)}
"""Addresses, and discovery by multicast or broadcast."""
