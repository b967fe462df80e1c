"""Assigns a role to every host, once the management node is known: nodes, outside addresses, groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from analysis.addresses import is_link_local, is_local, is_loopback, network
from analysis.errors import CaptureError
from analysis.host_index import NODE_PORTS, HostIndex, SmsIdentity, name_candidates
from analysis.model import Server, Sms
from analysis.observed import Role
from analysis.signatures import TCP, UDP

ROUTER = 4
"""A link address with addresses of this many foreign networks belongs to a router: a node has one IPv4 network and a
few IPv6 networks."""
COMMON_PORTS = {*NODE_PORTS, *((TCP, port) for port in (25, 53, 80, 443, 8080, 8443)), (UDP, 53), (UDP, 67), (UDP, 443)}
"""Ports that machines other than nodes use on a management node, too; a DHCP relay uses 67."""


@dataclass(frozen=True)
class Roles:
    """The role of every host.

    Attributes:
        by_index: one `observed.Role` byte for each host.
        remarks: reasons to doubt the roles, as sentences.
        node: the node that the capture was restricted to.
        routed: nodes behind routers, whose link address says nothing about the machine.
        machine: the machine of each host, by its link address if it has one.
        given: hosts in the networks of ``--nodes``.
        servers: other machines that serve nodes or the management node.
    """

    sms: Sms
    by_index: bytes
    remarks: tuple[str, ...] = ()
    node: str = ""
    routed: frozenset[int] = frozenset()
    machine: tuple[str, ...] = ()
    given: frozenset[int] = frozenset()
    servers: tuple[Server, ...] = ()


def _prefix24(address: str) -> str:
    """Return the first 24 bits of an IPv4 address; "" for others."""
    return address.rpartition(".")[0]


class RoleAssigner:
    """Assigns roles to hosts, given the management node."""

    def __init__(self, host_index: HostIndex, identity: SmsIdentity) -> None:
        self.host_index, self.identity = host_index, identity
        self.macs = set(identity.macs)
        self.roles_of: list[Role] = [Role.UNKNOWN] * len(host_index.hosts)
        self.routed: set[int] = set()
        self.peers = self._peers_of({*self._behind(), *identity.confirmed})
        self.served = self._find_served(set(self.peers))
        self.own_hosts = self._find_own_addresses()
        self.primary = host_index.hosts[self._find_primary()].address if self.own_hosts else ""
        self.home_network = network(self.primary) if self.primary else ""
        # The management node's link address on the provisioning network.
        self.inner_mac = self._find_inner_mac()

    def roles(self) -> Roles:
        """Return the role of every host.

        Raises:
            CaptureError: the management node has no address in the capture.
        """
        host_index = self.host_index
        for index in range(len(host_index.hosts)):
            self.roles_of[index] = self._role_of_host(index)
        self._assign_by_entity()
        self._find_nat_address()
        addresses = sorted(
            (host_index.hosts[index].address for index, role in enumerate(self.roles_of) if role == Role.SMS),
            key=lambda address: (address != self.primary, ":" in address, address),
        )
        if not addresses:
            raise CaptureError("the management node has no address in the capture", name_candidates(host_index))
        mac = self.inner_mac or next(iter(self.identity.macs), "")
        return Roles(Sms(mac, tuple(addresses), self.identity.why), bytes(self.roles_of), routed=frozenset(self.routed))

    def _peers_of(self, hosts: set[int]) -> dict[int, set[int]]:
        """Return the peers of each of these hosts."""
        found: dict[int, set[int]] = defaultdict(set)
        for client, server, *_ in self.host_index.links:
            if client in hosts:
                found[client].add(server)
            if server in hosts:
                found[server].add(client)
        return found

    def _find_served(self, hosts: set[int]) -> dict[int, set[str]]:
        """Return the machines that use a service of these hosts which only a management node offers."""
        found: dict[int, set[str]] = defaultdict(set)
        for client, server, protocol, port, _, _ in self.host_index.links:
            if server in hosts and (protocol, port) not in NODE_PORTS and self.host_index.is_unicast(client):
                found[server].add(self.host_index.entity[client])
        return found

    def _behind(self) -> list[int]:
        """Return the hosts whose frames all come from or go to the management node's link addresses."""
        host_index = self.host_index
        return [
            index
            for index in range(len(host_index.hosts))
            if host_index.is_unicast(index)
            and host_index.entity[index] in self.macs
            and set(host_index.macs[index]) <= self.macs
        ]

    def _find_own_addresses(self) -> set[int]:
        """Return the management node's own addresses; the others behind its link address are forwarded."""
        host_index, identity = self.host_index, self.identity
        if not self.macs:
            return set(identity.confirmed)
        behind = self._behind()
        own = {index for index in behind if self._claims(index)} | identity.confirmed
        if identity.primary is None and not own:
            own = {max(behind, key=self._rank)} if behind else set()
        near = {_prefix24(host_index.hosts[index].address) for index in own} - {""}
        attached = self._find_attached()
        for index in behind:
            address = host_index.hosts[index].address
            # Traffic to a directly attached network is not routed.
            if is_link_local(address) or _prefix24(address) in near or network(address) in attached:
                own.add(index)
        return own

    def _find_attached(self) -> set[str]:
        """Return the IPv6 networks in which other machines send with link addresses of their own.

        Those of several machines; that of one only if it has no other, as a router would send from several.
        """
        host_index = self.host_index
        senders: dict[str, set[str]] = defaultdict(set)
        networks: dict[str, set[str]] = defaultdict(set)
        for index, host in enumerate(host_index.hosts):
            if ":" in host.address and host_index.is_unicast(index) and not is_link_local(host.address):
                for mac in set(host_index.macs[index]) - self.macs:
                    senders[network(host.address)].add(mac)
                    networks[mac].add(network(host.address))
        return {one for one, macs in senders.items() if len(macs) > 1 or all(len(networks[mac]) == 1 for mac in macs)}

    def _claims(self, index: int) -> bool:
        host = self.host_index.hosts[index]
        return host.claimed in self.macs if host.claimed else index in self.host_index.dhcp_servers

    def _rank(self, index: int) -> tuple[bool, bool, int, int]:
        """Return a sort key: how likely nodes use this address to reach the management node."""
        host_index, host = self.host_index, self.host_index.hosts[index]
        local = is_local(host.address) and not is_link_local(host.address)
        return index in host_index.dhcp_servers, local, len(self.served.get(index, ())), host.sent + host.received

    def _find_primary(self) -> int:
        return self.identity.primary if self.identity.primary is not None else max(self.own_hosts, key=self._rank)

    def _find_inner_mac(self) -> str:
        if not self.primary:
            return ""
        index = self.host_index.by_address[self.primary]
        claimed = self.host_index.hosts[index].claimed
        if claimed in self.macs:
            return claimed
        return next(
            (mac for mac in (*self.host_index.macs[index], self.host_index.hosts[index].via) if mac in self.macs), ""
        )

    def _role_of_host(self, index: int) -> Role:
        """Return the role that follows from a host's own addresses; UNKNOWN if its traffic must decide."""
        host_index, host = self.host_index, self.host_index.hosts[index]
        if host_index.unspecified[index]:
            return Role.NODE  # DHCP client or duplicate address detection
        if host_index.group[index]:
            return Role.GROUP
        if index in host_index.site_nodes and index not in self.own_hosts:
            return Role.NODE
        if index in self.own_hosts or (is_loopback(host.address) and not is_loopback(self.primary)):
            return Role.SMS
        forwarded = self.inner_mac and self.inner_mac in (
            *host_index.macs[index],
            host.via if not host_index.macs[index] else "",
        )
        if forwarded and not (
            host_index.entity[index] != self.inner_mac and network(host.address) == self.home_network
        ):
            return Role.OUTSIDE
        if not host_index.macs[index] and not host.via and not self._of_cluster(host.address):
            return Role.OUTSIDE
        return Role.UNKNOWN

    def _of_cluster(self, address: str) -> bool:
        return is_local(address) or network(address) == self.home_network

    def _assign_by_entity(self) -> None:
        """Assign the remaining hosts by link address: routers, nodes, unknown machines."""
        host_index = self.host_index
        behind: dict[str, list[int]] = defaultdict(list)
        for index, role in enumerate(self.roles_of):
            # A router may have addresses behind it that are already assigned: outside, or given by --nodes.
            beyond = role == Role.OUTSIDE or index in host_index.site_nodes
            if role == Role.UNKNOWN or (beyond and host_index.entity[index] not in self.macs):
                behind[host_index.entity[index]].append(index)
        routers = {name for name, found in behind.items() if self._is_router(found)}
        public = self._find_public_addresses(routers)
        contacted: dict[int, set[int]] = defaultdict(set)
        for index in self.own_hosts:
            for peer in self.peers[index]:
                contacted[peer].add(index)
        users = self._find_users(self.own_hosts - public)
        for name, found in behind.items():
            role = Role.OUTSIDE if name in routers else self._role_of_machine(found, public, contacted)
            routed = self._find_routed_nodes(found, users) if name in routers else set()
            for index in found:
                if self.roles_of[index] == Role.UNKNOWN:
                    self.roles_of[index] = Role.NODE if index in routed else role
                if name in routers and self.roles_of[index] == Role.NODE:
                    self.routed.add(index)

    def _find_users(self, inner: set[int]) -> set[int]:
        """Return the hosts of private networks that use services which only nodes use."""
        return {
            client
            for client, server, protocol, port, _, _ in self.host_index.links
            if server in inner and port and protocol in (TCP, UDP) and (protocol, port) not in COMMON_PORTS
            if self.host_index.is_unicast(client) and is_local(self.host_index.hosts[client].address)
        }

    def _find_routed_nodes(self, found: list[int], users: set[int]) -> set[int]:
        """Return the nodes behind a router: users of node services; with two of them their whole network."""
        hosts = self.host_index.hosts
        there = Counter(network(hosts[index].address) for index in found if index in users)
        return {
            index
            for index in found
            if index in users or (there[network(hosts[index].address)] > 1 and is_local(hosts[index].address))
        }

    def _is_router(self, found: list[int]) -> bool:
        addresses = [self.host_index.hosts[index].address for index in found]
        given = [index for index in found if index in self.host_index.site_nodes]
        if sum(network(self.host_index.hosts[index].address) != self.home_network for index in given) > 1:
            return True
        far = {one for one in addresses if not is_link_local(one) and network(one) != self.home_network}
        forwarded = any(self.roles_of[index] == Role.OUTSIDE for index in found)
        # A machine of a private network has at most one address of the internet: one of another is forwarded.
        internet = {network(one) for one in far if ":" not in one and not is_local(one)}
        if is_local(self.primary) and len(internet) > 1:
            return True
        # A node may have one IPv4 address and a few IPv6 addresses; addresses of one network count once.
        return forwarded or len({network(one) for one in far}) >= ROUTER or len(far) >= 4 * ROUTER

    def _find_public_addresses(self, routers: set[str]) -> set[int]:
        """Return the management node's addresses on networks without nodes."""
        host_index = self.host_index
        if not self.primary:
            return set()
        found = set()
        for index in self.own_hosts:
            address = host_index.hosts[index].address
            other = bool(self.inner_mac) and host_index.entity[index] != self.inner_mac
            if network(address) == self.home_network or is_link_local(address):
                continue
            outwards = any(
                self.roles_of[peer] == Role.OUTSIDE or host_index.entity[peer] in routers for peer in self.peers[index]
            )
            if (other and outwards) or (not is_local(address) and (other or is_local(self.primary))):
                found.add(index)
        return found

    def _role_of_machine(self, found: list[int], public: set[int], by_peer: dict[int, set[int]]) -> Role:
        """Return the role of a machine: a node if it talks to the management node or is on the nodes' network."""
        addresses = [self.host_index.hosts[index].address for index in found]
        contacted = {one for index in found for one in by_peer.get(index, ())}
        if contacted:
            return Role.OUTSIDE if contacted <= public else Role.NODE
        towards = {network(self.host_index.hosts[index].address) for index in public}
        if towards & set(map(network, addresses)):
            return Role.OUTSIDE
        if any(map(self._of_cluster, addresses)):
            return Role.NODE
        return Role.UNKNOWN

    def _find_nat_address(self) -> None:
        """Find the management node's public address where it has a separate link address.

        Only this address has the same outside destinations and ports as the nodes, and no peers inside.
        """
        host_index, roles = self.host_index, self.roles_of
        destinations: set[tuple[int, int, int]] = set()
        strangers: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
        is_home = [network(host.address) == self.home_network for host in host_index.hosts]
        for client, server, protocol, port, _, _ in host_index.links:
            if roles[server] == Role.OUTSIDE and roles[client] in (Role.NODE, Role.UNKNOWN):
                (destinations if is_home[client] else strangers[client]).add((server, protocol, port))
        if not strangers:
            return
        peers = self._peers_of(set(strangers))
        found = [
            index
            for index, places in strangers.items()
            if places & destinations and all(roles[peer] == Role.OUTSIDE for peer in peers[index])
        ]
        # NAT usually uses one address; several private ones are more likely nodes of another network.
        for index in found:
            if len(found) == 1 or not is_local(host_index.hosts[index].address):
                roles[index] = Role.SMS
