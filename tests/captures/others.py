"""Other machines that serve, beside a simulated cluster's management node, as a switch's mirror port shows them."""

from __future__ import annotations

from itertools import count

from tests.captures import packets as p
from tests.captures.cluster import START_S, Made, Plan, simulate
from tests.captures.files import Packet
from tests.captures.variants import small
from tests.captures.wire import Message, Station

FILER = Station("filer", "52:54:00:0b:00:01", "10.1.0.50")
STORE = Station("store", "52:54:00:0b:00:03", "10.1.0.52")
STANDBY = Station("standby", "52:54:00:00:00:03", "10.1.0.2")


def mount(made: Made, client: Station, server: Station, *, every_s: float = 10.0, port: int = 2049) -> None:
    """A mount through the whole capture, made before it, that is used regularly."""
    turns = int((made.plan.duration_s - 5) / every_s)
    messages: list[Message] = []
    for xid in range(turns):
        messages += [(every_s, "c", p.rpc_call(xid, 1, bytes(40))), (0.001, "s", p.rpc_reply(xid, bytes(112)))]
    made.connect(START_S + 1, "files", client, server, port, messages, own=1021, opened=False, closed=False)


def filer(*, nodes: int = 8, every_s: float = 0.5, services: tuple[str, ...] = ()) -> Made:
    """Nodes mount a filer, and nothing of the management node; it is far busier than that."""
    made = small(*services or ("slurm", "ntp", "syslog", "ssh", "arp"), nodes=nodes, duration_s=1200.0)
    for node in made.nodes:
        mount(made, node, FILER, every_s=every_s)
    return made


def lustre() -> Made:
    """Two servers of a file system that the catalogue does not have, which are each other's clients, too."""
    made = small("slurm", "ntp", "arp", nodes=6, duration_s=1200.0)
    other = Station("filer2", "52:54:00:0b:00:04", "10.1.0.51")
    for client in (*made.nodes, FILER, other):
        for server in {FILER, other} - {client}:
            mount(made, client, server, port=988)
    return made


def message(made: Made, time_s: float, client: Station, server: Station, port: int, kind: int) -> None:
    """A message of Slurm and its answer."""
    request = p.slurm(kind, bytes(60), sender=client.address, sender_port=port)
    answer = p.slurm(8001, bytes(8), sender=server.address)
    made.connect(time_s, "standby", client, server, port, [(2e-4, "c", request), (1e-3, "s", answer)])


def failover_pair() -> Made:
    """A second management node: its slurmctld and the first's ping each other, nodes register there, too, and query its
    clock; it logs in on nodes."""
    made = simulate(
        Plan(nodes=8, boots=2, duration_s=1800.0, services=("provisioning", "slurm", "ntp", "syslog", "ssh", "arp"))
    )
    for turn in range(17):
        message(made, START_S + 3 + 100 * turn, made.sms, STANDBY, 6817, 1008)
        message(made, START_S + 53 + 100 * turn, STANDBY, made.sms, 6817, 1008)
    for number, node in enumerate(made.nodes):
        for time_s in made.times(number, 600, made.random("standby", number)):
            message(made, time_s, node, STANDBY, 6817, 1002)
            request, answer = (p.ntp(mode, stratum=2, poll=9, sent_ns=round(time_s * 1e9)) for mode in (3, 4))
            messages: list[Message] = [(0, "c", request), (0.001, "s", answer)]
            made.exchange(time_s, "clock", node, STANDBY, (node.port(), 123), messages)
            made.connect(time_s + 9, "login", STANDBY, node, 22, [(0.01, "s", b"SSH-2.0-x\r\n"), (0.01, "c", bytes(9))])
    return made


def own_dhcp_server(*more: Station) -> Made:
    """A server of DHCP beside the management node, which has the scheduler; ``more`` answer some other nodes."""
    made = small("slurm", "ntp", "arp", nodes=4 + len(more), duration_s=1200.0)
    broadcast, identities = "255.255.255.255", count(1)
    for number, node in enumerate(made.nodes):
        server = more[number - 4] if number >= 4 else STANDBY
        time_s, xid = START_S + 100 + 800 * number / len(made.nodes), next(identities)
        requests = made.open((p.UDP, "0.0.0.0", 68, broadcast, 67), "dhcp", "node")
        replies = made.open((p.UDP, server.address, 67, broadcast, 68), "dhcp", "node")
        for wait_s, kind in ((0.0, 1), (0.5, 2), (0.6, 3), (0.7, 5)):
            answer = kind in (2, 5)
            options = [(54, p.ip_bytes(server.address)), (51, (86400).to_bytes(4))] if answer else [(60, b"Linux")]
            yours = node.address if answer else "0.0.0.0"
            payload = p.bootp(kind, mac=node.mac, xid=xid, options=options, yours=yours)
            made.datagram(
                time_s + wait_s,
                replies if answer else requests,
                payload,
                (server, 67, node, 68) if answer else (node, 68, server, 67),
                to=p.BROADCAST,
                source=server.address if answer else "0.0.0.0",
                target=broadcast,
            )
    return made


def many_ports(ports: int) -> Made:
    """A server of which all nodes use many ports that nobody knows."""
    made = small("slurm", "ntp", "arp", nodes=4, duration_s=1200.0)
    for number in range(ports):
        for turn, node in enumerate(made.nodes):
            time_s = START_S + 10 + number + turn / 4
            made.connect(time_s, "many", node, STORE, 20000 + number, [(0.01, "c", bytes(40)), (0.01, "s", bytes(40))])
    return made


def peers() -> Made:
    """Nodes copy files from each other, over ssh, rsync and slurmd's port: none is a server."""
    made = small("slurm", "ntp", "arp", nodes=6, duration_s=900.0)
    for number, client in enumerate(made.nodes):
        for other, server in enumerate(made.nodes):
            if client is not server:
                time_s = START_S + 10 + 30 * number + other
                for port in (22, 873, 6818):
                    made.connect(time_s, "peers", client, server, port, [(0.01, "c", b"x"), (0.01, "s", bytes(500))])
    # The first process of a job is everybody's.
    for client in made.nodes[1:]:
        made.connect(START_S + 300, "job", client, made.nodes[0], 29500, [(0.01, "c", b"x"), (0.01, "s", b"y")])
    return made


def two_clusters() -> list[Packet]:
    """Two clusters on one mirror port: each has a management node that routes, and nodes that use only that one."""
    services = ("slurm", "ntp", "ganglia", "routing", "nfs", "arp")
    first = simulate(Plan(nodes=6, boots=0, duration_s=1200.0, services=services))
    second = simulate(
        Plan(nodes=5, boots=0, duration_s=1200.0, services=services, seed=2, sms="10.2.0.1", network="10.2.1")
    )
    # Link addresses of their own.
    other = ((time, frame[:42].replace(b"RT\0", b"RT\2") + frame[42:]) for time, frame in second.packets())
    return sorted([*first.packets(), *other])
