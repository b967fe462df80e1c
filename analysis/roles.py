"""Who is who in a capture: the management node, compute nodes, addresses outside, groups."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv6Address, ip_address

from analysis.errors import CaptureError
from analysis.model import Sms
from analysis.observed import Host, Link, Role, Sample
from analysis.protocols import DHCP_PORTS
from analysis.protocols.dhcp import is_reply, read_dhcp
from analysis.signatures import TCP, UDP

NEARLY_ALL = 0.95
"""Share of the packets that have the management node at an end, in a capture taken on its own interface."""
ROUTER = 4
"""So many networks beyond the cluster's behind one link address make it a router's: a node has one of IPv4 and a few of
IPv6."""
NODE_PORTS = {(TCP, 22), (TCP, 6818), (UDP, 623), (UDP, 68), (UDP, 161), (TCP, 9100)}
"""Where nodes listen, or anybody: that somebody listens there does not make them the management node."""
NO_MAC = "00:00:00:00:00:00"
UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104
NAMED = 6
"""Candidates that a hint names."""


@dataclass(frozen=True)
class Roles:
    """``by_index`` holds one `observed.Role` byte for each host; ``remarks`` say what makes one doubt them."""

    sms: Sms
    by_index: bytes
    remarks: tuple[str, ...] = ()


def find_roles(
    hosts: Sequence[Host], links: Sequence[Link], samples: Sequence[Sample], *, sms: str = "", node: str = ""
) -> Roles:
    """Say what every address is; find the management node unless ``sms``, an address or MAC, names it.

    Args:
        node: address or MAC that the capture was narrowed to: it is an end of every packet, and yet not the
            management node.

    Raises:
        CaptureError: ``sms`` is not in the capture, or nothing tells which one it is; the hint names candidates.
    """
    if not hosts:
        raise CaptureError("no packet of IP was read", "capture on the management node's provisioning interface")
    scene = _Scene(hosts, links, samples, node)
    own = _given(scene, sms) if sms else _outgoing(scene) or _found(scene)
    return _Casting(scene, own).roles()


# What is asked of hosts again and again.


def is_group(host: Host) -> bool:
    """Whether packets to it go to many: multicast, broadcast."""
    address = host.address
    if ":" in address:
        return address.startswith("ff")
    if address == "255.255.255.255" or 224 <= _first(address) < 240:
        return True
    # A subnet's broadcast address: its frames tell, or, without link addresses, its last byte and its silence.
    if host.sent or host.macs:
        return False
    return bool(int(host.via[:2], 16) & 1) if host.via else address.endswith(".255")


def is_local(address: str) -> bool:
    """Whether it is of a private network: RFC 1918, RFC 6598, RFC 3927, RFC 4193, RFC 4291 (link-local), loopback."""
    if ":" in address:
        return address.startswith(("fe8", "fe9", "fea", "feb", "fc", "fd")) or address == "::1"
    if address.startswith(("10.", "192.168.", "169.254.", "127.")):
        return True
    low, high = {"172": (16, 31), "100": (64, 127)}.get(address.partition(".")[0], (1, 0))
    return low <= high and low <= _first(address.partition(".")[2]) <= high


def is_link_local(address: str) -> bool:
    """IPv6 addresses that no router passes on."""
    return address.startswith(("fe8", "fe9", "fea", "feb"))


def network(address: str) -> str:
    """What two addresses of one cluster's network have in common: IPv4's first 16 bits, IPv6's first 64."""
    if ":" in address:
        return str(IPv6Address(address.partition("%")[0]).exploded[:19])
    return address[: address.find(".", address.find(".") + 1)]


def _first(address: str) -> int:
    first = address.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _near(one: str, other: str) -> bool:
    """Whether two IPv4 addresses share their first 24 bits."""
    return "." in one and one.rpartition(".")[0] == other.rpartition(".")[0]


class _Scene:
    """Hosts and links, and who stands behind which link address.

    ``entity`` names what a host belongs to: its link address, the one its frames go to where it never sent, and
    its own address where there are no link addresses.
    """

    def __init__(self, hosts: Sequence[Host], links: Sequence[Link], samples: Sequence[Sample], node: str) -> None:
        self.hosts, self.links, self.samples = hosts, links, samples
        self.group = [is_group(host) for host in hosts]
        self.nobody = [host.address in UNSPECIFIED for host in hosts]
        self.macs = [tuple(mac for mac in host.macs if mac != NO_MAC) for host in hosts]
        self.entity = [self._entity(index) for index in range(len(hosts))]
        self.by_address = {host.address: index for index, host in enumerate(hosts)}
        self.node = self._of(node)
        self.dhcp = self._dhcp()

    def _entity(self, index: int) -> str:
        host, macs = self.hosts[index], self.macs[index]
        if macs:
            return macs[0]
        return host.via if host.via and not self.group[index] else host.address

    def _of(self, name: str) -> str:
        """The entity of an address or MAC; "" for none."""
        found = self.by_address.get(_address(name))
        return self.entity[found] if found is not None else _mac(name)

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
class _Own:
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


# Given.


def _given(scene: _Scene, sms: str) -> _Own:
    own, index = _outgoing(scene), scene.by_address.get(_address(sms))
    if mac := _mac(sms):
        if not any(mac in (*macs, host.via, host.claimed) for host, macs in zip(scene.hosts, scene.macs, strict=True)):
            raise CaptureError(f"{mac} is not in the capture", _candidates(scene))
        return replace(own, why="given") if own and mac in own.macs else _Own((mac,), "given")
    if not _address(sms):
        raise CaptureError(f"{sms!r} is neither an IP address nor a link address", _candidates(scene))
    if index is None:
        raise CaptureError(f"{_address(sms)} is not in the capture", _candidates(scene))
    if not scene.plain(index):
        raise CaptureError(f"{_address(sms)} is not the address of one machine", _candidates(scene))
    if own and index in own.sure:
        return replace(own, why="given", primary=index)
    host = scene.hosts[index]
    mac = next((mac for mac in (host.claimed, *scene.macs[index], host.via) if mac), "")
    return _Own((mac,) if mac else (), "given", {index}, index)


def _mac(text: str) -> str:
    """A link address as the core writes it; "" where the text is none."""
    if not re.fullmatch(
        r"([0-9a-fA-F]{2}([:-])[0-9a-fA-F]{2}(\2[0-9a-fA-F]{2}){4}|([0-9a-fA-F]{4}\.){2}[0-9a-fA-F]{4})", text
    ):
        return ""
    digits = re.sub(r"[:.-]", "", text).lower()
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


def _address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


def _candidates(scene: _Scene) -> str:
    """A hint that names who was busiest."""
    plain = [index for index in range(len(scene.hosts)) if scene.plain(index)]
    plain.sort(key=lambda index: -scene.hosts[index].sent - scene.hosts[index].received)
    named = [
        f"{scene.hosts[index].address}{f' ({scene.entity[index]})' if scene.macs[index] else ''}"
        for index in plain[:NAMED]
    ]
    if not named:
        return "capture on the management node's provisioning interface"
    return f"name the management node with --sms; the capture has {', '.join(named)}"


# Found.


def _outgoing(scene: _Scene) -> _Own | None:
    """The machine that captured, where the capture tells which frames it sent itself (Linux cooked, LINUX_SLL).

    What it only passes on is sent by it, too, but came in before with another link address.
    """
    mine = [
        index
        for index, host in enumerate(scene.hosts)
        if host.outgoing and scene.plain(index) and len(scene.macs[index]) <= 1 and not _loopback(host.address)
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
    return _Own(tuple(mac for mac, _ in macs.most_common()), why, set(mine))


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


@dataclass
class _Ends:
    """What links say of entities, by entity."""

    peers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    served: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    ports: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))


def _shares(scene: _Scene) -> dict[str, float]:
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


def _ends(scene: _Scene) -> _Ends:
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


def _found(scene: _Scene) -> _Own:
    """By what passes through it: first who is an end of nearly all packets, then what a management node does."""
    kinds = "link address" if any(scene.macs) else "address"
    # Who has no address but those it passes on cannot be told from a router.
    alone = {
        scene.entity[index] for index in range(len(scene.hosts)) if scene.plain(index) and len(scene.macs[index]) < 2
    }
    shares = {name: share for name, share in _shares(scene).items() if name in alone and name != scene.node}
    many = {name for name, share in shares.items() if share >= NEARLY_ALL}
    # Of a capture that was narrowed to a node, shares tell whom the node talks to most.
    left = set(shares) if scene.node else many or set(shares)
    if len(many) == 1 and not scene.node:
        (name,) = many
        # 99.96 % is not all.
        share = 100 if shares[name] == 1 else min(100 * shares[name], 99.9)
        return _own(scene, name, f"its {kinds} is an end of {share:.3g} % of all packets")
    ends = _ends(scene)
    for said, narrow in _tests(scene, ends):
        better = narrow(left)
        if len(better) == 1:
            (name,) = better
            return _own(scene, name, said.format(served=len(ends.served[name]), ports=len(ends.ports[name])))
        left = better or left
    raise CaptureError("nothing in the capture tells which machine is the management node", _candidates(scene))


def _tests(scene: _Scene, ends: _Ends) -> list[tuple[str, Callable[[set[str]], set[str]]]]:
    """What a management node does, the surest first: each narrows the candidates down."""
    dhcp = {scene.entity[index] for index in scene.dhcp}
    gateways = _gateways(scene)

    def most(left: set[str], counted: dict[str, set[str]] | dict[str, set[tuple[int, int]]]) -> set[str]:
        best = max((len(counted.get(name, ())) for name in left), default=0)
        return {name for name in left if len(counted.get(name, ())) == best} if best else set()

    return [
        ("it answers the nodes' DHCP", lambda left: left & dhcp),
        ("the other machine is a router: all its addresses lie outside", lambda left: left - gateways),
        ("more machines use its services than those of any other: {served}", lambda left: most(left, ends.served)),
        ("it offers more services than any other machine: {ports}", lambda left: most(left, ends.ports)),
        ("it talks to more machines than any other", lambda left: most(left, ends.peers)),
    ]


def _gateways(scene: _Scene) -> set[str]:
    """Link addresses with nothing but addresses outside behind them."""
    behind: dict[str, list[str]] = defaultdict(list)
    for index, host in enumerate(scene.hosts):
        if scene.plain(index) and not is_link_local(host.address):
            behind[scene.entity[index]].append(host.address)
    return {name for name, found in behind.items() if len(found) >= ROUTER and not any(map(is_local, found))}


def _own(scene: _Scene, name: str, why: str) -> _Own:
    index = scene.by_address.get(name)
    return _Own((), why, {index}, index) if index is not None else _Own((name,), why)


# Who all the others are.


class _Casting:
    """Gives every host its role, once the management node is known."""

    def __init__(self, scene: _Scene, own: _Own) -> None:
        self.scene, self.own = scene, own
        self.macs = set(own.macs)
        self.roles_of: list[Role] = [Role.UNKNOWN] * len(scene.hosts)
        self.peers = self._peers_of({*self._behind(), *own.sure})
        self.served = self._served(set(self.peers))
        self.mine = self._mine()
        self.primary = scene.hosts[self._primary()].address if self.mine else ""
        self.home = network(self.primary) if self.primary else ""
        # Frames of the provisioning network have this one.
        self.inside = self._inside()

    def roles(self) -> Roles:
        """Everybody's role."""
        scene = self.scene
        for index in range(len(scene.hosts)):
            self.roles_of[index] = self._alone(index)
        self._by_entity()
        self._translator()
        addresses = sorted(
            (scene.hosts[index].address for index, role in enumerate(self.roles_of) if role == Role.SMS),
            key=lambda address: (address != self.primary, ":" in address, address),
        )
        if not addresses:
            raise CaptureError("the management node has no address in the capture", _candidates(scene))
        mac = self.inside or next(iter(self.own.macs), "")
        return Roles(Sms(mac, tuple(addresses), self.own.why), bytes(self.roles_of))

    def _peers_of(self, wanted: set[int]) -> dict[int, set[int]]:
        """Whom these hosts talk to."""
        found: dict[int, set[int]] = defaultdict(set)
        for client, server, *_ in self.scene.links:
            if client in wanted:
                found[client].add(server)
            if server in wanted:
                found[server].add(client)
        return found

    def _served(self, wanted: set[int]) -> dict[int, set[str]]:
        """Machines that use a service of these hosts, such as only a management node has."""
        found: dict[int, set[str]] = defaultdict(set)
        for client, server, protocol, port, _, _ in self.scene.links:
            if server in wanted and (protocol, port) not in NODE_PORTS and self.scene.plain(client):
                found[server].add(self.scene.entity[client])
        return found

    def _behind(self) -> list[int]:
        """Hosts whose frames come from the management node, or go to it, and no other."""
        scene = self.scene
        return [
            index
            for index in range(len(scene.hosts))
            if scene.plain(index) and scene.entity[index] in self.macs and set(scene.macs[index]) <= self.macs
        ]

    def _mine(self) -> set[int]:
        """The management node's own addresses among those behind its link address; the others it passes on."""
        scene, own = self.scene, self.own
        if not self.macs:
            return set(own.sure)
        behind = self._behind()
        mine = {index for index in behind if self._claims(index)} | own.sure
        if own.primary is None and not mine:
            mine = {max(behind, key=self._rank)} if behind else set()
        near = [scene.hosts[index].address for index in mine]
        for index in behind:
            address = scene.hosts[index].address
            # Nobody routes to the network that the management node stands in itself.
            if is_link_local(address) or any(_near(address, one) for one in near):
                mine.add(index)
        return mine

    def _claims(self, index: int) -> bool:
        host = self.scene.hosts[index]
        return host.claimed in self.macs if host.claimed else index in self.scene.dhcp

    def _rank(self, index: int) -> tuple[bool, bool, int, int]:
        """How likely it is the address that nodes know the management node by."""
        scene, host = self.scene, self.scene.hosts[index]
        local = is_local(host.address) and not is_link_local(host.address)
        return index in scene.dhcp, local, len(self.served.get(index, ())), host.sent + host.received

    def _primary(self) -> int:
        return self.own.primary if self.own.primary is not None else max(self.mine, key=self._rank)

    def _inside(self) -> str:
        if not self.primary:
            return ""
        index = self.scene.by_address[self.primary]
        claimed = self.scene.hosts[index].claimed
        if claimed in self.macs:
            return claimed
        return next((mac for mac in (*self.scene.macs[index], self.scene.hosts[index].via) if mac in self.macs), "")

    def _alone(self, index: int) -> Role:
        """What a host's own addresses tell; UNKNOWN where its traffic has to."""
        scene, host = self.scene, self.scene.hosts[index]
        if scene.nobody[index]:
            return Role.NODE  # it asks for its address, or whether it may have it
        if scene.group[index]:
            return Role.GROUP
        if index in self.mine or (_loopback(host.address) and not _loopback(self.primary)):
            return Role.SMS
        passed_on = self.inside and self.inside in (*scene.macs[index], host.via if not scene.macs[index] else "")
        if passed_on and not (scene.entity[index] != self.inside and network(host.address) == self.home):
            return Role.OUTSIDE
        if not scene.macs[index] and not host.via and not self._of_cluster(host.address):
            return Role.OUTSIDE
        return Role.UNKNOWN

    def _of_cluster(self, address: str) -> bool:
        return is_local(address) or network(address) == self.home

    def _by_entity(self) -> None:
        """What remains stands behind link addresses of its own: routers, nodes, strangers."""
        scene = self.scene
        behind: dict[str, list[int]] = defaultdict(list)
        for index, role in enumerate(self.roles_of):
            # A router has addresses behind it that are known to lie outside already.
            if role == Role.UNKNOWN or (role == Role.OUTSIDE and scene.entity[index] not in self.macs):
                behind[scene.entity[index]].append(index)
        routers = {name for name, found in behind.items() if self._is_router(found)}
        public = self._public(routers)
        asked: dict[int, set[int]] = defaultdict(set)
        for index in self.mine:
            for peer in self.peers[index]:
                asked[peer].add(index)
        for name, found in behind.items():
            role = Role.OUTSIDE if name in routers else self._role_of_machine(found, public, asked)
            for index in found:
                if self.roles_of[index] == Role.UNKNOWN:
                    self.roles_of[index] = role

    def _is_router(self, found: list[int]) -> bool:
        addresses = [self.scene.hosts[index].address for index in found]
        far = {one for one in addresses if not is_link_local(one) and network(one) != self.home}
        passed_on = any(self.roles_of[index] == Role.OUTSIDE for index in found)
        # A node may have an address of IPv4 and a few of IPv6; those of one network are one.
        return passed_on or len({network(one) for one in far}) >= ROUTER or len(far) >= 4 * ROUTER

    def _public(self, routers: set[str]) -> set[int]:
        """Addresses of the management node that look outwards, where nodes do not stand."""
        scene = self.scene
        if not self.primary:
            return set()
        found = set()
        for index in self.mine:
            address = scene.hosts[index].address
            other = bool(self.inside) and scene.entity[index] != self.inside
            if network(address) == self.home or is_link_local(address):
                continue
            outwards = any(
                self.roles_of[peer] == Role.OUTSIDE or scene.entity[peer] in routers for peer in self.peers[index]
            )
            if (other and outwards) or (not is_local(address) and (other or is_local(self.primary))):
                found.add(index)
        return found

    def _role_of_machine(self, found: list[int], public: set[int], by_peer: dict[int, set[int]]) -> Role:
        """A machine of its own: a node, if it talks to the management node, or stands where nodes do."""
        addresses = [self.scene.hosts[index].address for index in found]
        asked = {one for index in found for one in by_peer.get(index, ())}
        if asked:
            return Role.OUTSIDE if asked <= public else Role.NODE
        towards = {network(self.scene.hosts[index].address) for index in public}
        if towards & set(map(network, addresses)):
            return Role.OUTSIDE
        if any(map(self._of_cluster, addresses)):
            return Role.NODE
        return Role.UNKNOWN

    def _translator(self) -> None:
        """The management node's public address, where a link address of its own hides whose it is.

        It alone goes where nodes go through the management node, to the same port, and talks to nobody inside.
        """
        scene, roles = self.scene, self.roles_of
        wanted: set[tuple[int, int, int]] = set()
        strangers: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
        home = [network(host.address) == self.home for host in scene.hosts]
        for client, server, protocol, port, _, _ in scene.links:
            if roles[server] == Role.OUTSIDE and roles[client] in (Role.NODE, Role.UNKNOWN):
                (wanted if home[client] else strangers[client]).add((server, protocol, port))
        if not strangers:
            return
        peers = self._peers_of(set(strangers))
        found = [
            index
            for index, places in strangers.items()
            if places & wanted and all(roles[peer] == Role.OUTSIDE for peer in peers[index])
        ]
        # One address translates as a rule; several that are private are more likely nodes of another network.
        for index in found:
            if len(found) == 1 or not is_local(scene.hosts[index].address):
                roles[index] = Role.SMS
