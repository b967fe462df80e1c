"""Who still speaks to the old node after an adoption: from the frames that arrive there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from appliance.catalog import Service
from appliance.plan.adopt.model import Survey
from appliance.shared.adopt import OldInterface
from appliance.text import whole_number

PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}
"""Names of those that have ports, by their numbers (IANA)."""
SHOWN = 8
"""Addresses that are named of each group."""
THROUGH = "routing"
"""Stands for a service in ``Speaker``: its addresses send packets to other machines through the old node."""


@dataclass(frozen=True)
class Speaker:
    """Machines that use a service of the old node.

    Attributes:
        service: of the catalogue, else the process; "routing": they send packets through it; "" if it is not known.
        port: such as tcp/2049; empty without one.
        addresses: the first of them; ``count``: all.
        planned: whether the plan says that it goes on running there.
    """

    service: str
    port: str
    addresses: tuple[str, ...]
    count: int
    planned: bool


def unicast_filter(interface: OldInterface, ssh_ports: Iterable[int]) -> str:
    """Return a filter (pcap-filter(7)) for frames to the old node itself, without SSH, over which they are read."""
    return f"ether dst {interface.spare_mac} and {no_ssh(ssh_ports)}"


def no_ssh(ports: Iterable[int]) -> str:
    """Return a filter without these TCP ports: a capture must not contain its own transfer."""
    return f"not ({' or '.join(f'tcp port {port}' for port in sorted({22, *ports}))})"


def ssh_ports(survey: Survey) -> list[int]:
    """Return the ports on which sshd of the old node listens."""
    shown = [one.port.partition("/") for one in survey.listeners if "ssh" in (one.service, one.process[:3])]
    return [number for protocol, _, port in shown if protocol == "tcp" and (number := whole_number(port)) is not None]


@dataclass
class _Group:
    addresses: dict[str, None] = field(default_factory=dict)
    planned: bool = False


def find_speakers(
    flows: Iterable[tuple[str, str, int, int]],
    *,
    own: Collection[str],
    others: Collection[str],
    survey: Survey,
    services: Sequence[Service],
) -> list[Speaker]:
    """Return who uses what of the old node, what is not planned first.

    Args:
        flows: client, server, IP protocol and port of the server, of frames that the old node received.
        own: addresses of the old node, those that have moved too.
        others: machines that may speak to it: admin hosts.
        services: of the container; what else listens on the old node goes on running there.
    """
    listening = {one.port: one.service or one.process for one in survey.listeners}
    carried = {one.name for one in services}
    groups: dict[tuple[str, str], _Group] = {}
    for client, server, protocol, number in flows:
        if not client or client in own or client in others or (server in others and server not in own):
            continue
        name = PROTOCOLS.get(protocol)
        port = f"{name}/{number}" if name and number else ""
        if server in own and not port:
            continue  # ICMP: asking whether it is there uses no service
        service, port = (listening.get(port, ""), port) if server in own else (THROUGH, "")
        group = groups.setdefault((service, port), _Group())
        group.addresses[client] = None
        group.planned = service != THROUGH and port in listening and service not in carried
    found = [
        Speaker(service, port, tuple(list(group.addresses)[:SHOWN]), len(group.addresses), group.planned)
        for (service, port), group in groups.items()
    ]
    return sorted(found, key=lambda one: (one.planned, one.service, one.port))
