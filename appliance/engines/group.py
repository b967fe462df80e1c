"""From the services of a site to workloads: what shares a socket file runs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from appliance.catalog import Base, Service
from appliance.config.model import Site, SystemUser
from appliance.engines.model import Ids, Placement, Port, Unit, Workload
from appliance.errors import ConfigError
from appliance.plan.image.accounts import DEBIAN_SLURM
from appliance.plan.image.definition import fixed_accounts

ETC = "/etc/"
"""What lies below is made of the image's files, exported files and secrets at each start: it is not state."""


def make_workloads(services: Sequence[Service], ids: Mapping[str, Ids]) -> list[Workload]:
    """Return the workloads of the services that an engine can run, without files; in starting order.

    A service without ports that others need or wait for is reached by a socket file: it runs beside each of these.
    If it has state and several need it, all of them are one workload, named by the first.
    """
    carried = {service.name: service for service in services if service.engines.place == "one"}
    wanted = {name for one in carried.values() for name in (*one.needs, *one.after)}
    beside = {name for name, each in carried.items() if not each.ports and name in wanted}
    groups = [[name] for name in carried if name not in beside]
    for helper in beside:
        users = [group for group in groups if helper in _helpers(group, carried, beside)]
        if len(users) > 1 and state_of(carried[helper]):
            groups = [group for group in groups if group not in users]
            groups.append([name for group in users for name in group])
    order = list(carried)
    made = []
    for group in sorted(groups, key=lambda group: min(map(order.index, group))):
        helpers = _helpers(group, carried, beside)
        names = sorted({*group, *helpers}, key=order.index)
        units = tuple(Unit(carried[name], ids[carried[name].user], name in helpers) for name in names)
        made.append(_workload(group[0], units, carried))
    return [_ordered(one, made) for one in made]


def on_engine(service: Service, site: Site) -> Service:
    """Return a service as engines run it; one whose secret files the site file does not name stays in the container."""
    own = service.engines
    changes: dict[str, object] = {name: getattr(own, name) for name in ("run", "ports", "probe") if getattr(own, name)}
    memory_mb = site.engines.memory_mb.get(service.name)
    if memory_mb:
        changes["engines"] = own = own.model_copy(update={"memory_mb": memory_mb})
    missing = [name for name in (*service.needs_secrets, *own.needs_secrets) if getattr(site.secrets, name) is None]
    if own.place == "one" and missing:
        why = f"it needs a file that the site file does not name: `secrets.{missing[0]}`"
        changes["engines"] = own.model_copy(update={"place": "gateway", "why": why})
    return service.model_copy(update=changes)


def _helpers(group: Sequence[str], carried: Mapping[str, Service], beside: set[str]) -> set[str]:
    found: set[str] = set()
    todo = list(group)
    while todo:
        one = carried[todo.pop()]
        needs = {*one.needs, *one.after} & beside - found
        found |= needs
        todo += needs
    return found


def _workload(name: str, units: Sequence[Unit], carried: Mapping[str, Service]) -> Workload:
    state = {path for unit in units for path in state_of(unit.service)}
    scratch = {path for unit in units for path in unit.service.engines.scratch} - state
    ports = [port for unit in units for port in ports_of(unit.service)]
    return Workload(name, tuple(units), tuple(sorted(state)), tuple(sorted(_outermost(scratch, state))), tuple(ports))


def _outermost(scratch: set[str], state: set[str]) -> Iterator[str]:
    """Yield the folders that are not below /var/log or /run, which are fresh in every workload, nor below others."""
    for path in scratch:
        if not any(path.startswith(f"{top}/") for top in (*scratch, *state, "/var/log", "/run", "/tmp")):
            yield path


def _ordered(one: Workload, others: Sequence[Workload]) -> Workload:
    """Return the workload with the names of those that its services need or start after."""
    mine = {unit.name for unit in one.units}
    wanted = {need for unit in one.units for need in (*unit.service.needs, *unit.service.after)} - mine
    after = tuple(other.name for other in others if wanted & {unit.name for unit in other.units if not unit.helper})
    return Workload(one.name, one.units, one.state, one.scratch, one.ports, after=after)


def state_of(service: Service) -> list[str]:
    """Return the folders that outlive a restart of the service. A log file is in its folder."""
    paths = [path.rpartition("/")[0] if path in service.tails else path for path in service.state]
    return [path for path in paths if not path.startswith(ETC) and path not in service.engines.scratch]


def ports_of(service: Service) -> Iterator[Port]:
    """Yield the ports of TCP and UDP that a service listens on."""
    for port in service.ports:
        protocol, _, number = port.partition("/")
        if protocol in ("tcp", "udp") and number.isdecimal():
            yield Port(service.name, "tcp" if protocol == "tcp" else "udp", int(number))


def place(services: Sequence[Service], workloads: Sequence[Workload]) -> tuple[Placement, ...]:
    """Return where each service runs."""
    found = []
    for service in services:
        of = [one.name for one in workloads if service.name in {unit.name for unit in one.units}]
        if of:
            found.append(Placement(service.name, "engine", ", ".join(of)))
        else:
            where = "none" if service.engines.place == "none" else "gateway"
            found.append(Placement(service.name, "none" if where == "none" else "gateway", why=service.engines.why))
    return tuple(found)


def user_ids(base: Base, services: Sequence[Service], users: Mapping[str, SystemUser]) -> dict[str, Ids]:
    """Return the numeric ids of the users of services in the image.

    Raises:
        ConfigError: they are not known before the image is built.
    """
    found = {name: Ids(uid, gid) for gid, name, uid in fixed_accounts(base, services, users) if uid is not None}
    found["root"] = Ids(0, 0)
    if base.manager == "apt":
        found.setdefault("slurm", Ids(DEBIAN_SLURM, DEBIAN_SLURM))
    for service in services:
        if service.engines.place == "one" and service.user not in found:
            raise ConfigError(
                f"the ids of {service.user} are not known before an image of {base.name} is built",
                hint=f"set `{service.user}.user: {{uid: ..., gid: ...}}` in the site file, as on the nodes",
            )
    return found
