"""Preflight checks of a host before the services container is started there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import PurePosixPath

from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.under_way import explain_busy
from appliance.plan.machine import GATEWAY, inside_argv, instance_name, instance_of, trial_argv
from appliance.plan.migration.lease import handover_hint, read_lease
from appliance.plan.services.confinement import (
    HIDDEN_FILES,
    HIDDEN_FOLDERS,
    READ_ONLY,
    Confinement,
    capabilities_for,
    find_age,
    find_gaps,
    find_instance_gaps,
    is_unconfined,
)
from appliance.plan.services.runs import NOT_CONFINED
from appliance.share import share
from appliance.shared.locks import ports_lock
from appliance.text import one_line
from appliance.tools import apptainer, bridge
from appliance.tools.programs import find_missing
from appliance.tools.scripts import script_argv

PROGRAMS = ("apptainer", "arping", "debugfs", "e2fsck", "flock", "losetup", "python3")
UNCONFINED = (
    "an earlier version of sms started the services container, so it is not confined: "
    "`sms stop`, then `sms start`, confines it"
)
OLDER = (
    "the services container runs with an older confinement ({}): "
    "`sms stop`, then `sms start`, or a migration, confines it"
)
SECCOMP = "is its Apptainer built with libseccomp? `apptainer buildcfg` and `ldd` of its starter show that"


def check_programs(host: Host) -> None:
    """Check that the host has the programs that every verb needs.

    Raises:
        Refused: with all missing programs.
    """
    if missing := find_missing(host, *PROGRAMS):
        raise _cannot(host, [f"{program} is not installed" for program in missing])


def find_instance(cluster: Cluster, host: Host) -> apptainer.Instance | None:
    """Return the running instance of the services container on the host, or None."""
    return apptainer.find_instance(host, instance_name(cluster.site))


def running_gateway(cluster: Cluster, host: Host) -> Cluster | None:
    """Return what runs on in the services container of the host while an engine has the other services, or None."""
    part = cluster.of_gateway()
    if not find_instance(part, host):
        return None
    listed = host.run(*inside_argv(part.site, part.services, "cat", "/etc/sms/services.json"), ok=None).stdout
    names = set()
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        names = {*json.loads(listed)["services"]}
    return cluster.of_gateway([one for one in cluster.services if one.name in names])


def find_second(cluster: Cluster, host: Host) -> str:
    """Return the name of the second instance that a killed switch has left on the host; empty without one."""
    return next((one.name for one in apptainer.list_instances(host, f"{instance_name(cluster.site)}.*")), "")


def is_confined(host: Host, running: apptainer.Instance) -> bool:
    """Return whether the instance is confined: one that an earlier version of sms has started is not."""
    return not is_unconfined((host.read(f"/proc/{running.pid}/status") or b"").decode(errors="replace"))


def query_age(cluster: Cluster, host: Host, running: apptainer.Instance) -> str:
    """Return what a running instance lacks of today's confinement: an earlier version of sms has started it."""
    result = host.run(*script_argv("inspect-confinement", str(running.pid)), ok=None, timeout=60)
    if result.status:
        return ""  # it has just ended
    gaps = find_age(result.stdout.decode(errors="replace"), query_confinement(cluster, host))
    return OLDER.format("; ".join(gaps[:3])) if gaps else ""


def check_networks(cluster: Cluster, host: Host) -> None:
    """Check that both bridges exist, are up and have a port, or that a macvlan interface can be created instead.

    And that the container's addresses are not the host's own, which answers no probe of its own.

    Raises:
        Refused: with every problem.
    """
    problems: list[str] = []
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    for network in networks:
        if network.attach == "macvlan":
            if problem := bridge.parent_problem(host, name := network.uplink(host.name)):
                problems.append(f"{name} {problem}")
            continue
        ports = bridge.bridge_ports(host, network.bridge)
        if ports is None:
            # The CNI plugin would silently create a bridge without ports.
            problems.append(f"bridge {network.bridge} does not exist or is down")
        elif not ports:
            problems.append(f"bridge {network.bridge} has no port that is up: the container would be isolated")
    own, addresses = bridge.own_addresses(host), [str(network.address.ip) for network in networks]
    problems += [
        f"{one}, an address of the container, is the host's own on {own[one]}" for one in addresses if one in own
    ]
    if any(network.attach == "macvlan" for network in networks) and find_missing(host, "tc"):
        problems.append("tc, which detaches macvlan interfaces, is not installed")
    if problems:
        raise _cannot(host, problems)


def query_confinement(cluster: Cluster, host: Host) -> Confinement:
    """Return what a container on the host is confined with; ``prepare_confinement`` writes its files."""
    paths = (*HIDDEN_FOLDERS, *HIDDEN_FILES, *READ_ONLY)
    # -L: a link to nothing cannot be mounted.
    present = host.run("find", "-L", *paths, "-maxdepth", "0", "!", "-type", "l", ok=None).text.split()
    where = cluster.places
    return Confinement(capabilities_for(cluster.services), str(where.seccomp), str(where.empty), tuple(present))


def prepare_confinement(cluster: Cluster, host: Host) -> Confinement:
    """Write the seccomp profile on the host and create the empty folder; return what a container is confined with."""
    confinement = query_confinement(cluster, host)
    host.run("mkdir", "-p", confinement.empty)
    host.write(confinement.seccomp, share("definitions", "seccomp.json").read_bytes())
    return confinement


def check_confinement(cluster: Cluster, host: Host, image: str) -> Confinement:
    """Prepare a start: ``try_confinement``, and load the kernel module whose parameters the container sets.

    Raises:
        Refused: as ``try_confinement``.
    """
    confinement = try_confinement(cluster, host, image)
    if any(name.startswith("net.netfilter.") for service in cluster.services for name in service.sysctl):
        # The kernel has these parameters once the module is loaded: built in, or by this.
        host.run("env", "modprobe", "-q", "nf_conntrack", ok=None)  # env: it may be missing
    return confinement


def try_confinement(cluster: Cluster, host: Host, image: str) -> Confinement:
    """Check that the host's Apptainer confines a process of the image; return what the container is confined with.

    Apptainer without libseccomp only warns. Writes the seccomp profile into the state folder, and changes nothing else.

    Raises:
        Refused: it does not.
    """
    confinement = prepare_confinement(cluster, host)
    try:
        trial = apptainer.run_container(host, *trial_argv(cluster.site, confinement, image), timeout=60).text
        gaps = find_gaps(trial, confinement)
    except CommandError as error:
        if error.result.status != NOT_CONFINED:
            raise
        gaps = [error.result.stderr.decode(errors="replace").strip().rpartition("\n")[2]]
    if gaps:
        raise Refused(f"{host.name} does not confine the services container: {'; '.join(gaps)}", hint=SECCOMP)
    return confinement


def check_instance(cluster: Cluster, host: Host, pid: int, join: Sequence[str], confinement: Confinement) -> None:
    """Check how an instance that has just started is confined, and a program that joins it.

    Args:
        pid: of its first process.
        join: first words of a command in the instance.

    Raises:
        SmsError: less than it should be; the caller stops it.
    """
    argv = script_argv("inspect-confinement", str(pid), *join)
    shown = host.run(*argv, timeout=60).stdout.decode(errors="replace")
    if gaps := find_instance_gaps(shown, confinement):
        raise SmsError(f"{host.name} does not confine the instance: {'; '.join(gaps)}", hint=SECCOMP)


def _cannot(host: Host, problems: list[str]) -> Refused:
    return Refused(
        f"{host.name} cannot run the services container: " + "; ".join(problems),
        hint=f"`sms doctor --host {host.name}` prints the fixes; `sms host prepare {host.name}` applies most of them",
    )


def refuse_taken(cluster: Cluster, host: Host) -> None:
    """Check that both addresses of the container are free on their networks.

    Raises:
        Refused: a machine already uses one of them.
    """
    networks, taken = (cluster.site.networks.provisioning, cluster.site.networks.public), find_taken(cluster, host)
    if any(mac.lower() in {network.mac.lower() for network in networks} for mac in taken.values()):
        holder = None
        for one in (cluster.of_gateway(), cluster):  # what stays while an engine has the other services, and the whole
            with suppress(SmsError):
                lease = read_lease(host.read(str(one.places.lease)), one.site.cluster)
                holder = holder if lease.engine else lease.holder or holder
        known = holder not in (None, host.name)
        raise Refused(
            f"the services container already runs on {holder if known else 'another host'}: its MAC address answers",
            hint=handover_hint(str(holder), host.name)
            if known
            else "`sms host list` shows where; after `sms adopt --undo` it is the old node",
        )
    if taken:
        users = "; ".join(f"{address} is already used by {mac}" for address, mac in taken.items())
        raise Refused(users, hint="does the old management node still use it?")


def refuse_renamed(cluster: Cluster, host: Host) -> None:
    """Check, before a cluster starts for the first time on a host, that no other one was stopped there.

    With a mistyped ``cluster``, slurmctld would begin without jobs, and nodes end those that they run.

    Raises:
        Refused: one was.
    """
    if cluster.is_gateway:
        return
    name, folder = cluster.site.cluster, str(cluster.places.lease.parent)
    paths = host.run("find", folder, "-maxdepth", "1", "-name", "*.lease", ok=None).text.splitlines()
    if str(cluster.places.lease) in paths:
        return
    for path in sorted(paths):
        other = PurePosixPath(path).stem
        if other.endswith(GATEWAY):
            continue
        try:
            found = read_lease(host.read(path), other)
        except SmsError:  # that is reported to its own cluster
            continue
        here = found.holder in (None, host.name) and found.generation
        if here and not apptainer.find_instance(host, instance_of(other)):
            other = one_line(other, 60)
            raise Refused(
                f"cluster {name} never ran on {host.name}, which has the state of {other}, which is stopped",
                hint=f"is `cluster` of the site file mistyped? A new one has no jobs, and nodes end those of {other}\n"
                f"  --force: start {name} as a new cluster beside it",
            )


def find_taken(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return the addresses of the services container for which another machine answers the host, with its MAC address.

    Raises:
        SmsError: a network cannot be probed.
    """
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    addresses = {str(network.address.ip): network.uplink(host.name) for network in networks}
    return bridge.taken(host, addresses, cluster.env.pool)


@contextmanager
def lock_host(cluster: Cluster, host: Host) -> Iterator[None]:
    """Hold the lock under which the services container is started, stopped and changed on the host.

    Raises:
        Busy: another run is at work there; if it moves the services container, with what it does and who began it.
    """
    with ExitStack() as stack:
        try:
            busy = f"another sms is at work on {host.name}"
            stack.enter_context(cluster.env.locks.hold(host, str(cluster.places.lock), busy))
        except Busy as error:
            raise explain_busy(cluster, host, error) from error
        yield


def lock_ports(cluster: Cluster, host: Host) -> AbstractContextManager[None]:
    """Hold the lock under which ports of the running container are moved; its holder waits for nothing.

    Raises:
        Busy: another run moves them.
    """
    return cluster.env.locks.hold(host, ports_lock(str(cluster.places.lock)), f"another sms moves ports on {host.name}")
