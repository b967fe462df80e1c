"""Whether a host can carry the appliance: asked before anything is changed there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from appliance.errors import Busy, Refused
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.tools import bridge
from appliance.tools.programs import find_missing

PROGRAMS = ("apptainer", "arping", "debugfs", "e2fsck", "flock", "losetup", "python3")
LOCKED = 75
"""Status of a lock that another run holds (EX_TEMPFAIL, sysexits.h)."""
LOCK_WAIT_S = 5
"""A snapshot holds the lock of its host for less than a second, while writers wait: that is no reason to refuse."""


def check_programs(host: Host) -> None:
    """Whether the host has the programs that every verb needs there.

    Raises:
        Refused: with all that are missing.
    """
    if missing := find_missing(host, *PROGRAMS):
        raise _cannot(host, [f"{program} is not installed" for program in missing])


def check_bridges(cluster: Cluster, host: Host) -> None:
    """Whether both bridges are there, up, and lead somewhere.

    Raises:
        Refused: with everything that is missing.
    """
    problems: list[str] = []
    for network in (cluster.site.networks.provisioning, cluster.site.networks.public):
        ports = bridge.bridge_ports(host, network.bridge)
        if ports is None:
            # Apptainer's plugin would make it in silence, leading nowhere.
            problems.append(f"there is no bridge {network.bridge} that is up")
        elif not ports:
            problems.append(f"bridge {network.bridge} has no port that is up: the container would stand alone")
    if problems:
        raise _cannot(host, problems)


def _cannot(host: Host, problems: list[str]) -> Refused:
    return Refused(
        f"{host.name} cannot carry the appliance: " + "; ".join(problems),
        hint=f"`sms doctor --host {host.name}` tells what mends it; `sms host prepare {host.name}` does most of it",
    )


def refuse_taken(cluster: Cluster, host: Host) -> None:
    """Whether both addresses of the container are free on their networks.

    Raises:
        Refused: a machine answers for one of them.
    """
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    taken = bridge.taken(host, {network.bridge: str(network.address.ip) for network in networks})
    if any(mac.lower() in {network.mac.lower() for network in networks} for mac in taken.values()):
        raise Refused(
            "the appliance runs already, on another host: its own MAC address answers",
            hint="`sms host list` shows where",
        )
    if taken:
        who = "; ".join(f"{address} is taken, by {mac}" for address, mac in taken.items())
        raise Refused(who, hint="does the old management node still have it?")


@contextmanager
def only_one(host: Host, path: str, what: str) -> Iterator[None]:
    """Hold the lock at ``path`` on the host.

    Raises:
        Busy: another run holds it, and goes on holding it.
    """
    try:
        with host.lock(path, wait_s=LOCK_WAIT_S):
            yield
    except CommandError as error:
        if error.result.status == LOCKED:
            raise Busy(what, hint="wait for it, then run this again") from error
        raise
