"""Which machines are compute nodes, and how many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from analysis.addresses import UNSPECIFIED, is_link_local
from analysis.observed import Host, Link, Role, Sample, Scan
from analysis.protocols import DHCP_PORTS
from analysis.protocols.dhcp import is_relayed, is_reply
from analysis.signatures import ICMP, ICMPV6, TCP, UDP

ROUTER = 4
"""A link address with more IPv4 addresses, or four times as many IPv6 addresses, belongs to several machines."""
IPMI, SNMP = {(UDP, 623), (TCP, 623)}, {(UDP, 161), (UDP, 162)}
"""Protocols of BMCs (RMCP, IPMI 2.0, 13.1.2), and of switches, PDUs and BMCs (RFC 3411)."""
DHCP = {(UDP, port) for port in DHCP_PORTS}
HARDWARE_PORTS = {*SNMP, *DHCP, (ICMP, 0), (ICMPV6, 0), (2, 0)}
"""All that hardware or a DHCP relay uses."""
BMC_PORTS = {*HARDWARE_PORTS, *IPMI, (TCP, 22), (TCP, 80), (TCP, 443), (UDP, 123), (UDP, 514)}
"""All that a BMC uses: also a console, a web page or Redfish, a clock and a log."""


def find_nodes(
    hosts: Sequence[Host],
    roles: bytes,
    links: Iterable[Link] = (),
    samples: Iterable[Sample] = (),
    *,
    routed: Collection[int] = (),
    scans: Iterable[Scan] = (),
) -> tuple[dict[str, list[str]], set[str]]:
    """Return the addresses of every compute node by link address, and the machines that are excluded.

    A node may have IPv4 and IPv6 addresses. Without link addresses, and behind a router, nodes are counted by address.
    Excluded are machines with the role of a node that are not nodes: switches and bridges, which only send multicast
    from a link-local address (as every IPv6 host does, RFC 4861) and receive nothing; hardware managed by IPMI or SNMP
    only; DHCP relays; machines that only scan, and scanned addresses that nobody has.

    Args:
        links: without scans.
        routed: hosts behind routers.
    """
    machine = find_machines(hosts, roles, routed)
    found: dict[str, list[str]] = defaultdict(list)
    for index, name in machine.items():
        found[name].append(hosts[index].address)
    links = list(links)
    silent = {host.address for host in hosts if is_link_local(host.address) and not host.received}
    excluded = {name for name, addresses in found.items() if silent.issuperset(addresses)}
    excluded |= _of_scans(hosts, machine, links, scans)
    hardware = _hardware(machine, links, {machine[one] for one in _relays(samples) if one in machine})
    # If everything looks like hardware, the capture just shows no other traffic of the nodes.
    if set(found) - excluded - hardware:
        excluded |= hardware
    return {name: addresses for name, addresses in found.items() if name not in excluded}, excluded


def find_machines(hosts: Sequence[Host], roles: bytes, routed: Collection[int]) -> dict[int, str]:
    """Return the machine of every host that has the role of a node."""
    behind: dict[str, list[int]] = defaultdict(list)
    for host in hosts:
        if roles[host.index] == Role.NODE and host.address not in UNSPECIFIED:
            mac = host.macs[0] if host.macs and any(host.macs[0].replace(":", "0").strip("0")) else host.via
            behind[mac or host.address].append(host.index)
    machine = {}
    for mac, indexes in behind.items():
        old = [index for index in indexes if ":" not in hosts[index].address]
        new = [index for index in indexes if ":" in hosts[index].address and not is_link_local(hosts[index].address)]
        machine.update(dict.fromkeys(indexes, mac))
        behind_router = any(index in routed for index in indexes)
        if behind_router or len(old) > ROUTER or len(new) > 4 * ROUTER:
            # Which IPv4 and IPv6 addresses belong together is unknown; only the number of machines matters.
            for one, other in zip_longest(old, new, fillvalue=-1):
                name = hosts[max(one, other) if one < 0 else one].address
                machine.update({index: name for index in (one, other) if index >= 0})
    return machine


def _of_scans(hosts: Sequence[Host], machine: dict[int, str], links: Iterable[Link], scans: Iterable[Scan]) -> set[str]:
    """Return the machines that appear in nothing but scans: who scans, and targets that sent no packet."""
    found = set[int]()
    for scan in scans:
        found |= {scan.source, *(target for target in scan.targets if not hosts[target].sent)}
    if not found:
        return set()
    used = {end for client, server, *_ in links for end in (client, server)}
    other = {name for index, name in machine.items() if index not in found or index in used}
    return {machine[index] for index in found if index in machine} - other


def _hardware(machine: dict[int, str], links: Iterable[Link], relays: set[str]) -> set[str]:
    """Return the machines that use the protocols of hardware, and no others."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for client, server, protocol, port, _, _ in links:
        for name in {machine.get(client), machine.get(server)}:
            if name is not None:
                places[name].add((protocol, port))
    return {
        name
        for name, used in places.items()
        if (used & IPMI and used <= BMC_PORTS) or ((used & SNMP or name in relays) and used <= HARDWARE_PORTS)
    }


def _relays(samples: Iterable[Sample]) -> set[int]:
    """Return the hosts that relay DHCP."""
    return {
        one.source
        for one in samples
        if one.protocol == UDP and one.port in DHCP_PORTS and not is_reply(one.payload) and is_relayed(one.payload)
    }
