"""What a new instance would break for nodes and users, before it is started: it may have other addresses and ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.config.types import is_ipv4
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.overlay.names import answers_names, find_missing
from appliance.operations.services.faults import MOST_PROBED
from appliance.operations.services.present import QUERY_S
from appliance.operations.services.reach import inspect_inside, see_accepting
from appliance.operations.services.users import find_without_directory
from appliance.plan.image.definition import fixed_accounts
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.seed import node_addresses
from appliance.plan.services.apply import FileChange
from appliance.plan.services.effect import Fault, Present
from appliance.plan.services.network import INTERFACES, find_cut_off, read_network, running_network
from appliance.text import one_line
from appliance.tools.scripts import script_argv

OF_NODES = (INTERFACES[0], "routes")
"""Of ``running_network``, what leads to nodes."""
CONTROLLER = re.compile(r"(?im)^\s*SlurmctldHost\s*=\s*[^\s(]+\(([^\s)]+)\)")
"""The address of the container in a slurm.conf of ours."""


def find_waits(
    cluster: Cluster, host: Host, resolved: Cluster, changes: Sequence[FileChange], *, switch: bool
) -> Iterator[Fault]:
    """Yield what slurmctld would wait for, for minutes: names of nodes that it cannot ask for.

    Args:
        resolved: of ``resolve_running``.
        switch: a second instance is started, which is isolated.
    """
    missing = find_missing(resolved)
    asks = bool(missing and cluster.site.networks.dns)  # without a name server nothing waits
    if not asks or not (switch or any(one.path.startswith(f"{FOLDER}/") for one in changes)):
        return
    if switch or not answers_names(cluster, host, missing[0]):
        yield Fault(
            f"slurmctld would wait for name servers: {host.name} finds no address of the nodes "
            f"{one_line(fold(missing), 120)}{', and a second instance reaches no name server' * switch}",
            "give nodes an `address`, or names that resolve: `sms config check --resolve`",
        )


def query_network(cluster: Cluster, host: Host) -> dict[str, str]:
    """Return the network that the running instance was started with, as ``running_network`` does of the site's.

    Raises:
        CommandError: the container does not answer.
    """
    script = inside_argv(cluster.site, cluster.services, *script_argv("running-network"))
    return read_network(host.run(*script, timeout=QUERY_S).text)


def find_faults_of_instance(
    cluster: Cluster,
    host: Host,
    present: Present | None,
    running: Mapping[str, str],
    *,
    differs: bool,
    same_image: bool = False,
) -> Iterator[Fault]:
    """Yield what a new instance breaks for nodes and users: it may have other addresses, ids, and no directory.

    Args:
        present: what the controller has; None if it does not answer.
        running: of ``query_network``.
        differs: how to reach the directory changes, too.
        same_image: it has the image that runs now.
    """
    if present is None:
        wanted = running_network(cluster.site)
        if cluster.find_role("controller") and any(running.get(one, "") != wanted[one] for one in OF_NODES):
            why = "networks.provisioning changes, and what nodes and jobs lose by it is not known"
            yield Fault(why, "`sms exec -- sinfo` and `squeue` have to answer")
        return
    yield from _find_cut_off(cluster, present, running)
    yield from find_without_directory(cluster, host, present.users, differs=differs)
    if not same_image:
        yield from _find_other_ids(cluster, host, present)


def _find_cut_off(cluster: Cluster, present: Present, running: Mapping[str, str]) -> Iterator[Fault]:
    """Yield what nodes and jobs lose by another address of the container, or without a route to them."""
    wanted = running_network(cluster.site)
    now, becomes = (one.get(OF_NODES[0], " ").partition(" ")[2].partition("/")[0] for one in (running, wanted))
    yield from _find_left_behind(present, now, becomes)
    used = _find_used(present)
    by_name = {name: address for address, names in node_addresses(cluster.site) for name in names.split()}
    found = {one.name: by_name.get(one.address, one.address) for one in present.nodes if one.name in used}
    addresses = {name: address for name, address in found.items() if is_ipv4(address)}
    if lost := sorted(find_cut_off(running, cluster.site, addresses)):
        yield Fault(
            f"networks.provisioning no longer leads to nodes in use ({len(lost)}): {one_line(fold(lost), 200)}",
            "keep their network in `routes`; or drain them, wait until their jobs have ended, and remove them first",
        )


def find_moved_address(before: Mapping[str, bytes], after: Mapping[str, bytes], present: Present) -> Iterator[Fault]:
    """Yield what nodes in use lose by a start with another address of the container.

    Args:
        before, after: files of Slurm by path, of which slurm.conf has the address that nodes know.
        present: what the controller had when it was stopped.
    """
    now, becomes = (
        CONTROLLER.search(files.get(f"{FOLDER}/slurm.conf", b"").decode(errors="replace")) for files in (before, after)
    )
    if now and becomes:
        yield from _find_left_behind(present, now[1], becomes[1])


def _find_used(present: Present) -> set[str]:
    """Return the nodes that take jobs, or have some."""
    return set(present.usable).union(*(job.nodes for job in present.jobs if not job.waits))


def _find_left_behind(present: Present, now: str, becomes: str) -> Iterator[Fault]:
    """Yield the nodes that keep the address of before, and their jobs."""
    jobs = [job for job in present.jobs if not job.waits]
    if (used := _find_used(present)) and now != becomes:
        yield Fault(
            f"networks.provisioning.address: nodes in use ({len(used)}) keep {now}, not {becomes}, and so do their "
            f"running jobs ({len(jobs)}): {one_line(fold(sorted(used)), 200)}",
            "wait until the jobs have ended, apply or start with --force, then give every node the new address and "
            "restart its slurmd",
        )


def find_silent_since(cluster: Cluster, host: Host, before: Present, names: Set[str]) -> list[str]:
    """Return nodes that were usable before, and at which no slurmd accepts connections of the container now.

    Args:
        names: those that the site has. Of many, some of all are asked.
    """
    nodes = [one for one in before.nodes if one.name in before.usable & names]
    some = nodes[:: len(nodes) // MOST_PROBED + 1]
    accept = see_accepting(cluster, host, [(one.address, str(one.port)) for one in some]) if some else []
    return [one.name for one, accepts in zip(some, accept, strict=True) if not accepts]


def _find_other_ids(cluster: Cluster, host: Host, present: Present) -> Iterator[Fault]:
    """Yield nodes in use that would refuse a controller whose user has another id than in the running container.

    Those that refuse it already may have the new one. Munge's user may differ: its id is nowhere compared.
    """
    controller = cluster.find_role("controller")
    user = controller.user if controller else ""
    accounts = fixed_accounts(cluster.base, cluster.services, cluster.site.system_users)
    wanted = next((str(uid) for _, name, uid in accounts if name == user and uid is not None), "")
    now = host.run(*inside_argv(cluster.site, cluster.services, "id", "-u", user), ok=None, timeout=QUERY_S).text
    if wanted in ("", now):
        return
    if nodes := sorted(present.usable - {*inspect_inside(cluster, host, confined=True).refusing}):
        yield Fault(
            f"{user}.user: its id becomes {wanted}, not {now}: nodes where it is {now} would start and end no job "
            f"({len(nodes)}): {one_line(fold(nodes), 200)}",
            f"`id {user}` on each prints it; once all have {wanted}, and their slurmd was restarted: --force",
        )
