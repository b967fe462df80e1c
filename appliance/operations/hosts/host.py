"""``sms host``: prepare admin hosts and list their state."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from appliance.config.model import AdminHost
from appliance.errors import SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.host.ssh import Ssh
from appliance.operations.context import Cluster, need_root
from appliance.operations.hosts.admin_keys import key_variables
from appliance.operations.hosts.signing import refuse_signing_keys
from appliance.operations.lease import query_lease
from appliance.operations.preflight import find_instance
from appliance.operations.under_way import query_move
from appliance.plan.migration.under_way import Move
from appliance.share import share
from appliance.tools.ansible import Play, Target, run_playbook
from appliance.tools.python import find_python

FOLDERS = ("images", "overlays", "snapshots", "leases", "journal", "keys")
"""Folders below the state folder."""

HINTS = {
    "packages": "check the package mirrors of that host, then run it again; installed packages are kept",
    "apptainer": "check the package mirrors of that host; `sms doctor --host {name}` lists what is missing",
    "bridges": "use another interface, or create the bridge yourself; everything but the bridges is prepared",
}
"""Hints by failed role of the playbook."""


@dataclass(frozen=True)
class HostLine:
    """State of an admin host.

    ``problem``: why it could not be queried. ``move``: what is under way there, or was killed.
    """

    name: str
    address: str
    reachable: bool
    running: bool
    holds_lease: bool
    problem: str = ""
    move: Move | None = None


def prepare(cluster: Cluster, name: str, *, dry_run: bool = False) -> Play:
    """Prepare the admin host ``name`` to run the services container.

    Raises:
        Unreachable: it does not answer, or its host key is not the known one.
        Refused: it has a private signing key, and another machine is the build host.
    """
    host = cluster.host(name)
    if isinstance(host, Local):
        need_root()
    with cluster.env.progress.step(f"connect to {name}"):
        target = _target(host)
    refuse_signing_keys(cluster, host)
    with cluster.env.progress.step("read the keys of the other admin hosts"):
        keys = key_variables(cluster, name)
    with cluster.env.progress.step(f"{'check' if dry_run else 'prepare'} {name}") as step:
        play = run_playbook(
            share("playbooks", "prepare-host.yml"),
            target,
            _variables(cluster, name) | keys,
            on_task=step.detail,
            dry_run=dry_run,
        )
        step.detail(_summary(play, dry_run))
    for note in play.notes:
        cluster.env.progress.report(note)
    return play


def failure(play: Play, name: str) -> SmsError | None:
    """Return the failed tasks as an error; None if there are none."""
    if not play.failed:
        return None
    tasks = "\n  ".join(f"{failed.task}: {failed.message}" for failed in play.failed)
    hint = HINTS.get(play.failed[0].role, "`sms doctor --host {name}` lists what is missing").format(name=name)
    return SmsError(f"{name} is not prepared\n  {tasks}", hint=hint)


def list_hosts(cluster: Cluster) -> list[HostLine]:
    """Return the state of every admin host, queried in parallel."""
    with cluster.env.pool(8) as pool:
        return list(pool.map(lambda admin: _line(cluster, admin), cluster.site.admin_hosts))


def _line(cluster: Cluster, admin: AdminHost) -> HostLine:
    host = cluster.host(admin.name)
    running = False
    try:
        holder, move = query_lease(host, cluster).holder, query_move(cluster, host)
        # Without Apptainer it cannot run an instance.
        with suppress(CommandError):
            running = find_instance(cluster, host) is not None
    except Unreachable as error:
        return HostLine(admin.name, admin.address, False, False, False, error.message)
    except SmsError as error:
        return HostLine(admin.name, admin.address, True, False, False, error.message)
    return HostLine(admin.name, admin.address, True, running, holder == admin.name, move=move)


def _target(host: Host) -> Target:
    """Return the Ansible target of a host. Connects first, for a clear error message."""
    python = find_python(host)
    if not isinstance(host, Ssh):
        return Target(host.name, python)
    return Target(host.name, python, host.address, host.user, host.port, host.key, host.known_hosts)


def _variables(cluster: Cluster, host: str) -> dict[str, object]:
    both = {"provisioning": cluster.site.networks.provisioning, "public": cluster.site.networks.public}
    return {
        "sms_state": str(cluster.site.state),
        "sms_folders": list(FOLDERS),
        "sms_overlays": str(cluster.places.overlay.parent),
        "sms_bridges": [
            {
                "name": network.bridge,
                "port": network.port_on(host) or "",
                "parent": (network.port_on(host) or "").removesuffix(f".{network.vlan}") if network.vlan else "",
                "vlan": network.vlan or 0,
                "key": f"networks.{key}",
            }
            for key, network in both.items()
            if network.attach == "bridge"
        ],
        "sms_parents": [
            {"name": network.uplink(host), "key": f"networks.{key}"}
            for key, network in both.items()
            if network.attach == "macvlan"
        ],
    }


def _summary(play: Play, dry_run: bool) -> str:
    count = len(play.changed)
    if not count:
        return "nothing to change"
    return f"{count} {'change' if count == 1 else 'changes'}{' to make' if dry_run else ''}"
