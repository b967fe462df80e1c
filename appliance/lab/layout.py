"""Who is in the lab: its hosts, their addresses and interfaces, and where its files lie. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class LabHost:
    """One host of the lab.

    ``kind`` is ``carrier`` (an admin host that can carry the container), ``admin`` (where a person
    sits), ``node`` (a compute node) or ``outside`` (the world beyond the public network).
    """

    name: str
    kind: str
    addresses: dict[str, str]

    @property
    def own_root(self) -> bool:
        """Whether it runs on the compute nodes' root, not on this machine's."""
        return self.kind in ("node", "outside")

    @property
    def gateway(self) -> str | None:
        """Where its packets to elsewhere go."""
        return None if self.kind == "outside" else GATEWAY[PROVISIONING if self.kind == "node" else PUBLIC]

    def interface(self, network: str) -> str:
        """The interface of its own that leads to the network's switch."""
        return {PROVISIONING: "prov0", PUBLIC: "pub0"}[network] if self.kind == "carrier" else "eth0"

    def port(self, network: str) -> str:
        """The switch's end of that cable."""
        return f"{'p' if network == PROVISIONING else 'u'}-{self.name}"


@dataclass(frozen=True)
class Layout:
    """A lab by its name and number of compute nodes; everything else follows."""

    name: str
    count: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", self.name):
            raise ConfigError(
                f"{self.name!r} is no name for a lab", hint="use up to 20 small letters, digits and dashes"
            )
        if not 0 <= self.count <= MAX_NODES:
            raise ConfigError(f"a lab of {self.count} nodes cannot be made", hint=f"ask for 0 to {MAX_NODES}")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The compute nodes' names."""
        return tuple(f"node{number}" for number in range(1, self.count + 1))

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """Every host; the container is not one of them."""
        both = ((PROVISIONING, "10.77.0"), (PUBLIC, "10.78.0"))
        carriers = [
            LabHost(name, "carrier", {network: f"{prefix}.{last}" for network, prefix in both})
            for name, last in (("host-a", 11), ("host-b", 12))
        ]
        nodes = [LabHost(name, "node", {PROVISIONING: f"10.77.0.{100 + i}"}) for i, name in enumerate(self.nodes, 1)]
        outside = LabHost("outside", "outside", {PUBLIC: GATEWAY[PUBLIC]})
        return (outside, *carriers, LabHost("admin", "admin", {PUBLIC: "10.78.0.20"}), *nodes)

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
        return DISK / self.name

    @property
    def etc(self) -> Path:
        """The folder that is /etc/sms on admin, host-a and host-b."""
        return self.disk / "etc-sms"

    def address_lines(self, viewer: LabHost) -> Iterator[tuple[str, str]]:
        """Address and name of everyone, by the address that ``viewer`` reaches best."""
        order = sorted((PROVISIONING, PUBLIC), key=lambda network: network not in viewer.addresses)
        everyone = [(host.name, host.addresses) for host in self.hosts]
        for name, addresses in [(CONTAINER, CONTAINER_ADDRESSES), *everyone]:
            if viewer.kind == "carrier" and name in ("host-a", "host-b"):
                yield addresses[PUBLIC], name  # the address that the site file has
            else:
                yield next(addresses[network] for network in order if network in addresses), name


def mac(address: str) -> str:
    """The MAC that goes with an IPv4 address: it is the same at every start."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])
