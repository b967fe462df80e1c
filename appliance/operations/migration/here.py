"""A switch on one host: a second instance of the services container replaces the running one, as in a migration.

It has a copy of the overlay with the site's files of now, and may have other addresses, services or another image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, NotRequired, TypedDict

from appliance.catalog import Service, read_catalog, select
from appliance.errors import Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host
from appliance.operations import history
from appliance.operations.context import Cluster
from appliance.operations.hosts.guarded import is_guarded, start_guard
from appliance.operations.image.deliver import Image
from appliance.operations.lease import Leases, query_all_leases, query_lease
from appliance.operations.migration.agents import open_agents
from appliance.operations.migration.copy import catch_up, copy_overlay, stop_services
from appliance.operations.migration.inspection import (
    PROGRAMS,
    record_if_missing,
    record_serving,
    shares_overlay,
)
from appliance.operations.migration.rollback import end_agents
from appliance.operations.migration.start import (
    WAIT_S,
    check_services,
    close_gate,
    list_jobs,
    open_gate,
    start_isolated,
)
from appliance.operations.migration.state import Here, Inspected, Migration, MigrationResult
from appliance.operations.migration.switch import clean_up, switch_addresses
from appliance.operations.networks import remove_isolated, write_networks
from appliance.operations.overlay.overlay import (
    archive_for,
    fitting,
    overlay_mark,
    query_room,
    resolve_running,
    second_overlay,
)
from appliance.operations.preflight import check_confinement, check_networks, find_instance, query_confinement
from appliance.operations.services.apply import Applied
from appliance.operations.services.apply import apply as apply_files
from appliance.operations.services.effect import compare, held, judge_running
from appliance.operations.services.holding import release
from appliance.operations.services.restart import tell_nodes
from appliance.operations.services.unfinished import (
    read_last_upgrade,
    recover_migration,
    resume_migration,
)
from appliance.operations.start_note import read_note
from appliance.operations.under_way import second_paths
from appliance.plan.machine import PROBE, inside_argv, instance_name, seed_argv
from appliance.plan.migration.here import SWITCHED, bound_outages, bound_parts, recent_switches
from appliance.plan.migration.lease import find_newer
from appliance.plan.migration.move import ServiceOutage
from appliance.plan.migration.plan import RESERVE, Plan, room_problem
from appliance.plan.services.apply import SERVICES, find_exceeded
from appliance.plan.services.network import INTERFACES
from appliance.share import share
from appliance.shared.migration import Second
from appliance.shared.ports import split_macvlan
from appliance.tools import bridge, files, ports
from appliance.tools.apptainer import Instance
from appliance.tools.programs import find_missing
from appliance.tools.space import need_space, query_used

RESTART = "sms stop --host {0}, then sms start --host {0}"


class NoSecond(Refused):
    """A second instance is not possible as the host is set up, whatever the site file and the image."""


@dataclass(frozen=True)
class Options:
    """Of a switch. ``verb``: that switches, for the history and hints; ``wait_s``: for each service to answer."""

    verb: str = "apply"
    wait_s: float = WAIT_S


@dataclass(frozen=True)
class Running:
    """The network of the running instance, as the kernel has it, by interface: bridge, MAC address, address."""

    bridges: dict[str, str]
    macs: dict[str, str]
    addresses: dict[str, str]


@dataclass(frozen=True)
class SwitchPlan:
    """What a switch would do; ``away``: outages that it does not exceed, by so many measured switches."""

    host: str
    image: str
    used_bytes: int
    away: list[ServiceOutage]
    measured: int


@dataclass
class Switched:
    """What a switch did; ``exceeded``: the outages that were longer than predicted. Times in seconds.

    ``failures``: messages about services that do not answer since.
    """

    host: str
    image: str
    away: list[ServiceOutage]
    outage: dict[str, float]
    exceeded: list[str]
    parts: dict[str, float]
    notes: list[str]
    connections: int
    jobs: int
    lost_datagrams: int
    seconds: float
    failures: str = ""
    generation: int = 0


def plan_switch(cluster: Cluster, host: Host, image: Image) -> SwitchPlan:
    """Run the checks of a switch and return its plan; changes nothing.

    Raises:
        NoSecond: it is not possible on this host.
        Refused: it is not possible now.
    """
    return _inspect(cluster, host, image, Options())[1]


def switch_here(cluster: Cluster, host: Host, image: Image, options: Options) -> Switched:
    """Replace the running instance by one that is started from the site file and ``image``.

    Services that do not answer since are in the result: what the new instance has received must not be lost.

    Raises:
        Refused: it is not possible; nothing was changed.
        RolledBack: a step failed; the instance of before serves.
        Unverified: it serves, but the end was not confirmed.
        SmsError: neither serves, or that is not known.
    """
    with cluster.env.progress.step("check the host") as step:
        inspected, plan = _inspect(cluster, host, image, options)
        step.detail("; ".join(shown_outages(plan.away)))
    files.make_folders(host, str(cluster.places.journal))
    check_confinement(cluster, host, image.path)
    write_networks(cluster, host, isolated=True)
    history.note(cluster, host, options.verb, "begun", image=image.key, generation=inspected.lease.generation)
    try:
        result, failures = _run_steps(cluster, inspected, image)
    except BaseException as error:
        history.note(cluster, host, options.verb, "failed", why=str(error) or type(error).__name__)
        raise
    predicted = {one.name: one.predicted_s for one in plan.away}
    done = Switched(
        host.name, image.path, plan.away, result.outage, find_exceeded(predicted, result.outage), result.parts,
        result.notes, result.connections, result.jobs, result.lost_datagrams, result.seconds, failures,
    )  # fmt: skip
    _record(cluster, host, image, done)
    facts = {"parts": result.parts, "outage": result.outage, "exceeded": done.exceeded}
    history.note(cluster, host, options.verb, SWITCHED, generation=done.generation, image=image.key, **facts)
    tell_nodes(cluster, host)
    return done


def apply(
    cluster: Cluster, host: Host, *, wait_s: float, force: bool = False, accepted: frozenset[str] = frozenset()
) -> tuple[Applied, Switched | None]:
    """Apply the site file to the running container, by a switch if it needs a new instance; first resume a killed one.

    Args:
        wait_s: how long each service that is reloaded or restarted may take to answer.
        force: also if jobs, reservations or nodes are lost by it.
        accepted: what may be lost, of ``costs`` of an earlier plan.

    Raises:
        Unverified: a new instance serves, but a service does not answer.
        SmsError: as ``apply_files`` and ``switch_here``.
    """
    recover_migration(cluster, host)
    record_interrupted(cluster, host)
    done, image = apply_files(cluster, host, wait_s=wait_s, force=force, accepted=accepted)
    if not done.switch:
        try:
            if is_guarded(cluster, host):
                start_guard(cluster, host, renew=bool(done.changed))
        except SmsError as error:  # it is applied
            cluster.env.progress.report(f"note: the guard on {host.name} has the site file of before: {error.message}")
        return done, None
    judged = judge_running(cluster, host)
    with nullcontext() if force else held(cluster, host, judged, "apply", accepted):
        switched = switch_here(cluster, host, image, Options())
    if switched.failures:
        raise Unverified(
            f"{switched.failures}\n  the new instance serves on {host.name}: what it has received must not be lost",
            hint="correct the site file and apply it; `sms status` probes every service",
        )
    cost = compare(cluster, host, judged, moved=True)
    done.unusable, done.failed, done.unknown = cost.nodes, cost.jobs, cost.users
    return done, switched


def record_interrupted(cluster: Cluster, host: Host) -> None:
    """Record a switch that a killed run has completed without recording it."""
    running = find_instance(cluster, host)
    if running and query_lease(host, cluster).holder == host.name:
        lease = query_lease(host, cluster)
        if record_if_missing(cluster, host, running, lease):
            remove_isolated(cluster, host)
            release(cluster, host, written=True)  # of what it has not removed


def _inspect(cluster: Cluster, host: Host, image: Image, options: Options) -> tuple[Inspected, SwitchPlan]:
    """Check that the host can switch; return what its steps need, and the plan.

    Raises:
        Refused: it cannot.
    """
    running = find_instance(cluster, host)
    if not running:
        raise Refused(f"the services container does not run on {host.name}", hint=f"sms start --host {host.name}")
    leases = query_all_leases(host, cluster)
    _check_state(cluster, host, running, leases, own_upgrade=options.verb == "upgrade")
    _refuse_macvlan(cluster, host, running)
    now = _query_running(host, running)
    _check_networks(cluster, host, now)
    used = query_used(host, str(cluster.places.overlay))
    folder = str(cluster.places.overlay.parent)
    need_space(host, folder, used + RESERVE, "MiB free, a copy of the overlay needs %d", hint="free space there")
    if room := room_problem(query_room(cluster, host)):
        raise Refused(room, hint="or make room there: `sms exec -- du -x /var`")
    lease = replace(query_lease(host, cluster), generation=leases.top)
    confinement = query_confinement(cluster, host)
    measured = recent_switches(history.read_history(cluster, host))
    away = bound_outages(cluster.services, measured)
    plan = Plan(
        host.name, host.name, image.path, image.sha256, lease.generation, False, used, 0, 0.0,
        bound_parts(measured), len(measured), away,
    )  # fmt: skip
    known, unknown = _query_services(cluster, host)
    name = f"{instance_name(cluster.site)}.{lease.generation + 1}"
    second = Second(name, second_overlay(cluster), *second_paths(cluster))
    fitted = fitting(cluster, host)
    mark, archive = overlay_mark(archive_for(fitted), image), archive_for(resolve_running(fitted, host))
    seed = seed_argv(cluster.site, confinement, image.path, second.overlay, mark)
    macs = tuple(now.macs.values())
    here = Here(
        second, known, unknown, now.bridges, now.addresses, macs, (seed, archive), options.verb, options.wait_s
    )  # fmt: skip
    inspected = Inspected(host, host, running.pid, lease, plan, confinement, confinement, here)
    return inspected, SwitchPlan(host.name, image.path, used, away, len(measured))


def _check_state(cluster: Cluster, host: Host, running: Instance, leases: Leases, *, own_upgrade: bool) -> None:
    """Check lease, record and overlay.

    Args:
        own_upgrade: the upgrade that is under way is the caller.

    Raises:
        NoSecond: the overlay does not allow a switch.
        Refused: the others do not.
    """
    name, restart = host.name, RESTART.format(host.name)
    lease = leases.views[name].lease
    if not lease or lease.holder != name or find_newer(name, leases.views):
        raise Refused(f"{name} does not hold the lease", hint="`sms host list` shows who does")
    note = read_note(cluster, host)
    if not note or note.image != running.image or not note.sha256:
        raise Refused(f"the instance on {name} was not started by sms, or its record is missing", hint=restart)
    upgrade = read_last_upgrade(cluster, host)
    if upgrade and not upgrade.ended and not own_upgrade:
        raise Refused(f"an upgrade was interrupted on {name}", hint="`sms upgrade` resumes it")
    if missing := find_missing(host, *PROGRAMS):
        raise Refused(f"{name} lacks {', '.join(missing)}", hint=f"sms doctor --host {name}")
    if host.works("test", "-L", str(cluster.places.overlay)):
        raise NoSecond(
            f"the overlay of {name} is on a mirror: a second instance cannot use a copy of it",
            hint=f"the change needs a new start: {restart}",
        )
    for other in cluster.site.admin_hosts:
        if other.name == name or other.name in leases.unreachable:
            continue
        if shares_overlay(cluster, host, cluster.host(other.name)):
            raise NoSecond(
                f"{name} shares its overlay with {other.name}: a failover would not know of a second one",
                hint=f"the change needs a new start: {restart}",
            )


def _refuse_macvlan(cluster: Cluster, host: Host, running: Instance) -> None:
    """Refuse a switch to or from a macvlan interface: the kernel allows a MAC address once on a parent.

    Raises:
        NoSecond: there is one.
    """
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    attached = map(split_macvlan, ports.find_ports(host, running.pid).values())
    if any(network.attach == "macvlan" for network in networks) or any(attached):
        raise NoSecond(
            "with macvlan, a second instance cannot have the MAC address of the running one on the same interface",
            hint=f"the change needs a new start: {RESTART.format(host.name)}",
        )


class _Address(TypedDict, total=False):
    family: str
    scope: str
    local: str


class _Link(TypedDict):
    """An interface, as ``ip -json address show`` prints it."""

    ifname: str
    address: NotRequired[str]
    addr_info: NotRequired[list[_Address]]


def _query_running(host: Host, running: Instance) -> Running:
    """Return the network of the running instance.

    Raises:
        Refused: a port is not on a bridge, or an interface has no address.
    """
    here = ports.find_ports(host, running.pid)
    masters = {link["ifname"]: link.get("master", "") for link in ports.list_links(host)}
    argv = ("nsenter", f"--net=/proc/{running.pid}/ns/net", "ip", "-json", "address", "show")
    links = {link["ifname"]: link for link in host.run(*argv).parse(list[_Link], empty=b"[]")}
    bridges = {name: str(masters.get(here.get(name, ""), "")) for name in INTERFACES}
    addresses = {name: _first_address(links.get(name, {})) for name in INTERFACES}
    if missing := [name for name in INTERFACES if not bridges[name] or not addresses[name]]:
        raise Refused(
            f"{' and '.join(missing)} of the running container has no address, or its port is not on a bridge",
            hint="`sms status` shows its networks",
        )
    return Running(bridges, {name: str(links[name]["address"]).lower() for name in INTERFACES}, addresses)


def _first_address(link: Mapping[str, Any]) -> str:
    found = [one for one in link.get("addr_info", []) if one.get("family") == "inet" and one.get("scope") == "global"]
    return str(found[0]["local"]) if found else ""


def _check_networks(cluster: Cluster, host: Host, now: Running) -> None:
    """Check the bridges, that new addresses are free, and that a new gateway answers.

    Raises:
        Refused: with all problems.
    """
    check_networks(cluster, host)
    networks = dict(zip(INTERFACES, (cluster.site.networks.provisioning, cluster.site.networks.public), strict=True))
    problems = []
    for name, network in networks.items():
        moved = network.bridge != now.bridges[name]
        address = str(network.address.ip)
        if not moved and address == now.addresses[name]:
            continue
        user = bridge.taken(host, {address: network.bridge}, cluster.env.pool).get(address, "").lower()
        if user and user not in now.macs.values():
            problems.append(f"{address} is already used by {user} on {network.bridge}")
    public = cluster.site.networks.public
    gateway = str(public.gateway)
    if not bridge.taken(host, {gateway: public.bridge}, cluster.env.pool):
        problems.append(f"no machine has the gateway's address {gateway} on {public.bridge}")
    if problems:
        raise Refused("; ".join(problems), hint="correct the site file: nothing was changed")


def _query_services(cluster: Cluster, host: Host) -> tuple[tuple[Service, ...], tuple[str, ...]]:
    """Return the services of the running instance in their order, and the names of those that sms does not know."""
    argv = inside_argv(cluster.site, cluster.services, "cat", SERVICES)
    try:
        names = sorted(map(str, json.loads(host.run(*argv).stdout)["services"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{SERVICES} in the container is invalid: {error}", hint=RESTART.format(host.name)) from None
    catalog = {**read_catalog(share("definitions", "services")), **{one.name: one for one in cluster.services}}
    return select(catalog, [name for name in names if name in catalog]), tuple(
        name for name in names if name not in catalog
    )


def _run_steps(cluster: Cluster, inspected: Inspected, image: Image) -> tuple[MigrationResult, str]:
    """Run the steps of a migration with source and target on one host; return as ``migration.steps.run_steps``.

    Raises:
        Busy, Refused: as ``open_agents``; nothing was changed.
        RolledBack, Unverified, SmsError: as ``_raise_outcome``.
    """
    began = cluster.env.clock.monotonic()
    with ExitStack() as agents:
        migration = open_agents(cluster, inspected, image, agents)
        try:
            copy_overlay(migration)
            jobs = list_jobs(migration)
            catch_up(migration)
            stop_services(migration)
            start_isolated(migration, jobs)
            close_gate(migration)
            switch_addresses(migration)
            open_gate(migration)
            failures = check_services(migration)
            clean_up(migration)
        except BaseException as error:
            end_agents(migration, error)
            _raise_outcome(migration, error)
    migration.result.seconds = round(cluster.env.clock.monotonic() - began, 3)
    return migration.result, failures


def _raise_outcome(migration: Migration, cause: BaseException) -> NoReturn:
    """Raise the outcome of a failed switch, by the instance that runs.

    Raises:
        RolledBack: that of before.
        Unverified: the second one.
        SmsError: none, or it does not serve.
    """
    cluster, host, here = migration.cluster, migration.source.host, migration.inspected.here
    assert here
    message = cause.message if isinstance(cause, SmsError) else "the switch was interrupted"
    hint = cause.hint if isinstance(cause, SmsError) else ""
    try:
        resume_migration(cluster, host)  # an agent may have been killed
        running = find_instance(cluster, host)
    except SmsError as error:
        raise SmsError(
            f"{message}\n  which instance serves on {host.name} is not known: {error.message}",
            hint=f"`sms {here.verb} --host {host.name}` again completes the switch or undoes it",
        ) from cause
    if not running:
        raise SmsError(f"{message}\n  no instance runs on {host.name}", hint=f"sms start --host {host.name}") from cause
    if running.pid != migration.inspected.pid:
        raise Unverified(
            f"{message}\n  the new instance serves on {host.name}, but the end of the switch was not confirmed",
            hint=f"`sms {here.verb} --host {host.name}` again verifies and records it",
        ) from cause
    remove_isolated(cluster, host)
    names = [service.name for service in here.services]
    argv = inside_argv(cluster.site, cluster.services, PROBE, "--wait", "20", *names)
    if host.run(*argv, ok=None, timeout=60).status:
        raise SmsError(
            f"{message}\n  not every service of the instance of before answers again",
            hint=f"sms status --host {host.name}",
        ) from cause
    raise RolledBack(f"{message}\n  the instance of before serves on {host.name}, unchanged", hint=hint) from cause


def _record(cluster: Cluster, host: Host, image: Image, done: Switched) -> None:
    """Record the new instance as a start does; what fails is only noted."""
    try:
        lease = query_lease(host, cluster)
        done.generation = lease.generation
        remove_isolated(cluster, host)
        write_networks(cluster, host)
        record_serving(cluster, host, image, lease)
    except SmsError as error:
        done.notes.append(f"the switch could not be recorded: {error.message}")


def shown_outages(away: Sequence[ServiceOutage], measured: Mapping[str, float] | None = None) -> list[str]:
    """Return a line per outage that several services share: predicted, measured if there is one, tolerated."""
    groups: dict[tuple[float, float | None], list[str]] = {}
    for one in away:
        took = measured.get(one.name) if measured else None
        groups.setdefault((one.predicted_s, took), []).append(one.name)
    lines = []
    for (predicted, took), names in sorted(groups.items(), key=lambda group: group[0][0]):
        was = "" if took is None else f", was {took:.2f} s"
        lines.append(f"outage at most {predicted:.2f} s{was}: {', '.join(names)}")
    return lines
