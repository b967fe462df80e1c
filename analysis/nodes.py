"""Which machines are compute nodes, and how many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from analysis.addresses import UNSPECIFIED, is_link_local
from analysis.observed import Host, Link, Role, Sample
from analysis.protocols import DHCP_PORTS
from analysis.protocols.dhcp import is_relayed, is_reply
from analysis.signatures import ICMP, ICMPV6, TCP, UDP

ROUTER = 4
"""More addresses of IPv4 behind one link address, or four times as many of IPv6, are those of several machines."""
IPMI, SNMP = {(UDP, 623), (TCP, 623)}, {(UDP, 161), (UDP, 162)}
"""What BMCs speak (RMCP, IPMI 2.0, 13.1.2), and switches, PDUs and BMCs (RFC 3411)."""
BOOTP = {(UDP, port) for port in DHCP_PORTS}
QUIET = {*SNMP, *BOOTP, (ICMP, 0), (ICMPV6, 0), (2, 0)}
"""What hardware, or a DHCP relay, says at most."""
QUIET_BMC = {*QUIET, *IPMI, (TCP, 22), (TCP, 80), (TCP, 443), (UDP, 123), (UDP, 514)}
"""... and a BMC besides: it has a console, a web page or Redfish, a clock and a log."""


def find_nodes(
    hosts: Sequence[Host], roles: bytes, links: Iterable[Link] = (), samples: Iterable[Sample] = ()
) -> tuple[dict[str, list[str]], set[str]]:
    """Addresses of every compute node, by its link address where there are any: a node may have IPv4 and IPv6.

    Behind a router they are counted by address. What has the role of a node and yet is none is named apart: what does
    nothing but be there, such as a switch or a bridge (it sent multicast from its address of the link, as all that
    speaks IPv6 does, RFC 4861, and nobody sent it anything); hardware that is looked after by IPMI or SNMP alone;
    DHCP relays.
    """
    machine = _machines(hosts, roles)
    found: dict[str, list[str]] = defaultdict(list)
    for index, name in machine.items():
        found[name].append(hosts[index].address)
    silent = {host.address for host in hosts if is_link_local(host.address) and not host.received}
    apart = {name for name, addresses in found.items() if silent.issuperset(addresses)}
    hardware = _hardware(machine, links, {machine[one] for one in _relays(samples) if one in machine})
    # If all there is looks like hardware, it was asked for nothing else while the capture ran.
    if set(found) - apart - hardware:
        apart |= hardware
    return {name: addresses for name, addresses in found.items() if name not in apart}, apart


def _machines(hosts: Sequence[Host], roles: bytes) -> dict[int, str]:
    """Whose address it is, for every host that has the role of a node."""
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
        if len(old) > ROUTER or len(new) > 4 * ROUTER:
            # Which belongs to which nobody can tell; that many there are.
            for one, other in zip_longest(old, new, fillvalue=-1):
                name = hosts[max(one, other) if one < 0 else one].address
                machine.update({index: name for index in (one, other) if index >= 0})
    return machine


def _hardware(machine: dict[int, str], links: Iterable[Link], relays: set[str]) -> set[str]:
    """Machines that say nothing but what hardware says, and say that."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for client, server, protocol, port, _, _ in links:
        for name in {machine.get(client), machine.get(server)}:
            if name is not None:
                places[name].add((protocol, port))
    return {
        name
        for name, said in places.items()
        if (said & IPMI and said <= QUIET_BMC) or ((said & SNMP or name in relays) and said <= QUIET)
    }


def _relays(samples: Iterable[Sample]) -> set[int]:
    """Hosts that pass nodes' DHCP on."""
    return {
        one.source
        for one in samples
        if one.protocol == UDP and one.port in DHCP_PORTS and not is_reply(one.payload) and is_relayed(one.payload)
    }
