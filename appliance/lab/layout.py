"""Who is in the lab: its hosts, their addresses and interfaces, and where its files lie. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError

RUNNING = Path("/run/sms-lab")
"""One folder a lab while it is up: what was rendered for it, its logs, its journal."""
DISK = Path("/var/lib/sms-lab")
"""One folder a lab, kept by `down`: /etc/sms, the admin hosts' state, what they share."""
CACHE = Path("/var/cache/sms-lab")
"""The compute nodes' root file system, built once for all labs."""
LOCKS = Path("/run/lock")

CONTAINER = "sms-services"
PROVISIONING = "provisioning"
PUBLIC = "public"
GATEWAY = {PROVISIONING: "10.77.0.1", PUBLIC: "10.78.0.254"}
CONTAINER_ADDRESSES = {PROVISIONING: "10.77.0.1", PUBLIC: "10.78.0.2"}
BRIDGES = {PROVISIONING: "br-prov", PUBLIC: "br-pub"}
MAX_NODES = 100
MAX_METAL = 4
BMC = "bmc"
BMC_ADDRESS = "10.77.0.90"
PROVISION_ADDRESSES = {PROVISIONING: "10.77.0.2", PUBLIC: "10.78.0.3"}
"""The provisioning VM's."""
ALICE = "alice:x:2000:2000:Alice:/home/alice:/bin/bash"
ALICE_GROUP = "alice:x:2000:"


@dataclass(frozen=True)
class LabHost:
    """One host of the lab.

    ``kind`` is ``carrier`` (an admin host that can carry the container), ``admin`` (where a person
    sits), ``node`` (a compute node), ``bmc`` (where the management controllers of machines are) or ``outside`` (the
    world beyond the public network). ``addresses`` by network: an
    empty one is a cable without an address. ``tag`` stands in names of interfaces, which are short. ``more``: pairs of
    a network, or ``lo``, and an address with its prefix that it has besides.
    """

    name: str
    kind: str
    addresses: dict[str, str]
    tag: str = ""
    more: tuple[tuple[str, str], ...] = ()

    @property
    def own_root(self) -> bool:
        """Whether it runs on the compute nodes' root, not on this machine's."""
        return self.kind in ("node", "outside")

    def interface(self, network: str) -> str:
        """The interface of its own that leads to the network's switch."""
        several = self.kind == "carrier" or len(self.addresses) > 1
        return {PROVISIONING: "prov0", PUBLIC: "pub0"}[network] if several else "eth0"

    def port(self, network: str) -> str:
        """The switch's end of that cable."""
        return f"{'p' if network == PROVISIONING else 'u'}-{self.tag or self.name}"

    def mac(self, network: str) -> str:
        """The MAC of its interface there."""
        address = self.addresses[network]
        return mac(address) if address else {PROVISIONING: "02:01:00:00:00:01", PUBLIC: "02:01:00:00:00:02"}[network]


@dataclass(frozen=True)
class Machine:
    """A machine without a disk: QEMU while it is on. ``port`` is its cable's name at the switch, ``bmc`` an address."""

    name: str
    address: str
    bmc: str
    port: str
    memory_mb: int = 512

    @property
    def mac(self) -> str:
        """The MAC of its only card."""
        return mac(self.address)


@dataclass(frozen=True)
class Plan:
    """The networks of a lab, and who is in it; the usual lab's where nothing else is said.

    Addresses, bridges, gateways and prefix lengths by network, ``addresses`` being the container's. ``hosts``: none
    are the usual ones. ``held``: nodes' cables are down until somebody puts them up. ``disk``: where it keeps things,
    a folder of its name below ``DISK`` when empty. ``user``: one line of passwd and one of group, empty for none.
    ``answers``: addresses by name that the outside tells as name server; any other name is the outside's own.
    ``ports``: more ports that the outside takes syslog and mail on. ``binds``: folders of the machine that carriers see
    at the same path.
    """

    container: str = CONTAINER
    addresses: dict[str, str] = field(default_factory=lambda: dict(CONTAINER_ADDRESSES))
    gateways: dict[str, str] = field(default_factory=lambda: dict(GATEWAY))
    bridges: dict[str, str] = field(default_factory=lambda: dict(BRIDGES))
    prefixes: dict[str, int] = field(default_factory=lambda: {PROVISIONING: 24, PUBLIC: 24})
    hosts: tuple[LabHost, ...] = ()
    held: bool = False
    disk: str = ""
    ssh: bool = True
    user: tuple[str, str] = (ALICE, ALICE_GROUP)
    answers: dict[str, str] | None = None
    ports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    binds: tuple[str, ...] = ()

    def gateway(self, host: LabHost) -> str | None:
        """Where a host's packets to elsewhere go; nowhere from the outside, and from who has no address."""
        network = PROVISIONING if host.kind == "node" else PUBLIC
        return self.gateways[network] if host.kind not in ("outside", "bmc") and host.addresses[network] else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> Plan:
        """What ``as_dict`` gave, by way of JSON."""
        hosts = tuple(LabHost(**{**host, "more": tuple(map(tuple, host["more"]))}) for host in said["hosts"])
        lists = {name: tuple(said[name]) for name in ("user", "binds")}
        ports = {name: tuple(numbers) for name, numbers in said["ports"].items()}
        return cls(**{**said, **lists, "hosts": hosts, "ports": ports})


USUAL = Plan()


@dataclass(frozen=True)
class Layout:
    """A lab by its name and numbers of compute nodes and machines; everything else follows from these and its plan."""

    name: str
    count: int
    plan: Plan = USUAL
    metal: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", self.name):
            raise ConfigError(
                f"{self.name!r} is no name for a lab", hint="use up to 20 small letters, digits and dashes"
            )
        if not 0 <= self.count <= MAX_NODES:
            raise ConfigError(f"a lab of {self.count} nodes cannot be made", hint=f"ask for 0 to {MAX_NODES}")
        if not 0 <= self.metal <= MAX_METAL:
            raise ConfigError(
                f"a lab of {self.metal} machines cannot be made",
                hint=f"ask for 0 to {MAX_METAL}: each takes a CPU and half a GiB",
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The compute nodes' names."""
        if self.plan.hosts:
            return tuple(host.name for host in self.plan.hosts if host.kind == "node")
        return tuple(f"node{number}" for number in range(1, self.count + 1))

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines without a disk."""
        return tuple(
            Machine(f"metal{i}", f"10.77.0.{150 + i}", f"10.77.0.{190 + i}", f"m-metal{i}")
            for i in range(1, self.metal + 1)
        )

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """Every host; the container is not one of them."""
        if self.plan.hosts:
            return self.plan.hosts
        both = ((PROVISIONING, "10.77.0"), (PUBLIC, "10.78.0"))
        carriers = [
            LabHost(name, "carrier", {network: f"{prefix}.{last}" for network, prefix in both})
            for name, last in (("host-a", 11), ("host-b", 12))
        ]
        nodes = [LabHost(name, "node", {PROVISIONING: f"10.77.0.{100 + i}"}) for i, name in enumerate(self.nodes, 1)]
        outside = LabHost("outside", "outside", {PUBLIC: GATEWAY[PUBLIC]})
        more = tuple((PROVISIONING, f"{machine.bmc}/24") for machine in self.machines)
        bmc = [LabHost(BMC, "bmc", {PROVISIONING: BMC_ADDRESS}, more=more)] if more else []
        return (outside, *carriers, LabHost("admin", "admin", {PUBLIC: "10.78.0.20"}), *nodes, *bmc)

    def namespace(self, host: str) -> str:
        """The network namespace of a host, or of the ``switch``."""
        return f"sms-{self.name}-{host}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.namespace(name) for name in ("switch", *(host.name for host in self.hosts)))

    @property
    def running(self) -> Path:
        """What there is only while the lab is up."""
        return RUNNING / self.name

    @property
    def disk(self) -> Path:
        """What stays when the lab goes down."""
        return Path(self.plan.disk) if self.plan.disk else DISK / self.name

    @property
    def consoles(self) -> Path:
        """What its machines say on their serial lines, a file each; and what QEMU needs beside them."""
        return self.running / "metal"

    @property
    def etc(self) -> Path:
        """The folder that is /etc/sms on admin, host-a and host-b."""
        return self.disk / "etc-sms"

    def address_lines(self, viewer: LabHost) -> Iterator[tuple[str, str]]:
        """Address and name of everyone, by the address that ``viewer`` reaches best."""
        order = sorted((PROVISIONING, PUBLIC), key=lambda network: network not in viewer.addresses)
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


def mac(address: str) -> str:
    """The MAC that goes with an IPv4 address: it is the same at every start."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])
