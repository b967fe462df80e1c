"""``sms host``: prepare admin hosts and list their state."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from appliance.config.model import AdminHost
from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.host.ssh import Ssh
from appliance.operations.context import Cluster, need_root
from appliance.operations.hosts.admin_keys import key_variables
from appliance.operations.hosts.signing import refuse_signing_keys
from appliance.operations.lease import query_lease
from appliance.operations.preflight import find_instance
from appliance.operations.under_way import query_move
from appliance.plan.hosts.authorized import mark_of
from appliance.plan.migration.under_way import Move
from appliance.share import share
from appliance.tools.ansible import Play, Target, run_playbook
from appliance.tools.python import find_python

FOLDERS = ("images", "overlays", "snapshots", "leases", "journal", "keys")
"""Folders below the state folder."""

HINTS = {
    "packages": "check the package mirrors of that host, then run it again; installed packages are kept",
    "apptainer": "check the package mirrors of that host; `sms doctor --host {name}` lists what is missing",
    "unprepare": "remove what needs them first; nothing else was changed if it was refused",
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
    host, target = _connect(cluster, name)
    refuse_signing_keys(cluster, host)
    with cluster.env.progress.step("read the keys of the other admin hosts"):
        keys = key_variables(cluster, name)
    return _run(cluster, "prepare-host.yml", target, _variables(cluster, name) | keys, "prepare", dry_run=dry_run)


def unprepare(cluster: Cluster, name: str, *, dry_run: bool = False) -> Play:
    """Take back what ``prepare`` did to the network, the firewall, the modules and the keys of an admin host.

    Raises:
        Unreachable: it does not answer, or its host key is not the known one.
        Refused: the services container runs there.
    """
    host, target = _connect(cluster, name)
    with suppress(CommandError):  # without Apptainer it cannot run an instance
        if find_instance(cluster, host):
            raise Refused(
                f"the services container runs on {name}, and needs its networks",
                hint="`sms migrate` to another host, or `sms stop`, first",
            )
    user = next(one.user for one in cluster.site.admin_hosts if one.name == name)
    own = {"sms_user": user, "sms_mark": mark_of(cluster.site.cluster), "sms_here": isinstance(host, Local)}
    variables = _variables(cluster, name) | own
    return _run(cluster, "unprepare-host.yml", target, variables, "take back the preparation of", dry_run=dry_run)


def _connect(cluster: Cluster, name: str) -> tuple[Host, Target]:
    """Return an admin host, and the Ansible target that it is."""
    host = cluster.host(name)
    if isinstance(host, Local):
        need_root()
    with cluster.env.progress.step(f"connect to {name}"):
        return host, _target(host)


def _run(
    cluster: Cluster, playbook: str, target: Target, variables: dict[str, object], what: str, *, dry_run: bool
) -> Play:
    """Run a playbook and print its notes."""
    with cluster.env.progress.step(f"{'check' if dry_run else what} {target.name}") as step:
        play = run_playbook(share("playbooks", playbook), target, variables, on_task=step.detail, dry_run=dry_run)
        step.detail(_summary(play, dry_run))
    for note in play.notes:
        cluster.env.progress.report(note)
    return play


def failure(play: Play, name: str, what: str = "{} is not prepared") -> SmsError | None:
    """Return the failed tasks as an error that says ``what`` of the host; None if there are none."""
    if not play.failed:
        return None
    tasks = "\n  ".join(f"{failed.task}: {failed.message}" for failed in play.failed)
    hint = HINTS.get(play.failed[0].role, "`sms doctor --host {name}` lists what is missing").format(name=name)
    return SmsError(f"{what.format(name)}\n  {tasks}", hint=hint)


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
