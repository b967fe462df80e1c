"""The addresses of a capture, what they say to each other, and who stands behind which link address."""

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
"""Where nodes listen, or anybody: that somebody listens there does not make them the management node."""
NO_MAC = "00:00:00:00:00:00"
NAMED = 6
"""Candidates that a hint names."""
INTERFACE = "capture on the management node's interface that faces the nodes"


def is_group(host: Host) -> bool:
    """Whether packets to it go to many: multicast, broadcast."""
    address = host.address
    if ":" in address:
        return address.startswith("ff")
    if address == "255.255.255.255" or 224 <= first_byte(address) < 240:
        return True
    # A subnet's broadcast address: its frames tell, or, without link addresses, its last byte and its silence.
    if host.sent or host.macs:
        return False
    return bool(int(host.via[:2], 16) & 1) if host.via else address.endswith(".255")


class Parties:
    """Hosts and links, and who stands behind which link address.

    ``entity`` names what a host belongs to: its link address, the one its frames go to where it never sent, and
    its own address where there are no link addresses.
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
        self.nobody = [host.address in UNSPECIFIED for host in hosts]
        self.macs = [tuple(mac for mac in host.macs if mac != NO_MAC) for host in hosts]
        self.entity = [self._entity(index) for index in range(len(hosts))]
        # "" is no address, but all further ones behind a router.
        self.by_address = {host.address: index for index, host in enumerate(hosts) if host.address}
        self.given = self._given(nodes)
        self.node = self._of(node)
        self.dhcp = self._dhcp()

    def _given(self, nodes: Sequence[IPv4Network | IPv6Network]) -> set[int]:
        """Hosts that are nodes, as the site says."""
        found = set[int]()
        parsed = [(index, ip_address(name)) for name, index in self.by_address.items()] if nodes else []
        for each in nodes:
            inside = {index for index, address in parsed if address in each and self.plain(index)}
            if not inside:
                busy = ", ".join(
                    sorted(self.by_address, key=lambda name: -self.hosts[self.by_address[name]].sent)[:NAMED]
                )
                raise CaptureError(f"--nodes: no address of {each} is in the capture", f"it has {busy}, ...")
            found |= inside
        return found

    def _entity(self, index: int) -> str:
        host, macs = self.hosts[index], self.macs[index]
        if macs:
            return macs[0]
        return host.via if host.via and not self.group[index] else host.address

    def _of(self, name: str) -> str:
        """The entity of an address or MAC; "" for none."""
        if not name:
            return ""
        found = self.by_address.get(read_ip(name))
        return self.entity[found] if found is not None else read_mac(name)

    def _dhcp(self) -> set[int]:
        """Hosts that answered a node's DHCP, and those that the answers name."""
        answers: dict[int, bytes] = {}
        for one in self.samples:
            if one.protocol == UDP and one.port in DHCP_PORTS and is_reply(one.payload):
                answers.setdefault(one.source, one.payload)
        told = [read_dhcp(payload) for _, payload in sorted(answers.items())[:4]]
        named = {self.by_address.get(one.server) for one in told if one}
        return {index for index in (*answers, *named) if index is not None and 0 <= index < len(self.hosts)}

    def plain(self, index: int) -> bool:
        """Whether a host is one machine's address."""
        return not self.group[index] and not self.nobody[index]


@dataclass
class Own:
    """What is known of the management node.

    Attributes:
        macs: its link addresses, the provisioning network's first.
        sure: hosts that are its own beyond doubt.
        primary: the host that nodes know it by; None where that has to be found yet.
        why: how it was found.
    """

    macs: tuple[str, ...]
    why: str
    sure: set[int] = field(default_factory=set)
    primary: int | None = None


def name_candidates(scene: Parties) -> str:
    """A hint that names who was busiest."""
    plain = [index for index in range(len(scene.hosts)) if scene.plain(index)]
    plain.sort(key=lambda index: -scene.hosts[index].sent - scene.hosts[index].received)
    named = [
        f"{scene.hosts[index].address}{f' ({scene.entity[index]})' if scene.macs[index] else ''}"
        for index in plain[:NAMED]
    ]
    if not named:
        return INTERFACE
    return f"name the management node with --sms; the capture has {', '.join(named)}"
