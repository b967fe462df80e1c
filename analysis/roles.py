"""Find the role of every host in a capture: management node, compute node, outside address, group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from analysis.addresses import is_link_local, is_local, is_loopback, read_ip, read_mac
from analysis.cluster import CONTROLLERS
from analysis.errors import CaptureError
from analysis.host_index import INTERFACE, MAX_NAMED, NODE_PORTS, HostIndex, SmsIdentity, name_candidates
from analysis.observed import Host, Link, Role, Sample
from analysis.role_assigner import ROUTER, RoleAssigner, Roles
from analysis.units import number, share

__all__ = ["Roles", "find_roles", "no_hosts_error"]

NEARLY_ALL = 0.95
"""Minimum share of packets to or from the management node in a capture taken on its own interface."""
MANY = 0.5
"""Share of its peers that another machine must have, to be the management node in spite of fewer packets."""


def find_roles(
    hosts: Sequence[Host],
    links: Sequence[Link],
    samples: Sequence[Sample],
    *,
    sms: str = "",
    node: str = "",
    nodes: Sequence[str] = (),
) -> Roles:
    """Assign a role to every host; find the management node unless ``sms``, an address or MAC, names it.

    Args:
        hosts: at least one; ``no_hosts_error`` explains why there are none.
        node: address or MAC that the capture was restricted to: an end of every packet, but not the management node.
        nodes: networks whose addresses are compute nodes, such as 10.2.0.0/16, whatever their traffic shows.

    Raises:
        CaptureError: ``sms`` or a network of ``nodes`` is not in the capture, the management node cannot be
            identified, or there is no compute node; the hint lists candidates.
    """
    host_index = HostIndex(hosts, links, samples, node, [_network(each) for each in nodes])
    identity = _from_option(host_index, sms) if sms else _find_capturing_host(host_index) or _detect(host_index)
    found = RoleAssigner(host_index, identity).roles()
    if Role.NODE not in found.by_index:
        raise CaptureError(
            f"no compute node is in the capture: all hosts except the management node {found.sms.addresses[0]} are "
            "outside",
            f"{INTERFACE}; --sms names the management node, --nodes 10.2.0.0/16 networks of nodes behind a router",
        )
    return replace(
        found,
        remarks=(
            *(_find_contradictions(host_index, identity, sms) if sms else ()),
            *_find_other_router(host_index, identity, found.by_index),
        ),
        node=node,
        machine=tuple(host_index.entity),
        given=frozenset(host_index.site_nodes),
    )


def _find_other_router(host_index: HostIndex, identity: SmsIdentity, by_index: bytes) -> tuple[str, ...]:
    """Return a remark if nodes reach the outside mostly through another machine than the management node."""
    through: Counter[str] = Counter()
    for link in host_index.links if identity.macs else ():
        if {by_index[link.client], by_index[link.server]} == {Role.NODE, Role.OUTSIDE}:
            index = link.server if by_index[link.server] == Role.OUTSIDE else link.client
            own = {*host_index.macs[index], host_index.hosts[index].via} & {*identity.macs}
            through["" if own else host_index.entity[index]] += link.packets
    total, others = through.total(), {name: count for name, count in through.items() if read_mac(name)}
    if not others or 2 * sum(others.values()) <= total:
        return ()
    name, part = max(others, key=lambda one: others[one]), share(sum(others.values()) / total)
    return (
        f"{part} of the packets between nodes and the outside pass another router ({name}), not the management node's "
        "link address: NAT may not be its service",
    )


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise CaptureError(f"--nodes: {text!r} is not a network", "such as 10.2.0.0/16 or fd00:2::/64") from None


def no_hosts_error(node: str, totals: Mapping[str, Any]) -> CaptureError:
    """Return the error that explains from the core's totals why there are no hosts."""
    packets, other, skipped = (totals.get(name) for name in ("packets", "other", "skipped"))
    if packets and other:
        kinds = sorted(other.items(), key=lambda one: (-one[1][0], one[0]))
        named = ", ".join(f"{number(count)} {what}" for what, (count, _) in kinds[:MAX_NAMED])
        linked = any("link type" in what for what in other)
        hint = "Ethernet, Linux cooked, raw IP and loopback are supported: tcpdump -y EN10MB" if linked else INTERFACE
        return CaptureError(f"no IP packet was read: {named}", hint)
    if skipped:
        kinds = sorted(skipped.items(), key=lambda one: (-one[1], one[0]))
        named = ", ".join(f"{number(count)} {what}" for what, count in kinds[:MAX_NAMED])
        return CaptureError(f"the capture is unreadable: {named}", "capture again, or copy the file again")
    if node:
        hint = "run without --node to list the addresses, then name one of them"
        return CaptureError(f"{node} is not in the capture", hint)
    hint = f"was it stopped too early, or taken on the wrong interface? {INTERFACE}"
    return CaptureError("the capture holds no packet" if totals else "no IP packet was read", hint)


# Named by --sms.


def _from_option(host_index: HostIndex, sms: str) -> SmsIdentity:
    identity, index = _find_capturing_host(host_index), host_index.by_address.get(read_ip(sms))
    if mac := read_mac(sms):
        if not any(
            mac in (*macs, host.via, host.claimed) for host, macs in zip(host_index.hosts, host_index.macs, strict=True)
        ):
            raise CaptureError(f"{mac} is not in the capture", name_candidates(host_index))
        return replace(identity, why="given") if identity and mac in identity.macs else SmsIdentity((mac,), "given")
    if not read_ip(sms):
        raise CaptureError(f"{sms!r} is neither an IP address nor a link address", name_candidates(host_index))
    if index is None:
        raise CaptureError(f"{read_ip(sms)} is not in the capture", name_candidates(host_index))
    if not host_index.is_unicast(index):
        raise CaptureError(f"{read_ip(sms)} is not a unicast address", name_candidates(host_index))
    if identity and index in identity.confirmed:
        return replace(identity, why="given", primary=index)
    host = host_index.hosts[index]
    mac = next((mac for mac in (host.claimed, *host_index.macs[index], host.via) if mac), "")
    return SmsIdentity((mac,) if mac else (), "given", {index}, index)


def _find_contradictions(host_index: HostIndex, identity: SmsIdentity, sms: str) -> tuple[str, ...]:
    """Return a remark if another machine than the given one clearly is the management node."""
    if host_index.node or not (other := _find_dominant(host_index, _shares(host_index))):
        return ()
    found = RoleAssigner(host_index, other).roles().sms
    # It may have an address on a network without other hosts.
    same = set(identity.macs) & set(other.macs) and (read_mac(sms) or is_local(read_ip(sms)))
    if same or read_ip(sms) in found.addresses:
        return ()
    return (f"{sms} was given as the management node, but {found.addresses[0]} seems to be it: {found.found}",)


# Detected.


def _find_capturing_host(host_index: HostIndex) -> SmsIdentity | None:
    """Find the capturing machine if the capture marks the frames that it sent itself (Linux cooked, LINUX_SLL).

    Forwarded frames are marked as sent, too, but also arrived with another link address.
    """
    own = [
        index
        for index, host in enumerate(host_index.hosts)
        if host.outgoing
        and host_index.is_unicast(index)
        and len(host_index.macs[index]) <= 1
        and not is_loopback(host.address)
    ]
    if not own:
        return None
    macs = Counter[str]()
    for index in own:
        macs.update(dict.fromkeys(host_index.macs[index], 1 + host_index.hosts[index].sent))
    if not macs:
        # A tunnel has no link addresses: forwarded packets look like sent ones.
        own = [max(own, key=lambda index: host_index.hosts[index].sent)]
    why = "it is the capturing machine: the capture marks which frames it sent"
    return SmsIdentity(tuple(mac for mac, _ in macs.most_common()), why, set(own))


@dataclass
class _Peers:
    """Peers, clients and served ports of each entity."""

    peers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    served: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    ports: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))


def _shares(host_index: HostIndex) -> dict[str, float]:
    """Return for each entity its share of the packets between machines."""
    counted, total = dict.fromkeys(host_index.entity, 0), 0
    skip = [not host_index.is_unicast(index) for index in range(len(host_index.hosts))]
    # Forwarded packets have a second link address; both count.
    second = [macs[1] if len(macs) > 1 else "" for macs in host_index.macs]
    counted.update(dict.fromkeys(filter(None, second), 0))
    for client, server, _, _, packets, _ in host_index.links:
        if skip[client] or skip[server]:
            continue
        total += packets
        one, other = host_index.entity[client], host_index.entity[server]
        counted[one] += packets
        if one != other:
            counted[other] += packets
        for name in {second[client], second[server]} - {"", one, other} if second[client] or second[server] else ():
            counted[name] += packets
    return {name: packets / total for name, packets in counted.items() if packets}


def _collect_peers(host_index: HostIndex) -> _Peers:
    peers, entity = _Peers(), host_index.entity
    for client, server, protocol, port, _, _ in host_index.links:
        one, other = entity[client], entity[server]
        if one == other or not host_index.is_unicast(client) or not host_index.is_unicast(server):
            continue
        peers.peers[one].add(other)
        peers.peers[other].add(one)
        if port and (protocol, port) not in NODE_PORTS:
            peers.served[other].add(one)
            peers.ports[other].add((protocol, port))
    return peers


def _candidates(host_index: HostIndex, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the entities that could be the management node."""
    # An entity that only forwards cannot be distinguished from a router.
    alone = {
        host_index.entity[index]
        for index in range(len(host_index.hosts))
        if host_index.is_unicast(index) and len(host_index.macs[index]) < 2
    }
    return {name: share for name, share in shares.items() if name in alone and name != host_index.node}


def _find_dominant(host_index: HostIndex, shares: Mapping[str, float]) -> SmsIdentity | None:
    """Return the only entity that nearly all packets are to or from; None if there is none."""
    many = {name: share for name, share in _candidates(host_index, shares).items() if share >= NEARLY_ALL}
    if len(many) != 1 or host_index.node:
        return None
    ((name, share),) = many.items()
    if share < 1 and _has_rival(host_index, shares, name):
        return None
    kinds = "link address" if any(host_index.macs) else "address"
    # Never round 99.96 % up to 100 %.
    percent = 100 if share == 1 else min(100 * share, 99.9)
    return _identify(host_index, name, f"{percent:.3g} % of all packets are to or from its {kinds}")


def _detect(host_index: HostIndex) -> SmsIdentity:
    """Find the management node by its traffic: by its share of the packets, then by typical behaviour.

    Raises:
        CaptureError: no criterion selects one machine.
    """
    shares = _shares(host_index)
    if identity := _find_dominant(host_index, shares):
        return identity
    shares = _candidates(host_index, shares)
    # With --node, shares only show which machine the node talks to most.
    left = {name for name, share in shares.items() if share >= NEARLY_ALL}
    if host_index.node or len(left) < 2:
        left = set(shares)
    if host_index.node and len(left) == 1:
        return _identify(host_index, left.pop(), "it is the only machine that the node talks to")
    peers = _collect_peers(host_index)
    for reason, narrow in _criteria(host_index, peers):
        better = narrow(left)
        if len(better) == 1:
            (name,) = better
            return _identify(
                host_index, name, reason.format(served=len(peers.served[name]), ports=len(peers.ports[name]))
            )
        left = better or left
    raise CaptureError("the management node cannot be identified in the capture", name_candidates(host_index))


def _criteria(host_index: HostIndex, peers: _Peers) -> list[tuple[str, Callable[[set[str]], set[str]]]]:
    """Return the criteria for a management node, the most reliable first: each narrows the candidates down."""
    dhcp = {host_index.entity[index] for index in host_index.dhcp_servers}
    gateways = _gateways(host_index)

    def most(left: set[str], counted: dict[str, set[str]] | dict[str, set[tuple[int, int]]]) -> set[str]:
        best = max((len(counted.get(name, ())) for name in left), default=0)
        return {name for name in left if len(counted.get(name, ())) == best} if best else set()

    return [
        ("it answers the nodes' DHCP requests", lambda left: left & dhcp),
        ("it is the only candidate with a scheduler", lambda left: left & _controllers(host_index)),
        ("it is the only candidate that is not a router to outside addresses", lambda left: left - gateways),
        ("it serves more machines than any other: {served}", lambda left: most(left, peers.served)),
        ("it offers more services than any other machine: {ports}", lambda left: most(left, peers.ports)),
        ("it talks to more machines than any other", lambda left: most(left, peers.peers)),
    ]


def _controllers(host_index: HostIndex) -> set[str]:
    """Return the machines that serve a scheduler to several others."""
    clients: dict[str, set[str]] = defaultdict(set)
    for client, server, protocol, port, _, _ in host_index.links:
        if (protocol, port) in CONTROLLERS and host_index.hosts[server].sent:
            clients[host_index.entity[server]].add(host_index.entity[client])
    return {name for name, found in clients.items() if len(found - {name}) > 1}


def _gateways(host_index: HostIndex) -> set[str]:
    """Return the link addresses that have only outside addresses behind them."""
    behind: dict[str, list[str]] = defaultdict(list)
    for index, host in enumerate(host_index.hosts):
        if host_index.is_unicast(index) and not is_link_local(host.address):
            behind[host_index.entity[index]].append(host.address)
    return {name for name, found in behind.items() if len(found) >= ROUTER and not any(map(is_local, found))}


def _has_rival(host_index: HostIndex, shares: Mapping[str, float], name: str) -> bool:
    """Return whether another machine talks to half as many others, or more: a mirror port with a busy filer.

    On the management node's own interface, packets between other machines are rare: switches flood a few.
    """
    if not any(host_index.macs):
        return False
    peers = _collect_peers(host_index).peers
    least = max(2, MANY * len(peers[name]))
    others = _candidates(host_index, shares).keys() - {name} - _gateways(host_index)
    return any(len(peers[other] - {name}) >= least for other in others)


def _identify(host_index: HostIndex, name: str, why: str) -> SmsIdentity:
    index = host_index.by_address.get(name)
    return SmsIdentity((), why, {index}, index) if index is not None else SmsIdentity((name,), why)
