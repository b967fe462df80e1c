"""Who is who in a capture: the management node, compute nodes, addresses outside, groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from analysis.addresses import is_link_local, is_local, is_loopback, read_ip, read_mac
from analysis.casting import ROUTER, Casting, Roles
from analysis.errors import CaptureError
from analysis.observed import Host, Link, Role, Sample
from analysis.parties import INTERFACE, NAMED, NODE_PORTS, Own, Parties, name_candidates
from analysis.units import number

__all__ = ["Roles", "find_roles"]

NEARLY_ALL = 0.95
"""Share of the packets that have the management node at an end, in a capture taken on its own interface."""


def find_roles(
    hosts: Sequence[Host],
    links: Sequence[Link],
    samples: Sequence[Sample],
    *,
    sms: str = "",
    node: str = "",
    nodes: Sequence[str] = (),
    totals: Mapping[str, Any] | None = None,
) -> Roles:
    """Say what every address is; find the management node unless ``sms``, an address or MAC, names it.

    Args:
        node: address or MAC that the capture was narrowed to: it is an end of every packet, and yet not the
            management node.
        nodes: networks whose addresses are compute nodes, such as 10.2.0.0/16, whatever their traffic tells.
        totals: what the core counted of everything: says why there are no hosts.

    Raises:
        CaptureError: ``sms`` or a network of ``nodes`` is not in the capture, nothing tells which one is the management
            node, or there is no compute node; the hint names candidates.
    """
    if not hosts:
        raise _nothing(node, totals or {})
    scene = Parties(hosts, links, samples, node, [_network(each) for each in nodes])
    own = _given(scene, sms) if sms else _outgoing(scene) or _found(scene)
    found = Casting(scene, own).roles()
    if Role.NODE not in found.by_index:
        raise CaptureError(
            f"no compute node is in the capture: besides the management node {found.sms.addresses[0]} all lie outside",
            f"{INTERFACE}; --sms names the management node, --nodes 10.2.0.0/16 networks of nodes behind a router",
        )
    return replace(found, remarks=_doubts(scene, own, sms) if sms else (), node=node)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise CaptureError(f"--nodes: {text!r} is no network", "such as 10.2.0.0/16 or fd00:2::/64") from None


def _nothing(node: str, totals: Mapping[str, Any]) -> CaptureError:
    """Why there is no packet of IP."""
    packets, other, skipped = (totals.get(name) for name in ("packets", "other", "skipped"))
    if packets and other:
        kinds = sorted(other.items(), key=lambda one: (-one[1][0], one[0]))
        named = ", ".join(f"{number(count)} {what}" for what, (count, _) in kinds[:NAMED])
        linked = any("link type" in what for what in other)
        hint = "Ethernet, Linux cooked, raw IP and loopback are read: tcpdump -y EN10MB" if linked else INTERFACE
        return CaptureError(f"no packet of IP was read: {named}", hint)
    if skipped:
        kinds = sorted(skipped.items(), key=lambda one: (-one[1], one[0]))
        named = ", ".join(f"{number(count)} {what}" for what, count in kinds[:NAMED])
        return CaptureError(f"nothing in the capture could be read: {named}", "capture anew, or copy the file again")
    if node:
        hint = "without --node all addresses are counted; name one of those"
        return CaptureError(f"{node} is not in the capture", hint)
    hint = f"was it ended too soon, or on the wrong interface? {INTERFACE}"
    return CaptureError("the capture holds no packet" if totals else "no packet of IP was read", hint)


# Given.


def _given(scene: Parties, sms: str) -> Own:
    own, index = _outgoing(scene), scene.by_address.get(read_ip(sms))
    if mac := read_mac(sms):
        if not any(mac in (*macs, host.via, host.claimed) for host, macs in zip(scene.hosts, scene.macs, strict=True)):
            raise CaptureError(f"{mac} is not in the capture", name_candidates(scene))
        return replace(own, why="given") if own and mac in own.macs else Own((mac,), "given")
    if not read_ip(sms):
        raise CaptureError(f"{sms!r} is neither an IP address nor a link address", name_candidates(scene))
    if index is None:
        raise CaptureError(f"{read_ip(sms)} is not in the capture", name_candidates(scene))
    if not scene.plain(index):
        raise CaptureError(f"{read_ip(sms)} is not the address of one machine", name_candidates(scene))
    if own and index in own.sure:
        return replace(own, why="given", primary=index)
    host = scene.hosts[index]
    mac = next((mac for mac in (host.claimed, *scene.macs[index], host.via) if mac), "")
    return Own((mac,) if mac else (), "given", {index}, index)


def _doubts(scene: Parties, own: Own, sms: str) -> tuple[str, ...]:
    """A remark where another machine than that which was given plainly is the management node."""
    if scene.node or not (other := _plainly(scene, _shares(scene))):
        return ()
    found = Casting(scene, other).roles().sms
    # It may have an address in a network of its own, from which nobody else speaks.
    same = set(own.macs) & set(other.macs) and (read_mac(sms) or is_local(read_ip(sms)))
    if same or read_ip(sms) in found.addresses:
        return ()
    return (f"{sms} was given as the management node, but {found.addresses[0]} looks like it: {found.found}",)


# Found.


def _outgoing(scene: Parties) -> Own | None:
    """The machine that captured, where the capture tells which frames it sent itself (Linux cooked, LINUX_SLL).

    What it only passes on is sent by it, too, but came in before with another link address.
    """
    mine = [
        index
        for index, host in enumerate(scene.hosts)
        if host.outgoing and scene.plain(index) and len(scene.macs[index]) <= 1 and not is_loopback(host.address)
    ]
    if not mine:
        return None
    macs = Counter[str]()
    for index in mine:
        macs.update(dict.fromkeys(scene.macs[index], 1 + scene.hosts[index].sent))
    if not macs:
        # A tunnel has no link addresses: what is passed on looks like what is sent.
        mine = [max(mine, key=lambda index: scene.hosts[index].sent)]
    why = "it is the machine that captured: the capture tells frames that it sent from those that came in"
    return Own(tuple(mac for mac, _ in macs.most_common()), why, set(mine))


@dataclass
class _Ends:
    """What links say of entities, by entity."""

    peers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    served: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    ports: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))


def _shares(scene: Parties) -> dict[str, float]:
    """Share of the packets between machines that an entity is an end of."""
    counted, total = dict.fromkeys(scene.entity, 0), 0
    skip = [not scene.plain(index) for index in range(len(scene.hosts))]
    # What is passed on has a second link address; both were an end.
    second = [macs[1] if len(macs) > 1 else "" for macs in scene.macs]
    counted.update(dict.fromkeys(filter(None, second), 0))
    for client, server, _, _, packets, _ in scene.links:
        if skip[client] or skip[server]:
            continue
        total += packets
        one, other = scene.entity[client], scene.entity[server]
        counted[one] += packets
        if one != other:
            counted[other] += packets
        for name in {second[client], second[server]} - {"", one, other} if second[client] or second[server] else ():
            counted[name] += packets
    return {name: packets / total for name, packets in counted.items() if packets}


def _ends(scene: Parties) -> _Ends:
    ends, entity = _Ends(), scene.entity
    for client, server, protocol, port, _, _ in scene.links:
        one, other = entity[client], entity[server]
        if one == other or not scene.plain(client) or not scene.plain(server):
            continue
        ends.peers[one].add(other)
        ends.peers[other].add(one)
        if port and (protocol, port) not in NODE_PORTS:
            ends.served[other].add(one)
            ends.ports[other].add((protocol, port))
    return ends


def _able(scene: Parties, shares: Mapping[str, float]) -> dict[str, float]:
    """Shares of those that could be the management node."""
    # Who has no address but those it passes on cannot be told from a router.
    alone = {
        scene.entity[index] for index in range(len(scene.hosts)) if scene.plain(index) and len(scene.macs[index]) < 2
    }
    return {name: share for name, share in shares.items() if name in alone and name != scene.node}


def _plainly(scene: Parties, shares: Mapping[str, float]) -> Own | None:
    """The one that is an end of nearly all packets, where there is one."""
    many = {name: share for name, share in _able(scene, shares).items() if share >= NEARLY_ALL}
    if len(many) != 1 or scene.node:
        return None
    ((name, share),) = many.items()
    kinds = "link address" if any(scene.macs) else "address"
    # 99.96 % is not all.
    percent = 100 if share == 1 else min(100 * share, 99.9)
    return _own(scene, name, f"its {kinds} is an end of {percent:.3g} % of all packets")


def _found(scene: Parties) -> Own:
    """By what passes through it: first who is an end of nearly all packets, then what a management node does."""
    shares = _shares(scene)
    if own := _plainly(scene, shares):
        return own
    shares = _able(scene, shares)
    # Of a capture that was narrowed to a node, shares tell whom the node talks to most.
    left = set(shares) if scene.node else {name for name, share in shares.items() if share >= NEARLY_ALL} or set(shares)
    if scene.node and len(left) == 1:
        return _own(scene, left.pop(), "it is the only machine that the node talks to")
    ends = _ends(scene)
    for said, narrow in _tests(scene, ends):
        better = narrow(left)
        if len(better) == 1:
            (name,) = better
            return _own(scene, name, said.format(served=len(ends.served[name]), ports=len(ends.ports[name])))
        left = better or left
    raise CaptureError("nothing in the capture tells which machine is the management node", name_candidates(scene))


def _tests(scene: Parties, ends: _Ends) -> list[tuple[str, Callable[[set[str]], set[str]]]]:
    """What a management node does, the surest first: each narrows the candidates down."""
    dhcp = {scene.entity[index] for index in scene.dhcp}
    gateways = _gateways(scene)

    def most(left: set[str], counted: dict[str, set[str]] | dict[str, set[tuple[int, int]]]) -> set[str]:
        best = max((len(counted.get(name, ())) for name in left), default=0)
        return {name for name in left if len(counted.get(name, ())) == best} if best else set()

    return [
        ("it answers the nodes' DHCP", lambda left: left & dhcp),
        ("of all that could be it, it alone is no router to addresses outside", lambda left: left - gateways),
        ("more machines use its services than those of any other: {served}", lambda left: most(left, ends.served)),
        ("it offers more services than any other machine: {ports}", lambda left: most(left, ends.ports)),
        ("it talks to more machines than any other", lambda left: most(left, ends.peers)),
    ]


def _gateways(scene: Parties) -> set[str]:
    """Link addresses with nothing but addresses outside behind them."""
    behind: dict[str, list[str]] = defaultdict(list)
    for index, host in enumerate(scene.hosts):
        if scene.plain(index) and not is_link_local(host.address):
            behind[scene.entity[index]].append(host.address)
    return {name for name, found in behind.items() if len(found) >= ROUTER and not any(map(is_local, found))}


def _own(scene: Parties, name: str, why: str) -> Own:
    index = scene.by_address.get(name)
    return Own((), why, {index}, index) if index is not None else Own((name,), why)
