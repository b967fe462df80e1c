"""The workload model: which services of a site an engine runs together, with what state, files, secrets and ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.catalog import Service
from appliance.catalog.model import Role


@dataclass(frozen=True)
class Ids:
    """Numeric ids of a user in the image."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Unit:
    """A service of a workload: one container or task.

    ``helper``: it is there for others of the workload, which reach it by a socket file.
    """

    service: Service
    ids: Ids
    helper: bool = False

    @property
    def name(self) -> str:
        """The name of the service."""
        return self.service.name


@dataclass(frozen=True)
class Port:
    """A port that a service listens on: ``tcp`` or ``udp``, and its number there."""

    service: str
    protocol: Literal["tcp", "udp"]
    number: int

    @property
    def name(self) -> str:
        """A name of at most 15 characters, unique in its workload."""
        return f"{self.protocol}-{self.number}"


@dataclass(frozen=True)
class ConfigFile:
    """A file below /etc; it contains no secret. ``key``: its name in a flat folder."""

    path: str
    key: str
    text: str
    owner: str = "root"
    group: str = "root"
    mode: str = "0644"


@dataclass(frozen=True)
class SecretFile:
    """A file below /etc whose content the engine has; ``name``: its setting in ``secrets`` of the site file."""

    name: str
    path: str
    owner: str
    mode: str

    @property
    def key(self) -> str:
        """The name of the file, which is its key in a Secret of Kubernetes."""
        return self.path.rpartition("/")[2]

    @property
    def slug(self) -> str:
        """Its name for engines that know letters, digits and dashes: munge-key."""
        return self.name.replace("_", "-")


@dataclass(frozen=True)
class Workload:
    """Services that run in the same place.

    Attributes:
        name: that of its main service.
        units: in starting order, helpers first.
        state: folders that outlive a restart, sorted.
        scratch: further folders that its services write to.
        after: workloads that are to be started before.
    """

    name: str
    units: tuple[Unit, ...]
    state: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    files: tuple[ConfigFile, ...] = ()
    secrets: tuple[SecretFile, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def main(self) -> Unit:
        """The unit that the others are there for."""
        return next(unit for unit in self.units if unit.name == self.name)

    @property
    def stop_s(self) -> int:
        """Timeout of its shutdown, in seconds: its units stop one after the other."""
        return sum(unit.service.stop_wait_s for unit in self.units) + 10

    @property
    def starts_long(self) -> bool:
        """Whether a start may take hours: no engine may end it, or go back to what ran before."""
        return any(unit.service.engines.starts_long for unit in self.units)

    @property
    def fragile(self) -> bool:
        """Whether a restart takes longer than nodes tolerate."""
        services = [unit.service for unit in self.units if not unit.helper]
        return any((one.restart_s or one.stop_wait_s) > one.outage.budget_s for one in services)


@dataclass(frozen=True)
class Placement:
    """Where a service runs. ``workload``: of the engine; without one, ``why`` the engine does not run it.

    ``place``: ``engine``; ``gateway``, in the services container on an admin host; ``none``. ``engine``: which one,
    where there can be several.
    """

    service: str
    place: Literal["engine", "gateway", "none"]
    workload: str = ""
    why: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Deployment:
    """All that an engine runs of a site; every service of the site has a placement."""

    cluster: str
    workloads: tuple[Workload, ...]
    placements: tuple[Placement, ...]
    networks: tuple[str, ...] = ()

    def find(self, role: Role) -> Workload | None:
        """Return the workload whose main service has that role; None if the engine runs none."""
        return next((one for one in self.workloads if one.main.service.role == role), None)


def secrets_of(deployment: Deployment) -> list[SecretFile]:
    """Return the secret files of all workloads, each once."""
    found = {secret.name: secret for one in deployment.workloads for secret in one.secrets}
    return [found[name] for name in sorted(found)]
