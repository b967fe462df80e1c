"""Who opens connections to whom: the traffic between machines, in at most 50 rows for the nodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from ipaddress import ip_address

from analysis.addresses import UNSPECIFIED
from analysis.context import CaptureContext
from analysis.model import Matrix, Party, Talk
from analysis.observed import Observation, Role

MAX_NODES = 50
"""Nodes that have a row each; more are in blocks of adjacent addresses."""
OTHERS = {
    Role.SMS: Party("the management node", "sms"),
    Role.SERVER: Party("other servers", "server"),
    Role.NODE: Party("machines that are not nodes", "other"),
    Role.OUTSIDE: Party("outside", "outside"),
    Role.GROUP: Party("multicast and broadcast", "group"),
    Role.UNKNOWN: Party("unknown addresses", "other"),
}
"""What is not a node; the first two are above the nodes, the others below."""
NAMELESS = Party("nodes without an address", "node")

_Row = int | Party
"""A row of nodes by its number, or one of the others."""


def make_matrix(observation: Observation, roles: bytes, context: CaptureContext) -> Matrix:
    """Return the matrix of a capture; scans are not in it."""
    nodes, row_of = _place_nodes(observation, context)
    others: dict[Party, set[int]] = defaultdict(set)
    sums: dict[tuple[_Row, _Row], list[int]] = defaultdict(lambda: [0, 0])

    def find_row(index: int) -> _Row:
        if index in row_of:
            return row_of[index]
        nameless = roles[index] == Role.NODE and observation.hosts[index].address in UNSPECIFIED
        other = NAMELESS if nameless else OTHERS[Role(roles[index])]
        others[other].add(index)
        return other

    for client, server, _, _, packets, octets in observation.links:
        entry = sums[find_row(client), find_row(server)]
        entry[0] += packets
        entry[1] += octets
    above, below = list(OTHERS.values())[:2], [NAMELESS, *list(OTHERS.values())[2:]]
    rows: list[_Row] = [
        *(party for party in above if party in others),
        *range(len(nodes)),
        *(party for party in below if party in others),
    ]
    number = {row: place for place, row in enumerate(rows)}
    parties = [nodes[row] if isinstance(row, int) else replace(row, machines=len(others[row])) for row in rows]
    talks = sorted(Talk(number[client], number[server], *entry) for (client, server), entry in sums.items())
    return Matrix(tuple(parties), tuple(talks))


def _place_nodes(observation: Observation, context: CaptureContext) -> tuple[list[Party], dict[int, int]]:
    """Return the rows of the nodes, in the order of their addresses, and the row of each of their hosts."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for index, machine in context.machine.items():
        if machine not in context.hardware:
            hosts[machine].append(index)
    first = {
        machine: min(_order(observation.hosts[index].address) for index in indexes)
        for machine, indexes in hosts.items()
    }
    order = sorted(hosts, key=lambda machine: (first[machine], machine))
    size = -(-len(order) // MAX_NODES) or 1
    parties: list[Party] = []
    row_of: dict[int, int] = {}
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        row_of.update({index: len(parties) for machine in block for index in hosts[machine]})
        ends = [first[machine][2] or machine for machine in (block[0], block[-1])]
        parties.append(Party(" to ".join(dict.fromkeys(ends)), "node", len(block)))
    return parties, row_of


def _order(address: str) -> tuple[int, int, str]:
    """Sort by IPv4, then IPv6; without an address last."""
    if not address:
        return 9, 0, ""
    parsed = ip_address(address)
    return parsed.version, int(parsed), address
