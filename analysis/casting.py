"""Who all the others are, once the management node is known: nodes, addresses outside, groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from analysis.addresses import is_link_local, is_local, is_loopback, network
from analysis.errors import CaptureError
from analysis.model import Sms
from analysis.observed import Role
from analysis.parties import NODE_PORTS, Own, Parties, name_candidates
from analysis.signatures import TCP, UDP

ROUTER = 4
"""So many networks beyond the cluster's behind one link address make it a router's: a node has one of IPv4 and a few of
IPv6."""
ANYBODYS = {*NODE_PORTS, *((TCP, port) for port in (25, 53, 80, 443, 8080, 8443)), (UDP, 53), (UDP, 67), (UDP, 443)}
"""What others than nodes want of a management node, too, from behind a router; a relay asks for addresses at 67."""


@dataclass(frozen=True)
class Roles:
    """Who is who.

    Attributes:
        by_index: one `observed.Role` byte for each host.
        remarks: what makes one doubt it, as sentences.
        node: the node that the capture was narrowed to.
    """

    sms: Sms
    by_index: bytes
    remarks: tuple[str, ...] = ()
    node: str = ""


def _near(address: str) -> str:
    """The first 24 bits of an IPv4 address; "" for others."""
    return address.rpartition(".")[0]


class Casting:
    """Gives every host its role, once the management node is known."""

    def __init__(self, scene: Parties, own: Own) -> None:
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
            raise CaptureError("the management node has no address in the capture", name_candidates(scene))
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
        near = {_near(scene.hosts[index].address) for index in mine} - {""}
        for index in behind:
            address = scene.hosts[index].address
            # Nobody routes to the network that the management node stands in itself.
            if is_link_local(address) or _near(address) in near:
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
        if index in scene.given and index not in self.mine:
            return Role.NODE
        if index in self.mine or (is_loopback(host.address) and not is_loopback(self.primary)):
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
            # A router has addresses behind it that are known already, to lie outside or by the site's word.
            beyond = role == Role.OUTSIDE or index in scene.given
            if role == Role.UNKNOWN or (beyond and scene.entity[index] not in self.macs):
                behind[scene.entity[index]].append(index)
        routers = {name for name, found in behind.items() if self._is_router(found)}
        public = self._public(routers)
        asked: dict[int, set[int]] = defaultdict(set)
        for index in self.mine:
            for peer in self.peers[index]:
                asked[peer].add(index)
        users = self._users(self.mine - public)
        for name, found in behind.items():
            role = Role.OUTSIDE if name in routers else self._role_of_machine(found, public, asked)
            routed = self._routed(found, users) if name in routers else set()
            for index in found:
                if self.roles_of[index] == Role.UNKNOWN:
                    self.roles_of[index] = Role.NODE if index in routed else role

    def _users(self, inner: set[int]) -> set[int]:
        """Hosts of private networks that use services of the management node's such as only nodes use."""
        return {
            client
            for client, server, protocol, port, _, _ in self.scene.links
            if server in inner and port and protocol in (TCP, UDP) and (protocol, port) not in ANYBODYS
            if self.scene.plain(client) and is_local(self.scene.hosts[client].address)
        }

    def _routed(self, found: list[int], users: set[int]) -> set[int]:
        """Nodes behind a router: those that use what nodes use, and where there are two their whole network."""
        hosts = self.scene.hosts
        there = Counter(network(hosts[index].address) for index in found if index in users)
        return {
            index
            for index in found
            if index in users or (there[network(hosts[index].address)] > 1 and is_local(hosts[index].address))
        }

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
