"""Where slurmctld can run: in the services container, and on the engines that the site file has.

Every slurm.conf names all of them, its own first. Daemons and commands try each in turn. So do the processes of jobs
that were started before the services moved, which never read the file again: jobs run through a move.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.catalog import Service
from appliance.config.model import Site

CONTAINER, KUBERNETES, NOMAD = "container", "kubernetes", "nomad"
ENGINES = (KUBERNETES, NOMAD)
"""Engines to which the state can be moved."""


def find_controllers(site: Site, services: Sequence[Service]) -> dict[str, str]:
    """Return HOST(ADDRESS) of the controller at each place where nodes reach it at its own port.

    A NodePort is another port, and slurm.conf has one for all controllers.
    """
    name = next((one.name for one in services if one.role == "controller"), "")
    if not name:
        return {}
    own = site.networks.provisioning.address.ip
    found = {CONTAINER: f"{site.hostname}({own})"}
    kubernetes, nomad = site.engines.kubernetes, site.engines.nomad
    if nomad.address:
        found[NOMAD] = f"{nomad.host or site.admin_hosts[0].name}({nomad.address})"
    if kubernetes.network == "attached":
        found[KUBERNETES] = f"{name}-0({own})"
    elif kubernetes.address and (kubernetes.network == "host" or kubernetes.service != "NodePort"):
        host = kubernetes.node if kubernetes.network == "host" else f"{name}-0"
        found[KUBERNETES] = f"{host}({kubernetes.address})"
    return found


def other_controllers(site: Site, services: Sequence[Service], own: str) -> list[str]:
    """Return HOST(ADDRESS) of the controllers at other places than ``own``; each host and each address once."""
    found = find_controllers(site, services)
    taken = set(found[own].split("(")) if own in found else set()
    others = []
    for place, each in found.items():
        if place != own and not taken & set(each.split("(")):
            taken |= set(each.split("("))
            others.append(each)
    return others
