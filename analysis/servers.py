"""Find other machines that serve: the management node's servers (filers, name servers), and those of nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from analysis.addresses import UNSPECIFIED, is_local
from analysis.cluster import BOOTS, CONTROLLERS, DHCP, DHCP_SERVERS, FILE_SYSTEMS, GMOND, NODE_DAEMONS
from analysis.host_index import NODE_PORTS
from analysis.model import Server, ServerRole
from analysis.nodes import IPMI, find_machines
from analysis.observed import Host, Link, Role
from analysis.role_assigner import COMMON_PORTS, Roles
from analysis.services import iana_name
from analysis.signatures import TCP, UDP, Signature
from analysis.units import counted

UPSTREAM_PORTS = {
    *COMMON_PORTS,
    *((UDP, port) for port in (88, 123, 389, 514)),
    *((TCP, port) for port in (88, 389, 514, 601, 636, 6514)),
}
"""Ports of a management node that servers use, too: names, time, logs, accounts, mail."""
WEB = {*((TCP, port) for port in (80, 443, 8080, 8443)), (UDP, 443)}
"""Ports of anything: a node with a web page for two others is not a server."""
MAX_SHARE = 0.5
"""Maximum share of the machines that serve the management node; more are nodes with a daemon that it queries."""
MANY = 0.5
"""Share of the nodes that use a port which nobody knows, if that is a service rather than a job."""
SEVERAL = 2
"""Minimum nodes that use a service of another machine."""
MAX_SERVERS = 100
Place = tuple[int, int]


def find_servers(roles: Roles, hosts: Sequence[Host], links: Sequence[Link], signatures: Sequence[Signature]) -> Roles:
    """Return the roles with other machines that serve as servers, and the list of these.

    - The management node is a client of it: it uses a service there that the catalogue does not let it open to nodes.
      No machine becomes a server if more than MAX_SHARE of all would.
    - The management node pings its scheduler's controller, or it answers DHCP: a second management node.
    - SEVERAL nodes are clients of it: of a service of the catalogue, a scheduler or a file system; or MANY are, of any
      port; and there are not as many servers of that as pure clients, as where nodes are each other's.

    They are nodes all the same if they run a scheduler's daemon or use the scheduler, or, in a capture without one, if
    they use services that only nodes use; so is hardware that the management node manages by IPMI, and what ``--nodes``
    names.

    Nodes of another cluster, beside this one on a mirror port, are none here.
    """
    seen = _Seen(roles, hosts, links, signatures)
    upstream, downstream = seen.upstream(), seen.downstream()
    if not upstream and not downstream:
        return roles
    changed, others = bytearray(roles.by_index), seen.nodes_of_others(upstream, downstream)
    for index in seen.own:
        name = seen.server_name(index)
        if name in upstream or name in others or (name in downstream and downstream[name].role != "node"):
            changed[index] = Role.SERVER
    remarks = roles.remarks
    if others:
        them = counted(len(others), "machine")
        remarks = (*remarks, f"of another scheduler alone, and not counted as nodes: {them}")
    return replace(roles, by_index=bytes(changed), servers=seen.report(upstream, downstream), remarks=remarks)


@dataclass(slots=True)
class _Traffic:
    """All traffic to one port of one host; ``clients`` are indexes of hosts."""

    packets: int = 0
    bytes: int = 0
    clients: set[int] = field(default_factory=set)


@dataclass
class _Served:
    """A machine that serves: its services with their clients, packets and bytes."""

    role: ServerRole = "server"
    services: set[str] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)
    hosts: set[int] = field(default_factory=set)
    packets: int = 0
    bytes: int = 0

    def add(self, what: str, use: _Use) -> None:
        self.services.add(what)
        self.clients |= use.clients
        self.hosts |= use.hosts
        self.packets += use.packets
        self.bytes += use.bytes


@dataclass
class _Use:
    """One service of one machine."""

    places: set[Place] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)
    hosts: set[int] = field(default_factory=set)
    packets: int = 0
    bytes: int = 0

    def add(self, host: int, place: Place, traffic: _Traffic, clients: Collection[str] = ()) -> None:
        self.places.add(place)
        self.clients.update(clients)
        self.hosts.add(host)
        self.packets += traffic.packets
        self.bytes += traffic.bytes


Uses = dict[str, dict[str, _Use]]
"""Uses by machine and service."""


class _Seen:
    """Who uses what of whom, between the management node, nodes and other machines."""

    def __init__(
        self, roles: Roles, hosts: Sequence[Host], links: Iterable[Link], signatures: Sequence[Signature]
    ) -> None:
        self.roles, self.hosts = roles, hosts
        self.place = {each: one for one in reversed(signatures) if not one.routed for each in one.ports}
        self.client_names = find_machines(hosts, roles.by_index, roles.routed)
        self.own = [
            index
            for index, role in enumerate(roles.by_index)
            if role == Role.NODE and hosts[index].address not in UNSPECIFIED
        ]
        self.of_sms: Uses = defaultdict(lambda: defaultdict(_Use))
        self.of_nodes: Uses = defaultdict(lambda: defaultdict(_Use))
        self.used: dict[str, set[Place]] = defaultdict(set)
        self.answers_dhcp: dict[str, _Use] = defaultdict(_Use)
        self.controllers: dict[str, _Use] = defaultdict(_Use)
        self.relays = set[str]()
        self.names: dict[Place, str] = {}
        # What the management node manages, and what takes part in its scheduler.
        self.managed, self.daemons, self.scheduled = set[str](), set[str](), set[str]()
        # Who exchanges anything with the management node, and where other machines use a scheduler's daemon.
        self.partners, self.daemons_of = set[str](), defaultdict[str, set[str]](set)
        self._see(links)

    def server_name(self, index: int) -> str:
        """Return the machine of a host: behind a router, its address."""
        if index in self.roles.routed or self.roles.by_index[index] == Role.OUTSIDE:
            return self.hosts[index].address
        return self.roles.machine[index]

    def _see(self, links: Iterable[Link]) -> None:
        """Group the links by server and place first: there may be a hundred thousand between nodes."""
        by_index, sms, node, group = self.roles.by_index, Role.SMS.value, Role.NODE.value, Role.GROUP.value
        managed, between, answers = (defaultdict[tuple[int, int, int], _Traffic](_Traffic) for _ in range(3))
        for client, server, protocol, port, packets, octets in links:
            opener, other = by_index[client], by_index[server]
            if opener == node and other == sms and port:
                self._see_node(client, (protocol, port))
                continue
            if opener == node and port:
                traffic = between[server, protocol, port]
            elif opener == sms and other == node:
                traffic = managed[server, protocol, port]
            elif opener == group and other == node and (protocol, port) == DHCP:
                # An answer to all: the client has no address yet.
                traffic = answers[server, protocol, port]
            else:
                continue
            traffic.packets += packets
            traffic.bytes += octets
            traffic.clients.add(client)
        for (server, protocol, port), traffic in managed.items():
            self._see_management(server, (protocol, port), traffic)
        for (server, protocol, port), traffic in between.items():
            self._see_between(server, (protocol, port), traffic)
        for (server, protocol, port), traffic in answers.items():
            self.answers_dhcp[self.server_name(server)].add(server, (protocol, port), traffic)

    def _see_management(self, server: int, place: Place, traffic: _Traffic) -> None:
        """Use of another machine by the management node."""
        name, signature = self.server_name(server), self.place.get(place)
        self.partners.add(name)
        if place in NODE_DAEMONS:
            self.daemons.add(name)
        if place in CONTROLLERS and signature and self.hosts[server].sent:
            self.controllers[name].add(server, place, traffic)
        if place in IPMI | GMOND or (signature and signature.critical and signature.sms_opens):
            self.managed.add(name)
        elif signature and not signature.sms_opens and self.hosts[server].sent:
            self.of_sms[name][signature.name].add(server, place, traffic)

    def _see_node(self, client: int, place: Place) -> None:
        """Use of the management node."""
        name = self.server_name(client)
        self.partners.add(name)
        self.used[name].add(place)
        if place in CONTROLLERS:
            self.scheduled.add(name)
        if place == DHCP and self.hosts[client].address not in UNSPECIFIED:
            self.relays.add(name)

    def _see_between(self, server: int, place: Place, traffic: _Traffic) -> None:
        """Use of another machine than the management node, by nodes."""
        if place in NODE_DAEMONS:
            for client in traffic.clients:
                self.daemons_of[self.server_name(client)].add(self.server_name(server))
        if place in NODE_PORTS or place in NODE_DAEMONS or not self._may_serve(server):
            return
        there = self.server_name(server)
        # Not those that talk to themselves.
        others = [one for one in traffic.clients if one in self.client_names and self.server_name(one) != there]
        if clients := {self.client_names[one] for one in others} - {there, self.client_names.get(server)}:
            if place not in self.names:
                signature = self.place.get(place)
                self.names[place] = signature.name if signature else FILE_SYSTEMS.get(place) or iana_name(place)
            self.of_nodes[there][self.names[place]].add(server, place, traffic, clients)

    def _may_serve(self, index: int) -> bool:
        role, host = self.roles.by_index[index], self.hosts[index]
        return host.sent > 0 and (
            role in (Role.NODE, Role.UNKNOWN) or (role == Role.OUTSIDE and is_local(host.address))
        )

    # The management node's servers.

    def upstream(self) -> dict[str, _Served]:
        """Return the machines that the management node is a client of, and that are not nodes."""
        nodes = self.managed | self._users() | self._certain()
        found = {name: self._served(uses) for name, uses in self.of_sms.items() if uses and name not in nodes}
        if len(found) > MAX_SHARE * len({self.server_name(index) for index in self.own}):
            return {}
        return found

    def _users(self) -> set[str]:
        """Return the machines that use services which only nodes use.

        A server calls back what it serves: statd and lockd of a filer, for instance.
        """
        return {
            name
            for name, places in self.used.items()
            if any(self._names(at) - set(self.of_sms.get(name, ())) for at in places - UPSTREAM_PORTS)
        }

    def _certain(self) -> set[str]:
        """Return the machines that are nodes whatever they do."""
        return {
            self.server_name(index) for index in self.own if index in self.roles.given or index in self.roles.routed
        }

    def _names(self, at: Place) -> set[str]:
        """Return the service of a port, by its name in the catalogue, else by the port."""
        signature = self.place.get(at)
        return {signature.name if signature else f"{at[0]}/{at[1]}"}

    def _served(self, uses: dict[str, _Use]) -> _Served:
        found = _Served()
        for what, use in uses.items():
            found.add(what, use)
        return found

    # The nodes' servers.

    def downstream(self) -> dict[str, _Served]:
        """Return the machines that nodes are clients of."""
        # Who takes part in the scheduler is a node; without one, who uses what only nodes use.
        nodes = (self.scheduled | self.daemons) or (self._users() | self.managed)
        nodes = nodes | self._certain()
        servers_of: dict[str, set[str]] = defaultdict(set)
        clients_of: dict[str, set[str]] = defaultdict(set)
        for name, uses in self.of_nodes.items():
            for what, use in uses.items():
                servers_of[what].add(name)
                clients_of[what] |= use.clients
        # Where nodes are each other's servers, none is only a client.
        few = {what for what, names in servers_of.items() if len(names) <= len(clients_of[what] - names)}
        found: dict[str, _Served] = {}
        for name, uses in self.of_nodes.items():
            for what in sorted(few & set(uses)):
                if self._is_service(uses[what], is_node=name in nodes):
                    found.setdefault(name, _Served()).add(what, uses[what])
                    if uses[what].places & (CONTROLLERS | BOOTS | DHCP_SERVERS):
                        found[name].role = "management node"
        # Nodes do not listen there: a second controller, which the first pings.
        others = [(name, use) for name, use in self.controllers.items() if name not in found]
        others += [(name, use) for name, use in self.answers_dhcp.items() if name not in self.relays]
        for name, use in others:
            names = {what for place in use.places for what in self._names(place)}
            found.setdefault(name, _Served()).add(min(names), use)
            found[name].services |= names
            found[name].role = "management node"
        for name, served in found.items():
            if name in self.daemons | self._certain() or (served.role == "server" and name in nodes):
                served.role = "node"
        return found

    def nodes_of_others(self, upstream: Collection[str], downstream: dict[str, _Served]) -> set[str]:
        """Return the nodes of other clusters: of another scheduler, if this one has nothing to do with them.

        Both schedulers of a pair have the same nodes.
        """
        found = set[str]()
        for name, served in downstream.items():
            if not any(use.places & CONTROLLERS for use in self.of_nodes.get(name, {}).values()):
                continue
            theirs = (served.clients | self.daemons_of[name]) - set(upstream) - set(downstream)
            if served.role == "management node" and len(self.partners) >= SEVERAL and not theirs & self.partners:
                found |= theirs
        return found - self._certain()

    def _is_service(self, use: _Use, *, is_node: bool) -> bool:
        known = any(place in self.place or place in FILE_SYSTEMS or place in CONTROLLERS for place in use.places)
        if known and not use.places <= WEB:
            return len(use.clients) >= (1 if self.roles.node else SEVERAL)
        return not is_node and len(use.clients) >= max(SEVERAL, MANY * len(set(self.client_names.values())))

    # The report.

    def report(self, upstream: dict[str, _Served], downstream: dict[str, _Served]) -> tuple[Server, ...]:
        """Return all servers: other management nodes first, then by packets."""
        found = dict(downstream)
        for name, served in upstream.items():
            both = found.setdefault(name, _Served())
            for what in sorted(served.services - both.services):
                both.add(what, self.of_sms[name][what])
        order = ("management node", "server", "node")
        others = {name for name, served in found.items() if served.role != "node"}
        servers = [self._server(name, served, served.clients - others) for name, served in found.items()]
        servers.sort(key=lambda one: (order.index(one.role), -one.packets, one.addresses))
        return tuple(servers[:MAX_SERVERS])

    def _server(self, name: str, served: _Served, clients: set[str]) -> Server:
        hosts = [self.hosts[index] for index in sorted(served.hosts)]
        addresses = tuple(sorted({host.address for host in hosts}, key=lambda one: (":" in one, one)))
        mac = name if any(name in host.macs for host in hosts) else ""
        services = tuple(sorted(served.services))
        return Server(addresses, mac, served.role, services, len(clients), served.packets, served.bytes)
