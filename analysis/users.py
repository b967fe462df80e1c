"""Count the machines that use a service, as the nodes of the capture are counted: one with two addresses is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from analysis.addresses import UNSPECIFIED
from analysis.context import CaptureContext
from analysis.observed import Host, Link, Observation, Role
from analysis.services import Place, ServiceCounts

Reached = dict[tuple[Role, Place], set[str]]
"""Machines by the role of the client and the place of the service."""


def count_users(
    services: Iterable[ServiceCounts], observation: Observation, roles: bytes, context: CaptureContext
) -> None:
    """Set ``users`` and ``reached`` of all services: never more than the capture has nodes."""
    reached = _find_reached(observation.links, roles, context)
    for counts in services:
        counts.users = min(_count_users(counts, observation.hosts, context), context.nodes)
        opener = Role.OUTSIDE if counts.routed else Role.SMS
        there = set[str]().union(*(reached.get((opener, place), ()) for place in counts.places))
        counts.reached = min(_count(there, context) or counts.most_servers, context.nodes)


def _count_users(counts: ServiceCounts, hosts: tuple[Host, ...], context: CaptureContext) -> int:
    # DHCP clients have no address yet and are counted by their boots.
    nameless = any(index < len(hosts) and hosts[index].address in UNSPECIFIED for index in counts.clients)
    found = _count({context.machine[index] for index in counts.clients if index in context.machine}, context)
    # The core lists the first 4096 clients of a row.
    listed = len(counts.clients) >= counts.most_clients
    return max(
        found, 0 if listed else counts.most_clients, context.booted_nodes if nameless else 0, bool(counts.clients)
    )


def _count(machines: Collection[str], context: CaptureContext) -> int:
    """Count nodes; hardware only if it is alone."""
    return len(set(machines) - context.hardware) or len(machines)


def _find_reached(links: Iterable[Link], roles: bytes, context: CaptureContext) -> Reached:
    found: Reached = defaultdict(set)
    for client, server, protocol, port, _, _ in links:
        if roles[client] in (Role.SMS, Role.OUTSIDE) and (name := context.machine.get(server)):
            found[Role(roles[client]), (protocol, port)].add(name)
    return found
