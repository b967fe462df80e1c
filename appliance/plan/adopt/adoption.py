"""Whether a live management node can be adopted, and what that does: from its survey and what else was found. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Interface
from statistics import median
from typing import Literal

from appliance.catalog import Service, find_role
from appliance.catalog.model import Role
from appliance.config.hostlist import expand, fold
from appliance.config.model import Network, Site
from appliance.config.types import is_ipv4
from appliance.errors import Refused
from appliance.plan.adopt.accounting import find_lacking
from appliance.plan.adopt.model import Link, Survey
from appliance.plan.adopt.read_network import addresses_of
from appliance.plan.migration.move import MUNGE_LIMIT_S, SKEW_LIMIT_S, ServiceOutage, predict_outages, predict_parts
from appliance.plan.migration.plan import RESERVE
from appliance.plan.migration.state import oldest_read, release_of, state_version
from appliance.plan.services.effect import Loss, count_losses, shown_losses
from appliance.plan.services.network import INTERFACES
from appliance.plan.services.nodes import NodesView
from appliance.shared.adopt import AdoptRequest, OldInterface
from appliance.text import one_line

FOLDER = "/var/lib/sms-adopt"
"""Folder of the adoption's files on the old node."""
ROLES: tuple[Role, ...] = ("controller", "accounting")
EARLIER = {"database": 5.0, "isolated": 4.0}
"""Parts before the controller stops, in seconds when none was measured."""
Severity = Literal["refused", "warning"]


@dataclass(frozen=True)
class Doubt:
    """What speaks against an adoption, and what to do about it.

    ``severity``: refused: it does not begin; warning: it does.
    """

    severity: Severity
    what: str
    todo: str


@dataclass(frozen=True)
class OldFacts:
    """What was found on the old node besides its survey.

    Attributes:
        name: of the old node.
        connected: the address there at which this run is connected to it; empty if it is this machine.
        programs: those that it has, of the ones that were searched.
        key_sha256: digest of its munge key; empty if it cannot be read.
        offset_s: seconds that its clock is ahead of this machine's.
        units: systemd units there that are active.
        used: TCP ports on which nodes have connections to it now.
        mark: state of an earlier adoption; empty without one.
        clustername: content of the file of that name in the state.
        nodes: as its slurmctld sees them.
        losses: jobs and reservations that a slurmctld with the site's files would end.
    """

    name: str
    connected: str
    programs: frozenset[str]
    key_sha256: str
    offset_s: float
    units: frozenset[str]
    used: tuple[int, ...]
    mark: str
    clustername: str
    nodes: NodesView = field(default_factory=NodesView)
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True)
class TargetFacts:
    """What was found on the admin host that gets the services.

    Attributes:
        addresses: of the admin host itself.
        key_sha256: digest of the site's munge key.
        offset_s: as for the old node.
        slurm: version of Slurm in the image.
        slurm_uid: of SlurmUser in the container; None if it is not known.
        free_bytes: for the state, in the overlay.
        other_runtime: the image was built by another version of sms.
        problems: what keeps the host from running the services container.
        answering: MAC address that answers for each address of the container.
    """

    name: str
    addresses: tuple[str, ...]
    key_sha256: str
    offset_s: float
    slurm: str
    slurm_uid: int | None
    free_bytes: int
    problems: tuple[str, ...]
    answering: Mapping[str, str]
    other_runtime: bool = False


@dataclass(frozen=True)
class AdoptPlan:
    """What an adoption does. Times in seconds, sizes in bytes.

    Attributes:
        moves: addresses that move, each with its MAC address, by interface of the container.
        keeps: addresses that stay on the old node.
        stops: systemd units that are stopped there.
        stays: services that go on running there, with their ports.
        state_bytes, database_bytes: what is copied.
        outages: predicted, by service; ``measured``: from so many adoptions, 0: defaults.
        doubts: what speaks against it.
        rehearsed: outages are predicted from a start of the services with a copy of this state.
        silent: nodes that do not respond already.
    """

    old: str
    target: str
    cluster: str
    interfaces: tuple[OldInterface, ...]
    moves: dict[str, str]
    keeps: tuple[str, ...]
    stops: tuple[str, ...]
    stays: tuple[str, ...]
    state: str
    state_bytes: int
    database: bool
    database_bytes: int
    outages: tuple[ServiceOutage, ...]
    measured: int
    doubts: tuple[Doubt, ...]
    rehearsed: bool = False
    silent: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Doubt, ...]:
        """What keeps it from beginning."""
        return tuple(one for one in self.doubts if one.severity == "refused")


@dataclass(frozen=True)
class Adoption:
    """The record of an adoption on the admin host. ``phase``: begun, adopted, undone or finished.

    ``target``: the old node as it was named: [USER@]HOST[:PORT]. ``at``: Unix time. ``slurm_conf``: its path there.
    ``request``: to the agent there.
    """

    cluster: str
    old: str
    target: str
    host: str
    phase: str
    at: float
    stays: tuple[str, ...]
    slurm_conf: str
    request: AdoptRequest


def find_database(services: Sequence[Service]) -> Service | None:
    """Return the service that has the accounting database: of those that accounting needs, the one with a dump."""
    accounting = find_role(services, "accounting")
    needs = accounting.needs if accounting else ()
    return next((service for service in services if service.name in needs and service.dump), None)


def unit_of(service: Service) -> str:
    """Return the systemd unit of a daemon of Slurm on the old node, which has the daemon's name everywhere."""
    return f"{service.name}.service"


HOLD = "/etc/sms/hold"
"""Folder of the overlay with a file for each service that must not start yet (definitions/runtime/sms-run)."""


def hold_argv(service: Service, folder: str) -> tuple[str, ...]:
    """Return the command that keeps a service from starting, in an overlay that is not in use.

    Args:
        folder: where ``HOLD`` of the overlay is for the command.
    """
    return ("sh", "-euc", 'mkdir -p "${1%/*}" && : >"$1"', "hold", f"{folder}/{service.name}")


def free_argv(service: Service) -> tuple[str, ...]:
    """Return the command that undoes ``hold_argv``, in the running instance."""
    return ("rm", f"{HOLD}/{service.name}")


def waits_for(services: Sequence[Service], one: Service, other: Service) -> bool:
    """Return whether a service needs another one, itself or through those that it needs."""
    by_name = {service.name: service for service in services}
    needed = [by_name[name] for name in (*one.needs, *one.after) if name in by_name]
    return one is other or any(waits_for(services, each, other) for each in needed)


BEGUN, ADOPTED, UNDONE, FINISHED = "begun", "adopted", "undone", "finished"


def spare_mac(cluster: str, mac: str) -> str:
    """Return the MAC address that an interface of the old node has while its own one is away; locally administered."""
    digest = hashlib.sha256(f"{cluster} {mac.lower()}".encode()).digest()
    return ":".join(["06", *(f"{byte:02x}" for byte in digest[:5])])


def moving_interfaces(site: Site, survey: Survey, witnesses: Sequence[str]) -> tuple[list[OldInterface], list[Doubt]]:
    """Return the interfaces of the old node from which addresses move to the container, and what is missing.

    Args:
        witnesses: addresses of other machines.
    """
    networks: dict[str, Network] = dict(
        zip(INTERFACES, (site.networks.provisioning, site.networks.public), strict=True)
    )
    found, doubts = [], []
    for inside, network in networks.items():
        link = next((one for one in survey.links if network.address in addresses_of(one)), None)
        if link is None:
            doubts.append(_no_address(survey, network))
            continue
        if link.mac.lower() != network.mac.lower():
            todo = f"set mac: {link.mac} for this network: neighbours and switches then notice nothing"
            doubts.append(
                Doubt("refused", f"{link.name} has MAC address {link.mac}, the site file {network.mac}", todo)
            )
        keeps = tuple(str(one) for one in addresses_of(link) if one != network.address)
        near = [
            one for one in witnesses if IPv4Address(one) in network.address.network and one != str(network.address.ip)
        ]
        spare = spare_mac(site.cluster, network.mac)
        found.append(
            OldInterface(link.name, inside, network.mac.lower(), spare, (str(network.address),), keeps, tuple(near))
        )
    return found, doubts


def _no_address(survey: Survey, network: Network) -> Doubt:
    same: list[tuple[Link, IPv4Interface]] = [
        (link, one) for link in survey.links for one in addresses_of(link) if one.ip == network.address.ip
    ]
    if same:
        link, one = same[0]
        return Doubt("refused", f"{link.name} has {one}, the site file {network.address}", "correct the prefix")
    return Doubt(
        "refused",
        f"no interface of the old node has {network.address}",
        "name an address of it in `networks` of the site file: the container gets it",
    )


def judge(
    site: Site,
    services: Sequence[Service],
    survey: Survey,
    old: OldFacts,
    target: TargetFacts,
    interfaces: Sequence[OldInterface],
) -> list[Doubt]:
    """Return what speaks against the adoption."""
    return [
        *_judge_access(survey, old, interfaces),
        *_judge_slurm(site, services, survey, old, target),
        *_judge_accounting(services, survey, old),
        *_judge_target(survey, old, target),
        *_judge_addresses(site, old, target, interfaces),
    ]


def _judge_access(survey: Survey, old: OldFacts, interfaces: Sequence[OldInterface]) -> list[Doubt]:
    doubts = []
    if old.mark:
        doubts.append(
            Doubt("refused", f"an adoption of {old.name} is {old.mark} already", "`sms adopt --undo` takes it back")
        )
    if not survey.system.root:
        doubts.append(
            Doubt("refused", f"{old.name} was not read as root", "log in as root, or permit sudo without a password")
        )
    if "python3" not in old.programs:
        doubts.append(
            Doubt("refused", f"{old.name} has no python3", "install it there: what moves its addresses needs it")
        )
    if "systemctl" not in old.programs:
        doubts.append(Doubt("refused", f"{old.name} has no systemd", "its services can only be stopped by it"))
    if "conntrack" not in old.programs and survey.translation.rules:
        todo = f"install conntrack-tools on {old.name}, or adopt when no node has long downloads"
        doubts.append(
            Doubt("warning", f"{old.name} has no conntrack: connections through NAT break at the switch", todo)
        )
    moving = {one.partition("/")[0] for each in interfaces for one in each.moves}
    if old.connected in moving:
        todo = "give the old node an address of its own, for example with `ip address add`"
        doubts.append(
            Doubt("refused", f"{old.name} is reached at {old.connected}, which moves", f"{todo}, and name it by that")
        )
    return doubts


def _judge_slurm(
    site: Site, services: Sequence[Service], survey: Survey, old: OldFacts, target: TargetFacts
) -> list[Doubt]:
    slurm, doubts = survey.slurm, []
    controller = find_role(services, "controller")
    if controller is None:
        return [Doubt("refused", "the site has no controller", "add Slurm's controller to `services`")]
    if slurm is None or not slurm.state:
        return [
            Doubt("refused", "no slurm.conf with StateSaveLocation was found", f"does {controller.name} run there?")
        ]
    unit = unit_of(controller)
    if unit not in old.units:
        doubts.append(Doubt("refused", f"{unit} is not active on {old.name}", f"systemctl status {unit}"))
    name = old.clustername.partition("|")[0] or slurm.cluster
    if name != site.cluster:
        doubts.append(
            Doubt("refused", f"the old node is of cluster {name}, the site of {site.cluster}", "set `cluster`")
        )
    written, known = max(slurm.state_versions.values(), default=0), state_version(target.slurm)
    if written > known or (written and known and written < oldest_read(known)):
        doubts.append(
            Doubt(
                "refused",
                f"Slurm {release_of(written)} wrote the state, and that of the image, {target.slurm or 'none'}, cannot "
                "read it",
                "build an image with the same version: `base.packages` of the site file names the packages",
            )
        )
    if slurm.uid is not None and target.slurm_uid is not None and slurm.uid != target.slurm_uid:
        doubts.append(
            Doubt(
                "refused",
                f"{slurm.user} has uid {slurm.uid} on the old node and {target.slurm_uid} in the container: nodes "
                "would refuse its messages",
                "set `slurm.user` to its uid and gid on the nodes, and build the image again",
            )
        )
    if silent := [one.name for one in old.nodes.faulty]:
        what = f"{len(silent)} of {old.nodes.count} nodes do not respond to {old.name}: {fold(silent)}"
        todo = "they will not respond to the container either: compare their munge key and clock, or drain them"
        doubts.append(Doubt("warning", one_line(what, 300), todo))
    if old.losses:
        what = f"Slurm would lose {count_losses(old.losses)} with the site file: {'; '.join(shown_losses(old.losses))}"
        doubts.append(
            Doubt("refused", one_line(what, 2000), "describe the same nodes and partitions in the site file, or wait")
        )
    if old.key_sha256 != target.key_sha256:
        todo = "`sms survey HOST --write DIR --munge-key` fetches it" if old.key_sha256 else "run it as root"
        doubts.append(Doubt("refused", f"the munge key of the site is not that of {old.name}", todo))
    if slurm.database and not find_role(services, "accounting"):
        doubts.append(
            Doubt(
                "refused",
                "the old node has slurmdbd, and `services` has no accounting",
                "add slurmdbd: sacct would be empty",
            )
        )
    return doubts


def _judge_accounting(services: Sequence[Service], survey: Survey, old: OldFacts) -> list[Doubt]:
    """Return what keeps the accounting database from being copied, or given back by an undo."""
    slurm, accounting = survey.slurm, find_role(services, "accounting")
    if not slurm or not slurm.database or accounting is None or unit_of(accounting) not in old.units:
        return []
    return [Doubt("refused", what, todo) for what, todo in find_lacking(slurm.accounting)]


def _judge_target(survey: Survey, old: OldFacts, target: TargetFacts) -> list[Doubt]:
    doubts = [Doubt("refused", one, f"sms doctor --host {target.name}") for one in target.problems]
    if target.other_runtime:
        what = "the image was built by another version of sms: it could not hold the controller back"
        doubts.append(Doubt("refused", what, "`sms build` builds another one"))
    size = _bytes(survey)
    if 0 <= target.free_bytes < size + RESERVE:
        what = (
            f"state and database have {size >> 20} MiB, the overlay on {target.name} {target.free_bytes >> 20} MiB free"
        )
        doubts.append(Doubt("refused", what, "set a larger `overlay.size_mb`, or free space there"))
    skew = abs(target.offset_s - old.offset_s)
    if skew > SKEW_LIMIT_S:
        what = f"the clocks of {old.name} and {target.name} are {skew:.0f} s apart; munge rejects at {MUNGE_LIMIT_S} s"
        doubts.append(Doubt("refused", what, "synchronise both"))
    return doubts


def _judge_addresses(site: Site, old: OldFacts, target: TargetFacts, interfaces: Sequence[OldInterface]) -> list[Doubt]:
    doubts = []
    names = dict(zip(INTERFACES, (site.networks.provisioning, site.networks.public), strict=True))
    for one in interfaces:
        network = names[one.inside]
        address, mac = str(network.address.ip), network.mac.lower()
        seen = target.answering.get(address, "").lower()
        if not seen:
            what = f"{target.name} does not see {address} on {network.uplink(target.name)}"
            doubts.append(Doubt("refused", what, "is its port in the same network as the old node?"))
        elif seen != mac:
            what = f"{address} is used by {seen}, which is not {one.name} of {old.name}, as seen from {target.name}"
            doubts.append(Doubt("refused", what, "find the machine with that MAC address"))
        if not one.witnesses:
            what = f"no other machine is known in the network of {one.name}"
            doubts.append(Doubt("warning", what, "the old node cannot tell whether its own network works"))
    return doubts


def _bytes(survey: Survey) -> int:
    slurm = survey.slurm
    return ((slurm.state_kb or 0) + (slurm.database_kb or 0)) << 10 if slurm else 0


def find_stays(survey: Survey, services: Sequence[Service], used: Sequence[int]) -> tuple[list[str], list[Doubt]]:
    """Return what goes on running on the old node, and doubts about what nodes reach at the addresses that move.

    Args:
        used: TCP ports on which nodes have connections now.
    """
    carried, shown = {one.name for one in services}, dict[str, list[str]]()
    for one in survey.listeners:
        if one.service in carried or one.address.startswith(("127.", "::1")):
            continue
        shown.setdefault(one.service or one.process or "unknown", []).append(one.port)
    stays = [f"{name} ({', '.join(dict.fromkeys(ports))})" for name, ports in sorted(shown.items())]
    doubts = []
    for name, ports in sorted(shown.items()):
        if busy := [
            port for port in dict.fromkeys(ports) if port.startswith("tcp/") and int(port[4:]) in used and name != "ssh"
        ]:
            doubts.append(
                Doubt(
                    "refused",
                    f"nodes use {name} ({', '.join(busy)}) at an address that moves, and it stays on the old node",
                    "let nodes use an address of the old node that stays, or run it elsewhere",
                )
            )
    return stays, doubts


def predict_adoption(
    services: Sequence[Service], measured: Sequence[Mapping[str, float]], *, database: bool
) -> tuple[ServiceOutage, ...]:
    """Return the predicted outage of each service: medians of what was measured, else defaults.

    The accounting stops before its database is copied and the other services start, and the controller after that.

    Args:
        measured: seconds of the parts of adoptions or of a rehearsal: those of a migration, ``database`` (its copy) and
            ``isolated`` (the start of all but the controller).
        database: the accounting database is copied.
    """
    more = 0.0
    for part, default in EARLIER.items():
        more += median([one[part] for one in measured if part in one] or [default])
    first = find_role(services, "accounting"), find_database(services)
    return tuple(
        replace(one, predicted_s=round(one.predicted_s + more, 3))
        if database and one.name in [each.name for each in first if each]
        else one
        for one in predict_outages(services, predict_parts(measured), shared=False)
    )


def plan_adoption(
    site: Site,
    services: Sequence[Service],
    survey: Survey,
    old: OldFacts,
    target: TargetFacts,
    measured: Sequence[Mapping[str, float]],
) -> AdoptPlan:
    """Return what the adoption would do, with all doubts; refuses nothing itself.

    Args:
        measured: the parts of earlier adoptions, in seconds.
    """
    witnesses = (*target.addresses, str(site.networks.public.gateway), *(_node_addresses(site)))
    interfaces, missing = moving_interfaces(site, survey, witnesses)
    stays, busy = find_stays(survey, services, old.used)
    units = [unit_of(one) for role in ROLES if (one := find_role(services, role))]
    accounting = len(units) > 1 and units[1] in old.units and find_database(services) is not None
    slurm = survey.slurm
    return AdoptPlan(
        old.name,
        target.name,
        site.cluster,
        tuple(interfaces),
        {one.inside: f"{', '.join(one.moves)} ({one.mac}) from {one.name}" for one in interfaces},
        tuple(address for one in interfaces for address in one.keeps),
        tuple(units[: 1 + accounting]),
        tuple(stays),
        slurm.state if slurm else "",
        (slurm.state_kb or 0) << 10 if slurm else 0,
        accounting,
        (slurm.database_kb or 0) << 10 if slurm else 0,
        predict_adoption(services, measured, database=accounting),
        len(measured),
        (*missing, *judge(site, services, survey, old, target, interfaces), *busy),
        silent=tuple(one.name for one in old.nodes.silent),
    )


def _node_addresses(site: Site) -> list[str]:
    """Return addresses of some nodes: machines that are in the provisioning network."""
    found = [one for node in site.slurm.nodes[:4] if node.address for one in expand(str(node.address))[:2]]
    return [one for one in found if is_ipv4(one)]


def refuse_doubtful(plan: AdoptPlan) -> None:
    """Check that nothing speaks against the adoption but warnings.

    Raises:
        Refused: with all that does.
    """
    if plan.refused:
        lines = [f"{one.what}\n      hint: {one.todo}" for one in plan.refused]
        raise Refused(f"{plan.old} cannot be adopted:\n  " + "\n  ".join(lines))
