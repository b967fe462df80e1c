"""Resolves names of nodes for the container's hosts file (``plan/overlay/names.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.config.hostlist import fold
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.names import find_names, read_hosts, read_resolved
from appliance.text import one_line
from appliance.tools.resolver import WAIT_S, resolve

TIMED_OUT = 124
"""Exit status of timeout(1)."""


def resolve_nodes(cluster: Cluster, host: Host, read_known: Callable[[], bytes]) -> tuple[Cluster, bool]:
    """Return it with the addresses of nodes' names, and whether they differ from those of the container.

    By the resolver of the host. What it does not resolve keeps the address that the container has, and is reported
    where that has none.

    Args:
        read_known: returns the container's hosts file; it is called if there are such names.
    """
    names = find_names(cluster.site)
    if not names:
        return cluster, False
    hosts = read_hosts(read_known().decode(errors="replace"))
    known = {name: hosts[name] for name in names if name in hosts}
    found = read_resolved(resolve(host, names), names, known, cluster.site.node_networks)
    resolved = replace(cluster, names=found)
    if missing := find_missing(resolved):
        cluster.env.progress.report(
            f"note: {host.name} has found no address of {len(missing)} of {len(names)} names of nodes in time: "
            f"{one_line(fold(missing), 120)}; slurmctld asks a name server for each of them"
        )
    return resolved, found != known


def find_missing(resolved: Cluster) -> list[str]:
    """Return the names that have no address in what ``resolve_nodes`` has returned."""
    return [name for name in find_names(resolved.site) if name not in resolved.names]


def answers_names(cluster: Cluster, host: Host, name: str) -> bool:
    """Return whether a name server answers the services container soon, also that there is no such name."""
    argv = inside_argv(cluster.site, cluster.services, "timeout", str(WAIT_S), "getent", "ahosts", name)
    return host.run(*argv, ok=None, timeout=WAIT_S + 30).status != TIMED_OUT
