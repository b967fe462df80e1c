"""Index of a capture's hosts: addresses, links between them, and which machine each address belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address

from analysis.addresses import UNSPECIFIED, first_byte, read_ip, read_mac
from analysis.errors import CaptureError
from analysis.observed import Host, Link, Sample
from analysis.protocols import DHCP_PORTS
from analysis.protocols.dhcp import is_reply, read_dhcp
from analysis.signatures import TCP, UDP

NODE_PORTS = {(TCP, 22), (TCP, 6818), (UDP, 623), (UDP, 68), (UDP, 161), (TCP, 9100)}
"""Ports that nodes and other machines serve too: serving them does not identify the management node."""
NO_MAC = "00:00:00:00:00:00"
MAX_NAMED = 6
"""Candidates listed in a hint."""
INTERFACE = "capture on the management node's interface that faces the nodes"


def is_group(host: Host) -> bool:
    """Return whether the address is multicast or broadcast."""
    address = host.address
    if ":" in address:
        return address.startswith("ff")
    if address == "255.255.255.255" or 224 <= first_byte(address) < 240:
        return True
    # A subnet's broadcast address: known by its frames; without link addresses by its last byte and no packets sent.
    if host.sent or host.macs:
        return False
    return bool(int(host.via[:2], 16) & 1) if host.via else address.endswith(".255")


class HostIndex:
    """Hosts and links, and the machine behind each link address.

    ``entity`` identifies the machine of a host: its link address, else the link address that frames to it went to,
    else its own address.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        links: Sequence[Link],
        samples: Sequence[Sample],
        node: str,
        nodes: Sequence[IPv4Network | IPv6Network],
    ) -> None:
        self.hosts, self.links, self.samples = hosts, links, samples
        self.group = [is_group(host) for host in hosts]
        self.unspecified = [host.address in UNSPECIFIED for host in hosts]
        self.macs = [tuple(mac for mac in host.macs if mac != NO_MAC) for host in hosts]
        self.entity = [self._entity(index) for index in range(len(hosts))]
        # "" stands for all further addresses behind a router.
        self.by_address = {host.address: index for index, host in enumerate(hosts) if host.address}
        self.site_nodes = self._find_site_nodes(nodes)
        self.node = self._entity_of(node)
        self.dhcp_servers = self._find_dhcp_servers()

    def _find_site_nodes(self, nodes: Sequence[IPv4Network | IPv6Network]) -> set[int]:
        """Return the hosts in the networks of --nodes."""
        found = set[int]()
        parsed = [(index, ip_address(name)) for name, index in self.by_address.items()] if nodes else []
        for each in nodes:
            inside = {index for index, address in parsed if address in each and self.is_unicast(index)}
            if not inside:
                busy = ", ".join(
                    sorted(self.by_address, key=lambda name: -self.hosts[self.by_address[name]].sent)[:MAX_NAMED]
                )
                raise CaptureError(f"--nodes: no address of {each} is in the capture", f"it has {busy}, ...")
            found |= inside
        return found

    def _entity(self, index: int) -> str:
        host, macs = self.hosts[index], self.macs[index]
        if macs:
            return macs[0]
        return host.via if host.via and not self.group[index] else host.address

    def _entity_of(self, name: str) -> str:
        """Return the entity of an address or MAC; "" for none."""
        if not name:
            return ""
        found = self.by_address.get(read_ip(name))
        return self.entity[found] if found is not None else read_mac(name)

    def _find_dhcp_servers(self) -> set[int]:
        """Return the hosts that answered DHCP requests, and the servers named in the answers."""
        answers: dict[int, bytes] = {}
        for one in self.samples:
            if one.protocol == UDP and one.port in DHCP_PORTS and is_reply(one.payload):
                answers.setdefault(one.source, one.payload)
        decoded = [read_dhcp(payload) for _, payload in sorted(answers.items())[:4]]
        named = {self.by_address.get(one.server) for one in decoded if one}
        return {index for index in (*answers, *named) if index is not None and 0 <= index < len(self.hosts)}

    def is_unicast(self, index: int) -> bool:
        """Return whether the address belongs to one machine."""
        return not self.group[index] and not self.unspecified[index]


@dataclass
class SmsIdentity:
    """What is known about the management node.

    Attributes:
        macs: its link addresses, the provisioning network's first.
        confirmed: hosts that certainly are its own addresses.
        primary: the host that nodes use to reach it; None if not yet determined.
        why: how it was found.
    """

    macs: tuple[str, ...]
    why: str
    confirmed: set[int] = field(default_factory=set)
    primary: int | None = None


def name_candidates(host_index: HostIndex) -> str:
    """Return a hint that lists the busiest hosts."""
    plain = [index for index in range(len(host_index.hosts)) if host_index.is_unicast(index)]
    plain.sort(key=lambda index: -host_index.hosts[index].sent - host_index.hosts[index].received)
    named = [
        f"{host_index.hosts[index].address}{f' ({host_index.entity[index]})' if host_index.macs[index] else ''}"
        for index in plain[:MAX_NAMED]
    ]
    if not named:
        return INTERFACE
    return f"name the management node with --sms; the capture has {', '.join(named)}"
