"""Whether nodes can reach the services container: queries of its links, of Slurm's controller and of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import PurePosixPath

from appliance.config.types import is_ipv4
from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.services.inside import LOGS
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.seed import node_addresses
from appliance.plan.services.discarded import Discarded
from appliance.plan.services.inside import Inside, Process, choose_silent, find_stopped, read_inside, view_nodes
from appliance.plan.services.links import Links, NetworkState, judge_networks, read_links
from appliance.plan.services.nodes import (
    NODES,
    NetworkProbe,
    NodesView,
    add_probes,
    choose_targets,
    expect_nodes,
    judge_probes,
    read_probes,
)
from appliance.text import one_line
from appliance.tools.scripts import python_argv, script_argv

SETTLE_S = 60
"""Seconds after its start within which the controller may not have heard of all nodes."""


@dataclass(frozen=True)
class Reach:
    """How the container is connected, its nodes, and its processes that a signal has stopped.

    ``problems``: why it is unhealthy. ``notices``: what is not a fault. ``nodes``: None without a controller.
    ``held``, ``strangers``, ``discarded``: those of ``Inside``.
    """

    networks: tuple[NetworkState, ...] = ()
    nodes: NodesView | None = None
    probes: tuple[NetworkProbe, ...] = ()
    stopped: tuple[Process, ...] = ()
    held: tuple[str, ...] = ()
    strangers: tuple[int, ...] = ()
    discarded: tuple[Discarded, ...] = ()
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def inspect_links(host: Host, pid: int, addresses: Mapping[str, str] | None = None) -> tuple[Links, str]:
    """Return the links of the host and of the instance with this process, and why they are not known.

    Args:
        addresses: those of the instance, by interface, of which to see whether another machine has them, too.
    """
    words = chain.from_iterable((addresses or {}).items())
    try:
        return read_links(host.run(*script_argv("collect-links", str(pid), *words)).text), ""
    except Unreachable:
        raise
    except (SmsError, ValueError) as error:
        return Links(), f"the network of {host.name} cannot be inspected: {one_line(str(error), 200)}"


UNWRITABLE = (
    "the overlay cannot be written, as after an error of its disk, or when that disk was full: look at the disk, "
    "then `sms stop` and `sms start` repair the overlay"
)


def inspect_inside(cluster: Cluster, host: Host, *, confined: bool) -> Inside:
    """Probe all services, and return what the running container knows of itself, and its controller of the nodes.

    Args:
        confined: that of ``inside_argv``.
    """
    controller = cluster.find_role("controller")
    names = " ".join(service.name for service in cluster.services)
    argv = script_argv("inspect-inside", names, *((f"{LOGS}/{controller.name}.log", *NODES) if controller else ()))
    result = host.run(*inside_argv(cluster.site, cluster.services, *argv, confined=confined), ok=None, timeout=90)
    inside = read_inside(result.stdout.decode(errors="replace"), controller.user if controller else "")
    return replace(inside, silence=one_line(result.stderr.decode(errors="replace")[-300:] or inside.silence, 300))


def inspect_reach(cluster: Cluster, host: Host, pid: int, found: tuple[Links, str], inside: Inside) -> Reach:
    """Connect to nodes from the network of a process of the instance, and judge everything."""
    links, problem = found
    reach, unreachable = _inspect_nodes(cluster, host, pid, links, inside)
    networks = () if problem else judge_networks(cluster.site, host.name, links, unreachable)
    problems = [problem] if problem else [one for network in networks for one in network.problems]
    if not inside.processes:
        problems.append("the processes of the services container cannot be listed")
    if inside.unwritable:
        problems.append(UNWRITABLE)
    stopped = find_stopped(inside.processes)
    problems += [
        f"process {process.name} of the services container is stopped by a signal: "
        f"`sms exec -- kill -CONT {process.pid}`"
        for process in stopped
    ]
    problems += [*inside.job_problems(), *reach.problems]
    notices = [
        *reach.notices,
        *inside.notices(),
        *(one.describe(cluster.site.syslog_forward or "") for one in inside.discarded),
    ]
    return replace(
        reach, networks=networks, stopped=stopped, held=inside.held, strangers=inside.strangers,
        discarded=inside.discarded, problems=problems, notices=notices,
    )  # fmt: skip


def _inspect_nodes(cluster: Cluster, host: Host, pid: int, links: Links, inside: Inside) -> tuple[Reach, set[str]]:
    """Return what concerns nodes, and the networks of which none can be reached."""
    controller = cluster.find_role("controller")
    if controller is None:
        return Reach(), set()
    age_s = inside.age_s(PurePosixPath(controller.run[0]).name)
    inside = replace(inside, nodes=expect_nodes(inside.nodes, age_s))
    probes, silent = probe_nodes(cluster, host, pid, links, inside)
    view = add_probes(view_nodes(inside), silent)
    if age_s < SETTLE_S:  # nodes register with a controller that has just started within seconds, and it queries them
        return Reach(nodes=view, probes=probes), set()
    unreachable, problems = judge_probes(probes, inside.nodes, controller.name)
    faulty, notices = view.warnings(controller.name)
    missing = view.missing(controller.name)
    notices += [missing] if missing else []
    return Reach(nodes=view, probes=probes, problems=faulty + problems, notices=notices), unreachable


def see_accepting(cluster: Cluster, host: Host, places: Sequence[tuple[str, str]]) -> list[bool]:
    """Return whether each address and port accepts connections from the running container.

    Raises:
        CommandError: that could not be seen.
    """
    argv = inside_argv(cluster.site, cluster.services, *connect_argv(places))
    lines = host.run(*argv).text.splitlines()
    accept = {int(one.split()[0]) for one in lines if re.fullmatch(r"\d{1,4} 0\s*", one)}
    return [number in accept for number in range(1, len(places) + 1)]


def connect_argv(places: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return the command that connects to each address and port."""
    return python_argv("connect-each", *(str(word) for place in places for word in place))


Probes = tuple[NetworkProbe, ...]


def probe_nodes(cluster: Cluster, host: Host, pid: int, links: Links, inside: Inside) -> tuple[Probes, Probes]:
    """Connect from the container to slurmd on nodes of each network, and on a few that do not respond.

    All at the same time; slurmd logs nothing. Return the results by network, and by node.
    """
    known = {name: address for address, name in node_addresses(cluster.site)}
    networks = choose_targets(inside.nodes, links.routes, known)
    targets = {**networks, **choose_silent(inside)}
    chosen = [(known.get(node.address, node.address), node.port) for nodes in targets.values() for node in nodes]
    if not chosen:
        return (), ()
    argv = connect_argv(chosen)
    if all(is_ipv4(address) for address, _ in chosen):
        argv = ("nsenter", f"--net=/proc/{pid}/ns/net", *argv)  # faster than a start of apptainer
    else:
        argv = inside_argv(
            cluster.site, cluster.services, *argv
        )  # where names are resolved as they are for the controller
    found = read_probes(targets, host.run(*argv, ok=None).stdout.decode(errors="replace"))
    return found[: len(networks)], found[len(networks) :]
