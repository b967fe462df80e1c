"""Find the machines that serve the management node: filers, name servers. They are not compute nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from analysis.addresses import UNSPECIFIED
from analysis.nodes import IPMI
from analysis.observed import Host, Link, Role
from analysis.role_assigner import COMMON_PORTS, Roles
from analysis.signatures import TCP, UDP, Signature

UPSTREAM_PORTS = {
    *COMMON_PORTS,
    *((UDP, port) for port in (88, 123, 389, 514)),
    *((TCP, port) for port in (88, 389, 514, 601, 636, 6514)),
}
"""Ports of a management node that servers use, too: names, time, logs, accounts, mail."""
MAX_SHARE = 0.5
"""Maximum share of the machines that serve; more are nodes with a daemon that the management node queries."""


def find_servers(roles: Roles, hosts: Sequence[Host], links: Sequence[Link], signatures: Sequence[Signature]) -> Roles:
    """Return the roles with those machines as servers that the management node is a client of.

    It uses a service there that the catalogue does not let it open to nodes. They are nodes all the same if they use
    services that only nodes use, or run a daemon of nodes, such as slurmd; so is hardware that it manages by IPMI. No
    machine becomes a server if more than MAX_SHARE of all would, and none that ``--nodes`` names.
    """
    place = {each: one for one in reversed(signatures) if not one.routed for each in one.ports}
    by_index, machine = roles.by_index, roles.machine
    served: dict[str, set[str]] = defaultdict(set)
    used: dict[str, set[tuple[int, int]]] = defaultdict(set)
    nodes = set[str]()
    for client, server, protocol, port, _, _ in links:
        signature, at = place.get((protocol, port)), (protocol, port)
        if (by_index[client], by_index[server]) == (Role.SMS, Role.NODE):
            if at in IPMI or (signature and signature.critical and signature.sms_opens):
                nodes.add(machine[server])
            elif signature and not signature.sms_opens and hosts[server].sent:
                served[machine[server]].add(signature.name)
        elif (by_index[client], by_index[server]) == (Role.NODE, Role.SMS) and port and at not in UPSTREAM_PORTS:
            used[machine[client]].add(at)
    own = [
        index for index, role in enumerate(by_index) if role == Role.NODE and hosts[index].address not in UNSPECIFIED
    ]
    # A server also calls back: statd and lockd of a filer, for instance.
    nodes |= {name for name, ports in used.items() if any(_names(place, at) - served[name] for at in ports)}
    nodes |= {machine[index] for index in own if index in roles.given or index in roles.routed}
    found = {name for name, services in served.items() if services} - nodes
    if not found or len(found) > MAX_SHARE * len({machine[index] for index in own}):
        return roles
    changed = bytearray(by_index)
    for index in own:
        if machine[index] in found:
            changed[index] = Role.SERVER
    return replace(roles, by_index=bytes(changed))


def _names(place: dict[tuple[int, int], Signature], at: tuple[int, int]) -> set[str]:
    """Return the service of a port, by its name in the catalogue, else by the port."""
    signature = place.get(at)
    return {signature.name if signature else f"{at[0]}/{at[1]}"}
