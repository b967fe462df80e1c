"""Layout of a lab: hosts, addresses, interfaces, and paths of its files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError

RUNNING = Path("/run/sms-lab")
"""One folder per lab while it is up: rendered files, logs, journal."""
DISK = Path("/var/lib/sms-lab")
"""One folder per lab, kept by `down`: /etc/sms, state of the admin hosts, shared folders."""
CACHE = Path("/var/cache/sms-lab")
"""Root file system of the compute nodes, built once for all labs."""
LOCKS = Path("/run/sms/lab")

CONTAINER = "sms-services"
PROVISIONING = "provisioning"
PUBLIC = "public"
ROUTED = "routed"
"""Networks of compute nodes behind a router of the provisioning network; all are on one bridge of the switch."""
GATEWAY = {PROVISIONING: "10.77.0.1", PUBLIC: "10.78.0.254"}
CONTAINER_ADDRESSES = {PROVISIONING: "10.77.0.1", PUBLIC: "10.78.0.2"}
BRIDGES = {PROVISIONING: "br-prov", PUBLIC: "br-pub"}
ROUTER = "router"
ROUTER_ADDRESS = "10.77.0.254"
CABINET = {"10.100.0.0/17": "10.100.0.1"}
"""The network of the nodes of a routed lab, and the router's address in it."""
MAX_NODES = 100
MAX_METAL = 4
BMC = "bmc"
BMC_ADDRESS = "10.77.0.90"
ENGINES = ("nomad", "kubernetes")
"""Other engines that a lab can have."""
BALANCED = "10.77.0.40"
"""Address of the load balancers of Kubernetes, which its control plane has."""
NOMAD_SERVERS, CLUSTER_NODES = 3, 2
SERVER, CONTROL, WORKER = "server", "control", "worker"
"""Kinds of hosts of engines: a server of Nomad, the control plane of Kubernetes, a cluster node that runs pods."""
LEGACY = "legacy"
"""Kind of a management node as sites have it before they adopt the services container."""
LEGACY_NAME = "sms-old"
LEGACY_ADDRESSES = {PROVISIONING: "10.77.0.5", PUBLIC: "10.78.0.5"}
"""Its own addresses, for administration; it also has those of the container."""
PROVISION_ADDRESSES = {PROVISIONING: "10.77.0.2", PUBLIC: "10.78.0.3"}
"""Addresses of the provisioning VM."""
ALICE = "alice:x:2000:2000:Alice:/home/alice:/bin/bash"
ALICE_GROUP = "alice:x:2000:"


@dataclass(frozen=True)
class LabHost:
    """One host of the lab.

    Attributes:
        kind: ``carrier`` (an admin host that can run the container), ``admin`` (the administrator's machine), ``node``
            (a compute node), ``router`` (of the provisioning network), ``bmc`` (management controllers of machines),
            ``outside`` (all outside the public network), ``legacy`` (a management node of before), or of an engine:
            ``server``, ``control``, ``worker``.
        addresses: by network; an empty one is a cable without an address.
        tag: short name for interface names.
        more: additional addresses: pairs of a network, or ``lo``, and an address with prefix.
        serves: addresses that it has before its own ones, by network; they also give its MACs.
    """

    name: str
    kind: str
    addresses: dict[str, str]
    tag: str = ""
    more: tuple[tuple[str, str], ...] = ()
    serves: dict[str, str] = field(default_factory=dict)

    @property
    def own_root(self) -> bool:
        """Whether it has a root file system that was built for it, not this machine's."""
        return self.kind in ("node", "outside", "router", LEGACY)

    def interface(self, network: str) -> str:
        """Return its interface that is connected to the network's switch."""
        several = self.kind == "carrier" or len(self.addresses) > 1
        return {PROVISIONING: "prov0", PUBLIC: "pub0", ROUTED: "rout0"}[network] if several else "eth0"

    def port(self, network: str) -> str:
        """Return the name of the switch port of that cable."""
        letter = {PROVISIONING: "p", PUBLIC: "u", ROUTED: "r"}[network]
        return f"{letter}-{self.tag or self.name}"

    def mac(self, network: str) -> str:
        """Return the MAC of its interface in the network."""
        address = self.serves.get(network, self.addresses[network])
        return mac(address) if address else {PROVISIONING: "02:01:00:00:00:01", PUBLIC: "02:01:00:00:00:02"}[network]


@dataclass(frozen=True)
class Machine:
    """A diskless machine, run by QEMU while it is on. ``port``: its switch port; ``bmc``: its controller's address."""

    name: str
    address: str
    bmc: str
    port: str
    memory_mb: int = 512

    @property
    def mac(self) -> str:
        """The MAC of its only network card."""
        return mac(self.address)


@dataclass(frozen=True)
class Plan:
    """Networks and hosts of a lab; the defaults are those of the standard lab.

    Attributes:
        addresses: of the container, by network, as are bridges, gateways and prefix lengths.
        hosts: empty for the default hosts.
        routed: networks of nodes behind the router, each with the router's address in it; empty without a router.
        held: the nodes' cables stay down until ``put_up_cables``.
        disk: folder for persistent files; empty: a folder of its name below ``DISK``.
        user: one line of passwd and one of group, empty for none.
        answers: addresses by name of the outside's name server, which resolves other names to itself.
        ports: additional ports on which the outside accepts syslog and mail.
        binds: folders of the machine that are mounted on carriers at the same path.
    """

    container: str = CONTAINER
    addresses: dict[str, str] = field(default_factory=lambda: dict(CONTAINER_ADDRESSES))
    gateways: dict[str, str] = field(default_factory=lambda: dict(GATEWAY))
    bridges: dict[str, str] = field(default_factory=lambda: dict(BRIDGES))
    prefixes: dict[str, int] = field(default_factory=lambda: {PROVISIONING: 24, PUBLIC: 24})
    hosts: tuple[LabHost, ...] = ()
    routed: dict[str, str] = field(default_factory=dict)
    held: bool = False
    disk: str = ""
    ssh: bool = True
    user: tuple[str, str] = (ALICE, ALICE_GROUP)
    answers: dict[str, str] | None = None
    ports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    binds: tuple[str, ...] = ()

    def gateway(self, host: LabHost) -> str | None:
        """Return the default gateway of a host; None for the outside and for hosts without an address."""
        if host.kind == "node" and ROUTED in host.addresses:
            return self.routed[self._find_routed(host.addresses[ROUTED])]
        network = PROVISIONING if host.kind in ("node", "router") else PUBLIC
        return self.gateways[network] if host.kind not in ("outside", "bmc") and host.addresses[network] else None

    def prefix(self, network: str, address: str) -> int:
        """Return the prefix length of an address in a network."""
        if network == ROUTED:
            return IPv4Network(self._find_routed(address)).prefixlen
        return self.prefixes[network]

    def network(self, name: str) -> str:
        """Return a network that the container is in, as ADDRESS/PREFIX."""
        return str(IPv4Network(f"{self.addresses[name]}/{self.prefixes[name]}", strict=False))

    def _find_routed(self, address: str) -> str:
        return next(each for each in self.routed if IPv4Address(address) in IPv4Network(each))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Restore a plan from the JSON of ``as_dict``."""
        hosts = tuple(LabHost(**{**host, "more": tuple(map(tuple, host["more"]))}) for host in data["hosts"])
        lists = {name: tuple(data[name]) for name in ("user", "binds")}
        ports = {name: tuple(numbers) for name, numbers in data["ports"].items()}
        return cls(**{**data, **lists, "hosts": hosts, "ports": ports})


USUAL = Plan()
SHAPES = {"flat": USUAL, "routed": Plan(routed=CABINET)}
"""Plans of the standard lab: nodes on the provisioning network, or in a network of their own behind a router."""


@dataclass(frozen=True)
class Extras:
    """What the standard lab has besides its compute nodes.

    Attributes:
        metal: number of diskless machines; the certificate of their controllers must be in the lab's folder.
        shape: where the compute nodes are: one of ``SHAPES``.
        engines: some of ``ENGINES``.
        legacy: a management node as sites have it before the services container; it serves the nodes.
    """

    metal: int = 0
    shape: str = "flat"
    engines: Sequence[str] = ()
    legacy: bool = False

    def layout(self, name: str, nodes: int) -> Layout:
        """Return the layout of a lab with them."""
        engines = tuple(engine for engine in ENGINES if engine in self.engines)
        return Layout(name, nodes, SHAPES[self.shape], metal=self.metal, engines=engines, legacy=self.legacy)


STANDARD = Extras()


@dataclass(frozen=True)
class Layout:
    """A lab: its name, numbers of compute nodes and machines, engines, whether it has a legacy management node.

    All else is derived from these and its plan.
    """

    name: str
    count: int
    plan: Plan = USUAL
    metal: int = 0
    engines: tuple[str, ...] = ()
    legacy: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", self.name):
            raise ConfigError(
                f"invalid lab name {self.name!r}", hint="use up to 20 lower case letters, digits and dashes"
            )
        if not 0 <= self.count <= MAX_NODES:
            raise ConfigError(f"invalid number of nodes {self.count}", hint=f"use 0 to {MAX_NODES}")
        if unknown := [engine for engine in self.engines if engine not in ENGINES]:
            raise ConfigError(f"there is no engine {', '.join(unknown)}", hint=f"use {' or '.join(ENGINES)}")
        if self.engines and self.plan != USUAL:
            raise ConfigError("nodes of a lab with an engine are on the provisioning network", hint="omit --shape")
        if self.legacy and (self.plan != USUAL or self.metal or self.engines):
            raise ConfigError("a lab with a legacy node has only compute nodes", hint="omit --shape, --metal, --engine")
        if not 0 <= self.metal <= MAX_METAL:
            raise ConfigError(
                f"invalid number of machines {self.metal}",
                hint=f"use 0 to {MAX_METAL}: each needs a CPU and half a GiB",
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The compute nodes' names."""
        if self.plan.hosts:
            return tuple(host.name for host in self.plan.hosts if host.kind == "node")
        return tuple(f"node{number}" for number in range(1, self.count + 1))

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The diskless machines."""
        return tuple(
            Machine(f"metal{i}", f"10.77.0.{150 + i}", f"10.77.0.{190 + i}", f"m-metal{i}")
            for i in range(1, self.metal + 1)
        )

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """Every host, without the container."""
        if self.plan.hosts:
            return self.plan.hosts
        both = ((PROVISIONING, "10.77.0"), (PUBLIC, "10.78.0"))
        carriers = [
            LabHost(name, "carrier", {network: f"{prefix}.{last}" for network, prefix in both})
            for name, last in (("host-a", 11), ("host-b", 12))
        ]
        network, prefix = (ROUTED, "10.100.0") if self.plan.routed else (PROVISIONING, "10.77.0")
        nodes = [LabHost(name, "node", {network: f"{prefix}.{100 + i}"}) for i, name in enumerate(self.nodes, 1)]
        if self.plan.routed:
            (inside,) = self.plan.routed.values()
            nodes.append(LabHost(ROUTER, "router", {PROVISIONING: ROUTER_ADDRESS, ROUTED: inside}))
        outside = LabHost("outside", "outside", {PUBLIC: GATEWAY[PUBLIC]})
        more = tuple((PROVISIONING, f"{machine.bmc}/24") for machine in self.machines)
        bmc = [LabHost(BMC, "bmc", {PROVISIONING: BMC_ADDRESS}, more=more)] if more else []
        numbers = {SERVER: (21, NOMAD_SERVERS)} if "nomad" in self.engines else {}
        numbers |= {CONTROL: (31, 1), WORKER: (32, CLUSTER_NODES)} if "kubernetes" in self.engines else {}
        engines = [
            LabHost(name, kind, {network: f"{prefix}.{number}" for network, prefix in both})
            for kind, (first, count) in numbers.items()
            for name, number in zip(_names(kind, count), range(first, first + count), strict=True)
        ]
        legacy = [LabHost(LEGACY_NAME, LEGACY, LEGACY_ADDRESSES, serves=self.plan.addresses)] if self.legacy else []
        return (outside, *carriers, LabHost("admin", "admin", {PUBLIC: "10.78.0.20"}), *legacy, *nodes, *bmc, *engines)

    def hosts_of(self, kind: str) -> tuple[LabHost, ...]:
        """The hosts of a kind."""
        return tuple(host for host in self.hosts if host.kind == kind)

    @property
    def engine_addresses(self) -> dict[str, str]:
        """By engine the address at which compute nodes reach its services: of host-a, or of the load balancer."""
        carriers = [host.addresses[PROVISIONING] for host in self.hosts_of("carrier")]
        return {engine: BALANCED if engine == "kubernetes" else carriers[0] for engine in self.engines}

    def namespace(self, host: str) -> str:
        """Return the network namespace of a host, or of the ``switch``."""
        return f"sms-{self.name}-{host}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All network namespaces."""
        return tuple(self.namespace(name) for name in ("switch", *(host.name for host in self.hosts)))

    @property
    def running(self) -> Path:
        """Folder of files that exist only while the lab is up."""
        return RUNNING / self.name

    @property
    def disk(self) -> Path:
        """Folder of files that are kept when the lab goes down."""
        return Path(self.plan.disk) if self.plan.disk else DISK / self.name

    @property
    def engines_disk(self) -> Path:
        """Folder of a folder for each host of an engine, and of the volumes; removed when the lab goes down."""
        return self.disk / "engines"

    def disk_of(self, host: LabHost) -> Path | None:
        """Return the folder of a host's changes to its root file system; None if these end with its power.

        It is removed when the lab goes down.
        """
        return self.disk / host.name if host.kind == LEGACY else None

    @property
    def consoles(self) -> Path:
        """Folder of the serial console logs of its machines, and other files of QEMU."""
        return self.running / "metal"

    @property
    def etc(self) -> Path:
        """The folder that is /etc/sms on admin, host-a and host-b."""
        return self.disk / "etc-sms"

    def address_lines(self, viewer: LabHost) -> Iterator[tuple[str, str]]:
        """Yield address and name of every host, preferring the networks of ``viewer``."""
        order = sorted((PROVISIONING, PUBLIC, ROUTED), key=lambda network: network not in viewer.addresses)
        everyone = [(host.name, host.addresses) for host in self.hosts]
        everyone += [(machine.name, {PROVISIONING: machine.address}) for machine in self.machines]
        everyone += [("sms-provision", PROVISION_ADDRESSES)] if self.metal else []
        for name, addresses in [(self.plan.container, self.plan.addresses), *everyone]:
            if not all(addresses.values()):
                continue
            if viewer.kind == "carrier" and name in ("host-a", "host-b"):
                yield addresses[PUBLIC], name  # the address that the site file has
            else:
                yield next(addresses[network] for network in order if network in addresses), name


def _names(kind: str, count: int) -> list[str]:
    return [kind] if count == 1 else [f"{kind}{i}" for i in range(1, count + 1)]


def mac(address: str) -> str:
    """Derive a MAC from an IPv4 address, so that it is the same at every start."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])
